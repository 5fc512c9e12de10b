"""Turn tensors into values: what each one is to the caller, and which of its elements the kernel defines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from harness.inputs import Inputs, Live, same_bits
from harness.observe.values import Array, Observation, Plain, Value, of_pass, path_of_pass, plain
from harness.quantized import SLOTS, flags, fp8_dtype, parts, state_tensors

Key = tuple[Any, ...]

WRITTEN = ", written to since"
"""Ends the meaning of a result that the subject changed in place: what is in it is the kernel's alone no more."""


class HarnessFault(RuntimeError):
    """Something went wrong in the watching, not in what is watched."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """The classes of an engine's seam that are told apart from plain tensors and values."""

    tensors: tuple[type, ...] = ()
    quantizers: tuple[type, ...] = ()

    @classmethod
    def of(cls, seam: Mapping[str, object]) -> Kinds:
        """Return those of a seam; of one that lacks them, none."""

        def named(*names: str) -> tuple[type, ...]:
            return tuple(found for name in names if isinstance(found := seam.get(name), type))

        return cls(
            named("QuantizedTensorStorage"), named("Float8Quantizer", "Float8CurrentScalingQuantizer", "MXFP8Quantizer")
        )


class Recorder:
    """Collects one Observation.

    A tensor is named by its memory, not by the Python object that carries it: the same storage seen with the same
    offset, dtype, shape and stride is the same tensor, another view of that storage is not. A quantized tensor is named
    by the memory of its parts. Kernel results are held until the observation ends, so that their memory cannot be given
    to another tensor that would then take their name; with ``holding`` off none is held, and none has a name.

    ``inputs``, ``live`` and ``number`` are those of the pass that is running; paths and names of every pass but the
    first have its number in them.
    """

    def __init__(self, inputs: Inputs, live: Live, *, padding_defined: bool, kinds: Kinds | None = None) -> None:
        self.observation = Observation()
        self.kinds = kinds or Kinds()
        self.padding_defined = padding_defined
        self.holding = True
        self._names: dict[Key, str] = {}
        self._given: dict[Key, tuple[torch.Tensor, int]] = {}
        self._buffers: dict[int, tuple[str, int]] = {}
        self._storages: dict[int, str] = {}
        self._held: list[torch.Tensor] = []
        self._versions: dict[int, int] = {}
        self._valid: dict[Key, torch.Tensor] = {}
        self._made: dict[Key, torch.Tensor] = {}
        self._quantizers: dict[int, str] = {}
        self._fault: Exception | None = None
        self.turn_to(inputs, live, 1)
        self.admit()

    def turn_to(self, inputs: Inputs, live: Live, number: int) -> None:
        """Record for a pass from here on."""
        self.inputs, self.live, self.number = inputs, live, number

    def admit(self) -> None:
        """Give the tensors and quantizers of the pass that is running their names."""
        for name, buffer in self.live.buffers.items():
            self._buffers[_storage(buffer.flat)] = (of_pass(name, self.number), buffer.margin)
        for name, tensor in self.live.tensors.items():
            self._name_given(tensor, of_pass(f"input {name}", self.number))
        self._name_given(self.live.output_grad, of_pass("gradient of the output", self.number), elements=True)
        if self.live.quantizers is not None:
            slots = {place: name for name, place in SLOTS.items()}
            for (group, index), state in self.live.quantizers.made.items():
                name = slots.get((group, index), f"{group}[{index}]")
                self._quantizers.setdefault(id(state.quantizer), name)
                for what, tensor in state.tensors.items():
                    self._names.setdefault(_key(tensor), f"{what} of {name}")
                    self._storages.setdefault(_storage(tensor), f"{what} of {name}")

    def _name_given(self, tensor: torch.Tensor, meaning: str, *, elements: bool = False) -> None:
        """Name a tensor of the caller's and its parts; elements are recorded always, or only once written to."""
        if self.is_quantized(tensor):
            for part, held in parts(tensor).items():
                self._name_given(held, f"{part} of {meaning}", elements=elements)
            self._names.setdefault(self._key(tensor), meaning)
            return
        self._names.setdefault(_key(tensor), meaning)
        if not elements:
            self._given.setdefault(_key(tensor), (tensor.detach().clone(), tensor._version))

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

    def is_quantized(self, item: Any) -> bool:
        """Whether this is a quantized tensor, a torch.Tensor or a bare storage."""
        return isinstance(item, self.kinds.tensors)

    def is_tensor(self, item: Any) -> bool:
        """Whether this is a tensor of either kind."""
        return isinstance(item, torch.Tensor) or self.is_quantized(item)

    def name(self, tensor: Any, meaning: str, valid: torch.Tensor | None = None) -> None:
        """Give a tensor that a kernel or the subject made a name; an input keeps its own.

        Its bits are kept: whoever changes them later, by whatever way round the version counter, is found out.
        """
        if not self.holding:
            return
        meaning = of_pass(meaning, self.number)
        if self.is_quantized(tensor):
            for part, held in parts(tensor).items():
                self._name_result(held, f"{part} of {meaning}")
            self._names.setdefault(self._key(tensor), meaning)
            return
        self._name_result(tensor, meaning)
        if valid is not None:
            self._valid.setdefault(_key(tensor), valid)

    def _name_result(self, tensor: torch.Tensor, meaning: str) -> None:
        self._made.setdefault(_key(tensor), tensor.detach().clone())
        self._held.append(tensor)
        self._names.setdefault(_key(tensor), meaning)
        self._storages.setdefault(_storage(tensor), meaning)
        self._versions.setdefault(_storage(tensor), tensor._version)

    def meaning(self, tensor: Any) -> str:
        """Return what a tensor is: a named one, a view of a buffer or of a named one, or ``fresh``."""
        if self.is_quantized(tensor):
            named = self._names.get(self._key(tensor), "fresh")
            written = named != "fresh" and any(self._is_written(part) for part in parts(tensor).values())
            return named + WRITTEN if written else named
        storage = _storage(tensor)
        written = self._is_written(tensor)
        named = self._names.get(_key(tensor), "")
        if named:
            return named + WRITTEN if written else named
        if storage in self._buffers:
            name, margin = self._buffers[storage]
            return f"view of buffer {name} at {tensor.storage_offset() - margin}"
        if storage in self._storages:
            return f"view of {self._storages[storage]}{WRITTEN if written else ''}"
        return "fresh"

    def _is_written(self, tensor: torch.Tensor) -> bool:
        """Whether a kernel's result was written to after it was named."""
        storage, made = _storage(tensor), self._made.get(_key(tensor))
        if storage in self._versions and self._versions[storage] != tensor._version:
            return True
        return made is not None and not same_bits(made, tensor)

    def array(self, tensor: Any, meaning: str | None = None) -> Array:
        """Return a tensor as a value. An input's elements are left out while they are what was given.

        A quantized tensor's elements are left out too: they are those of its parts, which ``see`` records beside it.
        """
        if meaning is None:
            meaning = self.meaning(tensor)
        if self.is_quantized(tensor):
            stride = tuple(tensor.stride()) if isinstance(tensor, torch.Tensor) else ()
            dtype = f"{_nominal(tensor)} as {type(tensor).__name__} {fp8_dtype(tensor)}"
            return Array(dtype, tuple(tensor.shape), stride, meaning)
        key = _key(tensor)
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

    def quantizer(self, item: Any) -> Plain:
        """Return a quantizer as a value: its class, whose it is, and its settings."""
        described = {"is": self.whose(item), "dtype": fp8_dtype(item)} | flags(item)
        return Plain(type(item).__name__, plain(described).value)

    def whose(self, quantizer: Any) -> str:
        """Return whose a quantizer is: the caller's, a copy that shares scale or amax with the caller's, or another."""
        name = self._quantizers.get(id(quantizer))
        if name is not None:
            return f"the caller's {name}"
        shared = [self._names[key].partition(" of ")[2] for tensor in state_tensors(quantizer).values()
                  if (key := _key(tensor)) in self._names]  # fmt: skip
        return f"a copy of the caller's {' and '.join(dict.fromkeys(shared))}" if shared else "another"

    def value(self, item: Any) -> Value:
        """Return any argument or result as a value."""
        if self.is_tensor(item):
            return self.array(item)
        if isinstance(item, self.kinds.quantizers):
            return self.quantizer(item)
        if isinstance(item, torch.Generator):
            own = self.live.generator is not None and item is self.live.generator
            return Plain("Generator", "the caller's own" if own else "another")
        if isinstance(item, torch.dtype):
            return Plain("dtype", str(item).removeprefix("torch."))
        if hasattr(item, "name") and isinstance(getattr(item, "name", None), str):  # enum members, pybind ones too
            return Plain("enum", item.name)
        return plain(item)

    def see(self, path: str, item: Any, meaning: str | None = None) -> None:
        """Record anything under a path.

        A list or tuple with something to look into is recorded item by item; a quantized tensor's parts and the scale
        and amax of a quantizer come below it.
        """
        if isinstance(item, (list, tuple)) and any(self._has_inside(part) for part in item):
            self.plain(f"{path}/length", len(item))
            for index, part in enumerate(item):
                self.see(f"{path}/{index}", part)
            return
        self.put(path, self.array(item, meaning) if meaning is not None else self.value(item))
        if self.is_quantized(item):
            quantizer = getattr(item, "_quantizer", None)
            self.put(f"{path}/quantizer", plain(quantizer) if quantizer is None else self.quantizer(quantizer))
            for name, part in parts(item).items():
                self.put(f"{path}/{name}", self.array(part))
        elif isinstance(item, self.kinds.quantizers):
            for name, part in state_tensors(item).items():
                self.put(f"{path}/{name}", self.array(part))

    def _has_inside(self, item: Any) -> bool:
        if isinstance(item, (list, tuple)):
            return any(self._has_inside(part) for part in item)
        return self.is_tensor(item) or isinstance(item, self.kinds.quantizers)

    def plain(self, path: str, value: Any) -> None:
        """Record a value that is not a tensor."""
        self.put(path, plain(value))

    def put(self, path: str, value: Value) -> None:
        """Record a value under the path that it has in the pass that is running."""
        self.observation.see(self.path(path), value)

    def path(self, path: str) -> str:
        """Return the path that a pass but the first has for what the first has under ``path``."""
        return path_of_pass(path, self.number)

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

    def _key(self, tensor: Any) -> Key:
        if self.is_quantized(tensor):
            return (type(tensor).__name__, *((name, _key(part)) for name, part in parts(tensor).items()))
        return _key(tensor)


def _nominal(tensor: Any) -> str:
    return str(getattr(tensor, "_dtype", None) or tensor.dtype).removeprefix("torch.")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _key(tensor: torch.Tensor) -> Key:
    return (_storage(tensor), tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def bind(arguments: Mapping[str, Any], recorder: Recorder, path: str) -> None:
    """Record the arguments of one call, each under its parameter's name."""
    for name, item in arguments.items():
        recorder.see(f"{path}/{name}", item)
