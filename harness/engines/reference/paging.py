"""Paged KV caches: token j of a sequence is slot j % page_size of the page that its table names at j // page_size."""

from __future__ import annotations

import torch

from harness.engines.reference import addressing
from harness.engines.reference.ragged import Tokens, real_tokens, slots_of


def locate(
    name: str,
    cache: torch.Tensor,
    fmt: str,
    table: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    longest: int,
) -> Tokens:
    """Return where the tokens of a paged ``cache`` lie, as rows of the cache seen as [pages * page_size, hg, d].

    ``cache`` is [pages, page_size, hg, d] in the format bshd, [page_size, pages, hg, d] in sbhd; ``table`` is int32
    [b, max_pages]. Entries of the table that no token needs are not read. Raises RuntimeError for tensors of another
    shape, for a sequence longer than ``longest`` or its row of the table, and for a page that does not exist.
    """
    if cache.dim() != len(fmt):
        raise RuntimeError(f"{name}.shape={tuple(cache.shape)}: a paged cache has the four dimensions of {fmt}")
    b = cu_seqlens_kv.numel() - 1
    if table.dim() != 2 or table.shape[0] != b or table.dtype != torch.int32:
        raise RuntimeError(
            f"page_table_{name} has shape {tuple(table.shape)} and dtype {table.dtype}; [{b}, pages of a sequence] and "
            "torch.int32 were expected"
        )
    pages, page_size = (int(cache.shape[fmt.index(letter)]) for letter in "bs")
    real = real_tokens("kv", cu_seqlens_kv, longest)
    sequence, position = real.nonzero(as_tuple=True)
    column, slot = position // page_size, position % page_size
    if column.numel() and int(column.max()) >= table.shape[1]:
        raise RuntimeError(
            f"page_table_{name}: {int(position.max()) + 1} tokens take more than {table.shape[1]} pages of {page_size}"
        )
    page = addressing.flat(f"page_table_{name}", table, torch.int64)[sequence, column]
    if page.numel() and not 0 <= int(page.min()) <= int(page.max()) < pages:
        raise RuntimeError(f"page_table_{name}: page {int(page.min())} or {int(page.max())} of {pages} pages")
    rows = page * page_size + slot if fmt == "bshd" else slot * pages + page
    return Tokens(rows, slots_of(real), pages * page_size)
