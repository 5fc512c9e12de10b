"""Attention written again, plainly and differently, to hold the reference engine against.

Nothing here uses the engine's own modules but its two kernels: masks come from a loop over positions, gradients from
autograd, packed tensors from stack and select.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harness.engines.reference import ReferenceEngine

SEAM: dict[str, Any] = ReferenceEngine().seam()
fused_attn_fwd = SEAM["fused_attn_fwd"]
fused_attn_bwd = SEAM["fused_attn_bwd"]
F16 = SEAM["FusedAttnBackend"]["F16_arbitrary_seqlen"]

# layout -> (order of q, order of k and v, where q, k and v are stacked, where k and v are)
DENSE_LAYOUTS: dict[str, tuple[str, str, int | None, int | None]] = {
    "sb3hd": ("sbhd", "sbhd", -3, None),
    "sbh3d": ("sbhd", "sbhd", -2, None),
    "bs3hd": ("bshd", "bshd", -3, None),
    "bsh3d": ("bshd", "bshd", -2, None),
    "sbhd_sb2hd": ("sbhd", "sbhd", None, -3),
    "sbhd_sbh2d": ("sbhd", "sbhd", None, -2),
    "bshd_bs2hd": ("bshd", "bshd", None, -3),
    "bshd_bsh2d": ("bshd", "bshd", None, -2),
    "sbhd_sbhd_sbhd": ("sbhd", "sbhd", None, None),
    "bshd_bshd_bshd": ("bshd", "bshd", None, None),
    "sbhd_bshd_bshd": ("sbhd", "bshd", None, None),
    "bshd_sbhd_sbhd": ("bshd", "sbhd", None, None),
}
MASKS = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
BIAS_SHAPES = ("1hss", "11ss", "b1ss", "bhss")


def to_format(tensor: torch.Tensor, order: str) -> torch.Tensor:
    """Turn [b, h, s, d] into ``order``, contiguous."""
    return (tensor.transpose(1, 2) if order == "bshd" else tensor.permute(2, 0, 1, 3)).contiguous()


def from_format(tensor: torch.Tensor, order: str) -> torch.Tensor:
    """Turn ``order`` into [b, h, s, d]."""
    return tensor.transpose(1, 2) if order == "bshd" else tensor.permute(1, 2, 0, 3)


@dataclass(frozen=True)
class Problem:
    """One call of both kernels, as plain values."""

    layout: str = "bshd_bshd_bshd"
    b: int = 2
    h: int = 4
    hg: int = 4
    sq: int = 5
    skv: int = 5
    d: int = 3
    d_v: int = 3
    dtype: torch.dtype = torch.float64
    mask: str = "no_mask"
    window: tuple[int, int] = (-1, -1)
    diagonal: bool | None = None
    bias_type: str = "no_bias"
    bias_shape: str = "1hss"
    softmax: str = "vanilla"
    dropout: float = 0.0
    scale: float | None = None
    lengths_q: tuple[int, ...] | None = None
    lengths_kv: tuple[int, ...] | None = None
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def q_order(self) -> str:
        return DENSE_LAYOUTS[self.layout][0]

    @property
    def kv_order(self) -> str:
        return DENSE_LAYOUTS[self.layout][1]

    def with_(self, **changes: Any) -> Problem:
        return replace(self, **changes)

    def lengths(self) -> tuple[list[int], list[int]]:
        return list(self.lengths_q or [self.sq] * self.b), list(self.lengths_kv or [self.skv] * self.b)

    def cu_seqlens(self) -> tuple[torch.Tensor, torch.Tensor]:
        result = []
        for lengths in self.lengths():
            total = [0]
            for length in lengths:
                total.append(total[-1] + length)
            result.append(torch.tensor(total, dtype=torch.int32))
        return result[0], result[1]


@dataclass
class Data:
    """The tensors of a problem in [b, h, s, d]; ``grad`` is the output's gradient."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    bias: torch.Tensor | None
    offset: torch.Tensor | None


