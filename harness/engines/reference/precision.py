"""What FP8 changes about a call: which kernel runs, how operands are read, what is rounded, how results are kept.

Which kernel runs follows from the tensors alone, as in TransformerEngine's extension: plain ones, ones with a scale
each (``float8``), or ones with a scale for each block (``mxfp8``).

``float8`` rounds the probabilities with the S quantizer, in backward with the one that is handed in then, and the
gradients of the scores with the dP quantizer. Results are quantized where their quantizer is a delayed one, and of the
nominal dtype where it is not. ``mxfp8`` rounds neither, and its results are of the nominal dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from harness.engines.reference import addressing, attention, batch, fp8
from harness.engines.reference.quantized import (
    Float8Tensor,
    Float8TensorStorage,
    MXFP8TensorStorage,
    QuantizedTensorStorage,
)
from harness.engines.reference.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer
from harness.engines.reference.ragged import Tokens

PLAIN, FLOAT8, MXFP8 = "none", "float8", "mxfp8"

_TENSORS = {FLOAT8: Float8TensorStorage, MXFP8: MXFP8TensorStorage}
_NOMINAL = (torch.float16, torch.bfloat16)
_NONE = type(None)
_INTERMEDIATE: dict[str, tuple[type, ...]] = {PLAIN: (_NONE,), FLOAT8: (Float8Quantizer,), MXFP8: (_NONE,)}
_RESULT: dict[str, tuple[type, ...]] = {
    PLAIN: (_NONE,),
    FLOAT8: (Float8Quantizer, Float8CurrentScalingQuantizer, _NONE),
    MXFP8: (MXFP8Quantizer, _NONE),
}


def kind(tensors: Mapping[str, Any]) -> str:
    """Return which kernel the tensors call for; raise RuntimeError for a mixture and for an emptied tensor."""
    found = {name: kind_of(tensor) for name, tensor in tensors.items()}
    if len(set(found.values())) > 1:
        raise RuntimeError(f"no kernel takes tensors of different kinds: {found}")
    for tensor in tensors.values():
        if isinstance(tensor, QuantizedTensorStorage):
            tensor.bytes_held()
    return next(iter(found.values()))


def kind_of(tensor: Any) -> str:
    """Return ``none``, ``float8`` or ``mxfp8``."""
    return next((name for name, quantized in _TENSORS.items() if isinstance(tensor, quantized)), PLAIN)


def nominal(fake_dtype: Any) -> torch.dtype:
    """Return the dtype of an FP8 call's unquantized results; raise RuntimeError for none of F16 and BF16."""
    if fake_dtype not in _NOMINAL:
        raise RuntimeError(f"fake_dtype={fake_dtype}: quantized tensors stand for torch.float16 or torch.bfloat16")
    return fake_dtype  # type: ignore[no-any-return]


def check_quantizers(tensors: str, intermediate: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Raise RuntimeError for quantizers that no kernel takes with this kind of tensors."""
    for group, allowed in ((intermediate, _INTERMEDIATE[tensors]), (results, _RESULT[tensors])):
        for name, quantizer in group.items():
            if not isinstance(quantizer, allowed):
                raise RuntimeError(
                    f"{name} is of type {type(quantizer).__name__}: with tensors of kind {tensors} a kernel takes "
                    f"{' or '.join('None' if one is _NONE else one.__name__ for one in allowed)}"
                )


def check_gradient(tensors: str, o: Any, d_o: Any, dqkv_quantizer: Any, aux: Sequence[torch.Tensor]) -> None:
    """Raise RuntimeError where O, its gradient and the quantizer of the results are not what one kernel takes."""
    if kind_of(d_o) != tensors:
        raise RuntimeError(f"d_o is of kind {kind_of(d_o)} and q of kind {tensors}")
    if kind_of(o) not in (PLAIN, tensors) or (tensors == MXFP8 and kind_of(o) != PLAIN):
        raise RuntimeError(f"o is of kind {kind_of(o)}, which no kernel takes with q of kind {tensors}")
    if tensors == FLOAT8 and kind_of(o) == PLAIN and isinstance(dqkv_quantizer, Float8Quantizer):
        raise RuntimeError("o is in high precision and dqkv_quantizer a Float8Quantizer: no kernel takes the mixture")
    if tensors == MXFP8 and (aux[-1].dtype not in _NOMINAL or aux[-1].shape != d_o.shape):
        raise RuntimeError(
            f"aux_ctx_tensors[-1] has shape {tuple(aux[-1].shape)} and dtype {aux[-1].dtype}: with MXFP8 it must be "
            f"the gradient of O in high precision, of shape {tuple(d_o.shape)}"
        )


def read(
    name: str,
    tensor: Any,
    part: str,
    sizes: Mapping[str, int],
    tokens: Tokens | None,
    dtype: torch.dtype,
    *,
    columns: bool = False,
) -> torch.Tensor:
    """Read an operand by ``part`` of a layout into a fresh [b, h, s, d] tensor of ``dtype``.

    ``columns`` asks for what products along tokens read, which is other bytes where blocks have scales. Raises
    RuntimeError where a tensor lacks them.
    """
    if isinstance(tensor, MXFP8TensorStorage):
        return addressing.read(name, tensor.decode_by(columns=columns, dtype=dtype), part, sizes, dtype)
    if isinstance(tensor, Float8TensorStorage):
        numbers = tensor.bytes_held().view(tensor._fp8_dtype.torch)
        return batch.read(name, numbers, part, sizes, tokens, dtype) * tensor._scale_inv
    return batch.read(name, tensor, part, sizes, tokens, dtype)


def rounding(quantizer: Any, *, record: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what rounds values as ``quantizer`` does, letting its amax grow if ``record``; None rounds nothing."""
    if quantizer is None:
        return attention.unrounded
    scale, dtype = quantizer.scale.detach().clone(), quantizer.dtype

    def rounded(values: torch.Tensor) -> torch.Tensor:
        if record:
            quantizer.record(values)
        return fp8.decode(fp8.encode(values, scale, dtype), scale.reciprocal(), dtype)

    return rounded


def keep_output(values: torch.Tensor, fmt: str, dtype: torch.dtype, quantizer: Any) -> torch.Tensor:
    """Return O as a fresh tensor in ``fmt``, quantized by a delayed quantizer."""
    if not isinstance(quantizer, Float8Quantizer):
        return addressing.write(values, fmt, dtype)
    quantizer.record(values)
    data = addressing.write(fp8.encode(values, quantizer.scale, quantizer.dtype), fmt, torch.uint8)
    return _wrap(data, dtype, quantizer, quantizer.scale.detach().reciprocal().view(1))


def keep_gradients(
    values: Sequence[torch.Tensor], layout: str, dtype: torch.dtype, quantizer: Any
) -> list[torch.Tensor]:
    """Return dq, dk and dv laid out by ``layout``, quantized by a delayed quantizer; they share its scale and amax."""
    if not isinstance(quantizer, Float8Quantizer):
        return addressing.write_packed(values, layout, dtype)
    quantizer.record(*values)
    data = [fp8.encode(value, quantizer.scale, quantizer.dtype) for value in values]
    scale_inv = quantizer.scale.detach().reciprocal().view(1)
    return [_wrap(part, dtype, quantizer, scale_inv) for part in addressing.write_packed(data, layout, torch.uint8)]


def _wrap(data: torch.Tensor, dtype: torch.dtype, quantizer: Float8Quantizer, scale_inv: torch.Tensor) -> Float8Tensor:
    return Float8Tensor.make({"_data": data, "_scale_inv": scale_inv}, quantizer.dtype, dtype, quantizer)
