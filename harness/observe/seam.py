"""Watch the seam: every call that a subject makes through it is recorded with all its arguments, by parameter name.

By name, so that a value passed by position, by keyword or by default is the same value. Lists are copied when the call
is made: a subject may change them afterwards. What a watched function calls itself is the engine's own affair.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from harness.observe.recorder import Kinds, Recorder, bind
from harness.observe.values import made_by, path_of_pass

WATCHED = (
    "fused_attn_fwd",
    "fused_attn_bwd",
    "combine_and_quantize",
    "combine_and_dequantize",
    "mxfp8_quantize_fast_path",
    "flash_attn_cuda_bwd",
    "start_offload",
    "mark_activation_offload",
    "nvtx_range_push",
    "nvtx_range_pop",
    "get_nvtx_range_context",
    "print_quantizers",
)
"""The seam's functions that do something. The rest only answer a question, and how often it is asked is spelling."""

AUX_SLOTS = ("softmax_stats", "rng_state")
GRADIENT_SLOTS = ("dq", "dk", "dv", "d_bias", "d_softmax_offset")
QUANTIZE = "quantize"
"""What a call of a quantizer itself is recorded as, be it ``quantizer(tensor)`` or ``quantizer.quantize(tensor)``."""


class WatchedSeam:
    """A seam whose calls are recorded while a recorder is attached, and pass through untouched otherwise."""

    def __init__(self, seam: Mapping[str, object]) -> None:
        self.recorder: Recorder | None = None
        self.kinds = Kinds.of(seam)
        # A namespace of its own for each subject: what one patches into it must not reach the other.
        self.names: dict[str, object] = {name: _own(value) for name, value in seam.items()}
        self._counts: dict[tuple[int, str], int] = {}
        self._sequences: dict[int, list[str]] = {}
        for name in WATCHED:
            function = self.names.get(name)
            if callable(function):
                self.names[name] = self._watch(name, function)

    @contextmanager
    def attached(self, recorder: Recorder) -> Iterator[None]:
        """Record every call made inside the block, and at its end in which order those of each pass were made."""
        self.recorder, self._counts, self._sequences = recorder, {}, {1: []}
        try:
            with ExitStack() as stack:
                for cls in self.kinds.quantizers if recorder.inputs.case.fp8 else ():
                    stack.enter_context(self._quantizing(cls))
                yield
        finally:
            self.recorder = None
            for number, names in sorted(self._sequences.items()):
                recorder.observation.plain(path_of_pass("calls/sequence", number), names)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Record no call inside the block: what is made in it is known from elsewhere."""
        recorder, self.recorder = self.recorder, None
        try:
            yield
        finally:
            self.recorder = recorder

    @contextmanager
    def _quantizing(self, cls: type) -> Iterator[None]:
        """Watch the calls of a class's instances. On the class: a call of an object finds its method there alone."""
        own = {name: vars(cls)[name] for name in ("__call__", QUANTIZE) if name in vars(cls)}
        for name in ("__call__", QUANTIZE):
            setattr(cls, name, self._watch(QUANTIZE, getattr(cls, name)))
        try:
            yield
        finally:
            for name in ("__call__", QUANTIZE):
                delattr(cls, name)
            for name, method in own.items():
                setattr(cls, name, method)

    def _watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            signature = SIGNATURES.get(name) or inspect.signature(function)
        except ValueError:  # a compiled function without one: its arguments go by position
            signature = inspect.signature(_anything)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            recorder = self.recorder
            if recorder is None:
                return function(*args, **kwargs)
            index = self._counts.get((recorder.number, name), 0)
            self._counts[recorder.number, name] = index + 1
            sequence = self._sequences.setdefault(recorder.number, [])
            sequence.append(name)
            with recorder.watching():
                _see_call(recorder, name, index, signature, args, kwargs)
            with self.silent():
                result = function(*args, **kwargs)
            if name == "get_nvtx_range_context":
                return _WatchedContext(result, sequence)
            with recorder.watching():
                for what, tensor in RESULTS.get(name, _no_results)(result):
                    if recorder.is_tensor(tensor):
                        valid = recorder.defined_statistics() if what == AUX_SLOTS[0] else None
                        recorder.name(tensor, made_by(name if index == 0 else f"{name} call {index}", what), valid)
            return result

        return watched