def make_data(problem: Problem) -> Data:
    p = problem
    generator = torch.Generator().manual_seed(p.seed + 1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(p.dtype)

    bias = offset = None
    if p.bias_type == "post_scale_bias":
        kind = p.bias_shape
        bias = normal(
            p.b if kind[0] == "b" else 1,
            p.h if kind[1] == "h" else 1,
            p.sq if kind[2] == "s" else 1,
            p.skv,
        )
    if p.softmax == "learnable":
        offset = torch.randn((1, p.h, 1, 1), generator=generator) + 1.0
    if p.softmax == "off-by-one":
        offset = torch.zeros((1, p.h, 1, 1))
    return Data(
        normal(p.b, p.h, p.sq, p.d),
        normal(p.b, p.hg, p.skv, p.d),
        normal(p.b, p.hg, p.skv, p.d_v),
        normal(p.b, p.h, p.sq, p.d_v),
        bias,
        offset,
    )


def pack(layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Lay q, k and v, each [b, h, s, d], out as ``layout`` says."""
    q_order, kv_order, all_dim, kv_dim = DENSE_LAYOUTS[layout]
    q, k, v = to_format(q, q_order), to_format(k, kv_order), to_format(v, kv_order)
    if all_dim is not None:
        return torch.stack([q, k, v], dim=all_dim).unbind(all_dim)
    if kv_dim is not None:
        return (q, *torch.stack([k, v], dim=kv_dim).unbind(kv_dim))
    return q, k, v


@dataclass
class Run:
    """What both kernels returned, gradients of q, k and v and the output also in [b, h, s, d]."""

    output: torch.Tensor
    aux: list[torch.Tensor]
    max_logit: torch.Tensor | None
    raw_output: torch.Tensor
    raw_grads: list[Any]
    grads: list[torch.Tensor]
    inputs: tuple[torch.Tensor, ...]


def forward(problem: Problem, data: Data, **changes: Any) -> tuple[Any, ...]:
    p = problem
    q, k, v = pack(p.layout, data.q, data.k, data.v)
    cu_q, cu_kv = p.cu_seqlens()
    arguments: dict[str, Any] = {
        "is_training": True,
        "max_seqlen_q": p.sq,
        "max_seqlen_kv": p.skv,
        "cu_seqlens_q": cu_q,
        "cu_seqlens_kv": cu_kv,
        "q": q,
        "k": k,
        "v": v,
        "fake_dtype": p.dtype,
        "fused_attention_backend": F16,
        "attn_bias": data.bias,
        "attn_scale": p.scale,
        "dropout": p.dropout,
        "qkv_layout": p.layout,
        "o_format": p.q_order,
        "attn_bias_type": p.bias_type,
        "attn_mask_type": p.mask,
        "softmax_type": p.softmax,
        "window_size": p.window,
        "bottom_right_diagonal": p.diagonal,
        "softmax_offset": data.offset,
    }
    return fused_attn_fwd(**(arguments | p.options | changes))


def backward(problem: Problem, data: Data, output: torch.Tensor, aux: list[torch.Tensor], **changes: Any) -> list[Any]:
    p = problem
    q, k, v = pack(p.layout, data.q, data.k, data.v)
    cu_q, cu_kv = p.cu_seqlens()
    arguments: dict[str, Any] = {
        "max_seqlen_q": p.sq,
        "max_seqlen_kv": p.skv,
        "cu_seqlens_q": cu_q,
        "cu_seqlens_kv": cu_kv,
        "q": q,
        "k": k,
        "v": v,
        "o": output,
        "d_o": to_format(data.grad, p.q_order),
        "fake_dtype": p.dtype,
        "aux_ctx_tensors": aux,
        "fused_attention_backend": F16,
        "attn_scale": p.scale,
        "dropout": p.dropout,
        "qkv_layout": p.layout,
        "o_format": p.q_order,
        "do_format": p.q_order,
        "dqkv_layout": p.layout,
        "attn_bias_type": p.bias_type,
        "attn_mask_type": p.mask,
        "softmax_type": p.softmax,
        "window_size": p.window,
        "bottom_right_diagonal": p.diagonal,
    }
    return fused_attn_bwd(**(arguments | changes))


def run(problem: Problem, data: Data | None = None) -> Run:
    """Run forward and backward."""
    data = make_data(problem) if data is None else data
    output, aux, *rest = forward(problem, data)
    raw = backward(problem, data, output, list(aux))
    return Run(
        output=from_format(output, problem.q_order),
        aux=aux,
        max_logit=rest[0] if rest else None,
        raw_output=output,
        raw_grads=raw,
        grads=[
            from_format(raw[0], problem.q_order),
            from_format(raw[1], problem.kv_order),
            from_format(raw[2], problem.kv_order),
        ],
        inputs=pack(problem.layout, data.q, data.k, data.v),
    )


def plain_mask(problem: Problem) -> torch.Tensor:
    """Return which query sees which key, [b, 1, sq, skv], position by position."""
    p = problem
    lengths_q, lengths_kv = p.lengths()
    named = p.diagonal is None or "causal" in p.mask  # cuDNN on an H200: a causal mask's name settles its diagonal
    diagonal = p.mask.endswith("bottom_right") if named else p.diagonal
    left, right = p.window
    if "causal" in p.mask:
        right = 0
    seen = torch.zeros((p.b, 1, p.sq, p.skv), dtype=torch.bool)
    for sequence in range(p.b):
        real_q, real_kv = (lengths_q[sequence], lengths_kv[sequence]) if "padding" in p.mask else (p.sq, p.skv)
        for query in range(real_q):
            centre = query + (real_kv - real_q if diagonal else 0)
            first = 0 if left < 0 else max(0, centre - left)
            last = real_kv - 1 if right < 0 else min(real_kv - 1, centre + right)
            for key in range(first, last + 1):
                seen[sequence, 0, query, key] = True
    return seen


def plain_alibi(problem: Problem) -> torch.Tensor:
    """Return the ALiBi bias [b, h, sq, skv] for a number of heads that is a power of two, or 6."""
    p = problem
    slopes = {
        1: [2**-8],
        2: [2**-4, 2**-8],
        4: [2**-2, 2**-4, 2**-6, 2**-8],
        6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    }[p.h]
    lengths_q, lengths_kv = p.lengths()
    named = p.diagonal is None or "causal" in p.mask  # cuDNN on an H200: a causal mask's name settles its diagonal
    diagonal = p.mask.endswith("bottom_right") if named else p.diagonal
    bias = torch.zeros((p.b, p.h, p.sq, p.skv), dtype=torch.float64)
    for sequence in range(p.b):
        real = (lengths_q[sequence], lengths_kv[sequence]) if "padding" in p.mask else (p.sq, p.skv)
        shift = real[1] - real[0] if diagonal else 0
        for query in range(p.sq):
            for key in range(p.skv):
                for head in range(p.h):
                    bias[sequence, head, query, key] = -slopes[head] * (query + shift - key)
    return bias


@dataclass
class Expected:
    output: torch.Tensor
    stats: torch.Tensor
    scores: torch.Tensor
    seen: torch.Tensor
    grads: list[torch.Tensor]
    d_bias: torch.Tensor | None
    d_offset: torch.Tensor | None


def expected(problem: Problem, data: Data, keep: torch.Tensor | None = None) -> Expected:
    """Compute everything in float64 with autograd; ``keep`` is a fixed dropout mask [b, h, sq, skv]."""
    p = problem
    q, k, v = (tensor.double().requires_grad_() for tensor in (data.q, data.k, data.v))
    bias = None if data.bias is None else data.bias.double().requires_grad_()
    offset = None if data.offset is None else data.offset.double().requires_grad_()
    repeat = p.h // p.hg
    keys, values = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scale = p.d**-0.5 if p.scale is None else p.scale
    scores = scale * torch.einsum("bhid,bhjd->bhij", q, keys)
    if bias is not None:
        scores = scores + bias
    if p.bias_type == "alibi":
        scores = scores + plain_alibi(p)
    seen = plain_mask(p)
    weight = torch.where(seen, scores.exp(), torch.zeros_like(scores))
    total = weight.sum(-1, keepdim=True)
    if offset is not None:
        total = total + offset.exp()
    chance = weight / torch.where(total == 0, torch.ones_like(total), total)
    if keep is not None:
        chance = chance * keep / (1 - p.dropout)
    output = torch.einsum("bhij,bhjd->bhid", chance, values)
    (output * data.grad.double()).sum().backward()
    return Expected(
        output=output.detach(),
        stats=total.log().detach(),
        scores=scores.detach(),
        seen=seen,
        grads=[q.grad, k.grad, v.grad],
        d_bias=None if bias is None else bias.grad,
        d_offset=None if offset is None else offset.grad,
    )
