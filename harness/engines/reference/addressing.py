"""Where elements lie in memory according to a layout string, whatever strides a tensor has.

The kernels take raw data pointers and derive every stride from the layout string, so a wrong string gives wrong
numbers, not an error. This module is that rule: it reads and allocates by the string alone. All tensors that it hands
to the arithmetic are in the order [b, h, s, d]. Which rows of a tensor without a batch dimension are read is not for
this module to say but for ``ragged`` and ``paging``.

Source: the element strides of TransformerEngine's C++ fused attention, all of which are the strides of a contiguous
buffer whose dimensions are the letters of the layout part, a digit standing for the number of interleaved tensors.
"""

from __future__ import annotations

import functools
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
OUTPUT_FORMATS = ("sbhd", "bshd", "thd")
CANONICAL = "bhsd"
RAGGED = "thd"


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


def require_output_format(name: str, value: str, layout: str) -> None:
    """Raise EngineUnsupported for a known format that is no single tensor's, or is ragged where q is not.

    Takes sbhd and bshd where q in ``layout`` is dense, in either order, and thd alone where q is ragged.
    """
    allowed = [fmt for fmt in OUTPUT_FORMATS if (fmt == RAGGED) == is_ragged(places(layout)[0].part)]
    if value not in allowed:
        raise EngineUnsupported(
            f"{name}={value!r}: with layout {layout!r} the reference engine takes {' or '.join(allowed)}"
        )


def require_same_kind(name: str, layout: str, other: str) -> None:
    """Raise EngineUnsupported where gradients would be ragged and their tensors dense, or the other way round."""
    if [is_ragged(place.part) for place in places(layout)] != [is_ragged(place.part) for place in places(other)]:
        raise EngineUnsupported(f"{name}={layout!r}: one of it and {other!r} is ragged where the other is dense")


def is_ragged(part: str) -> bool:
    """Whether tensors in this part of a layout have a dimension of tokens in place of batch and sequence."""
    return part.startswith("t")


@functools.cache
def places(layout: str) -> tuple[Place, Place, Place]:
    """Return where q, k and v lie in ``layout``: sbhd_sb2hd gives sbhd[0], sb2hd[0], sb2hd[1]."""
    found = [
        Place(part, index)
        for part in layout.removeprefix(PAGED).split("_")
        for index in range(next((int(letter) for letter in part if letter.isdigit()), 1))
    ]
    q, k, v = found
    return q, k, v


def heads(layout: str) -> int:
    """Return which dimension of q, k and v counts heads, from the end: the second but for MXFP8's own layout."""
    return -3 if layout == INTERNAL_LAYOUT else -2


def _buffer_sizes(part: str, sizes: Mapping[str, int]) -> list[int]:
    return [int(letter) if letter.isdigit() else sizes[letter] for letter in part]


def contiguous_strides(sizes: Sequence[int]) -> list[int]:
    """Return the element strides of a contiguous tensor of these sizes."""
    return [math.prod(sizes[position + 1 :]) for position in range(len(sizes))]


def strides(part: str, sizes: Mapping[str, int], order: str = CANONICAL) -> list[int]:
    """Return the element strides that the kernels assume for a tensor in ``part``, one for each letter of ``order``.

    ``sizes`` maps the letters to sizes. For part bs3hd in the order b, h, s, d the result is [3shd, d, 3hd, 1].
    """
    by_letter = dict(zip(part, contiguous_strides(_buffer_sizes(part, sizes)), strict=True))
    return [by_letter[letter] for letter in order]


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


def flat(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Read ``tensor`` as if it were contiguous with its own sizes, into a fresh tensor of ``dtype``."""
    view = reinterpret(name, tensor, tensor.shape, contiguous_strides(tensor.shape))
    return view.to(dtype=dtype, memory_format=torch.contiguous_format, copy=True)


def _order(values: torch.Tensor) -> str:
    return RAGGED if values.dim() == len(RAGGED) else CANONICAL


def write(values: torch.Tensor, fmt: str, dtype: torch.dtype) -> torch.Tensor:
    """Return ``values``, [b, h, s, d] or ragged [t, h, d], as a fresh contiguous tensor of ``dtype`` in ``fmt``."""
    order = _order(values)
    ordered = values.permute(*(order.index(letter) for letter in fmt))
    return ordered.to(dtype=dtype, memory_format=torch.contiguous_format, copy=True)


def write_packed(values: Sequence[torch.Tensor], layout: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return gradients of q, k and v, [b, h, s, d] or ragged [t, h, d], as fresh tensors laid out by ``layout``.

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
        order = _order(value)
        sizes = _buffer_sizes(place.part, dict(zip(order, value.shape, strict=True)))
        if place.part not in buffers:
            buffers[place.part] = torch.empty(sizes, dtype=dtype, device=value.device)
        if list(buffers[place.part].shape) != sizes:
            raise RuntimeError(
                f"dqkv_layout={layout!r}: tensors of different sizes cannot share the buffer {place.part!r}: "
                f"{list(buffers[place.part].shape)} and {sizes}"
            )
        view = buffers[place.part].select(digit, place.index)
        view.copy_(value.permute(*(order.index(letter) for letter in letters)))
        results.append(view)
    return results
