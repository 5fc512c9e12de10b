"""Implement cuDNN fused attention as an autograd function over two argument bags.

The work is done by helpers that know no ``ctx``: ``_fused_attn_forward_impl``, ``_fused_attn_setup_ctx`` and
``_fused_attn_backward_impl``. ``FusedAttnFunc`` only ties them to autograd, so that they can be registered as custom
operators as they are.
Source: the behaviour of TransformerEngine 2.20.2, after #3480; stricter about lengths, unset fields and aliases.
"""

import os
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Union

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

TensorOrQuantized = Union[torch.Tensor, QuantizedTensorStorage]

# The annotations of the two bags that torch.library.infer_schema refuses, and what a schema would carry instead: a
# quantized tensor enters an operator as its plain tensor; a generator, the FP8 recipe and the quantizers are live
# Python objects and enter as the integer handle of a registry. Every other annotation can be taken as it is.
SCHEMA_TYPES = {
    TensorOrQuantized: torch.Tensor,
    Optional[TensorOrQuantized]: Optional[torch.Tensor],
    Optional[torch.Generator]: Optional[int],
    Optional[Dict[str, Any]]: Optional[int],
    Any: Optional[int],
}

# The slots of what forward keeps for backward: the field that a slot fills, and the one tensor of the caller's that it
# may turn out to be. Each slot is compared with its own source only: k may well be the same object as v.
_KEPT_SLOTS = (
    ("q_fp8", "q"),
    ("k_fp8", "k"),
    ("v_fp8", "v"),
    ("out_fp8", "out"),
    ("q", "q"),
    ("k", "k"),
    ("v", "v"),
    ("out", "out"),
    ("softmax_stats", None),
    ("rng_state", None),
    ("aux_bias", "attn_bias"),
    ("aux_softmax_offset", "softmax_offset"),
)

# The order in which autograd saves them, sequence lengths added.
_SAVED_FIELDS = (
    "q_fp8",
    "k_fp8",
    "v_fp8",
    "out_fp8",
    "q",
    "k",
    "v",
    "out",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "softmax_stats",
    "rng_state",
    "aux_bias",
    "aux_softmax_offset",
)


class Unset:
    """Mark a field that nobody has filled; None is a value like any other, so it cannot say this."""


@dataclass(slots=True, eq=False)
class FusedAttnFwdArgs:
    """Hold everything that a forward call needs; no field has a default.

    q, k, v: [s, b, h, d], [b, s, h, d] or [t, h, d] as qkv_layout says. cu_seqlens_*: int32 [b + 1], tokens; the padded
    ones are offsets of the sequences' starts. Page tables: int32 [b, pages], one for K and one for V. softmax_offset:
    float32 [1, h, 1, 1]. Raises TypeError naming a missing field. Two bags are equal only if they are one object.
    Source: TransformerEngine 2.20.2, #3480.
    """

    q: TensorOrQuantized
    k: TensorOrQuantized
    v: TensorOrQuantized
    attn_bias: Optional[torch.Tensor]
    softmax_offset: Optional[torch.Tensor]

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    cu_seqlens_q_padded: Optional[torch.Tensor]
    cu_seqlens_kv_padded: Optional[torch.Tensor]
    page_table_k: Optional[torch.Tensor]
    page_table_v: Optional[torch.Tensor]
    packed_qkv: Optional[torch.Tensor]
    packed_kv: Optional[torch.Tensor]

    is_training: bool
    max_seqlen_q: int
    max_seqlen_kv: int
    attn_scale: Optional[float]
    dropout_p: float
    fast_zero_fill: bool
    qkv_layout: str
    attn_bias_type: str
    attn_mask_type: str
    softmax_type: str
    window_size: Optional[List[int]]
    bottom_right_diagonal: Optional[bool]
    fused_attention_backend: int
    deterministic: bool
    use_FAv2_bwd: bool
    return_max_logit: bool
    rng_gen: Optional[torch.Generator]

    fp8: bool
    fp8_meta: Optional[Dict[str, Any]]
    quantizers: Any
    fp8_output: bool
    bf16_backward: bool
    layer_number: Optional[int]


