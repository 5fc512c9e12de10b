"""Which query sees which key: causal masks, windows, padding and the diagonal they are aligned to."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MaskType:
    """What an attn_mask_type string says."""

    padding: bool
    causal: bool
    bottom_right: bool


MASK_TYPES = {
    "no_mask": MaskType(padding=False, causal=False, bottom_right=False),
    "padding": MaskType(padding=True, causal=False, bottom_right=False),
    "causal": MaskType(padding=False, causal=True, bottom_right=False),
    "padding_causal": MaskType(padding=True, causal=True, bottom_right=False),
    "causal_bottom_right": MaskType(padding=False, causal=True, bottom_right=True),
    "padding_causal_bottom_right": MaskType(padding=True, causal=True, bottom_right=True),
}


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask over scores [b, h, sq, skv].

    ``valid`` [1 or b, 1, sq, skv] is true where a query sees a key. ``rows`` [b, 1, sq, 1] and ``columns``
    [b, 1, skv, 1] are true for tokens that are no padding, None where nothing is. ``distance`` [1 or b, 1, sq, skv]
    is the key's position minus the query's, counted from the diagonal.
    """

    valid: torch.Tensor
    rows: torch.Tensor | None
    columns: torch.Tensor | None
    distance: torch.Tensor


def build_mask(
    mask_type: MaskType,
    window: tuple[int, int],
    bottom_right: bool,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    sq: int,
    skv: int,
) -> Mask:
    """Build the mask of one call.

    ``window`` counts keys left and right of the diagonal, -1 meaning unbounded; a causal mask caps the right at 0.
    The diagonal starts at the top left, or ends at the bottom right if ``bottom_right``: of the real lengths where
    the mask knows padding, of the full sizes otherwise. Lengths come from the cumulative ``cu_seqlens`` [b+1], and
    only with a padding mask.
    """
    device = cu_seqlens_q.device
    query = torch.arange(sq, device=device).view(1, 1, sq, 1)
    key = torch.arange(skv, device=device).view(1, 1, 1, skv)
    rows = columns = None
    valid = torch.ones((1, 1, sq, skv), dtype=torch.bool, device=device)
    distance = key - query
    if mask_type.padding:
        length_q = cu_seqlens_q.diff().view(-1, 1, 1, 1)
        length_kv = cu_seqlens_kv.diff().view(-1, 1, 1, 1)
        rows, seen = query < length_q, key < length_kv
        valid = rows & seen
        columns = seen.transpose(2, 3)
        if bottom_right:
            distance = distance - (length_kv - length_q)
    elif bottom_right:
        distance = distance - (skv - sq)
    left, right = window
    if left >= 0:
        valid = valid & (distance >= -left)
    if mask_type.causal:
        valid = valid & (distance <= 0)
    elif right >= 0:
        valid = valid & (distance <= right)
    return Mask(valid, rows, columns, distance)


def alibi_slopes(heads: int) -> list[float]:
    """Return the standard ALiBi slope of each head.

    For a power of two, n heads get 2**(-8/n) to its powers 1 to n; further heads get the odd powers of the series
    for 2n heads. Source: Press et al., "Train Short, Test Long".
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(heads - power)]
