"""Implement cuDNN fused attention as an autograd function that takes 36 positional values.

Source: the behaviour of TransformerEngine 2.19.0, before #3480.
"""

import os

import torch
import transformer_engine.pytorch.attention.dot_product_attention.utils as dpa_utils
from transformer_engine.pytorch.attention.dot_product_attention.utils import (
    combine_and_dequantize,
    combine_and_quantize,
    mxfp8_quantize_fast_path,
    print_quantizers,
)
from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_bwd, fused_attn_fwd
from transformer_engine.pytorch.cpu_offload import (
    NVTE_CPU_OFFLOAD_V1,
    is_cpu_offload_enabled,
    mark_activation_offload,
    start_offload,
)
from transformer_engine.pytorch.cpu_offload_v1 import is_current_layer_offloaded
from transformer_engine.pytorch.graph import is_graph_capturing
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensorStorage,
    prepare_for_saving,
    restore_from_func_ctx,
)
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.utils import get_nvtx_range_context, nvtx_range_pop, nvtx_range_push

try:
    from flash_attn_2_cuda import varlen_bwd as flash_attn_cuda_bwd
except ImportError:
    flash_attn_cuda_bwd = None

# Current scaling: hand backward the output in high precision, not a quantized copy of it. Fixed at import.
_dpa_fp8_cs_o_in_f16 = os.getenv("NVTE_DPA_FP8CS_O_in_F16", "1") == "1"  # noqa: SIM112


def _is_quantized(value):
    return isinstance(value, QuantizedTensorStorage)


def _scaling_kind(quantizer):
    """Name the scaling of the QKV quantizer: "delayed", "current" or "mxfp8".

    Raises TypeError for any other quantizer.
    """
    for kind, quantizer_class in (
        ("delayed", Float8Quantizer),
        ("current", Float8CurrentScalingQuantizer),
        ("mxfp8", MXFP8Quantizer),
    ):
        if isinstance(quantizer, quantizer_class):
            return kind
    raise TypeError(
        f"QKV quantizer={type(quantizer).__name__} is not supported by fused attention: "
        "use Float8Quantizer, Float8CurrentScalingQuantizer or MXFP8Quantizer"
    )


def _backward_wants_high_precision_o(kind):
    """Tell whether an FP8 backward of this scaling kind reads O in high precision."""
    return kind == "mxfp8" or (kind == "current" and _dpa_fp8_cs_o_in_f16)


def _both_precisions_of_o(o, o_quantizer, kind, is_training, backward_in_fp8, fp8_output, nominal_dtype):
    """Return (quantized O, high-precision O) as far as the caller or backward needs them.

    The kernel gives one of the two; the other is made only when somebody reads it, since it costs a pass over O.
    """
    high_precision_kept = not backward_in_fp8 or _backward_wants_high_precision_o(kind)
    if _is_quantized(o):
        if not fp8_output or (is_training and high_precision_kept):
            return o, o.dequantize().view(o.shape)
    elif fp8_output or (is_training and not high_precision_kept):
        return o_quantizer(o), o
    return o, o


def _separate_parts(qkv_layout):
    """Spell a layout with one part per tensor: "sb3hd" is "sbhd_sbhd_sbhd", "thd_t2hd" is "thd_thd_thd"."""
    separate = []
    for part in qkv_layout.split("_"):
        count = "".join(c for c in part if c.isdigit())
        separate += [part.replace(count, "")] * int(count) if count else [part]
    return "_".join(separate)


def _zero_tail_rows_(grad, cu_seqlens_padded):
    """Zero the rows of a [t, h, d] gradient from the last offset on, without waiting for the device."""
    if grad.dim() == 3 and cu_seqlens_padded is not None:
        rows = torch.arange(grad.shape[0], device=grad.device)
        grad.masked_fill_((rows >= cu_seqlens_padded[-1]).view(-1, 1, 1), 0)


def _remember(ctx, **attributes):
    for name, value in attributes.items():
        setattr(ctx, name, value)