@dataclass(slots=True, eq=False)
class FusedAttnBwdArgs:
    """Hold everything that a backward call needs; every field starts unset and must be filled, with None if need be.

    Between forward and backward the 17 tensors stay unset: autograd keeps them. Shapes as in FusedAttnFwdArgs;
    softmax_stats: float32 [b, h, sq, 1] or [t, h, 1]; rng_state: int64 [2].
    Source: TransformerEngine 2.20.2, #3480.
    """

    grad_output: TensorOrQuantized = Unset
    q_fp8: Optional[TensorOrQuantized] = Unset
    k_fp8: Optional[TensorOrQuantized] = Unset
    v_fp8: Optional[TensorOrQuantized] = Unset
    out_fp8: Optional[TensorOrQuantized] = Unset
    q: Optional[TensorOrQuantized] = Unset
    k: Optional[TensorOrQuantized] = Unset
    v: Optional[TensorOrQuantized] = Unset
    out: Optional[TensorOrQuantized] = Unset
    cu_seqlens_q: torch.Tensor = Unset
    cu_seqlens_kv: torch.Tensor = Unset
    cu_seqlens_q_padded: Optional[torch.Tensor] = Unset
    cu_seqlens_kv_padded: Optional[torch.Tensor] = Unset
    softmax_stats: torch.Tensor = Unset
    rng_state: torch.Tensor = Unset
    aux_bias: Optional[torch.Tensor] = Unset
    aux_softmax_offset: Optional[torch.Tensor] = Unset

    max_seqlen_q: int = Unset
    max_seqlen_kv: int = Unset
    attn_scale: Optional[float] = Unset
    dropout_p: float = Unset
    fast_zero_fill: bool = Unset
    qkv_layout: str = Unset
    dqkv_layout: str = Unset
    o_format: str = Unset
    attn_bias_type: str = Unset
    attn_mask_type: str = Unset
    softmax_type: str = Unset
    window_size: Optional[List[int]] = Unset
    bottom_right_diagonal: Optional[bool] = Unset
    fused_attention_backend: int = Unset
    deterministic: bool = Unset
    use_FAv2_bwd: bool = Unset
    nominal_dtype: torch.dtype = Unset

    fp8: bool = Unset
    is_input_fp8: bool = Unset
    bf16_backward: bool = Unset
    qkv_type: Optional[str] = Unset
    qkv_scale_inv_format: Optional[str] = Unset
    layer_number: Optional[int] = Unset
    QKV_quantizer: Any = Unset
    O_quantizer: Any = Unset
    S_quantizer: Any = Unset
    dQKV_quantizer: Any = Unset
    dO_quantizer: Any = Unset
    dP_quantizer: Any = Unset

    def require_set(self, *names):
        """Check that the named fields, or all of them, have been filled.

        Raises TypeError naming every field that has not.
        """
        missing = [name for name in names or self.__slots__ if getattr(self, name) is Unset]
        if missing:
            raise TypeError(f"FusedAttnBwdArgs: {len(missing)} field(s) not set: {', '.join(missing)}")

    def setup_saved_tensors(self, ctx):
        """Fill the 16 tensor fields that autograd kept.

        Raises ValueError if ctx gives back another number of them.
        """
        for name, tensor in zip(_SAVED_FIELDS, restore_from_func_ctx(ctx), strict=True):
            setattr(self, name, tensor)

    def aux_ctx_tensors(self):
        """Return the auxiliary tensors in the kernel's order, as a new list: the callee may append to it."""
        self.require_set("softmax_stats", "rng_state", "aux_bias", "aux_softmax_offset")
        optional = (self.aux_bias, self.aux_softmax_offset)
        return [self.softmax_stats, self.rng_state, *(tensor for tensor in optional if tensor is not None)]


