"""Where elements lie in memory according to a layout string, whatever strides a tensor has.

The kernels take raw data pointers and derive every stride from the layout string, so a wrong string gives wrong
numbers, not an error. This module is that rule: it reads and allocates by the string alone. All tensors that it hands
to the arithmetic are in the order [b, h, s, d].

Source: the element strides of TransformerEngine's C++ fused attention, all of which are the strides of a contiguous
buffer whose dimensions are the letters of the layout part, a digit standing for the number of interleaved tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.engines.reference.errors import EngineUnsupported
from harness.layouts import LAYOUTS

PAGED = "paged_kv_"
INTERNAL_LAYOUT = "bhsd_bhsd_bhsd"  # a product of MXFP8 quantization, never a caller's
KNOWN_LAYOUTS = frozenset(LAYOUTS) | {INTERNAL_LAYOUT}
FORMATS = ("sbhd", "bshd", "thd", "bhsd", "sbhd_2bshd", "bshd_2sbhd", "thd_2bshd", "thd_2sbhd")
DENSE_FORMATS = ("sbhd", "bshd")
CANONICAL = "bhsd"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies: the part of the layout that holds it, and its index among those interleaved there."""

    part: str
    index: int


def check_layout(name: str, value: str) -> None:
    """Raise KeyError unless ``value`` is one of the 26 layout strings of the kernels' map."""
    if value not in KNOWN_LAYOUTS:
        raise KeyError(f"{name}={value!r} is no qkv_layout")


def check_format(name: str, value: str | None, *, optional: bool = False) -> None:
    """Raise KeyError unless ``value`` is one of the format strings of the kernels' map (or None, if optional)."""
    if value not in FORMATS and not (optional and value is None):
        raise KeyError(f"{name}={value!r} is no tensor format")


def require_dense_layout(name: str, value: str) -> None:
    """Raise EngineUnsupported for a known layout that is paged, ragged (thd) or internal to MXFP8."""
    if value.startswith(PAGED):
        raise EngineUnsupported(f"{name}={value!r}: the reference engine has no paged KV cache")
    if "t" in value:
        raise EngineUnsupported(f"{name}={value!r}: the reference engine has no ragged (thd) batches")
    if value == INTERNAL_LAYOUT:
        raise EngineUnsupported(f"{name}={value!r}: the reference engine has no MXFP8 layout")


def require_dense_format(name: str, value: str) -> None:
    """Raise EngineUnsupported for a known format that is not one dense tensor's (sbhd or bshd)."""
    if value not in DENSE_FORMATS:
        raise EngineUnsupported(f"{name}={value!r}: the reference engine takes one of {', '.join(DENSE_FORMATS)}")


def places(layout: str) -> tuple[Place, Place, Place]:
    """Return where q, k and v lie in ``layout``: sbhd_sb2hd gives sbhd[0], sb2hd[0], sb2hd[1]."""
    found = [
        Place(part, index)
        for part in layout.removeprefix(PAGED).split("_")
        for index in range(next((int(letter) for letter in part if letter.isdigit()), 1))
    ]
    q, k, v = found
    return q, k, v


def _buffer_sizes(part: str, sizes: Mapping[str, int]) -> list[int]:
    return [int(letter) if letter.isdigit() else sizes[letter] for letter in part]


def contiguous_strides(sizes: Sequence[int]) -> list[int]:
    """Return the element strides of a contiguous tensor of these sizes."""
    return [math.prod(sizes[position + 1 :]) for position in range(len(sizes))]


def strides(part: str, sizes: Mapping[str, int]) -> list[int]:
    """Return the element strides along b, h, s and d that the kernels assume for a tensor in ``part``.

    ``sizes`` maps the letters b, s, h, d to sizes. For part bs3hd the result is [3shd, d, 3hd, 1].
    """
    by_letter = dict(zip(part, contiguous_strides(_buffer_sizes(part, sizes)), strict=True))
    return [by_letter[letter] for letter in CANONICAL]


def reinterpret(name: str, tensor: torch.Tensor, sizes: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """View the memory that ``tensor`` starts at with other sizes and strides, as a raw pointer would be read.

    Shares the tensor's storage; carries no autograd history. Raises RuntimeError where that would leave the storage,
    which on a GPU is an illegal memory access.
    """
    offset = int(tensor.storage_offset())
    last = offset + sum((size - 1) * step for size, step in zip(sizes, stride, strict=True))
    available = tensor.untyped_storage().nbytes() // tensor.element_size()
    if math.prod(sizes) and last >= available:
        raise RuntimeError(
            f"{name}: reading sizes {tuple(sizes)} with strides {tuple(stride)} from element {offset} leaves its "
            f"storage of {available} elements; its own shape is {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    return torch.as_strided(tensor.detach(), tuple(sizes), tuple(stride), offset)


def read(name: str, tensor: torch.Tensor, part: str, sizes: Mapping[str, int], dtype: torch.dtype) -> torch.Tensor:
    """Read ``tensor`` as the kernels would, by ``part``, into a fresh contiguous [b, h, s, d] tensor of ``dtype``."""
    view = reinterpret(name, tensor, [sizes[letter] for letter in CANONICAL], strides(part, sizes))
    # Always a copy: an unaligned view in the arithmetic could round otherwise than an aligned one.
    return view.to(dtype=dtype, memory_format=torch.contiguous_format, copy=True)


def write(values: torch.Tensor, fmt: str, dtype: torch.dtype) -> torch.Tensor:
    """Return ``values`` [b, h, s, d] as a fresh contiguous tensor of ``dtype`` in the dense format ``fmt``."""
    ordered = values.permute(*(CANONICAL.index(letter) for letter in fmt))
    return ordered.to(dtype=dtype, memory_format=torch.contiguous_format, copy=True)


def write_packed(values: Sequence[torch.Tensor], layout: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return gradients of q, k and v, each [b, h, s, d], as fresh tensors of ``dtype`` laid out by ``layout``.

    What shares a part of the layout comes back as strided views of one fresh buffer, everything else as separate
    contiguous tensors. Raises RuntimeError where tensors of different sizes should share a buffer.
    """
    buffers: dict[str, torch.Tensor] = {}
    results = []
    for value, place in zip(values, places(layout), strict=True):
        digit = next((position for position, letter in enumerate(place.part) if letter.isdigit()), None)
        if digit is None:
            results.append(write(value, place.part, dtype))
            continue
        letters = place.part[:digit] + place.part[digit + 1 :]
        sizes = _buffer_sizes(place.part, dict(zip(CANONICAL, value.shape, strict=True)))
        if place.part not in buffers:
            buffers[place.part] = torch.empty(sizes, dtype=dtype, device=value.device)
        if list(buffers[place.part].shape) != sizes:
            raise RuntimeError(
                f"dqkv_layout={layout!r}: tensors of different sizes cannot share the buffer {place.part!r}: "
                f"{list(buffers[place.part].shape)} and {sizes}"
            )
        view = buffers[place.part].select(digit, place.index)
        view.copy_(value.permute(*(CANONICAL.index(letter) for letter in letters)))
        results.append(view)
    return results
