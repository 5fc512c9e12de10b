"""Quantizers under TransformerEngine's names: what turns a plain tensor into a quantized one, and its state."""

from __future__ import annotations

from typing import Any, Self

import torch

from harness.engines.reference import fp8
from harness.engines.reference.fp8 import DType
from harness.engines.reference.quantized import (
    Float8Tensor,
    Float8TensorStorage,
    MXFP8Tensor,
    MXFP8TensorStorage,
    QuantizedTensorStorage,
)


class Quantizer:
    """Base of the quantizers: the flags that the autograd function and its helpers set on them.

    ``internal`` makes bare storages in place of tensors. ``optimize_for_gemm`` changes nothing here.
    """

    def __init__(self, fp8_dtype: DType, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.dtype = DType(fp8_dtype)
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Set which of the two copies a result will hold; None leaves that one as it is."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def copy(self) -> Self:
        """Return a shallow copy: flags of its own, the state shared."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __call__(self, tensor: torch.Tensor) -> Any:
        """Quantize a tensor; see ``quantize``."""
        return self.quantize(tensor)

    def quantize(self, tensor: torch.Tensor) -> Any:
        """Return the tensor quantized, with its dtype as the nominal one; autograd passes gradients straight through.

        A bare storage, which autograd knows nothing of, if ``internal``.
        """
        if torch.is_grad_enabled() and not self.internal:
            return _Quantize.apply(tensor, self)  # type: ignore[no-untyped-call]
        return self.make(tensor)

    def make(self, tensor: torch.Tensor) -> QuantizedTensorStorage:
        """Return the tensor quantized, unknown to autograd."""
        raise NotImplementedError(f"{type(self).__name__} does not quantize")


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, quantizer: Quantizer) -> Any:
        return quantizer.make(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _PerTensor(Quantizer):
    """Base of the quantizers with one scale for a whole tensor."""

    def scale_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the scale to quantize ``tensor`` with, as float32 [1]."""
        raise NotImplementedError(f"{type(self).__name__} has no scale")

    def make(self, tensor: torch.Tensor) -> QuantizedTensorStorage:
        """Return the tensor quantized, its bytes contiguous; their transpose beside them if used columnwise."""
        scale = self.scale_of(tensor)
        data = fp8.encode(tensor.detach().contiguous(), scale, self.dtype)
        parts: dict[str, torch.Tensor | None] = {"_data": data, "_scale_inv": scale.reciprocal()}
        if self.columnwise_usage:
            parts["_transpose"] = data.movedim(-1, 0).contiguous()
        kind = Float8TensorStorage if self.internal else Float8Tensor
        return kind.make(parts, self.dtype, tensor.dtype, self)


class Float8Quantizer(_PerTensor):
    """Delayed scaling: ``scale`` is given, and never changed here.

    ``amax`` [1] grows in place to the largest magnitude seen. The history that it is part of is rolled by others, who
    set it to zero for a new step.
    """

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.scale = scale
        self.amax = amax

    def record(self, *values: torch.Tensor) -> None:
        """Let ``amax`` grow to the largest magnitude in the values."""
        for value in values:
            self.amax.copy_(torch.maximum(self.amax, fp8.largest_of(value)))

    def scale_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record the tensor's largest magnitude; return the given scale."""
        self.record(tensor)
        return self.scale.detach().view(1)


class Float8CurrentScalingQuantizer(_PerTensor):
    """Current scaling: the scale is found from each tensor, so there is no state."""

    def __init__(self, fp8_dtype: DType, device: Any = None, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)

    def scale_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the scale that brings the tensor's largest magnitude to that of the format."""
        return fp8.scale_for(fp8.largest_of(tensor), self.dtype)


class MXFP8Quantizer(Quantizer):
    """Block scaling: one power of two for each 32 elements, by rows, by columns or both."""

    def make(self, tensor: torch.Tensor) -> QuantizedTensorStorage:
        """Return the tensor quantized in the ways that are used.

        Raises RuntimeError where its last dimension, or the rows before it, are no multiple of 32, and where neither
        way is used.
        """
        n = tensor.shape[-1]
        rows = tensor.detach().reshape(-1, n).to(torch.float32)
        if n % fp8.BLOCK or rows.shape[0] % fp8.BLOCK:
            raise RuntimeError(f"shape={tuple(tensor.shape)} is not made of blocks of {fp8.BLOCK}")
        if not (self.rowwise_usage or self.columnwise_usage):
            raise RuntimeError("rowwise_usage=False and columnwise_usage=False: nothing to quantize for")
        parts: dict[str, torch.Tensor | None] = {}
        for way, used in (("rowwise", self.rowwise_usage), ("columnwise", self.columnwise_usage)):
            if used:
                lines = rows if way == "rowwise" else rows.t()
                data, exponents = self._blocks(lines)
                if way == "columnwise":
                    data, exponents = data.t().contiguous(), exponents.t().contiguous()
                parts |= {f"_{way}_data": data.view(tensor.shape), f"_{way}_scale_inv": exponents}
        kind = MXFP8TensorStorage if self.internal else MXFP8Tensor
        return kind.make(parts, self.dtype, tensor.dtype, self)

    def _blocks(self, lines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bytes of ``lines`` [m, n], a scale for each 32 elements of a line, and the scales [m, n / 32]."""
        blocks = lines.reshape(lines.shape[0], -1, fp8.BLOCK)
        exponents = fp8.block_exponents(blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1), self.dtype)
        scales = fp8.block_scales(exponents).reciprocal().unsqueeze(-1)
        return fp8.encode(blocks, scales, self.dtype).view(lines.shape), exponents