def _same_view(kept, source):
    """Tell whether two tensors are the same memory seen the same way, be they one Python object or two.

    Two views of one buffer (q and k of a packed one, a transpose, another dtype) are not the same. Where there is no
    address to compare, as for empty tensors and quantized ones, only the same object is the same.
    """
    if kept is None or source is None:
        return False
    if kept is source:
        return True
    for tensor in (kept, source):
        if isinstance(tensor, QuantizedTensorStorage) or not isinstance(tensor, torch.Tensor):
            return False
    address = kept.untyped_storage().data_ptr()
    return (
        address != 0
        and address == source.untyped_storage().data_ptr()
        and kept.storage_offset() == source.storage_offset()
        and kept.shape == source.shape
        and kept.stride() == source.stride()
        and kept.dtype == source.dtype
        and kept.device == source.device
    )


def _qkv_quantizer_type(quantizer):
    """Return "delayed", "current" or "mxfp8" for the QKV quantizer.

    Raises TypeError for any other quantizer.
    """
    if isinstance(quantizer, MXFP8Quantizer):
        return "mxfp8"
    if isinstance(quantizer, Float8CurrentScalingQuantizer):
        return "current"
    if isinstance(quantizer, Float8Quantizer):
        return "delayed"
    raise TypeError(
        f"QKV quantizer={type(quantizer).__name__} is not supported by fused attention: "
        "use Float8Quantizer, Float8CurrentScalingQuantizer or MXFP8Quantizer"
    )


def _backward_reads_f16_out(qkv_type):
    return qkv_type == "mxfp8" or (qkv_type == "current" and _dpa_fp8_cs_o_in_f16)


def _has_bias(attn_bias_type):
    return attn_bias_type not in ("no_bias", "alibi")


def _has_softmax_offset(softmax_type):
    return softmax_type != "vanilla"


def _aux_by_slot(args: FusedAttnFwdArgs, aux):
    """Return (softmax_stats, rng_state, bias or None, softmax offset or None) from the kernel's list.

    Raises AssertionError if the list is not as long as the configuration says.
    """
    expected = ["softmax_stats", "rng_state"]
    if _has_bias(args.attn_bias_type) and args.attn_bias is not None:
        expected.append("aux_bias")
    if _has_softmax_offset(args.softmax_type) and args.softmax_offset is not None:
        expected.append("aux_softmax_offset")
    if len(aux) != len(expected):
        raise AssertionError(
            f"fused_attn_fwd returned {len(aux)} auxiliary tensors, expected {len(expected)} ({', '.join(expected)}) "
            f"for attn_bias_type={args.attn_bias_type!r}, softmax_type={args.softmax_type!r}"
        )
    slots = dict(zip(expected, aux, strict=True))
    return (
        slots["softmax_stats"],
        slots["rng_state"],
        slots.get("aux_bias"),
        slots.get("aux_softmax_offset"),
    )


