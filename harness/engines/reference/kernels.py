"""``fused_attn_fwd`` and ``fused_attn_bwd`` in plain PyTorch, with the contract of TransformerEngine's wrappers.

Like the kernels, they read memory by the layout string, save what backward needs in the auxiliary list, and hand the
bias and the softmax offset back as the very objects that came in. Ragged batches and paged KV caches become dense ones
on the way in and are taken apart again on the way out (``batch``). Quantized tensors call for FP8 (``precision``).

F16, BF16 and FP8 are computed in float32, FP32 and FP64 in float64; results are rounded once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harness.engines.reference import addressing, attention, batch, checks, masking, precision, rng
from harness.engines.reference.call import Call, call_of, dropout_factors


def _read_qkv(
    call: Call,
    layout: str,
    where: batch.Batch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    columns: tuple[bool, bool, bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read q, k and v; ``columns`` says for which of them a product along tokens is what reads it."""
    place_q, place_k, place_v = addressing.places(layout)
    return (
        precision.read("q", q, place_q.part, call.q_sizes, where.q, call.compute, columns=columns[0]),
        precision.read("k", k, place_k.part, call.k_sizes, where.k, call.compute, columns=columns[1]),
        precision.read("v", v, place_v.part, call.v_sizes, where.v, call.compute, columns=columns[2]),
    )


def _mask(
    call: Call,
    attn_mask_type: str,
    window: tuple[int, int],
    bottom_right_diagonal: bool | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
) -> masking.Mask:
    mask_type = masking.MASK_TYPES[attn_mask_type]
    if bottom_right_diagonal is None or mask_type.causal:  # a causal mask's name settles its diagonal, as in cuDNN
        bottom_right_diagonal = mask_type.bottom_right
    return masking.build_mask(mask_type, window, bottom_right_diagonal, cu_seqlens_q, cu_seqlens_kv, call.sq, call.skv)


def _bias(
    call: Call, attn_bias_type: str, attn_bias: torch.Tensor | None, mask: masking.Mask, name: str
) -> torch.Tensor | None:
    """Return what is added to the scaled scores, broadcastable to [b, h, sq, skv], or None."""
    if attn_bias_type == "alibi":
        slopes = torch.tensor(masking.alibi_slopes(call.h), dtype=call.compute, device=mask.distance.device)
        return slopes.view(1, -1, 1, 1) * mask.distance
    if attn_bias is None:
        return None
    checks.broadcastable(name, attn_bias, call.scores)
    return addressing.flat(name, attn_bias, call.compute)


def _offset(
    call: Call, softmax_type: str, offset: torch.Tensor | None, device: torch.device, name: str
) -> torch.Tensor | None:
    """Return the extra logit of each head [1, h, 1, 1], or None; off-by-one without a tensor is an offset of zero."""
    if softmax_type == "vanilla":
        return None
    if offset is None:
        return torch.zeros(call.offset_shape, dtype=call.compute, device=device)
    checks.exact(name, offset, call.offset_shape, (torch.float32, torch.float64))
    return addressing.flat(name, offset, call.compute)


def _kind(tensors: Mapping[str, Any], fake_dtype: Any) -> tuple[str, torch.dtype]:
    """Return which kernel the tensors call for, and their dtype or the nominal one."""
    kind = precision.kind(tensors)
    return kind, checks.dtypes(tensors) if kind == precision.PLAIN else precision.nominal(fake_dtype)


def _options(
    kind: str,
    qkv_layout: str,
    attn_bias_type: str,
    attn_mask_type: str,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    q: torch.Tensor,
    v: torch.Tensor,
) -> dict[str, Any]:
    """Return what a call says of its configuration, named as the fields of a case."""
    return {
        "qkv_layout": qkv_layout,
        "attn_bias_type": attn_bias_type,
        "attn_mask_type": attn_mask_type,
        "fp8_recipe": kind,
        "fp8_input": kind != precision.PLAIN,  # here every tensor of an FP8 call is quantized already
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
        "head_dim_qk": q.shape[-1],
        "head_dim_v": v.shape[-1],
    }


