"""Ragged batches: sequences of any length one after another in a tensor [t, h, d], with or without gaps between them.

The arithmetic knows only [b, h, s, d]. So the real tokens are gathered into such a tensor, zero elsewhere, and results
are scattered back. Rows that are no sequence's, gaps and the tail beyond the last one, are neither read nor written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from harness.engines.reference import addressing


@dataclass(frozen=True, slots=True)
class Tokens:
    """Where the n real tokens of a batch lie.

    Token i is row ``rows[i]`` of a tensor of ``total`` rows, and row ``slots[i]`` of the padded batch [b * s]. Both
    int64 [n].
    """

    rows: torch.Tensor
    slots: torch.Tensor
    total: int


def check_same_size(*cumulative: torch.Tensor) -> None:
    """Raise RuntimeError where cumulative tensors of one call differ in their number of entries."""
    sizes = [tensor.numel() for tensor in cumulative]
    if len(set(sizes)) > 1:
        raise RuntimeError(f"the cu_seqlens of one call differ in size: {sizes}")


def real_tokens(name: str, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """Return which positions of a padded batch are real: bool [b, longest], from cumulative lengths [b+1].

    Raises RuntimeError for a length below zero or above ``longest``, which a kernel would cut or answer with garbage.
    """
    lengths = cu_seqlens.diff()
    if lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= longest:
        raise RuntimeError(f"cu_seqlens_{name}: lengths {lengths.tolist()} are not all within 0 and {longest}")
    return torch.arange(longest, device=cu_seqlens.device) < lengths.view(-1, 1)


def slots_of(real: torch.Tensor) -> torch.Tensor:
    """Return the rows of the padded batch [b * s] that are real."""
    return real.flatten().nonzero().flatten()


def check_rows(name: str, rows: torch.Tensor, total: int) -> None:
    """Raise RuntimeError where a token lies outside a tensor of ``total`` rows."""
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < total:
        raise RuntimeError(f"{name}: a token lies in row {int(rows.min())} or {int(rows.max())} of {total} rows")


def locate(
    name: str, tensor: torch.Tensor, cu_seqlens: torch.Tensor, starts: torch.Tensor, longest: int, side: str
) -> Tokens:
    """Return where the tokens of a ragged ``tensor`` [t, h, d] lie.

    ``cu_seqlens`` [b+1] says how long each sequence is, ``starts`` [b+1] in which row it begins; the last entry of the
    latter is not used. Raises RuntimeError where a sequence is too long or leaves the tensor.
    """
    if tensor.dim() != len(addressing.RAGGED):
        raise RuntimeError(f"{name}.shape={tuple(tensor.shape)}: a ragged tensor has three dimensions, [t, h, d]")
    check_same_size(cu_seqlens, starts)
    real = real_tokens(side, cu_seqlens, longest)
    rows = (starts[:-1].long().view(-1, 1) + torch.arange(longest, device=starts.device))[real]
    total = int(tensor.shape[0])
    check_rows(name, rows, total)
    return Tokens(rows, slots_of(real), total)


def gather(
    name: str, tensor: torch.Tensor, part: str, sizes: Mapping[str, int], tokens: Tokens, dtype: torch.dtype
) -> torch.Tensor:
    """Read the real tokens of ``tensor`` by ``part``, a ragged part of a layout, into a fresh [b, h, s, d] tensor.

    ``sizes`` maps b, s, h and d to sizes; all other tokens are zero. Raises RuntimeError where a row that is read lies
    outside the tensor's storage.
    """
    b, s, h, d = (sizes[letter] for letter in "bshd")
    padded = torch.zeros((b * s, h, d), dtype=dtype, device=tensor.device)
    if tokens.rows.numel():
        reached = {"t": int(tokens.rows.max()) + 1, "h": h, "d": d}
        stride = addressing.strides(part, reached, addressing.RAGGED)
        view = addressing.reinterpret(name, tensor, list(reached.values()), stride)
        padded[tokens.slots] = view[tokens.rows].to(dtype)
    return padded.view(b, s, h, d).transpose(1, 2).contiguous()


def scatter(values: torch.Tensor, tokens: Tokens, elsewhere: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Return ``values`` [b, h, s, d] as a fresh ragged tensor [t, h, d], with ``elsewhere`` in all other rows.

    ``elsewhere`` broadcasts to [t, h, d].
    """
    b, h, s, d = values.shape
    result = values.new_empty((tokens.total, h, d))
    result[...] = elsewhere
    result[tokens.rows] = values.transpose(1, 2).reshape(b * s, h, d)[tokens.slots]
    return result