def _fused_attn_forward_impl(args: FusedAttnFwdArgs):
    """Run the forward kernel.

    args: FusedAttnFwdArgs. Returns (O, max logit [h] or None, 12 tensors to keep, what setup must know as a dict). A
    kept tensor that is an input or O itself is None in the 12 and named in "saved_from" instead, so that no result is
    an alias of an argument. Raises AssertionError when q, k and v are of different classes or the kernel returns an
    unexpected number of auxiliary tensors, TypeError for an unsupported QKV quantizer.
    """
    nvtx_range_push("transformer_engine.FusedAttnFunc.forward")
    q, k, v = args.q, args.k, args.v
    if is_cpu_offload_enabled():
        start_offload(q, k, v, offload_base_tensor=True)

    fp8_recipe = FP8GlobalStateManager.get_fp8_recipe()
    if args.fp8_meta is not None and "local_recipes" in args.fp8_meta:
        fp8_recipe = args.fp8_meta["local_recipes"][0]

    original_qkv_layout = qkv_layout = args.qkv_layout
    _, o_format, _ = dpa_utils.get_qkv_format(original_qkv_layout)

    if not (isinstance(k, q.__class__) and isinstance(v, q.__class__)):
        raise AssertionError(
            f"q, k and v must be of one class: q={type(q).__name__}, k={type(k).__name__}, v={type(v).__name__}"
        )
    is_input_fp8 = isinstance(q, QuantizedTensorStorage)
    # Read at every call, and not at all without FP8.
    is_bwd_fp8 = args.fp8 and bool(int(os.getenv("NVTE_FP8_DPA_BWD", "1")))
    quantizers = dpa_utils.get_attention_quantizers(args.fp8, args.quantizers)
    QKV_quantizer, O_quantizer, S_quantizer, dQKV_quantizer, dO_quantizer, dP_quantizer = quantizers
    qkv_type = _qkv_quantizer_type(QKV_quantizer) if args.fp8 else None
    nominal_dtype = q.dtype

    max_logit = None
    qkv_scale_inv_format = None
    q_fp8 = k_fp8 = v_fp8 = out_fp8 = None
    if args.fp8:
        if is_input_fp8:
            q_fp8, k_fp8, v_fp8 = q, k, v
            if fp8_recipe.mxfp8():
                qkv_scale_inv_format = "bhsd"
        else:
            q_fp8, k_fp8, v_fp8, qkv_layout, qkv_scale_inv_format = combine_and_quantize(
                qkv_layout,
                q,
                k,
                v,
                QKV_quantizer,
                used_in_backward=args.is_training,
                combined_qkv=args.packed_qkv,
                combined_kv=args.packed_kv,
            )
        print_quantizers("FusedAttnFunc.forward >> before: ", args.layer_number, *quantizers)
        # Neither page tables nor a max logit: the FP8 kernel knows neither.
        kernel_out, aux = fused_attn_fwd(
            is_training=args.is_training,
            max_seqlen_q=args.max_seqlen_q,
            max_seqlen_kv=args.max_seqlen_kv,
            cu_seqlens_q=args.cu_seqlens_q,
            cu_seqlens_kv=args.cu_seqlens_kv,
            q=q_fp8,
            k=k_fp8,
            v=v_fp8,
            fake_dtype=nominal_dtype,
            fused_attention_backend=FusedAttnBackend["FP8"],
            attn_bias=args.attn_bias,
            cu_seqlens_q_padded=args.cu_seqlens_q_padded,
            cu_seqlens_kv_padded=args.cu_seqlens_kv_padded,
            s_quantizer=S_quantizer,
            o_quantizer=O_quantizer,
            attn_scale=args.attn_scale,
            dropout=args.dropout_p,
            fast_zero_fill=args.fast_zero_fill,
            qkv_layout=qkv_layout,
            o_format=o_format,
            qkv_scale_inv_format=qkv_scale_inv_format,
            attn_bias_type=args.attn_bias_type,
            attn_mask_type=args.attn_mask_type,
            softmax_type=args.softmax_type,
            window_size=args.window_size,
            bottom_right_diagonal=args.bottom_right_diagonal,
            rng_gen=args.rng_gen,
            softmax_offset=args.softmax_offset,
            cuda_graph=is_graph_capturing(),
        )
        # Whoever reads O, the caller or backward, decides which of its two precisions are made.
        bwd_reads_f16_out = not is_bwd_fp8 or _backward_reads_f16_out(qkv_type)
        out_fp8 = out_f16 = kernel_out
        if isinstance(kernel_out, QuantizedTensorStorage):
            if not args.fp8_output or (args.is_training and bwd_reads_f16_out):
                out_f16 = kernel_out.dequantize().view(kernel_out.shape)
        elif args.fp8_output or (args.is_training and not bwd_reads_f16_out):
            out_fp8 = O_quantizer(kernel_out)
        print_quantizers("FusedAttnFunc.forward >> after:  ", args.layer_number, *quantizers)
        out = out_fp8 if args.fp8_output else out_f16

        if is_bwd_fp8:
            q = k = v = None
            if bwd_reads_f16_out:
                out_fp8 = None
            else:
                out_f16 = None
        else:
            if is_input_fp8:
                q, k, v = combine_and_dequantize(qkv_layout, q_fp8, k_fp8, v_fp8)
            q_fp8 = k_fp8 = v_fp8 = out_fp8 = None
    else:
        result = fused_attn_fwd(
            is_training=args.is_training,
            max_seqlen_q=args.max_seqlen_q,
            max_seqlen_kv=args.max_seqlen_kv,
            cu_seqlens_q=args.cu_seqlens_q,
            cu_seqlens_kv=args.cu_seqlens_kv,
            q=q,
            k=k,
            v=v,
            fake_dtype=nominal_dtype,
            fused_attention_backend=args.fused_attention_backend,
            attn_bias=args.attn_bias,
            cu_seqlens_q_padded=args.cu_seqlens_q_padded,
            cu_seqlens_kv_padded=args.cu_seqlens_kv_padded,
            page_table_k=args.page_table_k,
            page_table_v=args.page_table_v,
            attn_scale=args.attn_scale,
            dropout=args.dropout_p,
            fast_zero_fill=args.fast_zero_fill,
            qkv_layout=qkv_layout,
            o_format=o_format,
            attn_bias_type=args.attn_bias_type,
            attn_mask_type=args.attn_mask_type,
            softmax_type=args.softmax_type,
            window_size=args.window_size,
            bottom_right_diagonal=args.bottom_right_diagonal,
            rng_gen=args.rng_gen,
            softmax_offset=args.softmax_offset,
            return_max_logit=args.return_max_logit,
            cuda_graph=is_graph_capturing(),
        )
        if args.return_max_logit:
            out, aux, max_logit = result
        else:
            out, aux = result
        out_f16 = out

    nvtx_range_pop("transformer_engine.FusedAttnFunc.forward")

    # The real tensors, before some are handed back by name only.
    if NVTE_CPU_OFFLOAD_V1 and is_cpu_offload_enabled():
        if is_bwd_fp8:
            mark_activation_offload(q_fp8, k_fp8, v_fp8, out_fp8)
        else:
            mark_activation_offload(q, k, v, out_f16)
        mark_activation_offload(*aux)

    kept = (q_fp8, k_fp8, v_fp8, out_fp8, q, k, v, out_f16, *_aux_by_slot(args, aux))
    sources = {
        "q": args.q,
        "k": args.k,
        "v": args.v,
        "out": out,
        "attn_bias": args.attn_bias,
        "softmax_offset": args.softmax_offset,
    }
    saved_from = tuple(
        source if source is not None and _same_view(tensor, sources[source]) else None
        for (_, source), tensor in zip(_KEPT_SLOTS, kept, strict=True)
    )
    tensors_to_save = tuple(tensor if source is None else None for source, tensor in zip(saved_from, kept, strict=True))

    # The next step's scale may be written in place before this step's backward runs, so backward gets its own. The
    # amax stays shared: it feeds the history.
    if is_bwd_fp8 and isinstance(S_quantizer, Float8Quantizer):
        S_for_backward = S_quantizer.copy()
        S_for_backward.scale = S_quantizer.scale.clone()
    else:
        S_for_backward = S_quantizer

    if not args.fp8:
        backend_for_backward = args.fused_attention_backend
    else:
        backend_for_backward = FusedAttnBackend["FP8" if is_bwd_fp8 else "F16_arbitrary_seqlen"]

    ctx_attrs = {
        "fp8": is_bwd_fp8,
        "is_input_fp8": is_input_fp8,
        "saved_from": saved_from,
        "fused_attention_backend": backend_for_backward,
        "nominal_dtype": nominal_dtype,
        "qkv_type": qkv_type,
        "qkv_layout": qkv_layout,
        "original_qkv_layout": original_qkv_layout,
        "o_format": o_format,
        "qkv_scale_inv_format": qkv_scale_inv_format,
        "QKV_quantizer": QKV_quantizer,
        "O_quantizer": O_quantizer,
        "S_quantizer": S_for_backward,
        "dQKV_quantizer": dQKV_quantizer,
        "dO_quantizer": dO_quantizer,
        "dP_quantizer": dP_quantizer,
    }
    return out, max_logit, tensors_to_save, ctx_attrs