def fused_attn_fwd(
    is_training: bool,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    fake_dtype: torch.dtype,
    fused_attention_backend: Any,
    attn_bias: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    page_table_k: torch.Tensor | None = None,
    page_table_v: torch.Tensor | None = None,
    s_quantizer: Any = None,
    o_quantizer: Any = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    fast_zero_fill: bool = True,
    qkv_layout: str = "sbh3d",
    o_format: str = "sbhd",
    qkv_scale_inv_format: str | None = None,
    attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding",
    softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1),
    bottom_right_diagonal: bool | None = None,
    rng_gen: torch.Generator | None = None,
    softmax_offset: torch.Tensor | None = None,
    return_max_logit: bool = False,
    cuda_graph: bool = False,
) -> tuple[Any, ...]:
    """Run attention forward.

    Returns (O, aux), or (O, aux, max_logit [h] in O's dtype) with ``return_max_logit``. O is fresh, in ``o_format``,
    its last size v's; padded rows, and rows that see no key, are zero. aux is the log-sum-exp [b, h, max_seqlen_q, 1]
    or [t_q, h, 1] where q is ragged, in fp32 (fp64 for fp64 inputs; -inf, or the offset, in rows that see no key),
    rng_state int64 [2], then the given ``attn_bias`` and ``softmax_offset`` objects themselves where their types use
    them. The generator advances, dropout or not; dropout itself acts only in training.

    b is read from ``cu_seqlens_q``, both sequence lengths from the ``max_seqlen`` pair, head counts and dimensions
    from the tensors' last two sizes, every stride from ``qkv_layout``. In a ragged tensor [t, h, d] sequence i starts
    at row ``cu_seqlens_*_padded[i]`` if both padded tensors are given, else at ``cu_seqlens_*[i]``; where q, k and v
    share a buffer, k and v start where q does. A sequence longer than its ``max_seqlen`` is refused there, and cut
    in a dense tensor. A paged K is read by ``page_table_k`` alone, a paged V by ``page_table_v``. ``fast_zero_fill``,
    ``qkv_scale_inv_format``, and for other layouts the padded tensors and page tables, have no effect.

    Quantized q, k and v call for FP8, whatever the backend; that only settles how far the generator advances. Then the
    amax of ``s_quantizer`` grows, and O is quantized where ``o_quantizer`` is a Float8Quantizer, whose amax grows too.

    Raises ValueError, KeyError, TypeError, RuntimeError and EngineUnsupported as ``checks`` and ``precision`` say.
    Source: the wrapper around TransformerEngine's ``tex.fused_attn_fwd``.
    """
    if attn_scale is None:
        attn_scale = 1.0 / math.sqrt(q.shape[-1])
    checks.bias(attn_bias_type, attn_bias, q.dtype)
    backend = checks.backend(fused_attention_backend)
    addressing.check_layout("qkv_layout", qkv_layout)
    addressing.check_format("o_format", o_format)
    addressing.check_format("qkv_scale_inv_format", qkv_scale_inv_format, optional=True)
    checks.strings(attn_bias_type, attn_mask_type, softmax_type)
    window = checks.arguments(
        window_size,
        {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv},
        {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv, "q": q, "k": k, "v": v},
    )
    checks.optional_tensors(
        {
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
            "page_table_k": page_table_k,
            "page_table_v": page_table_v,
        }
    )
    checks.memory(qkv_layout, {"o_format": o_format})
    kind, dtype = _kind({"q": q, "k": k, "v": v}, fake_dtype)
    precision.check_quantizers(kind, {"s_quantizer": s_quantizer}, {"o_quantizer": o_quantizer})
    checks.configuration(
        dropout,
        **_options(kind, qkv_layout, attn_bias_type, attn_mask_type, max_seqlen_q, max_seqlen_kv, q, v),
        return_max_logit=return_max_logit,
    )
    if softmax_type == "learnable" and softmax_offset is None:
        raise RuntimeError("softmax_type='learnable' needs softmax_offset, which is None")

    call = call_of(max_seqlen_q, max_seqlen_kv, cu_seqlens_q, q, k, v, dtype, addressing.heads(qkv_layout))
    used_bias = None if attn_bias_type in checks.NO_BIAS_TENSOR else attn_bias
    used_offset = None if softmax_type == "vanilla" else softmax_offset
    sequences = batch.Sequences(
        cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, page_table_k, page_table_v
    )
    where = batch.locate(qkv_layout, sequences, q, k, v, (call.sq, call.skv))
    mask = _mask(call, attn_mask_type, window, bottom_right_diagonal, cu_seqlens_q, cu_seqlens_kv)
    read_q, read_k, read_v = _read_qkv(call, qkv_layout, where, q, k, v, (False, False, True))
    bias = _bias(call, attn_bias_type, used_bias, mask, "attn_bias")
    offset = _offset(call, softmax_type, used_offset, q.device, "softmax_offset")
    # Last of what can fail: a refused call leaves the generator alone, and the amax of the quantizers.
    rng_state = rng.draw(rng_gen, q.device, rng.advance(backend, max_seqlen_q))
    factors = dropout_factors(call, rng_state, dropout if is_training else 0.0)
    rounded = precision.rounding(s_quantizer, record=True)
    result = attention.forward(
        read_q, read_k, read_v, attention.Softmax(attn_scale, mask, bias, offset, factors, rounded)
    )

    output = precision.keep_output(batch.unpad(result.output, where.q), o_format, call.dtype, o_quantizer)
    no_key = -torch.inf if offset is None else offset.view(1, -1, 1)
    aux = [batch.unpad(result.stats, where.q, no_key).to(call.stats), rng_state]
    aux += [tensor for tensor in (used_bias, used_offset) if tensor is not None]
    if return_max_logit:
        return output, aux, result.max_logit.to(call.dtype)
    return output, aux


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    d_o: torch.Tensor,
    fake_dtype: torch.dtype,
    aux_ctx_tensors: list[torch.Tensor],
    fused_attention_backend: Any,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    s_quantizer: Any = None,
    dp_quantizer: Any = None,
    dqkv_quantizer: Any = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    fast_zero_fill: bool = True,
    qkv_layout: str = "sbh3d",
    o_format: str = "sbhd",
    do_format: str = "sbhd",
    dqkv_layout: str = "sbh3d",
    qkv_scale_inv_format: str | None = None,
    do_scale_inv_format: str | None = None,
    attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding",
    softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1),
    bottom_right_diagonal: bool | None = None,
    deterministic: bool = False,
    cuda_graph: bool = False,
) -> list[torch.Tensor | None]:
    """Run attention backward.

    Returns five entries: dq, dk, dv in ``dqkv_layout``, d_bias in q's dtype or None, d_softmax_offset fp32 (fp64 for
    fp64 inputs) [1, h, 1, 1] or None. All are fresh; interleaved layouts get strided views of one buffer. The softmax
    statistics come from aux[0], the dropout mask from aux[1] whenever ``dropout`` is not 0, the bias from aux[2], the
    softmax offset from the last entry; with MXFP8 one more entry follows, O's gradient in high precision, and must be
    there. No generator is touched. Sizes, strides and the starts of sequences are found as
    in forward; gradients of ragged tensors are [t, h, d] and zero in all rows that are no sequence's.

    Two oddities of the real kernels are kept. d_bias takes the shape of the last auxiliary entry: with a softmax
    offset there, it is zeros of the offset's shape. And no kernel writes the d_bias of a [1, 1, 1, skv] bias, whose
    buffer is uninitialized there and NaN here, so that nobody can rely on it; where q is ragged it is zeroed before.

    Quantized q, k and v call for FP8. Then the amax of ``dp_quantizer`` grows; dq, dk and dv are quantized where
    ``dqkv_quantizer`` is a Float8Quantizer, share its scale, and let its amax grow. O may be quantized or, where the
    gradients are not, in high precision.

    Raises ValueError, KeyError, TypeError, RuntimeError and EngineUnsupported as ``checks`` and ``precision`` say;
    RuntimeError also for a paged layout and for auxiliary tensors that are missing or of the wrong kind. Source: the
    wrapper around TransformerEngine's ``tex.fused_attn_bwd``.
    """
    if attn_scale is None:
        attn_scale = 1.0 / math.sqrt(q.shape[-1])
    checks.backend(fused_attention_backend)
    if len(aux_ctx_tensors) < 1:
        raise ValueError("aux_ctx_tensors is empty; it must hold at least the softmax statistics and rng_state")
    for name, layout in (("qkv_layout", qkv_layout), ("dqkv_layout", dqkv_layout)):
        addressing.check_layout(name, layout)
    for name, fmt in (("o_format", o_format), ("do_format", do_format)):
        addressing.check_format(name, fmt)
    addressing.check_format("qkv_scale_inv_format", qkv_scale_inv_format, optional=True)
    addressing.check_format("do_scale_inv_format", do_scale_inv_format, optional=True)
    checks.strings(attn_bias_type, attn_mask_type, softmax_type)
    window = checks.arguments(
        window_size,
        {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv},
        {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv, "q": q, "k": k, "v": v, "o": o, "d_o": d_o}
        | {f"aux_ctx_tensors[{index}]": tensor for index, tensor in enumerate(aux_ctx_tensors)},
    )
    checks.optional_tensors({"cu_seqlens_q_padded": cu_seqlens_q_padded, "cu_seqlens_kv_padded": cu_seqlens_kv_padded})
    for name, layout in (("qkv_layout", qkv_layout), ("dqkv_layout", dqkv_layout)):
        if layout.startswith(addressing.PAGED):
            raise RuntimeError(f"{name}={layout!r}: QKV layout not supported, a paged KV cache has no backward")
    checks.memory(qkv_layout, {"o_format": o_format, "do_format": do_format}, dqkv_layout)
    kind, dtype = _kind({"q": q, "k": k, "v": v}, fake_dtype)
    precision.check_quantizers(
        kind, {"s_quantizer": s_quantizer, "dp_quantizer": dp_quantizer}, {"dqkv_quantizer": dqkv_quantizer}
    )
    precision.check_gradient(kind, o, d_o, dqkv_quantizer, aux_ctx_tensors)
    if kind == precision.PLAIN:
        checks.dtypes({"q": q, "o": o, "d_o": d_o})
    checks.configuration(
        dropout, **_options(kind, qkv_layout, attn_bias_type, attn_mask_type, max_seqlen_q, max_seqlen_kv, q, v)
    )

    call = call_of(max_seqlen_q, max_seqlen_kv, cu_seqlens_q, q, k, v, dtype, addressing.heads(qkv_layout))
    sequences = batch.Sequences(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    where = batch.locate(qkv_layout, sequences, q, k, v, (call.sq, call.skv))
    exact_grad = aux_ctx_tensors[-1] if kind == precision.MXFP8 else None
    aux = aux_ctx_tensors if exact_grad is None else aux_ctx_tensors[:-1]
    stats, rng_state, aux_bias, aux_offset = _unpack_aux(call, where, aux, attn_bias_type, softmax_type)
    mask = _mask(call, attn_mask_type, window, bottom_right_diagonal, cu_seqlens_q, cu_seqlens_kv)
    bias = _bias(call, attn_bias_type, aux_bias, mask, "aux_ctx_tensors[2]")
    offset = _offset(call, softmax_type, aux_offset, q.device, "aux_ctx_tensors[-1]")

    def read_o(name: str, tensor: Any, fmt: str, columns: bool = False) -> torch.Tensor:
        return precision.read(name, tensor, fmt, call.o_sizes, where.q, call.compute, columns=columns)

    copies = None
    if exact_grad is not None:
        by_columns = _read_qkv(call, qkv_layout, where, q, k, v, (True, True, False))
        copies = attention.Copies(
            *by_columns[:2], read_o("d_o", d_o, do_format, True), read_o("aux_ctx_tensors[-1]", exact_grad, do_format)
        )
    softmax = attention.Softmax(
        attn_scale, mask, bias, offset, dropout_factors(call, rng_state, dropout),
        precision.rounding(s_quantizer, record=False), precision.rounding(dp_quantizer, record=True),
    )  # fmt: skip
    grads = attention.backward(
        *_read_qkv(call, qkv_layout, where, q, k, v, (False, False, False)),
        read_o("o", o, o_format),
        read_o("d_o", d_o, do_format),
        batch.read("aux_ctx_tensors[0]", stats, addressing.CANONICAL, call.stats_sizes, where.q, call.compute),
        softmax,
        copies,
    )

    results: list[torch.Tensor | None] = []
    unpadded = [batch.unpad(*pair) for pair in ((grads.q, where.q), (grads.k, where.k), (grads.v, where.v))]
    results += precision.keep_gradients(unpadded, dqkv_layout, call.dtype, dqkv_quantizer)
    results.append(None if aux_bias is None else _d_bias(call, where, grads.scores, aux_bias, aux_ctx_tensors[-1]))
    results.append(None if grads.offset is None else grads.offset.to(call.stats))
    return results


def _unpack_aux(
    call: Call, where: batch.Batch, aux: Sequence[torch.Tensor], attn_bias_type: str, softmax_type: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return statistics, rng_state, bias and softmax offset; raise RuntimeError where one is missing or another thing.

    An off-by-one softmax may come without an offset, as in forward.
    """
    has_bias = attn_bias_type not in checks.NO_BIAS_TENSOR
    without_offset = 2 + has_bias
    wanted = without_offset + (softmax_type == "learnable")
    if len(aux) < wanted:
        raise RuntimeError(
            f"aux_ctx_tensors has {len(aux)} entries; attn_bias_type={attn_bias_type!r} and "
            f"softmax_type={softmax_type!r} need {wanted}"
        )
    checks.exact("aux_ctx_tensors[0]", aux[0], call.stats_shape(where), (torch.float32, torch.float64))
    checks.exact("aux_ctx_tensors[1]", aux[1], (2,), (torch.int64,))
    if has_bias and aux[2].dtype != call.dtype:
        raise RuntimeError(f"aux_ctx_tensors[2].dtype={aux[2].dtype} is not that of q, {call.dtype}")
    offset = aux[-1] if softmax_type != "vanilla" and len(aux) > without_offset else None
    return aux[0], aux[1], aux[2] if has_bias else None, offset


def _d_bias(
    call: Call, where: batch.Batch, grad_scores: torch.Tensor, bias: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """Return the bias's gradient in the shape of the last auxiliary entry, with the oddities that backward keeps."""
    if last.shape != bias.shape:
        return torch.zeros(last.shape, dtype=call.dtype, device=bias.device)
    if tuple(bias.shape[:3]) == (1, 1, 1):
        unwritten = torch.nan if where.q is None else 0.0
        return torch.full(bias.shape, unwritten, dtype=call.dtype, device=bias.device)
    return grad_scores.sum_to_size(*bias.shape).to(call.dtype)
