"""Record what a pass leaves behind: outputs, saved tensors, gradients, generators, quantizers, the caller's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from harness.inputs import same_bits
from harness.observe.recorder import Recorder
from harness.quantized import parts
from harness.subjects.subject import Subject

GRADIENTS = ("q", "k", "v", "attn_bias", "softmax_offset")


def items(output: Any) -> tuple[Any, ...]:
    """Return the outputs of a call, one or several, as a tuple."""
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


def see_outputs(recorder: Recorder, output: Any) -> None:
    """Record what the call returned."""
    recorder.plain("output/type", type(output).__name__)
    for index, item in enumerate(items(output)):
        recorder.see(f"output/{index}", item)
        if isinstance(item, torch.Tensor):
            recorder.plain(f"output/{index}/requires_grad", item.requires_grad)
            recorder.plain(f"output/{index}/is a view", item._is_view())
            recorder.name(item, f"output {index}")


def node_of(output: Any) -> Any:
    """Return the graph's node that made the output, or None."""
    nodes = [item.grad_fn for item in items(output) if isinstance(item, torch.Tensor) and item.grad_fn is not None]
    return nodes[0] if nodes else None


def see_saved(recorder: Recorder, node: Any, saved: list[torch.Tensor] | None) -> None:
    """Record the tensors kept for backward, by what each is: the position is spelling.

    ``node`` is None where autograd recorded nothing, ``saved`` also where it is not to be looked at.
    """
    recorder.plain("saved/count", None if saved is None else len(saved))
    if node is not None:
        # Tensors on ctx are kept behind autograd's back: no hook sees them, no version check guards them.
        recorder.plain("saved/outside save_for_backward", on_ctx(recorder, node))
    if saved is None:
        return
    counts: dict[str, int] = {}
    for tensor in saved:
        array = recorder.array(tensor)
        what = array.meaning
        if what == "fresh":
            what = f"fresh {array.dtype} {'x'.join(map(str, array.shape))}"
        counts[what] = counts.get(what, 0) + 1
        again = f" (copy {counts[what]})" if counts[what] > 1 else ""
        recorder.see(f"saved/{what.removeprefix('input ')}{again}", tensor)


def on_ctx(recorder: Recorder, node: Any) -> list[str]:
    """Return what each tensor is that a node's context holds outside of what autograd saved."""
    return sorted(recorder.meaning(tensor) for tensor in tensors_in(vars(node), recorder))


def tensors_in(value: Any, recorder: Recorder, depth: int = 4) -> Iterator[Any]:
    """Yield the tensors in a value, looking into containers and dataclasses; an emptied storage is none."""
    if recorder.is_quantized(value):
        if isinstance(value, torch.Tensor) or parts(value):
            yield value
    elif isinstance(value, torch.Tensor):
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
            yield from tensors_in(item, recorder, depth - 1)


def see_raw(recorder: Recorder, subject: Subject, raw: list[Any]) -> None:
    """Record what the function's own ``backward`` returned, before autograd drops, casts or adds anything."""
    recorder.plain("backward/calls", len(raw))
    if not raw:
        return
    result = raw[0]
    results = result if isinstance(result, tuple) else (result,)
    names = subject.convention.parameters
    recorder.plain("backward/results beyond the inputs", len(results) - len(names))
    elsewhere = [
        names[index] if index < len(names) else f"beyond input {len(names)}"
        for index, item in enumerate(results)
        if item is not None and (index >= len(names) or names[index] not in GRADIENTS)
    ]
    recorder.plain("backward/gradients for what has none", elsewhere)
    for name in GRADIENTS:
        index = names.index(name)
        item = results[index] if index < len(results) else None
        if not recorder.is_tensor(item):
            recorder.see(f"grad/{name}", item)
            continue
        meaning = recorder.meaning(item) + _shared(recorder, item, results, names)
        if _left_unwritten(recorder, name):
            recorder.put(f"grad/{name}", dataclasses.replace(recorder.array(item, meaning), data=None))
        else:
            recorder.see(f"grad/{name}", item, meaning)


