"""The helpers of TransformerEngine's dot-product attention that the autograd function calls, by their names there.

The module itself is handed out under the name ``dpa_utils``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from harness.engines.reference import addressing
from harness.engines.reference.quantized import (
    Float8Tensor,
    MXFP8Tensor,
    MXFP8TensorStorage,
    QuantizedTensorStorage,
)
from harness.engines.reference.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer

# Where each quantizer sits in its list.
_FORWARD = {"QKV": 2, "O": 3, "S": 8}
_BACKWARD = {"dQKV": 0, "dO": 3, "dP": 5}
_ORDER = ("QKV", "O", "S", "dQKV", "dO", "dP")
_INTERNAL = ("S", "dP")
_FAST_LAYOUTS = ("bshd_bshd_bshd", "sbhd_sbhd_sbhd")
_SHORT = {Float8Quantizer: "DS", Float8CurrentScalingQuantizer: "CS", MXFP8Quantizer: "MXFP8", type(None): "None"}


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
    rowwise only, ``internal`` for S and dP alone. With an MXFP8 QKV all but S and dP are used columnwise too, QKV and
    dO are optimize_for_gemm, and S and dP are given as None. Raises TypeError for a quantizer of another kind.
    """
    if not fp8:
        return None, None, None, None, None, None
    found = {name: quantizers["scaling_fwd"][index] for name, index in _FORWARD.items()}
    found |= {name: quantizers["scaling_bwd"][index] for name, index in _BACKWARD.items()}
    mxfp8 = isinstance(found["QKV"], MXFP8Quantizer)
    for name, quantizer in found.items():
        quantizer.internal = name in _INTERNAL
        quantizer.set_usage(rowwise=True, columnwise=mxfp8 and name not in _INTERNAL)
    if mxfp8:
        found["QKV"].optimize_for_gemm = True
        found["dO"].optimize_for_gemm = True
        found["S"] = found["dP"] = None
    for name, quantizer in found.items():
        known = isinstance(quantizer, (Float8Quantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer))
        if not known and not (mxfp8 and name in _INTERNAL):
            raise TypeError(f"the {name} quantizer is of type {type(quantizer).__name__}, which is not one for FP8")
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
) -> tuple[Any, Any, Any, str, str | None]:
    """Quantize q, k and v together; return them, the layout that they are in now, and the format of their scales.

    With one scale for a tensor the three are views of the bytes of one buffer and share its scale: the packed buffer
    quantized where the layout has one, their elements one tensor after another elsewhere. A packed buffer that is not
    handed over is found as the memory that q, or k, starts at. With MXFP8 each is quantized by itself, in the ways that
    its products need (``used_in_forward`` alone: q and k by rows, v by columns); packed layouts become bhsd.

    Raises AssertionError for a packed buffer of another size where the layout says 3 or 2, and for sizes and formats
    that MXFP8 does not take; RuntimeError where a separate tensor is not contiguous.
    """
    if isinstance(qkv_quantizer, MXFP8Quantizer):
        ways = _ways(used_in_forward, used_in_backward)
        keep = keep_same_data_and_scale_inv_format
        return _quantize_mxfp8(qkv_layout, (q, k, v), qkv_quantizer, ways, keep)
    layout = qkv_layout.replace("paged_kv_", "")
    buffers = _buffers(layout, (q, k, v), combined_qkv, combined_kv)
    whole = buffers[0] if len(buffers) == 1 else torch.cat([buffer.view(-1) for buffer in buffers])
    quantized = qkv_quantizer(whole)
    parts = _split(layout, quantized._data, buffers)
    q8, k8, v8 = (Float8Tensor.make_like(quantized, data=part, dtype=q.dtype) for part in parts)
    return q8, k8, v8, layout, None


