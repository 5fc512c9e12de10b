"""What hooks on saved tensors give back: equal values in other memory.

Each kind takes a tensor when it is saved and returns what gives it back. Memory that comes back contiguous has room
behind it, as much as the kernels may reach that still read by an interleaved layout: they read wrong numbers, the same
ones every time, and stay inside the allocation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from harness.observe.recorder import Recorder
from harness.quantized import parts

Kind = Callable[[torch.Tensor], Callable[[], torch.Tensor]]

ROOM = 4
"""How many times its own size the memory of a copy has: three tensors share an interleaved buffer at most."""
FILLER = 1
"""What the room holds: small and finite in every dtype, and as bytes of FP8."""


def _roomy(shape: tuple[int, ...], tensor: torch.Tensor) -> torch.Tensor:
    size = math.prod(shape)
    flat = torch.full((ROOM * size,), FILLER, dtype=tensor.dtype, device=tensor.device)
    return flat[:size].view(shape)


def copied(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Give back a contiguous copy."""
    return lambda: _roomy(tuple(tensor.shape), tensor).copy_(tensor)


def through_the_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Give back a copy by way of the CPU's memory, with the strides and the offset that the tensor had.

    All of its storage goes, so that an interleaved tensor still has its neighbours.
    """
    place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    host, device = whole.to("cpu", copy=True), tensor.device
    return lambda: host.to(device, copy=True).as_strided(*place)


def strided(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Give back a floating-point tensor with a gap after every element, and a copy of any other.

    The others are offsets and bytes, which kernels read through bare pointers: offsets with gaps would lead anywhere.
    """
    if not tensor.is_floating_point():
        return copied(tensor)
    return lambda: _roomy((*tensor.shape, 2), tensor)[..., 0].copy_(tensor)


def by_parts(kind: Kind, tensor: torch.Tensor, recorder: Recorder) -> Callable[[], torch.Tensor]:
    """Apply a kind of hook to a tensor, or to each part of a quantized one."""
    if not recorder.is_quantized(tensor):
        return kind(tensor.detach())
    given = {name: kind(part) for name, part in parts(tensor).items()}
    kept = tensor.detach()

    def give_back() -> torch.Tensor:
        made = kept.detach()
        for name, part in given.items():
            setattr(made, f"_{name}", part())
        return made

    return give_back