def _left_unwritten(recorder: Recorder, name: str) -> bool:
    """Whether a gradient's elements mean nothing: cuDNN leaves that of a [1, 1, 1, skv] bias as it was allocated."""
    return name == "attn_bias" and recorder.inputs.case.bias_shape == "111s" and not recorder.padding_defined


def _shared(recorder: Recorder, item: Any, results: tuple[Any, ...], names: tuple[str, ...]) -> str:
    """Return words for which gradients lie in one buffer with this one, so that packed gradients stay packed."""

    def storage(tensor: Any) -> int | None:
        """Return where a tensor with elements lies, a quantized one by its first part."""
        if recorder.is_quantized(tensor):
            tensor = next(iter(parts(tensor).values()), None)
        return tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) and tensor.numel() else None

    by_name = dict(zip(names, results, strict=False))
    own = storage(item)
    together = [name for name in GRADIENTS if own is not None and storage(by_name.get(name)) == own]
    return f", in one buffer: {', '.join(together)}" if len(together) > 1 else ""


def raw_gradients(recorder: Recorder, subject: Subject, raw: list[Any]) -> dict[str, Any]:
    """Return the gradients that the function's own ``backward`` returned, by input."""
    results = raw[0] if raw and isinstance(raw[0], tuple) else ()
    by_name = dict(zip(subject.convention.parameters, results, strict=False))
    return {name: tensor for name in GRADIENTS if recorder.is_tensor(tensor := by_name.get(name))}


def see_leaves(recorder: Recorder, raw: Mapping[str, Any]) -> None:
    """Record the gradients that the caller finds on its own tensors, and whether they are what backward returned."""
    for name, leaf in recorder.live.leaves.items():
        gradient = leaf.grad
        if gradient is None:
            recorder.plain(f"leaf/{name}", None)
            continue
        if _left_unwritten(recorder, name):
            continue
        held = recorder.inputs.parts_of(name)
        meaning = "gradient"
        found = [raw[part] for part in held if part in raw]
        packed = len(held) > 1
        comparable = len(found) == len(held) and not (packed and any(map(recorder.is_quantized, found)))
        if comparable and _equal(recorder, recorder.inputs.pack(found) if packed else found[0], gradient):
            meaning = " and ".join(dict.fromkeys(map(recorder.meaning, found)))
        recorder.see(f"leaf/{name}", gradient, meaning)


def _equal(recorder: Recorder, one: Any, other: Any) -> bool:
    """Whether two gradients are of one kind and equal; quantized ones part by part."""
    if recorder.is_quantized(one) != recorder.is_quantized(other):
        return False
    if not recorder.is_quantized(one):
        return torch.equal(one, other)
    left, right = parts(one), parts(other)
    return left.keys() == right.keys() and all(same_bits(left[name], right[name]) for name in left)


def see_generators(recorder: Recorder, default: torch.Generator, when: str) -> None:
    """Record the states of the generators that a pass may draw from."""
    for name, generator in (("default", default), ("own", recorder.live.generator)):
        if generator is not None:
            recorder.see(f"generator/{name}/{when}", generator.get_state(), "state")


def see_quantizers(recorder: Recorder, when: str) -> None:
    """Record the six quantizers of attention, and whether scale and amax are still the tensors they were."""
    quantizers = recorder.live.quantizers
    for name, quantizer in quantizers.named().items() if quantizers is not None else ():
        recorder.see(f"quantizer/{name}/{when}", quantizer)


def see_writes(recorder: Recorder) -> None:
    """Record what became of the memory, the quantizers and the recipe that the caller handed over."""
    live = recorder.live
    for name, change in recorder.inputs.changes(live).items():
        recorder.plain(f"write/{name}", change)
    if live.quantizers is not None:
        recorder.plain("write/quantizers", live.quantizers.changes())
        recorder.plain("write/fp8_meta", live.changes_of_meta())