def combine_and_dequantize(
    qkv_layout: str,
    q_fp8: Any,
    k_fp8: Any,
    v_fp8: Any,
    src_nominal_dtype: torch.dtype | None = None,
    des_nominal_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v dequantized together, as views of one buffer; q's scale counts for all three.

    MXFP8 tensors are dequantized each by itself. Raises AssertionError where the nominal dtype is neither given nor
    known from the tensors.
    """
    together = (q_fp8, k_fp8, v_fp8)
    if all(isinstance(tensor, QuantizedTensorStorage) for tensor in together):
        src_nominal_dtype = q_fp8.dtype
    assert src_nominal_dtype is not None, "src_nominal_dtype=None: plain tensors do not say what they stand for"
    dtype = des_nominal_dtype or src_nominal_dtype
    if all(isinstance(tensor, MXFP8TensorStorage) for tensor in together):
        q, k, v = (tensor.dequantize(dtype=dtype) for tensor in together)
        return q, k, v
    layout = qkv_layout.replace("paged_kv_", "")
    buffers = _buffers(layout, [tensor._data for tensor in together])
    whole = torch.cat([buffer.reshape(-1) for buffer in buffers])
    q, k, v = _split(layout, Float8Tensor.make_like(q_fp8, data=whole).dequantize(dtype=dtype), buffers)
    return q, k, v


def _packed(part: str, tensors: Sequence[torch.Tensor], given: torch.Tensor | None, name: str) -> torch.Tensor:
    """Return the packed buffer of ``part`` (bs3hd): the given one, or the memory that the first tensor starts at."""
    dim, count = next((place, int(letter)) for place, letter in enumerate(part) if letter.isdigit())
    if given is not None:
        assert given.shape[dim] == count, (
            f"{name}.shape={tuple(given.shape)} does not fit {part}, which has size {count} at dimension {dim}"
        )
        return given
    sizes, strides = list(tensors[0].shape), list(tensors[0].stride())
    sizes.insert(dim, count)
    strides.insert(dim, strides[dim - 1] // count)
    return addressing.reinterpret(name, tensors[0], sizes, strides)


def _buffers(
    layout: str,
    tensors: Sequence[torch.Tensor],
    combined_qkv: torch.Tensor | None = None,
    combined_kv: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return the buffers that q, k and v are in, one for each part of the layout."""
    parts = layout.split("_")
    if len(parts) == 1:
        return [_packed(parts[0], tensors, combined_qkv, "combined_qkv")]
    if len(parts) == 2:
        return [tensors[0], _packed(parts[1], tensors[1:], combined_kv, "combined_kv")]
    return list(tensors)


def _split(layout: str, whole: torch.Tensor, buffers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return q, k and v as views of ``whole``, which holds what ``buffers`` did, one after another."""
    found: list[torch.Tensor] = []
    pieces = torch.split(whole.view(-1), [buffer.numel() for buffer in buffers])
    for part, piece, buffer in zip(layout.split("_"), pieces, buffers, strict=True):
        tensor = piece.view(buffer.shape)
        dim = next((place for place, letter in enumerate(part) if letter.isdigit()), None)
        found += [tensor] if dim is None else tensor.unbind(dim)
    return tuple(found)


def _ways(forward: bool, backward: bool) -> tuple[tuple[bool, bool] | None, ...]:
    """Return how q, k and v are used, (by rows, by columns); None leaves it as the quantizer has it."""
    if forward and not backward:
        return (True, False), (True, False), (False, True)
    if backward and not forward:
        return (True, True), (True, True), (True, False)
    return None, None, None


def _quantize_mxfp8(
    layout: str, tensors: Sequence[torch.Tensor], quantizer: MXFP8Quantizer, ways: Any, keep: bool
) -> tuple[Any, Any, Any, str, str]:
    fmt, q_format, kv_format = get_qkv_format(layout)
    assert fmt in ("bshd", "sbhd"), f"qkv_layout={layout!r}: MXFP8 takes bshd and sbhd, q, k and v alike"
    s_q, s_kv = tensors[0].shape[q_format.index("s")], tensors[2].shape[kv_format.index("s")]
    d, d_v = tensors[0].shape[-1], tensors[2].shape[-1]
    in_blocks = s_q % 128 == 0 and s_kv % 128 == 0 and d % 32 == 0 and d_v % 32 == 0
    assert in_blocks, (
        f"MXFP8 takes sequences of a multiple of 128 and head dimensions of a multiple of 32, not {s_q=}, {s_kv=}, "
        f"{d=}, {d_v=}"
    )
    own = [quantizer.copy() for _ in tensors]
    for each, way in zip(own, ways, strict=True):
        if way is not None:
            each.rowwise_usage, each.columnwise_usage = way
    if layout in _FAST_LAYOUTS and not keep:
        (q8, k8, v8), scales = mxfp8_quantize_fast_path(list(zip(tensors, own, strict=True)), fmt)
        return q8, k8, v8, layout, scales
    q8, k8, v8 = (
        each(tensor.permute([fmt.index(letter) for letter in "bhsd"]).contiguous())
        for each, tensor in zip(own, tensors, strict=True)
    )
    return q8, k8, v8, addressing.INTERNAL_LAYOUT, "bhsd"


def mxfp8_quantize_fast_path(tensor_quantizer_pairs: Any, src_format: str) -> tuple[list[Any], str]:
    """Quantize tensors [b, s, h, d] or [s, b, h, d] where they lie, by rows along d and by columns along s.

    Takes pairs of a tensor and its MXFP8Quantizer. Returns MXFP8 tensors, and the format of their scales, bhsd.
    Raises AssertionError for another format, RuntimeError for a tensor whose heads are not contiguous.
    """
    if not tensor_quantizer_pairs:
        return [], src_format
    assert src_format in ("bshd", "sbhd"), f"src_format={src_format!r}: bshd or sbhd is taken"
    results = []
    for tensor, quantizer in tensor_quantizer_pairs:
        tensor.view(*tensor.shape[: src_format.index("s") + 1], -1)  # raises where memory does not allow it
        quantized = quantizer(tensor.permute([src_format.index(letter) for letter in "bhsd"]).contiguous())
        back = ["bhsd".index(letter) for letter in src_format]
        parts = {
            name: part.permute(back).contiguous() if name.endswith("_data") else part
            for name, part in quantized.parts().items()
        }
        results.append(MXFP8Tensor.make(parts, quantizer.dtype, tensor.dtype, quantizer))
        results[-1]._order = src_format
    return results, "bhsd"


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
    """Print the quantizers of one layer, one a line, if NVTE_DEBUG * NVTE_DEBUG_LEVEL is 2; else do nothing.

    Those of the direction that ``label`` names, forward or backward. The layer is the one that NVTE_PRINT_LAYER_NUMBER
    names (1 unless set). The variables are read at each call.
    """
    if int(os.environ.get("NVTE_DEBUG", "0")) * int(os.environ.get("NVTE_DEBUG_LEVEL", "0")) != 2:
        return
    if layer_number != int(os.environ.get("NVTE_PRINT_LAYER_NUMBER", "1")):
        return
    forward = {"QKV": QKV_quantizer, "S": S_quantizer, "O": O_quantizer}
    backward = {"dO": dO_quantizer, "dP": dP_quantizer, "dQKV": dQKV_quantizer}
    shown = ({} if "backward" in label else forward) | ({} if "forward" in label else backward)
    for name, quantizer in shown.items():
        kind = _SHORT.get(type(quantizer), type(quantizer).__name__)
        state = ""
        if isinstance(quantizer, Float8Quantizer):
            state = f", scale={quantizer.scale.item():.4e}, amax={quantizer.amax.item():.4e}"
        print(f"{label} {name}_quantizer: {kind}{state}")
