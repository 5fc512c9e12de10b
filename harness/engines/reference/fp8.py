"""FP8 numbers: the two formats, and values to bytes and back."""

from __future__ import annotations

import enum

import torch

BLOCK = 32
"""How many elements share a scale in MXFP8."""

_EXPONENT_BIAS = 127


class DType(enum.IntEnum):
    """The FP8 formats, as TransformerEngine names and numbers them."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype with this format."""
        return torch.float8_e4m3fn if self is DType.kFloat8E4M3 else torch.float8_e5m2

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return torch.finfo(self.torch).max


def encode(values: torch.Tensor, scale: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return ``values * scale`` rounded to FP8, saturating, as bytes of the same shape; NaN stays NaN."""
    scaled = values.to(torch.float32) * scale
    return scaled.clamp(-dtype.largest, dtype.largest).to(dtype.torch).view(torch.uint8)


def decode(data: torch.Tensor, scale_inv: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return the float32 values of FP8 bytes, times ``scale_inv``."""
    return data.view(dtype.torch).to(torch.float32) * scale_inv


def largest_of(values: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a tensor as float32 [1], zero for one without elements; NaN does not count."""
    magnitudes = values.detach().to(torch.float32).abs().nan_to_num(nan=0.0, posinf=torch.inf)
    return magnitudes.amax().view(1) if values.numel() else magnitudes.new_zeros(1)


def scale_for(amax: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return the scale that brings ``amax`` to the largest value of the format; 1 where there is none."""
    scale = dtype.largest / amax
    usable = (amax > 0) & amax.isfinite()
    return torch.where(usable, scale.clamp(max=torch.finfo(torch.float32).max), 1.0)


def block_exponents(amax: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return the E8M0 bytes of the scales that ``amax`` of blocks need: powers of two, rounded up."""
    mantissa, exponent = torch.frexp(amax / dtype.largest)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = torch.where(amax > 0, exponent, -_EXPONENT_BIAS)
    return (exponent.clamp(-_EXPONENT_BIAS, _EXPONENT_BIAS) + _EXPONENT_BIAS).to(torch.uint8)


def block_scales(exponents: torch.Tensor) -> torch.Tensor:
    """Return the float32 scales that E8M0 bytes stand for."""
    return torch.exp2(exponents.to(torch.float32) - _EXPONENT_BIAS)
