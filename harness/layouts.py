"""The qkv_layout strings of TransformerEngine, one row each, and what each says about memory.

Source: the layout map of TransformerEngine 2.19 and 2.20 (26 strings; ``bhsd_bhsd_bhsd`` is a result of MXFP8
quantization, never an input).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Packing = Literal["3hd", "h3d", "2hd", "h2d"]


@dataclass(frozen=True, slots=True)
class Layout:
    """One qkv_layout: the formats of q and kv, and which of them share one buffer.

    ``packing`` is ``3hd`` or ``h3d`` where q, k and v are views of one buffer, ``2hd`` or ``h2d`` where k and v are,
    None where each is a tensor of its own.
    """

    name: str
    q_format: str
    kv_format: str
    packing: Packing | None
    paged: bool

    @property
    def parts(self) -> int:
        """Number of separate buffers: 1, 2 or 3."""
        if self.packing is None:
            return 3
        return 1 if "3" in self.packing else 2

    @property
    def thd(self) -> bool:
        """Whether q or kv is a ragged batch without a batch dimension."""
        return "thd" in (self.q_format, self.kv_format)


def _row(name: str) -> Layout:
    paged = name.startswith("paged_kv_")
    parts = name.removeprefix("paged_kv_").split("_")
    formats = [re.sub(r"\d", "", part) for part in parts]
    packed = next((part for part in parts if re.search(r"\d", part)), None)
    packing: Packing | None = None
    if packed is not None:
        digit = "3" if "3" in packed else "2"
        packing = f"{digit}hd" if f"{digit}hd" in packed else f"h{digit}d"  # type: ignore[assignment]
    return Layout(name, formats[0], formats[min(1, len(formats) - 1)], packing, paged)


LAYOUTS: dict[str, Layout] = {
    name: _row(name)
    for name in (
        "sb3hd", "sbh3d", "bs3hd", "bsh3d", "t3hd", "th3d",
        "sbhd_sb2hd", "sbhd_sbh2d", "bshd_bs2hd", "bshd_bsh2d", "thd_t2hd", "thd_th2d",
        "sbhd_sbhd_sbhd", "bshd_bshd_bshd", "thd_thd_thd",
        "sbhd_bshd_bshd", "bshd_sbhd_sbhd", "thd_bshd_bshd", "thd_sbhd_sbhd",
        "paged_kv_bshd_bshd_bshd", "paged_kv_bshd_sbhd_sbhd", "paged_kv_sbhd_bshd_bshd",
        "paged_kv_sbhd_sbhd_sbhd", "paged_kv_thd_bshd_bshd", "paged_kv_thd_sbhd_sbhd",
    )
}  # fmt: skip
