"""One pass of one subject over one case: forward, backward, and everything seen of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from harness.case import Case
from harness.engines.api import Engine
from harness.inputs import Inputs, Live
from harness.observe.recorder import Recorder
from harness.observe.seam import WatchedSeam
from harness.observe.state import watched_state
from harness.observe.values import Observation
from harness.subjects.subject import PARAMETERS, Subject

FATAL = (torch.OutOfMemoryError, MemoryError, KeyboardInterrupt)
"""What a subject raises that says nothing about the subject: it is passed on, and the case is an ``error``."""


def observe(subject: Subject, inputs: Inputs, engine: Engine, seam: WatchedSeam) -> Observation:
    """Run a subject once on tensors of its own and return all that was seen.

    Families of paths: ``output``, ``saved``, ``call``, ``calls``, ``aux``, ``backward`` (the raw results against the
    inputs), ``grad`` (raw, by input), ``leaf`` (as accumulated), ``write`` (to the caller's memory), ``generator``,
    ``exception``, ``state`` (of the process). Raises what FATAL names; every other exception of the subject is part of
    the observation.
    """
    case = inputs.case
    own = engine.generator(case.seed + 1) if case.generator == "own" else None
    live = inputs.fresh(own)
    recorder = Recorder(inputs, live, padding_defined=engine.defines_padding)
    seen = recorder.observation
    raw: list[Any] = []
    subject.on_backward.append(raw.append)
    default = default_generator(engine.device)
    try:
        with watched_state(seen), _seeded(default, case.seed), seam.attached(recorder):
            stage, node = "forward", None
            values = _values(case, live, seam)
            try:
                output = subject.call(values)
                with recorder.watching():
                    _see_outputs(recorder, output)
                stage = "saved tensors"
                node, saved = _saved(output)
                with recorder.watching():
                    _see_saved(recorder, node, saved)
                    _see_generators(recorder, default, "after forward")
                stage = "backward"
                _backward(recorder, output)
            except FATAL:
                raise
            except BaseException as error:
                seen.plain("exception/stage", stage)
                seen.plain("exception/type", type(error).__name__)
                seen.plain("exception/message", normalise(str(error), subject.tensor_inputs(values)))
            recorder.check()
            _see_raw(recorder, subject, raw)
            _see_leaves(recorder, _raw_gradients(subject, raw))
            if node is not None:
                stashed = sorted(recorder.meaning(tensor) for tensor in _tensors_in(vars(node)))
                seen.plain("saved/on ctx after backward", stashed)
            _see_generators(recorder, default, "after backward")
            for name, change in inputs.changes(live).items():
                seen.plain(f"write/{name}", change)
    finally:
        subject.on_backward.clear()
    return seen


def _values(case: Case, live: Live, seam: WatchedSeam) -> dict[str, Any]:
    """Return the value of every parameter that any version of the function takes, by TransformerEngine's name."""
    backend: Any = seam.names["FusedAttnBackend"]
    return {
        **dict.fromkeys(PARAMETERS),  # absent tensors are None
        **live.tensors,
        "is_training": case.is_training,
        "max_seqlen_q": case.max_seqlen_q,
        "max_seqlen_kv": case.max_seqlen_kv,
        "attn_scale": case.attn_scale,
        "dropout_p": case.dropout_p,
        "fast_zero_fill": case.fast_zero_fill,
        "qkv_layout": case.qkv_layout,
        "attn_bias_type": case.attn_bias_type,
        "attn_mask_type": case.attn_mask_type,
        "softmax_type": case.softmax_type,
        "window_size": case.window_size,
        "bottom_right_diagonal": case.bottom_right_diagonal,
        "rng_gen": live.generator,
        "fused_attention_backend": backend["F16_arbitrary_seqlen"],
        "use_FAv2_bwd": False,
        "fp8": False,
        "deterministic": case.deterministic,
        "fp8_output": False,
        "bf16_backward": False,
        "layer_number": case.layer_number,
        "return_max_logit": case.return_max_logit,
    }


def _see_outputs(recorder: Recorder, output: Any) -> None:
    seen = recorder.observation
    seen.plain("output/type", type(output).__name__)
    for index, item in enumerate(_items(output)):
        if isinstance(item, torch.Tensor):
            seen.see(f"output/{index}", recorder.array(item))
            seen.plain(f"output/{index}/requires_grad", item.requires_grad)
            seen.plain(f"output/{index}/is a view", item._is_view())
            recorder.name(item, f"output {index}")
        else:
            recorder.see(f"output/{index}", item)


def _items(output: Any) -> tuple[Any, ...]:
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


def _saved(output: Any) -> tuple[Any, list[torch.Tensor] | None]:
    """Return the graph's node, and the tensors that autograd keeps for backward; raises what unpacking them raises."""
    nodes = [item.grad_fn for item in _items(output) if isinstance(item, torch.Tensor) and item.grad_fn is not None]
    if not nodes:
        return None, None
    node: Any = nodes[0]
    return node, [tensor for tensor in node.saved_tensors if tensor is not None]


def _see_saved(recorder: Recorder, node: Any, saved: list[torch.Tensor] | None) -> None:
    """Record the tensors kept for backward, by what each is: the position is spelling."""
    recorder.observation.plain("saved/count", None if saved is None else len(saved))
    if saved is None:
        return
    # Tensors on ctx are kept behind autograd's back: no hook sees them, no version check guards them.
    stashed = sorted(recorder.meaning(tensor) for tensor in _tensors_in(vars(node)))
    recorder.observation.plain("saved/outside save_for_backward", stashed)
    counts: dict[str, int] = {}
    for tensor in saved:
        array = recorder.array(tensor)
        what = array.meaning
        if what == "fresh":
            what = f"fresh {array.dtype} {'x'.join(map(str, array.shape))}"
        counts[what] = counts.get(what, 0) + 1
        again = f" (copy {counts[what]})" if counts[what] > 1 else ""
        recorder.observation.see(f"saved/{what.removeprefix('input ')}{again}", array)


def _tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, looking into containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 0:
        inner: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, (list, tuple, set)):
            inner = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        for item in inner:
            yield from _tensors_in(item, depth - 1)


