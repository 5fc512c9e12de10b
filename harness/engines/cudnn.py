"""The cuDNN engine: the seam bound to the installed TransformerEngine, on a GPU. Written for 2.19 and 2.20."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from harness import constraints
from harness.case import causal
from harness.engines.api import EngineUnavailable

if TYPE_CHECKING:
    from harness.case import Case

_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.utils"

SEAM_HOMES: dict[str, str] = {
    "fused_attn_fwd": "transformer_engine.pytorch.cpp_extensions.fused_attn",
    "fused_attn_bwd": "transformer_engine.pytorch.cpp_extensions.fused_attn",
    "FusedAttnBackend": "transformer_engine.pytorch.cpp_extensions.fused_attn",
    "combine_and_quantize": _ATTENTION,
    "combine_and_dequantize": _ATTENTION,
    "mxfp8_quantize_fast_path": _ATTENTION,
    "print_quantizers": _ATTENTION,
    "FP8GlobalStateManager": "transformer_engine.pytorch.quantization",
    "Float8Quantizer": "transformer_engine.pytorch.tensor.float8_tensor",
    "Float8CurrentScalingQuantizer": "transformer_engine.pytorch.tensor.float8_tensor",
    "MXFP8Quantizer": "transformer_engine.pytorch.tensor.mxfp8_tensor",
    "QuantizedTensorStorage": "transformer_engine.pytorch.quantized_tensor",
    "prepare_for_saving": "transformer_engine.pytorch.quantized_tensor",
    "restore_from_func_ctx": "transformer_engine.pytorch.quantized_tensor",
    "NVTE_CPU_OFFLOAD_V1": "transformer_engine.pytorch.cpu_offload",
    "is_cpu_offload_enabled": "transformer_engine.pytorch.cpu_offload",
    "start_offload": "transformer_engine.pytorch.cpu_offload",
    "mark_activation_offload": "transformer_engine.pytorch.cpu_offload",
    "is_current_layer_offloaded": "transformer_engine.pytorch.cpu_offload_v1",
    "is_graph_capturing": "transformer_engine.pytorch.graph",
    "nvtx_range_push": "transformer_engine.pytorch.utils",
    "nvtx_range_pop": "transformer_engine.pytorch.utils",
    "get_nvtx_range_context": "transformer_engine.pytorch.utils",
}
"""Where TransformerEngine keeps each name. Source: the imports of its backends.py, 2.16 to 2.20."""

RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "mxfp8": "MXFP8BlockScaling",
           "hybrid": "Float8CurrentScaling"}  # fmt: skip
FP8_RECIPES_WITHOUT_KERNELS = {
    "current": "its kernels write O and the gradients in F16, which only sm100 and later have",
    "mxfp8": "its kernels exist for sm100 and later",
    "hybrid": "TransformerEngine's selection does not know this mixture of quantizers, so nothing says that a kernel "
    "takes it",
}
SCENARIOS_NOT_BOUND = {
    "offload": "TransformerEngine's CPU offload is not bound here",
    "offload_v1": "TransformerEngine's CPU offload is not bound here",
    "graph_capture": "the capture of CUDA graphs is not bound here",
}


class CudnnEngine:
    """TransformerEngine's own kernels on the current CUDA device.

    Raises EngineUnavailable where there is no GPU, no TransformerEngine, or one that cannot be imported.
    """

    name = "cudnn"
    defines_padding = False
    repeatable = False
    dtypes: tuple[str, ...] = ("bf16", "fp16")

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise EngineUnavailable(
                "engine=cudnn needs a CUDA GPU, and torch sees none. Run on a GPU machine, or use --engine reference, "
                "which shows nothing about kernels"
            )
        if importlib.util.find_spec("transformer_engine") is None:
            raise EngineUnavailable("engine=cudnn needs TransformerEngine, which is not installed here. Install this "
                                    "project with its gpu extra")  # fmt: skip
        try:
            importlib.import_module("transformer_engine.pytorch")
            self._tex: Any = importlib.import_module("transformer_engine_torch")
            self._fused: Any = importlib.import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
            self._utils: Any = importlib.import_module(_ATTENTION)
            self._constants: Any = importlib.import_module("transformer_engine.pytorch.constants")
            self._seam = self._bind()
        except (ImportError, OSError, RuntimeError) as error:
            raise EngineUnavailable(f"engine=cudnn: TransformerEngine is installed and cannot be imported: {error}. "
                                    "It must be built for this torch and this CUDA") from error  # fmt: skip
        self.device = torch.device("cuda", torch.cuda.current_device())

    def _bind(self) -> dict[str, object]:
        seam: dict[str, object] = {"dpa_utils": self._utils}
        for name, home in SEAM_HOMES.items():
            try:
                seam[name] = getattr(importlib.import_module(home), name)
            except AttributeError as error:
                version = importlib.metadata.version("transformer_engine")
                raise ImportError(f"TransformerEngine {version} has no {home}.{name}") from error
        try:
            seam["TensorOrQuantized"] = importlib.import_module(
                "transformer_engine.pytorch.dynamo.custom_op"
            ).TensorOrQuantized
        except ImportError:  # 2.19 has no such module; an alias is all that an annotation needs
            seam["TensorOrQuantized"] = torch.Tensor | Any
        try:
            seam["flash_attn_cuda_bwd"] = importlib.import_module("flash_attn_2_cuda").varlen_bwd
        except ImportError:
            seam["flash_attn_cuda_bwd"] = None
        return seam

    def seam(self, *, offload_v1: bool = False) -> dict[str, object]:
        """Return every name of the seam, bound to TransformerEngine's own."""
        return dict(self._seam) | ({"NVTE_CPU_OFFLOAD_V1": True} if offload_v1 else {})

    def quantizer(self, kind: str, fp8_dtype: str, scale: float = 1.0) -> Any:
        """Return a fresh quantizer of TransformerEngine's: kind delayed, current or mxfp8; dtype E4M3 or E5M2."""
        seam: dict[str, Any] = self._seam
        dtype = getattr(self._tex.DType, f"kFloat8{fp8_dtype}")
        if kind == "delayed":
            return seam["Float8Quantizer"](
                scale=torch.tensor(scale, dtype=torch.float32, device=self.device),
                amax=torch.zeros(1, dtype=torch.float32, device=self.device),
                fp8_dtype=dtype,
            )
        if kind == "current":
            return seam["Float8CurrentScalingQuantizer"](fp8_dtype=dtype, device=self.device)
        return seam["MXFP8Quantizer"](fp8_dtype=dtype)

    def recipe(self, kind: str, fp8_format: str) -> Any:
        """Return TransformerEngine's recipe of a kind: delayed, current, mxfp8 or hybrid."""
        recipes = importlib.import_module("transformer_engine.common.recipe")
        return getattr(recipes, RECIPES[kind])(fp8_format=getattr(recipes.Format, fp8_format))

    @contextlib.contextmanager
    def recipe_in_force(self, recipe: Any) -> Iterator[None]:
        """Make a recipe the global one inside the block; nothing is enabled, reduced or updated."""
        manager: Any = self._seam["FP8GlobalStateManager"]
        state = manager.quantization_state
        before = state.fp8_recipe
        state.fp8_recipe = recipe
        try:
            yield
        finally:
            state.fp8_recipe = before

    @contextlib.contextmanager
    def during(self, case: Case) -> Iterator[None]:
        """Switch on what TransformerEngine reads from the environment once: NVTX ranges and debug prints."""
        utils: Any = importlib.import_module("transformer_engine.pytorch.utils")
        if case.scenario == "debug_prints":
            switches = {"_NVTE_DEBUG": 1, "_NVTE_DEBUG_LEVEL": 2, "_print_layer": case.layer_number}
            before = {name: getattr(self._utils, name) for name in switches}
            vars(self._utils).update(switches)
            try:
                yield
            finally:
                vars(self._utils).update(before)
        elif case.scenario == "nvtx":
            utils._nvtx_enabled.cache_clear()  # it is asked inside the block, where the harness sets NVTE_NVTX_ENABLED
            try:
                yield
            finally:
                utils._nvtx_enabled.cache_clear()
                utils._nvtx_range_messages.clear()
        else:
            yield

    def generator(self, seed: int) -> torch.Generator:
        """Return a CUDA generator with this seed."""
        return torch.Generator(device=self.device).manual_seed(seed)

    def unsupported(self, case: Case) -> str | None:
        """Return TransformerEngine's refusal of the case, in its own words where it has some; None where it runs.

        Two kinds of configuration are refused here though the selection admits them, because the kernel then works on
        memory that is not what it takes it for.
        """
        if case.dtype not in ("bf16", "fp16"):
            return f"dtype={case.dtype}: cuDNN fused attention takes fp16 and bf16"
        backward = bool(case.requires_grad)
        if case.has_bias and case.has_softmax_offset and backward:
            return (
                f"attn_bias_type={case.attn_bias_type} with softmax_type={case.softmax_type}: TransformerEngine "
                "allocates the gradient of the bias in the shape of the softmax offset"
            )
        if case.layout.q_format == "thd" and case.layout.kv_format != "thd" and not case.layout.paged:
            return (
                f"qkv_layout={case.qkv_layout}: cuDNN reads and writes outside the dense k and v there (measured with "
                "cuDNN 9.19: NaN from beyond them in O, other tensors overwritten), so no run in this process is safe"
            )
        if case.scenario in SCENARIOS_NOT_BOUND:
            return f"scenario={case.scenario}: {SCENARIOS_NOT_BOUND[case.scenario]}"
        if case.scenario == "fav2_backward" and self._seam["flash_attn_cuda_bwd"] is None:
            return "scenario=fav2_backward needs FlashAttention 2 (flash_attn_2_cuda), which is not installed here"
        training = case.is_training or backward
        if not case.fp8:
            return self._refusal(case, training, fp8=False)
        if case.fp8_recipe in FP8_RECIPES_WITHOUT_KERNELS and self._sm < 100:
            return f"fp8_recipe={case.fp8_recipe} on sm{self._sm}: {FP8_RECIPES_WITHOUT_KERNELS[case.fp8_recipe]}"
        refusal = constraints.refusal(case)
        if refusal is not None:
            return refusal
        refusal = self._refusal(case, case.is_training or (backward and case.fp8_dpa_bwd), fp8=True)
        if refusal is None and backward and not case.fp8_dpa_bwd:
            refusal = self._refusal(case, training, fp8=False)
        return refusal

    @property
    def _sm(self) -> int:
        major, minor = torch.cuda.get_device_capability(self.device)
        return major * 10 + minor

    def _refusal(self, case: Case, training: bool, *, fp8: bool) -> str | None:
        """Return TransformerEngine's refusal of the case in FP8, or in F16, in its own words; None where it runs."""
        backend, message = self._select(case, training, fp8)
        if int(backend) == int(self._fused.FusedAttnBackend["FP8" if fp8 else "F16_arbitrary_seqlen"]):
            return None
        precision = f"fp8_recipe={case.fp8_recipe}: " if fp8 else ""
        return precision + (message or "TransformerEngine selects no fused attention backend (it gives no reason)")

    def _select(self, case: Case, training: bool, fp8: bool) -> tuple[Any, str]:
        """Ask TransformerEngine which backend it would select, by the question that its version takes."""
        fused = self._fused
        kinds = {
            "qkv_layout": fused.QKVLayout[case.qkv_layout],
            "bias_type": fused.AttnBiasType[case.attn_bias_type],
            "attn_mask_type": fused.AttnMaskType[case.attn_mask_type],
            "softmax_type": fused.SoftmaxType[case.softmax_type],
        }
        forward = backward = self._constants.TE_DType[{"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]]
        if fp8:  # delayed scaling, the only kind that gets this far: every operand and result is quantized
            forward = self._tex.DType.kFloat8E4M3
            backward = self._tex.DType.kFloat8E5M2 if case.fp8_format == "HYBRID" else forward
        parameters = getattr(self._utils, "FusedAttentionParams", None)
        if parameters is None:  # up to 2.19: nineteen values, an enum back
            backend = self._tex.get_fused_attn_backend(
                training, forward, forward, *kinds.values(), case.dropout_p, case.num_heads, case.num_gqa_groups,
                case.max_seqlen_q, case.max_seqlen_kv, case.head_dim_qk, case.head_dim_v, *case.window_size,
                case.return_max_logit, False, case.deterministic,
            )  # fmt: skip
            return backend, ""
        from harness.inputs import SPARE_PAGES, bias_sizes, geometry

        output_format = fused.QKVFormat[case.layout.q_format]
        sizes = bias_sizes(case) if case.has_bias else (0, 0, 0, 0)
        extra: dict[str, int] = {}
        q, kv = geometry(case)
        for side, place, layout_format in (("q", q, case.layout.q_format), ("kv", kv, case.layout.kv_format)):
            if layout_format == "thd":
                extra[f"num_tokens_{side}"] = place.rows
        if case.page_size:
            pages = case.max_seqlen_kv // case.page_size
            for name in ("k", "v"):
                extra[f"num_pages_{name}"] = case.batch_size * pages + SPARE_PAGES
                extra[f"page_size_{name}"] = case.page_size
                extra[f"max_pages_per_seq_{name}"] = pages
        question = parameters(
            is_training=training,
            deterministic=case.deterministic,
            return_max_logit=case.return_max_logit,
            window_size_left=case.window_size[0],
            window_size_right=case.window_size[1],
            bottom_right_diagonal=bottom_right(case),
            dropout=case.dropout_p,
            attn_scale=case.attn_scale or case.head_dim_qk**-0.5,
            **dict.fromkeys(("qkv_dtype", "o_dtype"), forward),
            **dict.fromkeys(("do_dtype", "dqkv_dtype"), backward),
            dqkv_layout=kinds["qkv_layout"],
            **kinds,
            o_format=output_format,
            do_format=output_format,
            **extra,
            batch_size=case.batch_size,
            num_attn_heads=case.num_heads,
            num_gqa_groups=case.num_gqa_groups,
            head_dim_qk=case.head_dim_qk,
            head_dim_v=case.head_dim_v,
            max_seqlen_q=case.max_seqlen_q,
            max_seqlen_kv=case.max_seqlen_kv,
            **dict(zip(("bias_batch_size", "bias_num_heads", "bias_seqlen_q", "bias_seqlen_kv"), sizes, strict=True)),
        )
        backend, message = self._tex.get_fused_attn_backend(question)
        return backend, " ".join(str(message).split())

    def environment(self) -> dict[str, str]:
        """Return versions, the GPU and the environment variables that TransformerEngine reads."""
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformer_engine": importlib.metadata.version("transformer_engine"),
            "cuda": str(torch.version.cuda),
            "cudnn": _cudnn_version(self._tex),
            "gpu": f"{properties.name} (sm{properties.major}{properties.minor})",
            "gpus visible": str(torch.cuda.device_count()),
            **{name: value for name, value in sorted(os.environ.items()) if name.startswith(("NVTE_", "CUDNN_"))},
        }


def bottom_right(case: Case) -> bool:
    """Return the diagonal that the wrappers take where the caller leaves it open."""
    if case.bottom_right_diagonal is not None:
        return case.bottom_right_diagonal
    return causal(case.attn_mask_type) and case.attn_mask_type.endswith("bottom_right")


def _cudnn_version(tex: Any) -> str:
    """Return the version of the cuDNN that TransformerEngine runs on, as 9.19.0."""
    own: Any = getattr(tex, "get_cudnn_version", torch.backends.cudnn.version)
    number = int(own() or 0)
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