class _WatchedContext:
    """A context manager that notes in the sequence of calls when it is entered and left."""

    def __init__(self, inner: Any, sequence: list[str]) -> None:
        self._inner = inner
        self._sequence = sequence

    def __enter__(self) -> Any:
        self._sequence.append("enter NVTX range")
        return self._inner.__enter__()

    def __exit__(self, *exception: Any) -> Any:
        self._sequence.append("leave NVTX range")
        return self._inner.__exit__(*exception)


def _own(value: object) -> object:
    if isinstance(value, (types.ModuleType, types.SimpleNamespace)):
        return types.SimpleNamespace(**vars(value))
    return dict(value) if type(value) is dict else value


def _anything(*args: Any) -> None:
    """Stand for a function whose signature cannot be read."""


def _quantize(quantizer: Any, tensor: Any, **options: Any) -> None:
    """Stand for the call of a quantizer."""


def _flash_attn_bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any,
    cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: Any, softmax_scale: Any,
    zero_tensors: Any, causal: Any, generator: Any, rng_state: Any,
) -> None:  # fmt: skip
    """Stand for FlashAttention 2's backward by the 19 values that the sources pass; it is compiled, without names."""


SIGNATURES = {QUANTIZE: inspect.signature(_quantize), "flash_attn_cuda_bwd": inspect.signature(_flash_attn_bwd)}
"""The signatures of what has none of its own."""

READ_ELSEWHERE = ("print_quantizers",)
"""Functions whose arguments' insides are left out: it prints those of one direction, and what it prints is recorded."""

UNWRITTEN = {"flash_attn_cuda_bwd": ("dq", "dk", "dv")}
"""Arguments whose memory is still to be written: what lies there before is nobody's."""


def _see_call(
    recorder: Recorder, name: str, index: int, signature: inspect.Signature, args: Any, kwargs: dict[str, Any]
) -> None:
    """Record the arguments of one call by their parameters' names."""
    path = f"call/{name}/{index}"
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:  # a call that does not fit: the function itself will say so
        recorder.see(f"{path}/arguments", [type(item).__name__ for item in (*args, *kwargs.values())])
        return
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    if name == "fused_attn_bwd":
        _see_aux(recorder, index, arguments.pop("aux_ctx_tensors"))
    for parameter in UNWRITTEN.get(name, ()):
        item = arguments.pop(parameter)
        recorder.put(f"{path}/{parameter}", dataclasses.replace(recorder.array(item), data=None))
    if name in READ_ELSEWHERE:
        for parameter, item in arguments.items():
            recorder.put(f"{path}/{parameter}", recorder.value(item))
        return
    bind(arguments, recorder, path)


def _see_aux(recorder: Recorder, index: int, aux: Any) -> None:
    """Record the aux list as the backward kernel receives it, slot by slot."""
    path = "aux" if index == 0 else f"aux/call {index}"
    if not isinstance(aux, (list, tuple)):
        recorder.see(path, aux)
        return
    recorder.plain(f"{path}/length", len(aux))
    for slot, item in enumerate(aux):
        recorder.see(f"{path}/{slot}", item)


Named = Iterator[tuple[str, Any]]


def _no_results(result: Any) -> Named:
    return iter(())


def _forward_results(result: Any) -> Named:
    if not isinstance(result, (list, tuple)) or len(result) < 2:
        return
    yield "output", result[0]
    for slot, item in enumerate(result[1] if isinstance(result[1], (list, tuple)) else ()):
        yield AUX_SLOTS[slot] if slot < len(AUX_SLOTS) else f"aux {slot}", item
    for item in result[2:]:
        yield "max_logit", item


def _in_order(*names: str) -> Callable[[Any], Named]:
    def named(result: Any) -> Named:
        return zip(names, result if isinstance(result, (list, tuple)) else (), strict=False)

    return named


def _fast_path_results(result: Any) -> Named:
    first = result[0] if isinstance(result, (list, tuple)) and result else None
    for index, item in enumerate(first if isinstance(first, (list, tuple)) else ()):
        yield f"tensor {index}", item


def _one_result(result: Any) -> Named:
    yield "result", result


RESULTS: dict[str, Callable[[Any], Named]] = {
    "fused_attn_fwd": _forward_results,
    "fused_attn_bwd": _in_order(*GRADIENT_SLOTS),
    "combine_and_quantize": _in_order("q", "k", "v"),
    "combine_and_dequantize": _in_order("q", "k", "v"),
    "mxfp8_quantize_fast_path": _fast_path_results,
    "flash_attn_cuda_bwd": _in_order(*GRADIENT_SLOTS[:3]),
    QUANTIZE: _one_result,
}
"""What each function makes, so that it is known again wherever it turns up."""