def _backward(recorder: Recorder, output: Any) -> None:
    """Run backward from the output, in every second case from the max logit too, whose gradient is to be ignored."""
    first, *rest = _items(output)
    if not (isinstance(first, torch.Tensor) and first.requires_grad):
        return
    outputs, gradients = [first], [recorder.live.output_grad]
    for item in rest if recorder.inputs.case.seed % 2 else ():
        if isinstance(item, torch.Tensor) and item.requires_grad:
            outputs.append(item)
            gradients.append(torch.ones_like(item))
    torch.autograd.backward(outputs, gradients)


def _see_raw(recorder: Recorder, subject: Subject, raw: list[Any]) -> None:
    """Record what the function's own ``backward`` returned, before autograd drops, casts or adds anything."""
    seen = recorder.observation
    seen.plain("backward/calls", len(raw))
    if not raw:
        return
    result = raw[0]
    results = result if isinstance(result, tuple) else (result,)
    names = subject.convention.parameters
    seen.plain("backward/results beyond the inputs", len(results) - len(names))
    elsewhere = [
        names[index] if index < len(names) else f"beyond input {len(names)}"
        for index, item in enumerate(results)
        if item is not None and (index >= len(names) or names[index] not in GRADIENTS)
    ]
    seen.plain("backward/gradients for what has none", elsewhere)
    for name in GRADIENTS:
        index = names.index(name)
        item = results[index] if index < len(results) else None
        if isinstance(item, torch.Tensor):
            array = recorder.array(item, recorder.meaning(item) + _shared(item, results, names))
            if _left_unwritten(recorder, name):
                array = dataclasses.replace(array, data=None)
            seen.see(f"grad/{name}", array)
        else:
            recorder.see(f"grad/{name}", item)


GRADIENTS = ("q", "k", "v", "attn_bias", "softmax_offset")


def _left_unwritten(recorder: Recorder, name: str) -> bool:
    """Whether a gradient's elements mean nothing: cuDNN leaves that of a [1, 1, 1, skv] bias as it was allocated."""
    return name == "attn_bias" and recorder.inputs.case.bias_shape == "111s" and not recorder.padding_defined


def _shared(item: torch.Tensor, results: tuple[Any, ...], names: tuple[str, ...]) -> str:
    """Return words for which gradients lie in one buffer with this one, so that packed gradients stay packed."""
    storage = item.untyped_storage().data_ptr()
    by_name = dict(zip(names, results, strict=False))
    together = [name for name in GRADIENTS if isinstance(other := by_name.get(name), torch.Tensor) and other.numel()
                and other.untyped_storage().data_ptr() == storage]  # fmt: skip
    return f", in one buffer: {', '.join(together)}" if len(together) > 1 else ""


def _raw_gradients(subject: Subject, raw: list[Any]) -> dict[str, torch.Tensor]:
    results = raw[0] if raw and isinstance(raw[0], tuple) else ()
    by_name = dict(zip(subject.convention.parameters, results, strict=False))
    return {name: tensor for name in GRADIENTS if isinstance(tensor := by_name.get(name), torch.Tensor)}


def _see_leaves(recorder: Recorder, raw: Mapping[str, torch.Tensor]) -> None:
    """Record the gradients that the caller finds on its own tensors, and whether they are what backward returned."""
    for name, leaf in recorder.live.leaves.items():
        gradient = leaf.grad
        if gradient is None:
            recorder.observation.plain(f"leaf/{name}", None)
            continue
        if _left_unwritten(recorder, name):
            continue
        parts = recorder.inputs.parts_of(name)
        meaning = "gradient"
        if all(part in raw for part in parts):
            whole = raw[parts[0]] if len(parts) == 1 else recorder.inputs.pack([raw[part] for part in parts])
            if torch.equal(whole, gradient):
                meaning = " and ".join(dict.fromkeys(recorder.meaning(raw[part]) for part in parts))
        recorder.observation.see(f"leaf/{name}", recorder.array(gradient, meaning))


def _see_generators(recorder: Recorder, default: torch.Generator, when: str) -> None:
    for name, generator in (("default", default), ("own", recorder.live.generator)):
        if generator is not None:
            recorder.observation.see(f"generator/{name}/{when}",
                                     recorder.array(generator.get_state(), meaning="state"))  # fmt: skip


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that ``rng_gen=None`` means on a device."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


@contextmanager
def _seeded(generator: torch.Generator, seed: int) -> Iterator[None]:
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def normalise(message: str, tensor_inputs: Sequence[str]) -> str:
    """Return an exception's message without what differs from run to run or with the calling convention.

    Addresses go. Autograd names a gradient by its index among the tensor inputs, which another signature moves; the
    input's name takes its place.
    """

    def named(match: re.Match[str]) -> str:
        index = int(match[1])
        return f"for {tensor_inputs[index]}" if index < len(tensor_inputs) else match[0]

    message = re.sub(r"at index (\d+)", named, message)
    message = re.sub(r"0x[0-9a-fA-F]+", "0x…", message)
    message = re.sub(r"harness_subject_[0-9a-f]+_\d+", "subject", message)
    return message[:2000]
