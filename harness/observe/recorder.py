"""Turn tensors into values: what each one is to the caller, and which of its elements the kernel defines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from harness.inputs import Inputs, Live, same_bits
from harness.observe.values import Array, Observation, Plain, Value, plain

Key = tuple[Any, ...]

WRITTEN = ", written to since"
"""Ends the meaning of a result that the subject changed in place: what is in it is the kernel's alone no more."""


class HarnessFault(RuntimeError):
    """Something went wrong in the watching, not in what is watched."""


class Recorder:
    """Collects one Observation.

    A tensor is named by its memory, not by the Python object that carries it: the same storage seen with the same
    offset, dtype, shape and stride is the same tensor, another view of that storage is not. Kernel results are held
    until the observation ends, so that their memory cannot be given to another tensor that would then take their name.
    """

    def __init__(self, inputs: Inputs, live: Live, *, padding_defined: bool) -> None:
        self.inputs = inputs
        self.live = live
        self.observation = Observation()
        self._names: dict[Key, str] = {}
        self._given: dict[Key, tuple[torch.Tensor, int]] = {}
        self._buffers = {_storage(buffer.flat): name for name, buffer in live.buffers.items()}
        self._results: dict[int, str] = {}
        self._held: list[torch.Tensor] = []
        self._versions: dict[int, int] = {}
        self._valid: dict[Key, torch.Tensor] = {}
        self._made: dict[Key, torch.Tensor] = {}
        self.padding_defined = padding_defined
        self._fault: Exception | None = None
        for name, tensor in live.tensors.items():
            self._names.setdefault(_key(tensor), f"input {name}")
            self._given.setdefault(_key(tensor), (tensor.detach().clone(), tensor._version))
        self._names.setdefault(_key(live.output_grad), "gradient of the output")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark code that watches: what it raises inside a subject's call is not the subject's doing."""
        try:
            yield
        except Exception as error:
            self._fault = self._fault or error
            raise

    def check(self) -> None:
        """Raise HarnessFault where the watching itself failed."""
        if self._fault is not None:
            raise HarnessFault(f"{type(self._fault).__name__}: {self._fault}") from self._fault

    def name(self, tensor: torch.Tensor, meaning: str, valid: torch.Tensor | None = None) -> None:
        """Give a tensor that a kernel or the subject made a name; an input keeps its own.

        Its bits are kept: whoever changes them later, by whatever way round the version counter, is found out.
        """
        self._made.setdefault(_key(tensor), tensor.detach().clone())
        self._held.append(tensor)
        self._names.setdefault(_key(tensor), meaning)
        self._results.setdefault(_storage(tensor), meaning)
        self._versions.setdefault(_storage(tensor), tensor._version)
        if valid is not None:
            self._valid.setdefault(_key(tensor), valid)

    def meaning(self, tensor: torch.Tensor) -> str:
        """Return what a tensor is: a named one, a view of a buffer or of a named one, or ``fresh``."""
        storage, made = _storage(tensor), self._made.get(_key(tensor))
        written = storage in self._results and self._versions[storage] != tensor._version
        if made is not None and not written:
            written = not same_bits(made, tensor)
        named = self._names.get(_key(tensor))
        if named is not None:
            return named + WRITTEN if written else named
        if storage in self._buffers:
            name = self._buffers[storage]
            offset = tensor.storage_offset() - self.live.buffers[name].margin
            return f"view of buffer {name} at {offset}"
        if storage in self._results:
            return f"view of {self._results[storage]}{WRITTEN if written else ''}"
        return "fresh"

    def array(self, tensor: torch.Tensor, meaning: str | None = None) -> Array:
        """Return the tensor as a value. An input's elements are left out while they are what was given."""
        key = _key(tensor)
        if meaning is None:
            meaning = self.meaning(tensor)
        given = self._given.get(key)
        untouched = given is not None and given[1] == tensor._version and same_bits(given[0], tensor)
        return Array(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            meaning,
            None if untouched else tensor.detach().clone(),
            self._valid.get(key),
        )

    def value(self, item: Any) -> Value:
        """Return any argument or result as a value."""
        if isinstance(item, torch.Tensor):
            return self.array(item)
        if isinstance(item, torch.Generator):
            own = self.live.generator is not None and item is self.live.generator
            return Plain("Generator", "the caller's own" if own else "another")
        if isinstance(item, torch.dtype):
            return Plain("dtype", str(item).removeprefix("torch."))
        if hasattr(item, "name") and isinstance(getattr(item, "name", None), str):  # enum members, pybind ones too
            return Plain("enum", item.name)
        return plain(item)

    def see(self, path: str, item: Any) -> None:
        """Record anything under a path; a list or tuple with tensors in it is recorded item by item."""
        if isinstance(item, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in item):
            self.observation.plain(f"{path}/length", len(item))
            for index, part in enumerate(item):
                self.observation.see(f"{path}/{index}", self.value(part))
        else:
            self.observation.see(path, self.value(item))

    def defined_statistics(self) -> torch.Tensor | None:
        """Return which softmax statistics, [b, h, s, 1] or [t, h, 1], the kernel defines; None where it defines all.

        Outside the sequences cuDNN leaves them as they were; O and the gradients are zero there.
        """
        case, place = self.inputs.case, self.inputs.q
        longest, ragged = case.max_seqlen_q, case.layout.q_format == "thd"
        if self.padding_defined or (not ragged and all(length == longest for length in place.lengths)):
            return None
        device = self.live.output_grad.device
        lengths = torch.tensor(place.lengths, device=device)[:, None]
        if not ragged:
            return (torch.arange(longest, device=device)[None, :] < lengths)[:, None, :, None]
        starts = torch.tensor(place.offsets[:-1], device=device)[:, None]
        rows = torch.arange(place.rows, device=device)[None, :]
        return ((rows >= starts) & (rows < starts + lengths)).any(0)[:, None, None]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _key(tensor: torch.Tensor) -> Key:
    return (_storage(tensor), tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def bind(arguments: Mapping[str, Any], recorder: Recorder, path: str) -> None:
    """Record the arguments of one call, each under its parameter's name."""
    for name, item in arguments.items():
        recorder.see(f"{path}/{name}", item)
