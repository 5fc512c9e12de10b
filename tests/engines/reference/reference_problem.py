"""Attention written again, plainly and differently, to hold the reference engine against.

Nothing here uses the engine's own modules but its two kernels: masks come from a loop over positions, gradients from
autograd, packed tensors from stack and select, ragged tensors and paged caches from a loop over sequences and tokens.
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
RAGGED_LAYOUTS: dict[str, tuple[str, str, int | None, int | None]] = {
    "t3hd": ("thd", "thd", -3, None),
    "th3d": ("thd", "thd", -2, None),
    "thd_t2hd": ("thd", "thd", None, -3),
    "thd_th2d": ("thd", "thd", None, -2),
    "thd_thd_thd": ("thd", "thd", None, None),
    "thd_bshd_bshd": ("thd", "bshd", None, None),
    "thd_sbhd_sbhd": ("thd", "sbhd", None, None),
}
PAGED_LAYOUTS: dict[str, tuple[str, str, int | None, int | None]] = {
    f"paged_kv_{q}_{kv}_{kv}": (q, kv, None, None) for q in ("bshd", "sbhd", "thd") for kv in ("bshd", "sbhd")
}
ALL_LAYOUTS = DENSE_LAYOUTS | RAGGED_LAYOUTS | PAGED_LAYOUTS
MASKS = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
BIAS_SHAPES = ("1hss", "11ss", "b1ss", "bhss")


def to_format(tensor: torch.Tensor, order: str) -> torch.Tensor:
    """Turn [b, h, s, d] into ``order``, contiguous."""
    return (tensor.transpose(1, 2) if order == "bshd" else tensor.permute(2, 0, 1, 3)).contiguous()


def from_format(tensor: torch.Tensor, order: str) -> torch.Tensor:
    """Turn ``order`` into [b, h, s, d]."""
    return tensor.transpose(1, 2) if order == "bshd" else tensor.permute(1, 2, 0, 3)


@dataclass(frozen=True)
class Rows:
    """A ragged tensor: the row where each sequence starts, the end of the last one's room, and all rows."""

    starts: tuple[int, ...]
    total: int


@dataclass(frozen=True)
class Pages:
    """A paged cache: ``count`` pages of ``size`` tokens, and the pages of each sequence."""

    size: int
    count: int
    table: tuple[tuple[int, ...], ...]


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
    rows_q: Rows | None = None
    rows_kv: Rows | None = None
    padded: bool = True
    pages_k: Pages | None = None
    pages_v: Pages | None = None
    fill: float = float("nan")
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def q_order(self) -> str:
        return ALL_LAYOUTS[self.layout][0]

    @property
    def kv_order(self) -> str:
        return ALL_LAYOUTS[self.layout][1]

    @property
    def one_buffer(self) -> bool:
        return ALL_LAYOUTS[self.layout][2] is not None

    @property
    def kv_rows(self) -> Rows | None:
        return self.rows_q if self.one_buffer else self.rows_kv

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


def lay(tensor: torch.Tensor, order: str, lengths: list[int], rows: Rows | None, fill: float) -> torch.Tensor:
    """Turn [b, h, s, d] into ``order``, with ``fill`` in all that is no token."""
    if order != "thd":
        filled = tensor.clone()
        for sequence, length in enumerate(lengths):
            filled[sequence, :, length:] = fill
        return to_format(filled, order)
    assert rows is not None
    result = torch.full((rows.total, tensor.shape[1], tensor.shape[3]), fill, dtype=tensor.dtype)
    for sequence, length in enumerate(lengths):
        for token in range(length):
            result[rows.starts[sequence] + token] = tensor[sequence, :, token]
    return result


def unlay(tensor: torch.Tensor, order: str, lengths: list[int], longest: int, rows: Rows | None) -> torch.Tensor:
    """Turn ``order`` into [b, h, s, d], with zero where a ragged tensor has no token."""
    if order != "thd":
        return from_format(tensor, order)
    assert rows is not None
    result = torch.zeros((len(lengths), tensor.shape[1], longest, tensor.shape[2]), dtype=tensor.dtype)
    for sequence, length in enumerate(lengths):
        for token in range(length):
            result[sequence, :, token] = tensor[rows.starts[sequence] + token]
    return result


def outside(tensor: torch.Tensor, lengths: list[int], rows: Rows) -> torch.Tensor:
    """Return the rows of a ragged tensor that are no token's."""
    inside = {rows.starts[sequence] + token for sequence, length in enumerate(lengths) for token in range(length)}
    return tensor[[row for row in range(rows.total) if row not in inside]]


