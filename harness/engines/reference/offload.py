"""CPU offload of the tensors that autograd saves, by the present path and by the first one (V1).

Offloading is on inside ``offloading``. Then what is saved goes to host memory, and comes back in memory of its own. On
the CPU the host's memory is other memory there, so that whoever holds on to a saved tensor behind autograd's back, or
takes it for contiguous, is found out.

Present path: every contiguous tensor of some size goes. One that is not contiguous goes only if ``start_offload``
marked it: then its base does, once for all its views, and it comes back as the same view of that. V1: what
``mark_activation_offload`` marked goes, and comes back contiguous, so that an interleaved layout is one no longer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from harness.engines.reference.quantized import QuantizedTensor, prepare_for_saving, restore_from_saved

SMALLEST = 16
"""How many elements a tensor has at least that the present path offloads; the real one takes large ones alone."""

OFF, PRESENT, V1 = "off", "present", "v1"
_path = OFF


def is_cpu_offload_enabled() -> bool:
    """Whether activations are being offloaded to the CPU."""
    return _path != OFF


def is_current_layer_offloaded() -> bool:
    """Whether the layer that runs is offloaded by the first path."""
    return _path == V1


def start_offload(*tensors: Any, offload_base_tensor: bool = False) -> None:
    """Mark tensors as ready to go; with ``offload_base_tensor``, a view as one whose base is to go in its stead.

    The marks are attributes of the tensors. Does nothing unless the present path is on.
    """
    if _path != PRESENT:
        return
    plain, objects = prepare_for_saving(*tensors)
    for tensor in plain:
        if tensor is not None and offload_base_tensor and tensor._base is not None:
            tensor.offload_base_tensor = True  # type: ignore[attr-defined]
    restore_from_saved(objects, plain)


def mark_activation_offload(*tensors: Any) -> None:
    """Mark tensors as ones to offload: quantized ones by their bytes, which is an attribute of these.

    Does nothing unless the first path is on.
    """
    if _path != V1:
        return
    for tensor in tensors:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        for part in (tensor,) if plain or tensor is None else tensor.get_data_tensors():
            if part is not None:
                part.activation_offloading = True


@dataclass(slots=True)
class _Host:
    """A tensor in host memory; it comes back once, so that its views share memory."""

    copy: torch.Tensor
    device: torch.device
    back: torch.Tensor | None = None

    def reload(self) -> torch.Tensor:
        if self.back is None:
            self.back = self.copy.to(self.device, copy=True)
        return self.back


def _to_host(tensor: torch.Tensor) -> _Host:
    return _Host(tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format), tensor.device)


@dataclass(slots=True)
class _Offload:
    """What one block has offloaded by the present path: the hosts of bases, for as long as these live."""

    bases: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def pack(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Take a tensor; return what gives it back."""
        base = tensor._base if getattr(tensor, "offload_base_tensor", False) else None
        if tensor.numel() < SMALLEST or (base is None and not tensor.is_contiguous()):
            return lambda: tensor
        if base is None:
            return _to_host(tensor).reload
        host = self.bases.get(base)  # type: ignore[no-untyped-call]
        if host is None:
            host = self.bases[base] = _to_host(base)
        place = tensor.shape, tensor.stride(), tensor.storage_offset() - base.storage_offset()
        return lambda: host.reload().as_strided(*place)


def _pack_marked(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Take a tensor by the first path; return what gives it back."""
    return _to_host(tensor).reload if hasattr(tensor, "activation_offloading") else lambda: tensor


def _by_parts(pack: Callable[[torch.Tensor], Callable[[], torch.Tensor]]) -> Callable[[torch.Tensor], Any]:
    """Return what takes quantized tensors too, by the parts they are made of."""

    def packed(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, QuantizedTensor):
            return pack(tensor)
        parts = {name: pack(part) for name, part in tensor.parts().items()}
        kept = tensor.detach()
        kept.prepare_for_saving()
        return lambda: kept.like({name: part() for name, part in parts.items()})

    return packed


@contextlib.contextmanager
def offloading(path: str) -> Iterator[None]:
    """Offload inside the block what autograd saves there, by the path ``present`` or ``v1``."""
    global _path
    before, _path = _path, path
    try:
        with saved_tensors_hooks(_by_parts(_Offload().pack if path == PRESENT else _pack_marked), _give_back):
            yield
    finally:
        _path = before


def _give_back(packed: Callable[[], torch.Tensor]) -> torch.Tensor:
    return packed()
