"""The seam bound to the reference engine: every name that a source of FusedAttnFunc takes from its surroundings."""

from __future__ import annotations

from types import MappingProxyType

from harness.engines.reference import dpa_utils, offload, quantized, quantizers, surroundings
from harness.engines.reference.backend import FusedAttnBackend
from harness.engines.reference.fav2 import flash_attn_cuda_bwd
from harness.engines.reference.kernels import fused_attn_bwd, fused_attn_fwd

SEAM = MappingProxyType[str, object](
    {
        "fused_attn_fwd": fused_attn_fwd,
        "fused_attn_bwd": fused_attn_bwd,
        "FusedAttnBackend": FusedAttnBackend,
        "dpa_utils": dpa_utils,
        "combine_and_quantize": dpa_utils.combine_and_quantize,
        "combine_and_dequantize": dpa_utils.combine_and_dequantize,
        "mxfp8_quantize_fast_path": dpa_utils.mxfp8_quantize_fast_path,
        "print_quantizers": dpa_utils.print_quantizers,
        "FP8GlobalStateManager": surroundings.FP8GlobalStateManager,
        "Float8Quantizer": quantizers.Float8Quantizer,
        "Float8CurrentScalingQuantizer": quantizers.Float8CurrentScalingQuantizer,
        "MXFP8Quantizer": quantizers.MXFP8Quantizer,
        "QuantizedTensorStorage": quantized.QuantizedTensorStorage,
        "prepare_for_saving": quantized.prepare_for_saving,
        "restore_from_func_ctx": quantized.restore_from_func_ctx,
        "TensorOrQuantized": quantized.TensorOrQuantized,
        "NVTE_CPU_OFFLOAD_V1": False,
        "is_cpu_offload_enabled": offload.is_cpu_offload_enabled,
        "start_offload": offload.start_offload,
        "mark_activation_offload": offload.mark_activation_offload,
        "is_current_layer_offloaded": offload.is_current_layer_offloaded,
        "is_graph_capturing": surroundings.is_graph_capturing,
        "nvtx_range_push": surroundings.nvtx_range_push,
        "nvtx_range_pop": surroundings.nvtx_range_pop,
        "get_nvtx_range_context": surroundings.get_nvtx_range_context,
        "flash_attn_cuda_bwd": flash_attn_cuda_bwd,
    }
)
