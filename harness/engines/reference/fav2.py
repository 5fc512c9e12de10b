"""FlashAttention 2's backward for sequences of any length, which can stand in for cuDNN's after cuDNN's forward.

Source: the signature of FlashAttention 2.0, by the 19 values that the sources pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from harness.engines.reference import addressing, attention, batch, checks, masking, ragged
from harness.engines.reference.call import call_of, dropout_factors


def flash_attn_cuda_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    causal: bool,
    generator: Any,
    rng_state: torch.Tensor,
) -> list[torch.Tensor]:
    """Write the gradients of q, k and v into ``dq``, ``dk`` and ``dv``, and return these.

    Tensors are [b, s, h, d] or [t, h, d], of any strides; ``softmax_lse`` is [b, h, s, 1] or [t, h, 1], as cuDNN's
    forward gives it, and ``rng_state`` says what dropout dropped there. Lengths always count, with any mask; a causal
    one starts at the top left; there is no window. A ragged tensor is packed: sequence i starts at row
    ``cu_seqlens[i]``, since nothing says where gaps are. ``softmax_scale`` None means 1 / sqrt(d).

    Rows that belong to no sequence are zeroed, where the real function leaves what memory held: a run must repeat
    itself. Raises RuntimeError for sizes and dtypes that do not fit together.
    """
    call = call_of(
        max_seqlen_q,
        max_seqlen_k,
        cu_seqlens_q,
        q,
        k,
        v,
        checks.dtypes({"q": q, "k": k, "v": v, "out": out, "dout": dout}),
    )
    ragged.check_same_size(cu_seqlens_q, cu_seqlens_k)
    q_tokens = _tokens("q", q, cu_seqlens_q, max_seqlen_q)
    k_tokens = _tokens("k", k, cu_seqlens_k, max_seqlen_k)
    checks.exact("softmax_lse", softmax_lse, call.stats_shape(batch.Batch(q_tokens)), (torch.float32, torch.float64))
    checks.exact("rng_state", rng_state, (2,), (torch.int64,))

    def read(name: str, tensor: torch.Tensor, sizes: dict[str, int], tokens: ragged.Tokens | None) -> torch.Tensor:
        part = "bshd" if tokens is None else addressing.RAGGED
        return batch.read(name, tensor.contiguous(), part, sizes, tokens, call.compute)

    mask = masking.build_mask(
        masking.MASK_TYPES["padding_causal" if causal else "padding"], (-1, -1), False,
        cu_seqlens_q, cu_seqlens_k, call.sq, call.skv,
    )  # fmt: skip
    scale = 1.0 / math.sqrt(call.d) if softmax_scale is None else softmax_scale
    grads = attention.backward(
        read("q", q, call.q_sizes, q_tokens),
        read("k", k, call.k_sizes, k_tokens),
        read("v", v, call.v_sizes, k_tokens),
        read("out", out, call.o_sizes, q_tokens),
        read("dout", dout, call.o_sizes, q_tokens),
        batch.read("softmax_lse", softmax_lse, addressing.CANONICAL, call.stats_sizes, q_tokens, call.compute),
        attention.Softmax(scale, mask, None, None, dropout_factors(call, rng_state, dropout_p)),
    )
    for target, values, tokens in ((dq, grads.q, q_tokens), (dk, grads.k, k_tokens), (dv, grads.v, k_tokens)):
        target.copy_(values.transpose(1, 2) if tokens is None else batch.unpad(values, tokens))
    return [dq, dk, dv]


def _tokens(name: str, tensor: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> ragged.Tokens | None:
    """Return where the tokens of a ragged tensor lie, None for a dense one."""
    if tensor.dim() == len(addressing.RAGGED):
        return ragged.locate(name, tensor, cu_seqlens, cu_seqlens, longest, name)
    if tensor.dim() != 4 or tensor.shape[0] != cu_seqlens.numel() - 1 or tensor.shape[1] != longest:
        raise RuntimeError(
            f"{name}.shape={tuple(tensor.shape)}: [t, h, d], or [b, {longest}, h, d] with b of cu_seqlens"
        )
    return None
