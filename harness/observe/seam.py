"""Watch the seam: every call that a subject makes through it is recorded with all its arguments, by parameter name.

By name, so that a value passed by position, by keyword or by default is the same value. Lists are copied when the call
is made: a subject may change them afterwards.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from harness.observe.recorder import Recorder, bind
from harness.observe.values import made_by

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


class WatchedSeam:
    """A seam whose calls are recorded while a recorder is attached, and pass through untouched otherwise."""

    def __init__(self, seam: Mapping[str, object]) -> None:
        self.recorder: Recorder | None = None
        # A namespace of its own for each subject: what one patches into it must not reach the other.
        self.names: dict[str, object] = {name: _own(value) for name, value in seam.items()}
        self._counts: dict[str, int] = {}
        self._sequence: list[str] = []
        for name in WATCHED:
            function = self.names.get(name)
            if callable(function):
                self.names[name] = self._watch(name, function)

    @contextmanager
    def attached(self, recorder: Recorder) -> Iterator[None]:
        """Record every call made inside the block, and the order of all of them at its end."""
        self.recorder, self._counts, self._sequence = recorder, {}, []
        try:
            yield
        finally:
            self.recorder = None
            recorder.observation.plain("calls/sequence", self._sequence)

    def _watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            signature = inspect.signature(function)
        except ValueError:  # a compiled function without one: its arguments go by position
            signature = inspect.signature(_anything)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            recorder = self.recorder
            if recorder is None:
                return function(*args, **kwargs)
            index = self._counts.get(name, 0)
            self._counts[name] = index + 1
            self._sequence.append(name)
            with recorder.watching():
                _see_call(recorder, name, index, signature, args, kwargs)
            result = function(*args, **kwargs)
            if name == "get_nvtx_range_context":
                return _WatchedContext(result, self._sequence)
            with recorder.watching():
                if name == "fused_attn_fwd":
                    _name_results(recorder, index, result)
                elif name == "fused_attn_bwd":
                    _name_gradients(recorder, index, result)
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
    bind(arguments, recorder, path)


def _see_aux(recorder: Recorder, index: int, aux: Any) -> None:
    """Record the aux list as the backward kernel receives it, slot by slot."""
    path = "aux" if index == 0 else f"aux/call {index}"
    if not isinstance(aux, (list, tuple)):
        recorder.see(path, aux)
        return
    recorder.observation.plain(f"{path}/length", len(aux))
    for slot, item in enumerate(aux):
        recorder.see(f"{path}/{slot}", item)


def _name_results(recorder: Recorder, index: int, result: Any) -> None:
    """Name what the forward kernel made, so that it is known again wherever it turns up."""
    if not isinstance(result, (list, tuple)) or len(result) < 2:
        return
    call = _call("fused_attn_fwd", index)
    if isinstance(result[0], torch.Tensor):
        recorder.name(result[0], made_by(call, "output"))
    aux = result[1] if isinstance(result[1], (list, tuple)) else ()
    for slot, tensor in enumerate(aux):
        if isinstance(tensor, torch.Tensor):
            label = AUX_SLOTS[slot] if slot < len(AUX_SLOTS) else f"aux {slot}"
            recorder.name(tensor, made_by(call, label), recorder.defined_statistics() if slot == 0 else None)
    for tensor in result[2:]:
        if isinstance(tensor, torch.Tensor):
            recorder.name(tensor, made_by(call, "max_logit"))


def _name_gradients(recorder: Recorder, index: int, result: Any) -> None:
    """Name what the backward kernel made."""
    if isinstance(result, (list, tuple)):
        for slot, tensor in zip(GRADIENT_SLOTS, result, strict=False):
            if isinstance(tensor, torch.Tensor):
                recorder.name(tensor, made_by(_call("fused_attn_bwd", index), slot))


def _call(name: str, index: int) -> str:
    return name if index == 0 else f"{name} call {index}"
