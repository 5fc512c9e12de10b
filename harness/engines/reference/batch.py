"""How the tokens of one call lie in memory, dense, ragged or paged, so that the kernels need not ask again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from harness.engines.reference import addressing, paging, ragged
from harness.engines.reference.ragged import Tokens
from harness.layouts import LAYOUTS


@dataclass(frozen=True, slots=True)
class Sequences:
    """What a call says about its sequences: cumulative lengths [b+1], the rows they start in [b+1], page tables.

    The cumulative starts, ``padded``, count only if both are given; otherwise sequences follow one another.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    cu_seqlens_q_padded: torch.Tensor | None
    cu_seqlens_kv_padded: torch.Tensor | None
    page_table_k: torch.Tensor | None = None
    page_table_v: torch.Tensor | None = None

    def starts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows in which sequences of q and of kv start."""
        if self.cu_seqlens_q_padded is None or self.cu_seqlens_kv_padded is None:
            return self.cu_seqlens_q, self.cu_seqlens_kv
        return self.cu_seqlens_q_padded, self.cu_seqlens_kv_padded


@dataclass(frozen=True, slots=True)
class Batch:
    """Where the tokens of q, k and v lie; None where they lie in a dense tensor."""

    q: Tokens | None = None
    k: Tokens | None = None
    v: Tokens | None = None


_DENSE = Batch()


def locate(
    layout: str, sequences: Sequences, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, longest: tuple[int, int]
) -> Batch:
    """Return where the tokens of a call lie; ``longest`` is how long sequences of q and kv may be.

    Raises RuntimeError as ``ragged.locate`` and ``paging.locate`` do, where the cumulative tensors differ in size, and
    for a paged layout without both page tables.
    """
    row = LAYOUTS.get(layout)  # None for MXFP8's own, which is dense
    if row is None or not (row.thd or row.paged):
        return _DENSE
    start_q, start_kv = sequences.starts()
    ragged.check_same_size(sequences.cu_seqlens_q, sequences.cu_seqlens_kv)
    found: dict[str, Tokens] = {}
    if row.q_format == addressing.RAGGED:
        found["q"] = ragged.locate("q", q, sequences.cu_seqlens_q, start_q, longest[0], "q")
    if row.kv_format == addressing.RAGGED:
        start = start_q if row.parts == 1 else start_kv
        for name, tensor in (("k", k), ("v", v)):
            found[name] = ragged.locate(name, tensor, sequences.cu_seqlens_kv, start, longest[1], "kv")
    if row.paged:
        if sequences.page_table_k is None or sequences.page_table_v is None:
            raise RuntimeError(f"qkv_layout={layout!r} needs both page_table_k and page_table_v")
        for name, tensor, table in (("k", k, sequences.page_table_k), ("v", v, sequences.page_table_v)):
            found[name] = paging.locate(name, tensor, row.kv_format, table, sequences.cu_seqlens_kv, longest[1])
    return Batch(**found)


def read(
    name: str, tensor: torch.Tensor, part: str, sizes: Mapping[str, int], tokens: Tokens | None, dtype: torch.dtype
) -> torch.Tensor:
    """Read ``tensor`` by ``part`` of a layout into a fresh contiguous [b, h, s, d] tensor of ``dtype``."""
    if tokens is None:
        return addressing.read(name, tensor, part, sizes, dtype)
    # The rows of a paged cache are contiguous in either format.
    rows = part if addressing.is_ragged(part) else addressing.RAGGED
    return ragged.gather(name, tensor, rows, sizes, tokens, dtype)


def unpad(values: torch.Tensor, tokens: Tokens | None, elsewhere: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Return ``values`` [b, h, s, d] as they are if dense, else [t, h, d] with ``elsewhere`` in rows of no token."""
    return values if tokens is None else ragged.scatter(values, tokens, elsewhere)