def _reload_qkv_layout(qkv_layout):
    """Return the layout with every tensor on its own: "sb3hd" gives "sbhd_sbhd_sbhd", "thd_t2hd" "thd_thd_thd"."""
    parts = []
    for part in qkv_layout.split("_"):
        letters, repeats = "", 1
        for character in part:
            if character.isdigit():
                repeats = int(character)
            else:
                letters += character
        parts.extend([letters] * repeats)
    return "_".join(parts)


def _fused_attn_setup_ctx(bwd_args: FusedAttnBwdArgs, fwd_args: FusedAttnFwdArgs, outputs, ctx_attrs, tensors_to_save):
    """Fill all but the tensors of the backward bag, and return the 16 tensors that must be kept for it.

    bwd_args: FusedAttnBwdArgs, fwd_args: FusedAttnFwdArgs, the rest as _fused_attn_forward_impl returns them, outputs
    being (O, max logit or None). Raises ValueError if the 12 tensors, their sources and the slots differ in number.
    """
    out, _ = outputs
    sources = {
        "q": fwd_args.q,
        "k": fwd_args.k,
        "v": fwd_args.v,
        "out": out,
        "attn_bias": fwd_args.attn_bias,
        "softmax_offset": fwd_args.softmax_offset,
    }
    to_keep = {
        field: tensor if source is None else sources[source]
        for (field, _), source, tensor in zip(_KEPT_SLOTS, ctx_attrs["saved_from"], tensors_to_save, strict=True)
    }
    for field in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        to_keep[field] = getattr(fwd_args, field)

    for field in (
        "max_seqlen_q",
        "max_seqlen_kv",
        "attn_scale",
        "dropout_p",
        "fast_zero_fill",
        "attn_bias_type",
        "attn_mask_type",
        "softmax_type",
        "window_size",
        "bottom_right_diagonal",
        "deterministic",
        "use_FAv2_bwd",
        "bf16_backward",
        "layer_number",
    ):
        setattr(bwd_args, field, getattr(fwd_args, field))
    for field in (
        "fp8",
        "is_input_fp8",
        "fused_attention_backend",
        "nominal_dtype",
        "qkv_type",
        "o_format",
        "qkv_scale_inv_format",
        "QKV_quantizer",
        "O_quantizer",
        "S_quantizer",
        "dQKV_quantizer",
        "dO_quantizer",
        "dP_quantizer",
    ):
        setattr(bwd_args, field, ctx_attrs[field])

    # Gradients take the caller's layout, whatever quantization did to it on the way to the kernel.
    bwd_args.dqkv_layout = ctx_attrs["original_qkv_layout"]
    if NVTE_CPU_OFFLOAD_V1 and is_cpu_offload_enabled() and is_current_layer_offloaded():
        # An interleaved buffer comes back from the host as separate tensors.
        bwd_args.qkv_layout = _reload_qkv_layout(ctx_attrs["qkv_layout"])
    elif fwd_args.fp8 and not ctx_attrs["fp8"]:
        bwd_args.qkv_layout = ctx_attrs["original_qkv_layout"]
    else:
        bwd_args.qkv_layout = ctx_attrs["qkv_layout"]

    return tuple(to_keep[field] for field in _SAVED_FIELDS)


