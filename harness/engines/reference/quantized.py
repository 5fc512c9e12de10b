"""Stand-ins for TransformerEngine's quantized tensors: what the autograd function asks of their classes.

There are no FP8 numbers here. The classes exist so that type tests work, that quantizers can be handed around, and
that anything with the storage protocol (``prepare_for_saving`` and ``restore_from_saved``) is saved and restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import torch


class QuantizedTensorStorage:
    """Base of everything quantized; a subclass that is no torch.Tensor is saved as the tensors it is made of."""

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], QuantizedTensorStorage]:
        """Hand out the tensors this is made of, emptied of them, and what takes them back."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it is made of")

    def restore_from_saved(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take back as many leading tensors as were handed out; return the rest."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it is made of")


TensorOrQuantized = Union[torch.Tensor, QuantizedTensorStorage]  # noqa: UP007 - a typing name in the original


class Quantizer:
    """Base of the quantizers: the flags that the autograd function and its helpers set on them."""

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
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


class Float8Quantizer(Quantizer):
    """Delayed scaling: ``scale`` is given, ``amax`` [1] is written by every use."""

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: Any = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.scale = scale
        self.amax = amax
        self.dtype = fp8_dtype


class Float8CurrentScalingQuantizer(Quantizer):
    """Current scaling: the scale is found from each tensor, so there is no state."""

    def __init__(self, fp8_dtype: Any = None, device: Any = None, *, rowwise: bool = True, columnwise: bool = True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_dtype
        self.device = device


class MXFP8Quantizer(Quantizer):
    """Block scaling: one scale for each 32 elements."""

    def __init__(self, fp8_dtype: Any = None, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_dtype


def prepare_for_saving(*tensors: Any) -> tuple[list[torch.Tensor | None], list[Any]]:
    """Turn tensors into what ``save_for_backward`` takes, and what is needed to put them together again.

    A plain tensor, a tensor subclass or None stays itself and leaves None in the second list. A storage that is no
    tensor takes as many slots of the first list as it is made of, and leaves its object.
    """
    saved: list[torch.Tensor | None] = []
    objects: list[Any] = []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, torch.Tensor):
            saved.append(tensor)
            objects.append(None)
        else:
            parts, whole = tensor.prepare_for_saving()
            saved.extend(parts)
            objects.append(whole)
    return saved, objects


def _restore(objects: Sequence[Any], saved: Sequence[torch.Tensor | None]) -> list[Any]:
    rest = list(saved)
    restored: list[Any] = []
    for whole in objects:
        if whole is None:
            restored.append(rest.pop(0))
        else:
            rest = list(whole.restore_from_saved(rest))
            restored.append(whole)
    return restored


def restore_from_func_ctx(ctx: Any) -> list[Any]:
    """Return what ``prepare_for_saving`` was given, from an autograd context, and drop the objects from it.

    Reads ``ctx.saved_tensors`` and ``ctx.tensor_objects``; sets the latter to None. Raises AttributeError where the
    context has no objects (left), and torch's RuntimeError where its tensors were freed.
    """
    objects = getattr(ctx, "tensor_objects", None)
    if objects is None:
        raise AttributeError("ctx.tensor_objects is missing or was used up; nothing says how to restore the tensors")
    restored = _restore(objects, ctx.saved_tensors)
    ctx.tensor_objects = None
    return restored
