"""Case -> Inputs: every tensor that a call takes, drawn from the case's seed, in memory that hides nothing.

Each buffer lies between two red zones of NaN (integers: of a value that is no valid offset), so that a read or write
outside it shows. Rows past a sequence's end hold large finite values: a kernel that lets them in gives a visibly wrong
result, and one that multiplies them by zero does not turn the whole tile into NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.case import Case, padding

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RED_ZONE_BYTES = 512
RED_ZONE_INTEGER = -(2**30) - 7
PADDING_POISON = 1024.0


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation: a flat tensor with a red zone at both ends, and the shape of what lies between them."""

    flat: torch.Tensor
    margin: int
    shape: tuple[int, ...]

    def inner(self) -> torch.Tensor:
        """Return the contiguous tensor between the red zones, as a view of ``flat``."""
        size = self.flat.numel() - 2 * self.margin
        return self.flat[self.margin : self.margin + size].view(self.shape)

    def clone(self) -> Buffer:
        """Return a buffer of its own memory with the same bits, red zones included."""
        return Buffer(self.flat.clone(), self.margin, self.shape)


@dataclass(slots=True)
class Live:
    """One set of tensors to call a subject with, in memory that no other call shares.

    ``tensors`` maps the names of FusedAttnFunc's tensor parameters to tensors; a name that the case has no tensor for
    is absent. ``leaves`` are the tensors that gradients accumulate in: the packed buffer itself in a packed layout.
    ``output_grad`` has the output's shape. ``generator`` is None where the default generator is meant.
    """

    buffers: dict[str, Buffer]
    tensors: dict[str, torch.Tensor]
    leaves: dict[str, torch.Tensor]
    output_grad: torch.Tensor
    generator: torch.Generator | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """The master copy of a case's tensors: ``fresh()`` gives a set to call a subject with, ``changes`` checks it after.

    ``lengths_q`` and ``lengths_kv`` are the actual sequence lengths in tokens, one per batch entry.
    """

    case: Case
    masters: dict[str, Buffer]
    lengths_q: tuple[int, ...]
    lengths_kv: tuple[int, ...]

    def fresh(self, generator: torch.Generator | None = None) -> Live:
        """Return a set of tensors in memory of their own, with the case's requires_grad pattern."""
        case = self.case
        buffers = {name: master.clone() for name, master in self.masters.items()}
        leaves: dict[str, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, parts in _parts(case).items():
            leaf = buffers[name].inner()
            leaves[name] = leaf.requires_grad_(parts[0] in case.requires_grad)
            if len(parts) == 1:
                tensors[parts[0]] = leaf
            else:
                tensors |= {part: leaf.select(self._packed_dim, index) for index, part in enumerate(parts)}
                tensors["packed_qkv" if len(parts) == 3 else "packed_kv"] = leaf
        for name in ("attn_bias", "softmax_offset"):
            if name in buffers:
                tensors[name] = leaves[name] = buffers[name].inner().requires_grad_(name in case.requires_grad)
        for name in buffers:
            if name.startswith("cu_seqlens"):
                tensors[name] = buffers[name].inner()
        return Live(buffers, tensors, leaves, _stride(buffers["output_grad"].inner(), case), generator)

    @property
    def _packed_dim(self) -> int:
        """The dimension of a packed buffer that tells q, k and v apart."""
        return -3 if str(self.case.layout.packing).endswith("hd") else -2

    def parts_of(self, leaf: str) -> tuple[str, ...]:
        """Return which of the function's tensors a leaf holds: ``qkv`` holds three, ``kv`` two, any other itself."""
        return _parts(self.case).get(leaf, (leaf,))

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensors of one packed buffer put together as it holds them."""
        return torch.stack(list(tensors), self._packed_dim)

    def changes(self, live: Live) -> dict[str, str]:
        """Return ``unchanged``, ``written`` or ``red zone written`` for each buffer of a used set, by its bits."""
        found = {name: _change(self.masters[name], buffer) for name, buffer in live.buffers.items()}
        given = _stride(self.masters["output_grad"].inner(), self.case)  # it may lie in memory of its own
        if not torch.equal(_integers(given.contiguous()), _integers(live.output_grad.detach().contiguous())):
            found["output_grad"] = "written"
        return found


def not_drawn(case: Case) -> str | None:
    """Return why no tensors can be drawn for a case, or None."""
    if case.layout.thd:
        return f"qkv_layout={case.qkv_layout}: THD inputs are not drawn by this version"
    if case.layout.paged:
        return f"qkv_layout={case.qkv_layout}: paged KV inputs are not drawn by this version"
    return None


def build(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Draw the tensors of a case; the same case gives the same bits on every machine and device."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = DTYPES[case.dtype]
    lengths_q = _lengths(case, case.max_seqlen_q, generator)
    one_part = case.layout.parts == 1
    lengths_kv = lengths_q if one_part else _lengths(case, case.max_seqlen_kv, generator)
    shapes = {
        "q": (case.num_heads, case.head_dim_qk),
        "k": (case.num_gqa_groups, case.head_dim_qk),
        "v": (case.num_gqa_groups, case.head_dim_v),
    }
    contents: dict[str, torch.Tensor] = {}
    for name, parts in _parts(case).items():
        is_q = parts[0] == "q"
        tokens = case.max_seqlen_q if is_q else case.max_seqlen_kv
        layout_format = case.layout.q_format if is_q else case.layout.kv_format
        outer = _outer(layout_format, case.batch_size, tokens)
        inner = shapes[parts[0]]
        if len(parts) > 1:
            hd = str(case.layout.packing).endswith("hd")
            inner = (len(parts), *inner) if hd else (inner[0], len(parts), inner[1])  # type: ignore[assignment]
        values = torch.randn((*outer, *inner), generator=generator)
        _poison(values, layout_format, lengths_q if is_q else lengths_kv)
        contents[name] = values.to(dtype)
    if case.has_bias:
        contents["attn_bias"] = torch.randn(bias_sizes(case), generator=generator).to(dtype)
    if case.has_softmax_offset:
        offset = torch.zeros(1, case.num_heads, 1, 1)
        if case.softmax_type == "learnable":  # far from zero, and both signs
            drawn = torch.rand(offset.shape, generator=generator) * 2 + 1
            offset = torch.where(torch.arange(case.num_heads).view_as(offset) % 2 == 0, drawn, -drawn)
        contents["softmax_offset"] = offset
    contents["output_grad"] = torch.randn(
        (*_outer(case.layout.q_format, case.batch_size, case.max_seqlen_q), case.num_heads, case.head_dim_v),
        generator=generator,
    ).to(dtype)
    for side, lengths in (("q", lengths_q), ("kv", lengths_kv)):
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        contents[f"cu_seqlens_{side}"] = offsets
        if padding(case.attn_mask_type):
            contents[f"cu_seqlens_{side}_padded"] = offsets
    masters = {name: _buffer(values, device) for name, values in contents.items()}
    return Inputs(case, masters, lengths_q, lengths_kv)


def bias_sizes(case: Case) -> tuple[int, int, int, int]:
    """Return the four sizes of the bias: batch, heads, query tokens, key tokens."""
    letters = case.bias_shape
    return (
        case.batch_size if letters[0] == "b" else 1,
        case.num_heads if letters[1] == "h" else 1,
        case.max_seqlen_q if letters[2] == "s" else 1,
        case.max_seqlen_kv,
    )


def _parts(case: Case) -> dict[str, tuple[str, ...]]:
    """Return the buffers of q, k and v, and which of them each holds."""
    return {
        1: {"qkv": ("q", "k", "v")},
        2: {"q": ("q",), "kv": ("k", "v")},
        3: {"q": ("q",), "k": ("k",), "v": ("v",)},
    }[case.layout.parts]  # type: ignore[return-value]


def _outer(layout_format: str, batch: int, tokens: int) -> tuple[int, int]:
    return (batch, tokens) if layout_format.startswith("b") else (tokens, batch)


def _lengths(case: Case, longest: int, generator: torch.Generator) -> tuple[int, ...]:
    """Draw actual lengths: full without padding; else between 1 and the longest, one of them the longest."""
    if not padding(case.attn_mask_type):
        return (longest,) * case.batch_size
    drawn = torch.randint(1, longest + 1, (case.batch_size,), generator=generator).tolist()
    if case.batch_size > 1:
        drawn[int(torch.randint(0, case.batch_size, (), generator=generator))] = longest
    return tuple(drawn)


def _poison(values: torch.Tensor, layout_format: str, lengths: tuple[int, ...]) -> None:
    for index, length in enumerate(lengths):
        rows = values[index, length:] if layout_format.startswith("b") else values[length:, index]
        rows.sign_().mul_(PADDING_POISON)


def _buffer(values: torch.Tensor, device: torch.device | str) -> Buffer:
    margin = RED_ZONE_BYTES // values.element_size()
    fill = float("nan") if values.is_floating_point() else RED_ZONE_INTEGER
    flat = torch.full((values.numel() + 2 * margin,), fill, dtype=values.dtype)
    flat[margin : margin + values.numel()] = values.reshape(-1)
    return Buffer(flat.to(device), margin, tuple(values.shape))


def _stride(gradient: torch.Tensor, case: Case) -> torch.Tensor:
    """Return the output's gradient as the case lays it out in memory; values are those of ``gradient``.

    An expanded gradient repeats its first token, since a stride of zero cannot hold more.
    """
    if case.output_grad == "transposed":
        return gradient.transpose(0, 2).contiguous().transpose(0, 2)
    if case.output_grad == "expanded":
        return gradient[:1, :1].expand_as(gradient)
    if case.output_grad == "sliced":
        wide = torch.full((*gradient.shape[:-1], gradient.shape[-1] + 3), float("nan"),
                          dtype=gradient.dtype, device=gradient.device)  # fmt: skip
        wide[..., 2:-1] = gradient
        return wide[..., 2:-1]
    return gradient


def _change(master: Buffer, used: Buffer) -> str:
    before, after = _integers(master.flat), _integers(used.flat.detach())
    if torch.equal(before, after):
        return "unchanged"
    inside = slice(master.margin, master.flat.numel() - master.margin)
    return "written" if not torch.equal(before[inside], after[inside]) else "red zone written"


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers, so that NaN equals itself."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