def _backward_by_flash_attn(bwd_args: FusedAttnBwdArgs, d_out, aux_ctx_tensors):
    """Return (dq, dk, dv) from FlashAttention-2's kernel, which writes them into tensors of ours.

    Raises ValueError if aux_ctx_tensors holds more than the softmax statistics and the RNG state.
    """
    softmax_lse, rng_state = aux_ctx_tensors
    q, k, v, out = bwd_args.q, bwd_args.k, bwd_args.v, bwd_args.out
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_out, q, k, v, out = [dpa_utils.maybe_contiguous(tensor) for tensor in (d_out, q, k, v, out)]
    zero_tensors, generator = False, None
    flash_attn_cuda_bwd(
        *(d_out, q, k, v, out, softmax_lse),
        *(dq, dk, dv),
        *(bwd_args.cu_seqlens_q, bwd_args.cu_seqlens_kv, bwd_args.max_seqlen_q, bwd_args.max_seqlen_kv),
        *(bwd_args.dropout_p, bwd_args.attn_scale, zero_tensors, "causal" in bwd_args.attn_mask_type),
        *(generator, rng_state),
    )
    offsets_kv = bwd_args.cu_seqlens_kv_padded
    gradients = []
    for grad, offsets in ((dq, bwd_args.cu_seqlens_q_padded), (dk, offsets_kv), (dv, offsets_kv)):
        # The kernel rounds the head size up.
        grad = grad[..., : d_out.shape[-1]]
        if grad.dim() == 3 and offsets is not None:
            # [t, h, d]: rows that belong to no sequence. A mask, since reading the offset would wait for the device.
            past_the_end = torch.arange(grad.shape[0], device=grad.device) >= offsets[-1]
            grad.masked_fill_(past_the_end[:, None, None], 0)
        gradients.append(grad)
    return tuple(gradients)


