"""Run an implementation's definitions on stub kernels that write down every call.

The numbers are made up: each result depends on every operand, so that a wrong operand changes it.
"""

import ast
import contextlib
import inspect
import types
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {name: ROOT / f"{name}_impl" / "backends.py" for name in ("legacy", "refactored")}

# What the seam offers; neither implementation may take anything else from TransformerEngine.
SEAM_NAMES = {
    "FP8GlobalStateManager",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "FusedAttnBackend",
    "MXFP8Quantizer",
    "NVTE_CPU_OFFLOAD_V1",
    "QuantizedTensorStorage",
    "TensorOrQuantized",
    "_dpa_fp8_cs_o_in_f16",
    "combine_and_dequantize",
    "combine_and_quantize",
    "dpa_utils",
    "flash_attn_cuda_bwd",
    "fused_attn_bwd",
    "fused_attn_fwd",
    "get_nvtx_range_context",
    "is_cpu_offload_enabled",
    "is_current_layer_offloaded",
    "is_graph_capturing",
    "mark_activation_offload",
    "mxfp8_quantize_fast_path",
    "nvtx_range_pop",
    "nvtx_range_push",
    "prepare_for_saving",
    "print_quantizers",
    "restore_from_func_ctx",
    "start_offload",
}


_SIGNATURES = {}


@cache
def _executed(source):
    seam = Stub().seam()
    tree = ast.parse(source)
    tree.body = [
        node
        for node in tree.body
        if not isinstance(node, ast.Try)
        and not (isinstance(node, ast.ImportFrom) and node.module.startswith("transformer_engine"))
        and not (isinstance(node, ast.Import) and node.names[0].name.startswith("transformer_engine"))
    ]
    module = types.ModuleType("implementation_under_test")
    vars(module).update(seam)
    exec(compile(tree, "backends.py", "exec"), vars(module))
    return module


def load(source, seam):
    """Execute a source text's definitions with the seam's names bound, and return them as a module.

    Imports from TransformerEngine and guarded imports are dropped; torch, os, dataclasses and typing are real. A text
    is executed once: the next call binds the same module to its own seam.
    """
    module = _executed(source)
    vars(module).update(seam)
    return module


class QuantizedTensorStorage:
    """Stand for a bare quantized tensor: not a torch.Tensor, emptied while it is saved."""

    def __init__(self, data, scale, quantizer=None):
        self.data_, self.scale_, self.quantizer_ = data, scale, quantizer
        self.dtype, self.shape, self.device = data.dtype, data.shape, data.device

    def dequantize(self, *, dtype=None):
        return (self.data_ / self.scale_).to(dtype or self.dtype)


class QuantizedTensor(QuantizedTensorStorage, torch.Tensor):
    """Stand for a quantized tensor that is a torch.Tensor, without any memory of its own address."""

    @staticmethod
    def __new__(cls, data, scale, quantizer=None, requires_grad=False):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            dtype=data.dtype,
            device=data.device,
            requires_grad=requires_grad,
        )
        self.data_, self.scale_, self.quantizer_ = data.detach(), scale, quantizer
        return self

    def __init__(self, *args, **kwargs):
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].data_, args[0].scale_, args[0].quantizer_)
        raise NotImplementedError(f"{func} on a stub quantized tensor")


class _Quantizer:
    def __init__(self, name, scale=2.0):
        self.name = name
        self.scale = torch.tensor(scale)
        self.amax = torch.zeros(1)

    def copy(self):
        twin = type(self)(self.name)
        twin.scale, twin.amax = self.scale, self.amax
        return twin

    def __call__(self, tensor):
        self.amax.copy_(tensor.detach().abs().max().float().view(1))
        return QuantizedTensor(tensor.detach() * self.scale.item(), self.scale.item(), self)


class Float8Quantizer(_Quantizer):
    pass


class Float8CurrentScalingQuantizer(_Quantizer):
    pass


class MXFP8Quantizer(_Quantizer):
    pass


QUANTIZERS = {"delayed": Float8Quantizer, "current": Float8CurrentScalingQuantizer, "mxfp8": MXFP8Quantizer}


