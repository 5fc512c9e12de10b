"""The sizes and dtypes of one call of a kernel, checked, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.engines.reference import batch, rng

_FLOAT64_LIKE = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Call:
    """The checked sizes and dtypes of one call; ``compute`` is what it is computed in, ``stats`` how that is saved.

    ``dtype`` is that of the tensors, the nominal one where they are quantized.
    """

    b: int
    h: int
    hg: int
    sq: int
    skv: int
    d: int
    d_v: int
    dtype: torch.dtype

    @property
    def compute(self) -> torch.dtype:
        return torch.float64 if self.dtype in _FLOAT64_LIKE else torch.float32

    @property
    def stats(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def q_sizes(self) -> dict[str, int]:
        return {"b": self.b, "s": self.sq, "h": self.h, "d": self.d}

    @property
    def k_sizes(self) -> dict[str, int]:
        return {"b": self.b, "s": self.skv, "h": self.hg, "d": self.d}

    @property
    def v_sizes(self) -> dict[str, int]:
        return {"b": self.b, "s": self.skv, "h": self.hg, "d": self.d_v}

    @property
    def o_sizes(self) -> dict[str, int]:
        return {"b": self.b, "s": self.sq, "h": self.h, "d": self.d_v}

    @property
    def scores(self) -> tuple[int, int, int, int]:
        return self.b, self.h, self.sq, self.skv

    @property
    def stats_sizes(self) -> dict[str, int]:
        return {"b": self.b, "s": self.sq, "h": self.h, "d": 1}

    def stats_shape(self, where: batch.Batch) -> tuple[int, ...]:
        return (self.b, self.h, self.sq, 1) if where.q is None else (where.q.total, self.h, 1)

    @property
    def offset_shape(self) -> tuple[int, int, int, int]:
        return 1, self.h, 1, 1


def call_of(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype,
    heads: int = -2,
) -> Call:
    """Gather the sizes; raise RuntimeError where heads or head dimensions do not fit together.

    ``heads`` is the dimension that counts them.
    """
    call = Call(
        b=cu_seqlens_q.numel() - 1,
        h=q.shape[heads],
        hg=k.shape[heads],
        sq=max_seqlen_q,
        skv=max_seqlen_kv,
        d=q.shape[-1],
        d_v=v.shape[-1],
        dtype=dtype,
    )
    if k.shape[-1] != call.d or v.shape[heads] != call.hg:
        raise RuntimeError(
            f"heads and head dimensions do not fit together: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if call.h % call.hg:
        raise RuntimeError(f"{call.hg} key heads do not divide {call.h} query heads")
    return call


def dropout_factors(call: Call, rng_state: torch.Tensor, dropout: float) -> torch.Tensor | None:
    """Return the factors that dropout puts on the probabilities: 0 or 1/(1-p), [b, h, sq, skv]."""
    if dropout == 0.0:
        return None
    return rng.keep_mask(rng_state, call.scores, dropout).to(call.compute) / (1.0 - dropout)