def _fused_attn_backward_impl(bwd_args: FusedAttnBwdArgs):
    """Run the backward kernel; return (dq, dk, dv, d_bias or None, d_softmax_offset or None).

    bwd_args: FusedAttnBwdArgs, grad_output [O's shape] and the saved tensors included. Raises TypeError naming every
    field that is not set, ValueError with use_FAv2_bwd and a bias or a softmax offset.
    """
    bwd_args.require_set()
    d_out = bwd_args.grad_output
    is_d_out_quantized = isinstance(d_out, QuantizedTensorStorage)
    # Kernels read d_out by the layout's name, not by its strides.
    if not is_d_out_quantized and not bwd_args.use_FAv2_bwd:
        d_out = d_out.contiguous()

    d_out_fp8 = do_scale_inv_format = None
    if bwd_args.fp8:
        if is_d_out_quantized:
            d_out_fp8 = d_out
        elif bwd_args.qkv_type == "mxfp8":
            quantized, do_scale_inv_format = mxfp8_quantize_fast_path(
                [(d_out, bwd_args.dO_quantizer)], bwd_args.o_format
            )
            (d_out_fp8,) = quantized
        else:
            d_out_fp8 = bwd_args.dO_quantizer(d_out)

    aux_ctx_tensors = bwd_args.aux_ctx_tensors()
    if not aux_ctx_tensors[0].is_contiguous():
        aux_ctx_tensors[0] = aux_ctx_tensors[0].contiguous()

    rest = [None]
    if bwd_args.use_FAv2_bwd:
        dq, dk, dv = _backward_by_flash_attn(bwd_args, d_out, aux_ctx_tensors)
    else:
        with get_nvtx_range_context("FusedAttnFunc.backward"):
            if bwd_args.fp8:
                quantizers = (
                    bwd_args.QKV_quantizer,
                    bwd_args.O_quantizer,
                    bwd_args.S_quantizer,
                    bwd_args.dQKV_quantizer,
                    bwd_args.dO_quantizer,
                    bwd_args.dP_quantizer,
                )
                print_quantizers("FusedAttnFunc.backward >> before: ", bwd_args.layer_number, *quantizers)
                if bwd_args.qkv_type == "mxfp8":
                    aux_ctx_tensors.append(d_out)
                operands = {
                    "q": bwd_args.q_fp8,
                    "k": bwd_args.k_fp8,
                    "v": bwd_args.v_fp8,
                    "o": bwd_args.out if _backward_reads_f16_out(bwd_args.qkv_type) else bwd_args.out_fp8,
                    "d_o": d_out_fp8,
                    "s_quantizer": bwd_args.S_quantizer,
                    "dp_quantizer": bwd_args.dP_quantizer,
                    "dqkv_quantizer": bwd_args.dQKV_quantizer,
                    "qkv_scale_inv_format": bwd_args.qkv_scale_inv_format,
                    "do_scale_inv_format": do_scale_inv_format,
                }
            else:
                if is_d_out_quantized:
                    d_out = d_out.dequantize(dtype=bwd_args.nominal_dtype)
                operands = {"q": bwd_args.q, "k": bwd_args.k, "v": bwd_args.v, "o": bwd_args.out, "d_o": d_out}

            dq, dk, dv, *rest = fused_attn_bwd(
                max_seqlen_q=bwd_args.max_seqlen_q,
                max_seqlen_kv=bwd_args.max_seqlen_kv,
                cu_seqlens_q=bwd_args.cu_seqlens_q,
                cu_seqlens_kv=bwd_args.cu_seqlens_kv,
                fake_dtype=bwd_args.nominal_dtype,
                aux_ctx_tensors=aux_ctx_tensors,
                fused_attention_backend=bwd_args.fused_attention_backend,
                cu_seqlens_q_padded=bwd_args.cu_seqlens_q_padded,
                cu_seqlens_kv_padded=bwd_args.cu_seqlens_kv_padded,
                attn_scale=bwd_args.attn_scale,
                dropout=bwd_args.dropout_p,
                fast_zero_fill=bwd_args.fast_zero_fill,
                qkv_layout=bwd_args.qkv_layout,
                o_format=bwd_args.o_format,
                do_format=bwd_args.o_format,
                dqkv_layout=bwd_args.dqkv_layout,
                attn_bias_type=bwd_args.attn_bias_type,
                attn_mask_type=bwd_args.attn_mask_type,
                softmax_type=bwd_args.softmax_type,
                window_size=bwd_args.window_size,
                bottom_right_diagonal=bwd_args.bottom_right_diagonal,
                deterministic=bwd_args.deterministic,
                cuda_graph=is_graph_capturing(),
                **operands,
            )

            if bwd_args.fp8:
                # Gradients go back in the kind that the inputs came in, unless the caller asked otherwise.
                want_fp8 = bwd_args.is_input_fp8 and not bwd_args.bf16_backward
                have_fp8 = isinstance(dq, QuantizedTensorStorage)
                if have_fp8 and not want_fp8:
                    dq, dk, dv = combine_and_dequantize(bwd_args.dqkv_layout, dq, dk, dv, src_nominal_dtype=dq.dtype)
                if want_fp8 and not have_fp8:
                    dq, dk, dv, _, _ = combine_and_quantize(bwd_args.dqkv_layout, dq, dk, dv, bwd_args.dQKV_quantizer)
                print_quantizers("FusedAttnFunc.backward >> after:  ", bwd_args.layer_number, *quantizers)

    d_bias = rest[0] if _has_bias(bwd_args.attn_bias_type) else None
    d_softmax_offset = rest[1] if _has_softmax_offset(bwd_args.softmax_type) else None
    return dq, dk, dv, d_bias, d_softmax_offset