class Recipe:
    def __init__(self, kind):
        self.kind = kind

    def mxfp8(self):
        return self.kind == "mxfp8"


def _plain(tensor):
    if isinstance(tensor, QuantizedTensorStorage):
        return tensor.data_.float() / tensor.scale_
    return tensor.detach().float()


def _pattern(shape, mix, dtype):
    count = torch.Size(shape).numel()
    return (torch.sin(torch.arange(count, dtype=torch.float32)) + mix).reshape(shape).to(dtype)


def same_view(a, b):
    """Tell whether two plain tensors are the same memory seen the same way."""
    return (
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    ) and a.numel() > 0


@dataclass
class Stub:
    """Bind the seam to stub kernels for one run.

    calls: (name, arguments by name as plain data), in order. labels: the caller's tensors by name. aux: how the kernel
    gives bias and offset back, as the "same" object, "rewrapped" (same memory) or "copied".
    """

    kind: str | None = None
    v1: bool = False
    offload: bool = False
    layer_offloaded: bool = False
    capturing: bool = False
    aux: str = "same"
    strided_stats: bool = False
    fail_in: str | None = None
    quantized_grads: bool | None = None
    labels: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)
    raw: list = field(default_factory=list)

    def describe(self, value):
        """Return plain comparable data: what a value is, which of the caller's tensors it is, and its bits."""
        if isinstance(value, QuantizedTensorStorage):
            label = next((name for name, known in self.labels.items() if known is value), None)
            inner = "emptied" if value.data_ is None else self.describe(value.data_)
            return ("quantized", type(value).__name__, label, inner, value.scale_)
        if isinstance(value, torch.Tensor):
            labels = [
                name
                for name, known in self.labels.items()
                if known is value or (not isinstance(known, QuantizedTensorStorage) and same_view(value, known))
            ]
            bits = value.detach().contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else value.item()
            return ("tensor", tuple(labels), str(value.dtype), tuple(value.shape), value.stride(), bits)
        if isinstance(value, _Quantizer):
            return ("quantizer", type(value).__name__, value.name, value.scale.item(), value.amax.item())
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, tuple(self.describe(item) for item in value))
        if isinstance(value, torch.Generator):
            return ("generator", id(value))
        return (type(value).__name__, repr(value))

    def record(self, name, arguments):
        self.raw.append((name, dict(arguments)))
        self.calls.append((name, {key: self.describe(value) for key, value in arguments.items()}))
        if name == self.fail_in:
            raise RuntimeError(f"{name} was told to fail")

    def names(self):
        return [name for name, _ in self.calls]

    def last(self, name):
        """Return the raw arguments of the last call of a name."""
        return next(arguments for called, arguments in reversed(self.raw) if called == name)

    def _watched(self, function, name=None):
        name = name or function.__name__

        def call(*args, **kwargs):
            if function.__code__ not in _SIGNATURES:
                _SIGNATURES[function.__code__] = inspect.signature(function)
            bound = _SIGNATURES[function.__code__].bind(*args, **kwargs)
            bound.apply_defaults()
            # A list is copied: callees and callers append to it.
            kept = {k: list(v) if isinstance(v, list) else v for k, v in bound.arguments.items()}
            self.record(name, kept)
            return function(*args, **kwargs)

        return call

    def seam(self):
        """Return every name of the seam bound to this stub."""

        def fused_attn_fwd(
            is_training,
            max_seqlen_q,
            max_seqlen_kv,
            cu_seqlens_q,
            cu_seqlens_kv,
            q,
            k,
            v,
            fake_dtype,
            fused_attention_backend,
            attn_bias=None,
            cu_seqlens_q_padded=None,
            cu_seqlens_kv_padded=None,
            page_table_k=None,
            page_table_v=None,
            s_quantizer=None,
            o_quantizer=None,
            attn_scale=None,
            dropout=0.0,
            fast_zero_fill=True,
            qkv_layout="sbh3d",
            o_format="sbhd",
            qkv_scale_inv_format=None,
            attn_bias_type="no_bias",
            attn_mask_type="padding",
            softmax_type="vanilla",
            window_size=(-1, -1),
            bottom_right_diagonal=None,
            rng_gen=None,
            softmax_offset=None,
            return_max_logit=False,
            cuda_graph=False,
        ):
            mix = sum(i * _plain(x).mean() for i, x in enumerate((q, k, v), start=1))
            o = _pattern((*q.shape[:-1], v.shape[-1]), mix, fake_dtype)
            stats = _pattern((*q.shape[:-1], 1), mix, torch.float32)
            if self.strided_stats:
                stats = torch.stack((stats, stats), dim=-1)[..., 0]
            aux = [stats, torch.tensor([1234, 16])]
            for given in (attn_bias if attn_bias_type == "post_scale_bias" else None, softmax_offset):
                if given is not None:
                    aux.append({"same": lambda x: x, "rewrapped": torch.detach, "copied": torch.clone}[self.aux](given))
            if o_quantizer is not None and self.kind == "delayed":
                s_quantizer.amax.fill_(0.5)
                o = o_quantizer(o)
            return (o, aux, _pattern((q.shape[-2],), mix, fake_dtype)) if return_max_logit else (o, aux)

        def fused_attn_bwd(
            max_seqlen_q,
            max_seqlen_kv,
            cu_seqlens_q,
            cu_seqlens_kv,
            q,
            k,
            v,
            o,
            d_o,
            fake_dtype,
            aux_ctx_tensors,
            fused_attention_backend,
            cu_seqlens_q_padded=None,
            cu_seqlens_kv_padded=None,
            s_quantizer=None,
            dp_quantizer=None,
            dqkv_quantizer=None,
            attn_scale=None,
            dropout=0.0,
            fast_zero_fill=True,
            qkv_layout="sbh3d",
            o_format="sbhd",
            do_format="sbhd",
            dqkv_layout="sbh3d",
            qkv_scale_inv_format=None,
            do_scale_inv_format=None,
            attn_bias_type="no_bias",
            attn_mask_type="padding",
            softmax_type="vanilla",
            window_size=(-1, -1),
            bottom_right_diagonal=None,
            deterministic=False,
            cuda_graph=False,
        ):
            scale = s_quantizer.scale.item() if s_quantizer is not None else 1.0
            mix = scale * sum(i * _plain(x).mean() for i, x in enumerate((q, k, v, o, d_o, aux_ctx_tensors[0])))
            grads = [_pattern(x.shape, mix + i, fake_dtype) for i, x in enumerate((q, k, v))]
            quantized = self.quantized_grads
            if (self.kind == "delayed" if quantized is None else quantized) and dqkv_quantizer is not None:
                grads = [dqkv_quantizer(grad) for grad in grads]
            extras = list(aux_ctx_tensors[2:])
            bias = extras.pop(0) if attn_bias_type == "post_scale_bias" else None
            offset = extras.pop(0) if softmax_type != "vanilla" else None
            return [*grads, *(None if x is None else _pattern(x.shape, mix, x.dtype) for x in (bias, offset))]

        def combine_and_quantize(
            qkv_layout, q, k, v, quantizer, used_in_backward=False, combined_qkv=None, combined_kv=None
        ):
            mxfp8 = isinstance(quantizer, MXFP8Quantizer)
            dense = qkv_layout in ("bshd_bshd_bshd", "sbhd_sbhd_sbhd")
            layout = qkv_layout if dense or not mxfp8 else "bhsd_bhsd_bhsd"
            return (*(quantizer(x) for x in (q, k, v)), layout, "bhsd" if mxfp8 else None)

        def combine_and_dequantize(qkv_layout, q, k, v, src_nominal_dtype=None):
            return tuple(x.dequantize(dtype=src_nominal_dtype) for x in (q, k, v))

        def mxfp8_quantize_fast_path(pairs, do_format):
            return [quantizer(tensor) for tensor, quantizer in pairs], "bhsd"

        def print_quantizers(label, layer_number, QKV, O, S, dQKV, dO, dP):  # noqa: E741
            pass

        def start_offload(*tensors, offload_base_tensor=False):
            pass

        def mark_activation_offload(*tensors):
            pass

        def nvtx_range_push(label):
            pass

        def nvtx_range_pop(label=None):
            pass

        @contextlib.contextmanager
        def get_nvtx_range_context(label):
            self.record("nvtx_enter", {"label": label})
            yield
            self.record("nvtx_exit", {"label": label})

        def is_cpu_offload_enabled():
            return self.offload

        def is_current_layer_offloaded():
            return self.layer_offloaded

        def is_graph_capturing():
            return self.capturing

        def prepare_for_saving(*tensors):
            saved, objects = [], []
            for tensor in tensors:
                bare = isinstance(tensor, QuantizedTensorStorage) and not isinstance(tensor, torch.Tensor)
                saved.append(tensor.data_ if bare else tensor)
                objects.append(tensor if bare else None)
                if bare:
                    tensor.data_ = None
            return saved, objects

        def restore_from_func_ctx(ctx):
            if ctx.tensor_objects is None:
                raise AttributeError("nothing to restore")
            restored = []
            for tensor, storage in zip(ctx.saved_tensors, ctx.tensor_objects, strict=True):
                if storage is not None:
                    storage.data_ = tensor
                restored.append(tensor if storage is None else storage)
            ctx.tensor_objects = None
            return restored

        def flash_attn_cuda_bwd(*args):
            # What dq, dk and dv hold so far is whatever was in memory: only their shapes are looked at.
            shapes = tuple((tuple(x.shape), x.stride()) for x in args[6:9])
            self.record("flash_attn_cuda_bwd", {"args": (*args[:6], *shapes, *args[9:])})
            for number, grad in enumerate(args[6:9]):
                mix = sum(i * _plain(x).mean() for i, x in enumerate(args[:6])) + number
                grad.copy_(_pattern(grad.shape, mix, grad.dtype))

        def get_qkv_format(qkv_layout):
            letters = "".join(c for c in qkv_layout.removeprefix("paged_kv_") if not c.isdigit()).split("_")
            return "_".join(letters), letters[0], letters[-1]

        def get_attention_quantizers(fp8, quantizers):
            if not fp8:
                return (None,) * 6
            forward, backward = quantizers["scaling_fwd"], quantizers["scaling_bwd"]
            mxfp8 = isinstance(forward[2], MXFP8Quantizer)
            return (
                forward[2],
                forward[3],
                None if mxfp8 else forward[8],
                backward[0],
                backward[3],
                None if mxfp8 else backward[5],
            )

        def maybe_contiguous(tensor):
            return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

        def get_fp8_recipe():
            return Recipe("delayed")

        watched = {
            function.__name__: self._watched(function)
            for function in (
                fused_attn_fwd,
                fused_attn_bwd,
                combine_and_quantize,
                combine_and_dequantize,
                mxfp8_quantize_fast_path,
                print_quantizers,
                start_offload,
                mark_activation_offload,
                nvtx_range_push,
                nvtx_range_pop,
                is_cpu_offload_enabled,
                is_current_layer_offloaded,
                is_graph_capturing,
                prepare_for_saving,
            )
        }
        dpa_utils = types.SimpleNamespace(
            get_qkv_format=self._watched(get_qkv_format),
            get_attention_quantizers=get_attention_quantizers,
            maybe_contiguous=self._watched(maybe_contiguous),
        )
        manager = types.SimpleNamespace(get_fp8_recipe=self._watched(get_fp8_recipe))

        def watched_restore(ctx):
            self.record("restore_from_func_ctx", {})
            return restore_from_func_ctx(ctx)

        return watched | {
            "flash_attn_cuda_bwd": flash_attn_cuda_bwd,
            "get_nvtx_range_context": get_nvtx_range_context,
            "restore_from_func_ctx": watched_restore,
            "dpa_utils": dpa_utils,
            "FP8GlobalStateManager": manager,
            "FusedAttnBackend": {"F16_arbitrary_seqlen": 1, "FP8": 2, "No_Backend": -1},
            "QuantizedTensorStorage": QuantizedTensorStorage,
            "Float8Quantizer": Float8Quantizer,
            "Float8CurrentScalingQuantizer": Float8CurrentScalingQuantizer,
            "MXFP8Quantizer": MXFP8Quantizer,
            "NVTE_CPU_OFFLOAD_V1": self.v1,
            "_dpa_fp8_cs_o_in_f16": True,
        }