class FusedAttnFunc(torch.autograd.Function):
    """Run cuDNN fused attention forward and backward, with all 36 arguments given by position.

    q, k, v: [s, b, h, d], [b, s, h, d] or [t, h, d] as qkv_layout says, float16, bfloat16 or quantized. Sequence
    lengths are in tokens, attn_scale is a plain factor. Gradients: q, k, v, attn_bias, softmax_offset.
    Source: TransformerEngine 2.19.0, before #3480.
    """

    @staticmethod
    def forward(
        ctx,
        is_training,
        max_seqlen_q,
        max_seqlen_kv,
        cu_seqlens_q,
        cu_seqlens_kv,
        cu_seqlens_q_padded,
        cu_seqlens_kv_padded,
        page_table_k,
        page_table_v,
        q,
        k,
        v,
        attn_bias,
        attn_scale,
        dropout_p,
        fast_zero_fill,
        qkv_layout,
        attn_bias_type,
        attn_mask_type,
        softmax_type,
        window_size,
        bottom_right_diagonal,
        rng_gen,
        fused_attention_backend,
        use_FAv2_bwd,
        fp8,
        fp8_meta,
        quantizers,
        deterministic,
        softmax_offset,
        fp8_output,
        bf16_backward,
        layer_number,
        return_max_logit,
        packed_qkv=None,
        packed_kv=None,
    ):
        """Compute attention; return O, or (O, max logit [h]) with return_max_logit.

        Raises AssertionError when q, k and v are of different classes, TypeError for an unsupported QKV quantizer.
        """
        nvtx_range_push("transformer_engine.FusedAttnFunc.forward")
        if is_cpu_offload_enabled():
            start_offload(q, k, v, offload_base_tensor=True)

        recipe = FP8GlobalStateManager.get_fp8_recipe()
        if fp8_meta is not None and "local_recipes" in fp8_meta:
            recipe = fp8_meta["local_recipes"][0]

        caller_layout = qkv_layout
        _, o_format, _ = dpa_utils.get_qkv_format(caller_layout)

        for other in (k, v):
            assert isinstance(other, q.__class__), (
                f"q, k and v must be of one class: q={type(q).__name__}, k={type(k).__name__}, v={type(v).__name__}"
            )
        qkv_come_quantized = _is_quantized(q)
        backward_in_fp8 = fp8 and int(os.getenv("NVTE_FP8_DPA_BWD", "1"))
        six_quantizers = dpa_utils.get_attention_quantizers(fp8, quantizers)
        qkv_quantizer, o_quantizer, s_quantizer, dqkv_quantizer, do_quantizer, dp_quantizer = six_quantizers
        kind = _scaling_kind(qkv_quantizer) if fp8 else None
        nominal_dtype = q.dtype

        # What both branches hand to the kernel alike.
        shared = {
            "is_training": is_training,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_kv": max_seqlen_kv,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
            "fake_dtype": nominal_dtype,
            "attn_bias": attn_bias,
            "attn_scale": attn_scale,
            "dropout": dropout_p,
            "fast_zero_fill": fast_zero_fill,
            "o_format": o_format,
            "attn_bias_type": attn_bias_type,
            "attn_mask_type": attn_mask_type,
            "softmax_type": softmax_type,
            "window_size": window_size,
            "bottom_right_diagonal": bottom_right_diagonal,
            "rng_gen": rng_gen,
            "softmax_offset": softmax_offset,
        }
        scale_inv_format = None
        max_logit = None
        saved_fp8 = (None, None, None, None)

        if fp8:
            fused_attention_backend = FusedAttnBackend["FP8"]
            if qkv_come_quantized:
                q_fp8, k_fp8, v_fp8 = q, k, v
                scale_inv_format = "bhsd" if recipe.mxfp8() else None
            else:
                q_fp8, k_fp8, v_fp8, qkv_layout, scale_inv_format = combine_and_quantize(
                    qkv_layout,
                    q,
                    k,
                    v,
                    qkv_quantizer,
                    used_in_backward=is_training,
                    combined_qkv=packed_qkv,
                    combined_kv=packed_kv,
                )

            print_quantizers("FusedAttnFunc.forward >> before: ", layer_number, *six_quantizers)
            # No page tables: the FP8 kernel has no paged form. No max logit either.
            o, aux = fused_attn_fwd(
                **shared,
                q=q_fp8,
                k=k_fp8,
                v=v_fp8,
                fused_attention_backend=fused_attention_backend,
                s_quantizer=s_quantizer,
                o_quantizer=o_quantizer,
                qkv_layout=qkv_layout,
                qkv_scale_inv_format=scale_inv_format,
                cuda_graph=is_graph_capturing(),
            )
            out_fp8, out_f16 = _both_precisions_of_o(
                o, o_quantizer, kind, is_training, backward_in_fp8, fp8_output, nominal_dtype
            )
            print_quantizers("FusedAttnFunc.forward >> after:  ", layer_number, *six_quantizers)
            returned = out_fp8 if fp8_output else out_f16

            if backward_in_fp8:
                o_stays_f16 = _backward_wants_high_precision_o(kind)
                saved_fp8 = (q_fp8, k_fp8, v_fp8, None if o_stays_f16 else out_fp8)
                saved_f16 = (None, None, None, out_f16 if o_stays_f16 else None)
            else:
                if qkv_come_quantized:
                    q, k, v = combine_and_dequantize(qkv_layout, q_fp8, k_fp8, v_fp8)
                saved_f16 = (q, k, v, out_f16)
        else:
            o, aux, *extra = fused_attn_fwd(
                **shared,
                q=q,
                k=k,
                v=v,
                fused_attention_backend=fused_attention_backend,
                page_table_k=page_table_k,
                page_table_v=page_table_v,
                qkv_layout=qkv_layout,
                return_max_logit=return_max_logit,
                cuda_graph=is_graph_capturing(),
            )
            if return_max_logit:
                (max_logit,) = extra
            returned = o
            saved_f16 = (q, k, v, o)

        nvtx_range_pop("transformer_engine.FusedAttnFunc.forward")

        # Before saving: saving empties bare quantized storages, and an emptied one carries no mark.
        if NVTE_CPU_OFFLOAD_V1 and is_cpu_offload_enabled():
            mark_activation_offload(*(saved_fp8 if backward_in_fp8 else saved_f16))
            mark_activation_offload(*aux)

        tensors, tensor_objects = prepare_for_saving(
            *saved_fp8,
            *saved_f16,
            cu_seqlens_q,
            cu_seqlens_kv,
            cu_seqlens_q_padded,
            cu_seqlens_kv_padded,
            *aux,
        )
        ctx.save_for_backward(*tensors)

        # The next step's scale may be written in place before this step's backward runs, so backward gets its own. The
        # amax stays shared: it feeds the history.
        s_for_backward = s_quantizer
        if backward_in_fp8 and isinstance(s_quantizer, Float8Quantizer):
            s_for_backward = s_quantizer.copy()
            s_for_backward.scale = s_quantizer.scale.clone()

        if NVTE_CPU_OFFLOAD_V1 and is_cpu_offload_enabled() and is_current_layer_offloaded():
            # An interleaved buffer comes back from the host as separate tensors.
            layout_for_backward = _separate_parts(qkv_layout)
        elif fp8 and not backward_in_fp8:
            layout_for_backward = caller_layout
        else:
            layout_for_backward = qkv_layout

        if fp8 and not backward_in_fp8:
            fused_attention_backend = FusedAttnBackend["F16_arbitrary_seqlen"]

        _remember(
            ctx,
            tensor_objects=tensor_objects,
            fp8_recipe=recipe,
            fp8_meta=fp8_meta,
            fp8=backward_in_fp8,
            is_input_fp8=qkv_come_quantized,
            is_output_fp8=fp8_output,
            bf16_backward=bf16_backward,
            nominal_dtype=nominal_dtype,
            layer_number=layer_number,
            qkv_type=kind,
            QKV_quantizer=qkv_quantizer,
            O_quantizer=o_quantizer,
            S_quantizer=s_for_backward,
            dQKV_quantizer=dqkv_quantizer,
            dO_quantizer=do_quantizer,
            dP_quantizer=dp_quantizer,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            attn_scale=attn_scale,
            dropout_p=dropout_p,
            fast_zero_fill=fast_zero_fill,
            qkv_layout=layout_for_backward,
            dqkv_layout=caller_layout,
            o_format=o_format,
            qkv_scale_inv_format=scale_inv_format,
            attn_bias_type=attn_bias_type,
            attn_mask_type=attn_mask_type,
            softmax_type=softmax_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            fused_attention_backend=fused_attention_backend,
            use_FAv2_bwd=use_FAv2_bwd,
            deterministic=deterministic,
        )
        return (returned, max_logit) if return_max_logit else returned

    @staticmethod
    def backward(ctx, d_out, *_ignored):
        """Compute the gradients; return one value per forward argument, 36 in all.

        d_out: O's shape; a gradient of the max logit is ignored. Values 9 to 12 and 29 are dq, dk, dv, d_bias and
        d_softmax_offset, the rest None. Raises ValueError with use_FAv2_bwd and a bias or a softmax offset.
        """
        # Kernels read d_out by the layout's name, not by its strides.
        if not _is_quantized(d_out) and not ctx.use_FAv2_bwd:
            d_out = d_out.contiguous()

        d_out_fp8 = None
        do_scale_inv_format = None
        if ctx.fp8:
            if _is_quantized(d_out):
                d_out_fp8 = d_out
            elif ctx.qkv_type == "mxfp8":
                (d_out_fp8,), do_scale_inv_format = mxfp8_quantize_fast_path([(d_out, ctx.dO_quantizer)], ctx.o_format)
            else:
                d_out_fp8 = ctx.dO_quantizer(d_out)

        restored = restore_from_func_ctx(ctx)
        q_fp8, k_fp8, v_fp8, out_fp8, q, k, v, out = restored[:8]
        cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded = restored[8:12]
        aux = list(restored[12:])
        if not aux[0].is_contiguous():
            aux[0] = aux[0].contiguous()

        rest = [None]
        if ctx.use_FAv2_bwd:
            softmax_lse, rng_state = aux
            dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
            d_out, q, k, v, out = (dpa_utils.maybe_contiguous(x) for x in (d_out, q, k, v, out))
            flash_attn_cuda_bwd(
                d_out,
                q,
                k,
                v,
                out,
                softmax_lse,
                dq,
                dk,
                dv,
                cu_seqlens_q,
                cu_seqlens_kv,
                ctx.max_seqlen_q,
                ctx.max_seqlen_kv,
                ctx.dropout_p,
                ctx.attn_scale,
                False,
                "causal" in ctx.attn_mask_type,
                None,
                rng_state,
            )
            # The kernel pads the head size; the gradients do not.
            dq, dk, dv = (x[..., : d_out.shape[-1]] for x in (dq, dk, dv))
            for grad, offsets in ((dq, cu_seqlens_q_padded), (dk, cu_seqlens_kv_padded), (dv, cu_seqlens_kv_padded)):
                _zero_tail_rows_(grad, offsets)
        else:
            shared = {
                "max_seqlen_q": ctx.max_seqlen_q,
                "max_seqlen_kv": ctx.max_seqlen_kv,
                "cu_seqlens_q": cu_seqlens_q,
                "cu_seqlens_kv": cu_seqlens_kv,
                "cu_seqlens_q_padded": cu_seqlens_q_padded,
                "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
                "fake_dtype": ctx.nominal_dtype,
                "aux_ctx_tensors": aux,
                "fused_attention_backend": ctx.fused_attention_backend,
                "attn_scale": ctx.attn_scale,
                "dropout": ctx.dropout_p,
                "fast_zero_fill": ctx.fast_zero_fill,
                "qkv_layout": ctx.qkv_layout,
                "o_format": ctx.o_format,
                "do_format": ctx.o_format,
                "dqkv_layout": ctx.dqkv_layout,
                "attn_bias_type": ctx.attn_bias_type,
                "attn_mask_type": ctx.attn_mask_type,
                "softmax_type": ctx.softmax_type,
                "window_size": ctx.window_size,
                "bottom_right_diagonal": ctx.bottom_right_diagonal,
                "deterministic": ctx.deterministic,
            }
            with get_nvtx_range_context("FusedAttnFunc.backward"):
                if ctx.fp8:
                    six_quantizers = (
                        ctx.QKV_quantizer,
                        ctx.O_quantizer,
                        ctx.S_quantizer,
                        ctx.dQKV_quantizer,
                        ctx.dO_quantizer,
                        ctx.dP_quantizer,
                    )
                    print_quantizers("FusedAttnFunc.backward >> before: ", ctx.layer_number, *six_quantizers)
                    if ctx.qkv_type == "mxfp8":
                        aux.append(d_out)
                    dq, dk, dv, *rest = fused_attn_bwd(
                        **shared,
                        q=q_fp8,
                        k=k_fp8,
                        v=v_fp8,
                        o=out if _backward_wants_high_precision_o(ctx.qkv_type) else out_fp8,
                        d_o=d_out_fp8,
                        s_quantizer=ctx.S_quantizer,
                        dp_quantizer=ctx.dP_quantizer,
                        dqkv_quantizer=ctx.dQKV_quantizer,
                        qkv_scale_inv_format=ctx.qkv_scale_inv_format,
                        do_scale_inv_format=do_scale_inv_format,
                        cuda_graph=is_graph_capturing(),
                    )
                    # Gradients go back in the kind that the inputs came in, unless the caller asked otherwise.
                    quantized_wanted = ctx.is_input_fp8 and not ctx.bf16_backward
                    if _is_quantized(dq) and not quantized_wanted:
                        dq, dk, dv = combine_and_dequantize(ctx.dqkv_layout, dq, dk, dv, src_nominal_dtype=dq.dtype)
                    elif quantized_wanted and not _is_quantized(dq):
                        dq, dk, dv, _, _ = combine_and_quantize(ctx.dqkv_layout, dq, dk, dv, ctx.dQKV_quantizer)
                    print_quantizers("FusedAttnFunc.backward >> after:  ", ctx.layer_number, *six_quantizers)
                else:
                    if _is_quantized(d_out):
                        d_out = d_out.dequantize(dtype=ctx.nominal_dtype)
                    dq, dk, dv, *rest = fused_attn_bwd(
                        **shared, q=q, k=k, v=v, o=out, d_o=d_out, cuda_graph=is_graph_capturing()
                    )

        d_bias = None if ctx.attn_bias_type in ("no_bias", "alibi") else rest[0]
        d_softmax_offset = None if ctx.softmax_type == "vanilla" else rest[1]
        # 9 values before q, 16 between attn_bias and softmax_offset, 6 after it.
        return (*[None] * 9, dq, dk, dv, d_bias, *[None] * 16, d_softmax_offset, *[None] * 6)