class FusedAttnFunc(torch.autograd.Function):
    """Tie the fused attention helpers to autograd: five differentiable tensors and a bag with the rest.

    Gradients: q, k, v, attn_bias, softmax_offset. Source: TransformerEngine 2.20.2, #3480.
    """

    @staticmethod
    def forward(ctx, q, k, v, attn_bias, softmax_offset, fwd_args: FusedAttnFwdArgs):
        """Compute attention; return O, or (O, max logit [h]) with return_max_logit.

        fwd_args: FusedAttnFwdArgs; the five tensors are written into it, so it belongs to one call at a time.
        Raises what _fused_attn_forward_impl raises.
        """
        fwd_args.q, fwd_args.k, fwd_args.v = q, k, v
        fwd_args.attn_bias, fwd_args.softmax_offset = attn_bias, softmax_offset

        out, max_logit, tensors_to_save, ctx_attrs = _fused_attn_forward_impl(fwd_args)
        bwd_args = FusedAttnBwdArgs()
        to_keep = _fused_attn_setup_ctx(bwd_args, fwd_args, (out, max_logit), ctx_attrs, tensors_to_save)

        tensors, tensor_objects = prepare_for_saving(*to_keep)
        ctx.save_for_backward(*tensors)
        ctx.tensor_objects = tensor_objects
        ctx.backward_objects = bwd_args
        return (out, max_logit) if fwd_args.return_max_logit else out

    @staticmethod
    def backward(ctx, d_out, *_ignored):
        """Compute the gradients; return one value per forward argument, 6 in all.

        d_out: O's shape; a gradient of the max logit is ignored. Raises what _fused_attn_backward_impl raises.
        """
        bwd_args = ctx.backward_objects
        if bwd_args is None:
            # A second backward: let autograd or the restore say what they say about it.
            restore_from_func_ctx(ctx)
            raise RuntimeError("FusedAttnFunc.backward was run before: what it had kept is gone")
        bwd_args.grad_output = d_out
        bwd_args.setup_saved_tensors(ctx)
        # From here on the tensors live as long as this call, not as long as the graph.
        ctx.backward_objects = None
        return (*_fused_attn_backward_impl(bwd_args), None)