def cache(tensor: torch.Tensor, order: str, lengths: list[int], pages: Pages, fill: float) -> torch.Tensor:
    """Put [b, h, s, d] into a cache [pages, page_size, h, d], or [page_size, pages, h, d] in sbhd."""
    result = torch.full((pages.count, pages.size, tensor.shape[1], tensor.shape[3]), fill, dtype=tensor.dtype)
    for sequence, length in enumerate(lengths):
        for token in range(length):
            page = pages.table[sequence][token // pages.size]
            result[page, token % pages.size] = tensor[sequence, :, token]
    return result if order == "bshd" else result.transpose(0, 1).contiguous()


def lay_out(problem: Problem, data: Data) -> tuple[torch.Tensor, ...]:
    """Lay the tensors of a problem out in memory: q, k and v."""
    p = problem
    if p.layout in DENSE_LAYOUTS:
        return pack(p.layout, data.q, data.k, data.v)
    lengths_q, lengths_kv = p.lengths()
    q = lay(data.q, p.q_order, lengths_q, p.rows_q, p.fill)
    if p.layout in PAGED_LAYOUTS:
        assert p.pages_k is not None
        assert p.pages_v is not None
        k = cache(data.k, p.kv_order, lengths_kv, p.pages_k, p.fill)
        return q, k, cache(data.v, p.kv_order, lengths_kv, p.pages_v, p.fill)
    k, v = (lay(tensor, p.kv_order, lengths_kv, p.kv_rows, p.fill) for tensor in (data.k, data.v))
    return stack(p.layout, q, k, v)


def places(problem: Problem) -> dict[str, Any]:
    """Return the arguments that say where tokens lie: starts of sequences and page tables."""
    p = problem
    found: dict[str, Any] = {}
    if p.padded and p.rows_q is not None:
        # A buffer that all three share has one row of starts, so the other must not be looked at; neither must that
        # of a dense or paged tensor.
        unused = Rows((1 << 20,) * (p.b + 1), 0)
        kv = unused if p.one_buffer or p.rows_kv is None else p.rows_kv
        found["cu_seqlens_q_padded"] = torch.tensor(p.rows_q.starts, dtype=torch.int32)
        found["cu_seqlens_kv_padded"] = torch.tensor(kv.starts, dtype=torch.int32)
    for name, pages in (("page_table_k", p.pages_k), ("page_table_v", p.pages_v)):
        if pages is not None:
            found[name] = torch.tensor(pages.table, dtype=torch.int32)
    return found


def pack(layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Lay q, k and v, each [b, h, s, d], out as a dense ``layout`` says."""
    q_order, kv_order, _, _ = DENSE_LAYOUTS[layout]
    return stack(layout, to_format(q, q_order), to_format(k, kv_order), to_format(v, kv_order))


def stack(layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Put what shares a buffer in ``layout`` into one, and return its parts."""
    _, _, all_dim, kv_dim = ALL_LAYOUTS[layout]
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
    q, k, v = lay_out(p, data)
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
    return fused_attn_fwd(**(arguments | places(p) | p.options | changes))


def gradient(problem: Problem, data: Data) -> torch.Tensor:
    """Lay the gradient of the output out as the output is."""
    if problem.layout in DENSE_LAYOUTS:
        return to_format(data.grad, problem.q_order)
    return lay(data.grad, problem.q_order, problem.lengths()[0], problem.rows_q, problem.fill)


def backward(problem: Problem, data: Data, output: torch.Tensor, aux: list[torch.Tensor], **changes: Any) -> list[Any]:
    p = problem
    q, k, v = lay_out(p, data)
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
        "d_o": gradient(p, data),
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
    starts = {name: value for name, value in places(p).items() if "page" not in name}
    return fused_attn_bwd(**(arguments | starts | changes))


def run(problem: Problem, data: Data | None = None) -> Run:
    """Run forward and backward."""
    data = make_data(problem) if data is None else data
    output, aux, *rest = forward(problem, data)
    raw = backward(problem, data, output, list(aux))
    p = problem
    lengths_q, lengths_kv = p.lengths()
    return Run(
        output=unlay(output, p.q_order, lengths_q, p.sq, p.rows_q),
        aux=aux,
        max_logit=rest[0] if rest else None,
        raw_output=output,
        raw_grads=raw,
        grads=[
            unlay(raw[0], p.q_order, lengths_q, p.sq, p.rows_q),
            unlay(raw[1], p.kv_order, lengths_kv, p.skv, p.kv_rows),
            unlay(raw[2], p.kv_order, lengths_kv, p.skv, p.kv_rows),
        ],
        inputs=lay_out(p, data),
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


def expected_by_sequence(problem: Problem, data: Data) -> Expected:
    """Compute everything in float64 with autograd, one sequence after another, from its own tokens alone.

    ``scores`` are -inf and ``stats`` zero where there is no token.
    """
    p = problem
    q, k, v = (tensor.double().requires_grad_() for tensor in (data.q, data.k, data.v))
    bias = None if data.bias is None else data.bias.double().requires_grad_()
    offset = None if data.offset is None else data.offset.double().requires_grad_()
    scale = p.d**-0.5 if p.scale is None else p.scale
    alibi = plain_alibi(p) if p.bias_type == "alibi" else None
    seen = plain_mask(p)
    output = torch.zeros((p.b, p.h, p.sq, p.d_v), dtype=torch.float64)
    stats = torch.zeros((p.b, p.h, p.sq, 1), dtype=torch.float64)
    all_scores = torch.full((p.b, p.h, p.sq, p.skv), -torch.inf, dtype=torch.float64)
    for sequence, (m, n) in enumerate(zip(*p.lengths(), strict=True)):
        for head in range(p.h):
            group = head // (p.h // p.hg)
            scores = scale * q[sequence, head, :m] @ k[sequence, group, :n].T
            for extra in (bias, alibi):
                if extra is not None:
                    full = extra.expand(p.b, p.h, p.sq, p.skv)
                    scores = scores + full[sequence, head, :m, :n]
            visible = seen[sequence, 0, :m, :n]
            weight = torch.where(visible, scores.exp(), torch.zeros_like(scores))
            total = weight.sum(-1, keepdim=True)
            if offset is not None:
                total = total + offset[0, head].exp()
            chance = weight / torch.where(total == 0, torch.ones_like(total), total)
            rows = chance @ v[sequence, group, :n]
            (rows * data.grad[sequence, head, :m].double()).sum().backward()
            output[sequence, head, :m] = rows.detach()
            stats[sequence, head, :m] = total.log().detach()
            all_scores[sequence, head, :m, :n] = scores.detach().masked_fill(~visible, -torch.inf)
    return Expected(
        output=output,
        stats=stats,
        scores=all_scores,
        seen=seen,
        grads=[torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in (q, k, v)],
        d_bias=None if bias is None else bias.grad,
        d_offset=None if offset is None else offset.grad,
    )
