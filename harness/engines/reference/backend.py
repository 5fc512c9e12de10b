"""The enum of kernel families, as TransformerEngine names and numbers it."""

from __future__ import annotations

import enum


class FusedAttnBackend(enum.IntEnum):
    """Kernel families; also found by name, as in ``FusedAttnBackend["FP8"]``."""

    No_Backend = -1
    F16_arbitrary_seqlen = 1
    FP8 = 2
