"""The helpers of TransformerEngine's dot-product attention that the autograd function calls, by their names there.

The module itself is handed out under the name ``dpa_utils``.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from harness.engines.reference.errors import EngineUnsupported
from harness.engines.reference.quantized import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
)

# Where each quantizer sits in its list.
_FORWARD = {"QKV": 2, "O": 3, "S": 8}
_BACKWARD = {"dQKV": 0, "dO": 3, "dP": 5}
_ORDER = ("QKV", "O", "S", "dQKV", "dO", "dP")
_INTERNAL = ("S", "dP")


def get_qkv_format(qkv_layout: str = "bshd_bshd_bshd", inference_params: Any = None) -> tuple[str, str, str]:
    """Return (format of the whole, of q, of k and v): sbhd_bshd_bshd gives sbhd_2bshd, sbhd, bshd.

    The letters of the layout's parts, digits and the paged_kv_ prefix dropped. Any string is taken: the kernels are
    who refuses an unknown one.
    """
    parts = [re.sub(r"[^a-z]", "", part) for part in qkv_layout.replace("paged_kv_", "").split("_")]
    q_format, kv_format = parts[0], parts[-1]
    whole = q_format if q_format == kv_format else f"{q_format}_2{kv_format}"
    return whole, q_format, kv_format


def get_attention_quantizers(fp8: bool, quantizers: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Return the quantizers of QKV, O, S, dQKV, dO and dP, in this order; six times None unless ``fp8``.

    ``quantizers`` holds the lists scaling_fwd and scaling_bwd. Every call sets flags on the quantizers themselves:
    rowwise only (columnwise too for an MXFP8 QKV), ``internal`` for S and dP alone. An MXFP8 QKV makes QKV and dO
    optimize_for_gemm and leaves S and dP None. Raises TypeError for a quantizer of another kind.
    """
    if not fp8:
        return None, None, None, None, None, None
    found = {name: quantizers["scaling_fwd"][index] for name, index in _FORWARD.items()}
    found |= {name: quantizers["scaling_bwd"][index] for name, index in _BACKWARD.items()}
    for name, quantizer in found.items():
        if not isinstance(quantizer, (Float8Quantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer)):
            raise TypeError(f"the {name} quantizer is of type {type(quantizer).__name__}, which is not one for FP8")
        quantizer.internal = name in _INTERNAL
        quantizer.set_usage(rowwise=True, columnwise=False)
    if isinstance(found["QKV"], MXFP8Quantizer):
        found["QKV"].set_usage(columnwise=True)
        found["QKV"].optimize_for_gemm = True
        found["dO"].optimize_for_gemm = True
        found["S"] = found["dP"] = None
    qkv, o, s, dqkv, do, dp = (found[name] for name in _ORDER)
    return qkv, o, s, dqkv, do, dp


def maybe_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, copied only if its last dimension is strided."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def combine_and_quantize(
    qkv_layout: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qkv_quantizer: Any,
    used_in_forward: bool = True,
    used_in_backward: bool = False,
    keep_same_data_and_scale_inv_format: bool = False,
    combined_qkv: torch.Tensor | None = None,
    combined_kv: torch.Tensor | None = None,
) -> Any:
    """Raise EngineUnsupported: there is no FP8 here."""
    raise EngineUnsupported("combine_and_quantize was called: the reference engine has no FP8 tensors")


def combine_and_dequantize(
    qkv_layout: str,
    q_fp8: Any,
    k_fp8: Any,
    v_fp8: Any,
    src_nominal_dtype: torch.dtype | None = None,
    des_nominal_dtype: torch.dtype | None = None,
) -> Any:
    """Raise EngineUnsupported: there is no FP8 here."""
    raise EngineUnsupported("combine_and_dequantize was called: the reference engine has no FP8 tensors")


def mxfp8_quantize_fast_path(tensor_quantizer_pairs: Any, src_format: str) -> Any:
    """Raise EngineUnsupported: there is no MXFP8 here."""
    raise EngineUnsupported("mxfp8_quantize_fast_path was called: the reference engine has no MXFP8 tensors")


def print_quantizers(
    label: str,
    layer_number: int | None,
    QKV_quantizer: Any,
    O_quantizer: Any,
    S_quantizer: Any,
    dQKV_quantizer: Any,
    dO_quantizer: Any,
    dP_quantizer: Any,
) -> None:
    """Print the quantizers of one layer if NVTE_DEBUG * NVTE_DEBUG_LEVEL reaches 2; else do nothing.

    The layer is the one that NVTE_PRINT_LAYER_NUMBER names (1 unless set). The variables are read at each call.
    """
    if int(os.environ.get("NVTE_DEBUG", "0")) * int(os.environ.get("NVTE_DEBUG_LEVEL", "0")) < 2:
        return
    if layer_number != int(os.environ.get("NVTE_PRINT_LAYER_NUMBER", "1")):
        return
    values = (QKV_quantizer, O_quantizer, S_quantizer, dQKV_quantizer, dO_quantizer, dP_quantizer)
    print(label)
    for name, quantizer in zip(_ORDER, values, strict=True):
        state = "".join(
            f" {field}={getattr(quantizer, field).tolist()}" for field in ("scale", "amax") if hasattr(quantizer, field)
        )
        print(f"  {name}: {type(quantizer).__name__}{state}")
