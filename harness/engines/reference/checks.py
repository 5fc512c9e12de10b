"""What the kernels refuse, and with which type of exception.

The order is that of the real call: what the Python wrapper checks (ValueError), then the look-up of every string
(KeyError), then the conversion of arguments to C++ (TypeError), then what the C++ code finds (RuntimeError). What this
engine does not model raises EngineUnsupported between the last two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harness.constraints import CONSTRAINTS
from harness.engines.reference import addressing
from harness.engines.reference.backend import FusedAttnBackend
from harness.engines.reference.masking import MASK_TYPES
from harness.engines.reference.quantized import QuantizedTensorStorage

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
NO_BIAS_TENSOR = ("no_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def backend(value: Any) -> FusedAttnBackend:
    """Return the backend that ``value`` names; raise ValueError for none of them and for No_Backend."""
    known = FusedAttnBackend(value)
    if known == FusedAttnBackend.No_Backend:
        raise ValueError(f"fused_attention_backend={value!r}: no kernel supports the inputs")
    return known


def bias(attn_bias_type: str, attn_bias: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Raise ValueError where the bias type needs a bias and there is none, or one of another dtype than q's."""
    if attn_bias_type in NO_BIAS_TENSOR:
        return
    if attn_bias is None:
        raise ValueError(f"attn_bias_type={attn_bias_type!r} needs attn_bias, which is None")
    if attn_bias.dtype != dtype:
        raise ValueError(f"attn_bias.dtype={attn_bias.dtype} differs from q.dtype={dtype}")


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Raise KeyError unless ``value`` is known."""
    if value not in known:
        raise KeyError(f"{name}={value!r} is not one of {', '.join(known)}")


def strings(attn_bias_type: str, attn_mask_type: str, softmax_type: str) -> None:
    """Raise KeyError for an unknown bias, mask or softmax type."""
    one_of("attn_bias_type", attn_bias_type, BIAS_TYPES)
    one_of("attn_mask_type", attn_mask_type, tuple(MASK_TYPES))
    one_of("softmax_type", softmax_type, SOFTMAX_TYPES)


def arguments(window_size: Any, sizes: dict[str, Any], tensors: dict[str, Any]) -> tuple[int, int]:
    """Return the window as two ints.

    Raises TypeError where the binding would find no matching signature: a window that is no pair of ints, a size that
    is no int, or something else than a tensor where a tensor must be. RuntimeError for a bound below -1.
    """
    for name, value in sizes.items():
        if not isinstance(value, int):
            raise TypeError(f"{name}={value!r} is no int")
    for name, value in tensors.items():
        if not isinstance(value, (torch.Tensor, QuantizedTensorStorage)):
            raise TypeError(f"{name} is no tensor but {type(value).__name__}")
    if not isinstance(window_size, (tuple, list)) or not all(isinstance(bound, int) for bound in window_size):
        raise TypeError(f"window_size={window_size!r} is no pair of ints")
    if len(window_size) != 2 or min(window_size) < -1:
        raise RuntimeError(f"window_size={window_size!r}: two bounds, -1 meaning unbounded")
    left, right = window_size
    return left, right


def optional_tensors(tensors: dict[str, Any]) -> None:
    """Raise TypeError for what is neither a tensor nor None."""
    for name, value in tensors.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is neither a tensor nor None but {type(value).__name__}")


def memory(qkv_layout: str, formats: dict[str, str], dqkv_layout: str | None = None) -> None:
    """Raise EngineUnsupported for layouts and formats of the output that are known but not modelled together."""
    for name, value in formats.items():
        addressing.require_output_format(name, value, qkv_layout)
    if dqkv_layout is not None:
        addressing.require_same_kind("dqkv_layout", dqkv_layout, qkv_layout)


def dtypes(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the one dtype of the tensors.

    F16, BF16, FP32 and FP64 are taken; real kernels know only the first two of these. Raises RuntimeError for
    another, and for two that differ.
    """
    (first, tensor), *rest = tensors.items()
    if tensor.dtype not in DTYPES:
        raise RuntimeError(f"{first}.dtype={tensor.dtype} is not supported")
    for name, other in rest:
        if other.dtype != tensor.dtype:
            raise RuntimeError(f"{name}.dtype={other.dtype} differs from {first}.dtype={tensor.dtype}")
    return tensor.dtype


def configuration(dropout: float, **options: Any) -> None:
    """Raise RuntimeError for a combination of options that no kernel takes.

    ``options`` are named as the fields of a case; what is not given constrains nothing.
    """
    if options["qkv_layout"] == addressing.INTERNAL_LAYOUT:  # dense, and so without constraints of its own
        del options["qkv_layout"]
    options["dropout_p"] = dropout
    for constraint in CONSTRAINTS:
        reason = constraint.refusal(options) if options.keys() >= set(constraint.fields) else None
        if reason is not None:
            raise RuntimeError(reason)
    if not 0.0 <= dropout < 1.0:
        raise RuntimeError(f"dropout={dropout}: a probability below 1 is needed")


def broadcastable(name: str, tensor: torch.Tensor, full: Sequence[int]) -> None:
    """Raise RuntimeError unless ``tensor`` has four sizes, the last as in ``full``, the others as there or 1."""
    sizes = tuple(tensor.shape)
    fits = len(sizes) == 4 and sizes[3] == full[3] and all(a in (1, b) for a, b in zip(sizes, full, strict=True))
    if not fits:
        raise RuntimeError(f"{name}.shape={sizes} does not broadcast to {tuple(full)}")


def exact(name: str, tensor: torch.Tensor, shape: Sequence[int], allowed: Sequence[torch.dtype]) -> None:
    """Raise RuntimeError unless ``tensor`` has this shape and one of these dtypes."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype not in allowed:
        raise RuntimeError(
            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; "
            f"{tuple(shape)} and {' or '.join(str(dtype) for dtype in allowed)} were expected"
        )
