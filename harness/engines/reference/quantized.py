"""Quantized tensors under TransformerEngine's names: bare storages, and torch.Tensors that hold bytes.

A quantized torch.Tensor says that it is of its nominal dtype. Where it lies in memory, storage, offset and strides, is
that of its bytes, so that it can be told apart from others by its memory as any tensor can. Views and copies of it stay
quantized; every other operation dequantizes it first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, Union

import torch
from torch.utils._pytree import tree_map

from harness.engines.reference import fp8
from harness.engines.reference.fp8 import DType

aten = torch.ops.aten


class QuantizedTensorStorage:
    """Base of everything quantized; a subclass that is no torch.Tensor is saved as the tensors it is made of.

    ``_PARTS`` names these, the bytes first. ``_dtype`` is the nominal dtype, ``_quantizer`` a copy of what made it.
    """

    _PARTS: ClassVar[tuple[str, ...]] = ()
    _dtype: torch.dtype
    _fp8_dtype: DType
    _quantizer: Any

    @classmethod
    def make(
        cls,
        parts: Mapping[str, torch.Tensor | None],
        fp8_dtype: DType,
        dtype: torch.dtype,
        quantizer: Any,
        requires_grad: bool = False,
    ) -> Self:
        """Return one made of ``parts``, which maps the names in ``_PARTS`` to tensors; a part left out is None."""
        outer = next(part for name in cls._PARTS if (part := parts.get(name)) is not None)
        self = cls._blank(outer, dtype, requires_grad)
        for name in cls._PARTS:
            setattr(self, name, parts.get(name))
        self._dtype = dtype
        self._fp8_dtype = fp8_dtype
        self._quantizer = quantizer.copy()
        return self

    @classmethod
    def _blank(cls, outer: torch.Tensor, dtype: torch.dtype, requires_grad: bool) -> Self:
        return object.__new__(cls)

    def parts(self) -> dict[str, torch.Tensor]:
        """Return the tensors this is made of, by name, without those it has not."""
        return {name: part for name in self._PARTS if (part := getattr(self, name)) is not None}

    def like(
        self, parts: dict[str, torch.Tensor], dtype: torch.dtype | None = None, requires_grad: bool = False
    ) -> Self:
        """Return another of this class made of other parts."""
        return type(self).make(parts, self._fp8_dtype, dtype or self._dtype, self._quantizer, requires_grad)

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], QuantizedTensorStorage]:
        """Hand out the tensors this is made of, emptied of them, and what takes them back."""
        parts = [getattr(self, name) for name in self._PARTS]
        for name in self._PARTS:
            setattr(self, name, None)
        return parts, self

    def restore_from_saved(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take back as many leading tensors as were handed out; return the rest."""
        for name, tensor in zip(self._PARTS, tensors, strict=False):
            setattr(self, name, tensor)
        return tensors[len(self._PARTS) :]

    def get_data_tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the bytes, in both of the ways they may be held."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it is made of")

    def bytes_held(self) -> torch.Tensor:
        """Return the bytes that are there; raise RuntimeError where they were handed out."""
        for part in self.get_data_tensors():
            if part is not None:
                return part
        raise RuntimeError(f"{type(self).__name__} holds no data: it was emptied for saving and not restored")

    @property
    def shape(self) -> torch.Size:
        """The sizes of the bytes."""
        return self.bytes_held().shape

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values as a fresh plain tensor, unknown to autograd."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its bytes mean")

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values as a plain tensor of ``dtype``, the nominal one if None."""
        wanted = dtype or self._dtype
        if isinstance(self, torch.Tensor) and torch.is_grad_enabled():
            return _Dequantize.apply(self, wanted)
        return self.decode(wanted)


TensorOrQuantized = Union[torch.Tensor, QuantizedTensorStorage]  # noqa: UP007 - a typing name in the original


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensorStorage, dtype: torch.dtype) -> torch.Tensor:
        return tensor.decode(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Float8TensorStorage(QuantizedTensorStorage):
    """Bytes ``_data`` with one scale, whose inverse is ``_scale_inv`` float32 [1].

    ``_transpose``, where there is one, holds the bytes again with the last dimension moved to the front.
    """

    _PARTS = ("_data", "_transpose", "_scale_inv")
    _data: torch.Tensor | None
    _transpose: torch.Tensor | None
    _scale_inv: torch.Tensor

    def get_data_tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the bytes and their transpose."""
        return self._data, self._transpose

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values as a fresh contiguous tensor."""
        if self._data is None and self._transpose is not None:
            return fp8.decode(self._transpose.movedim(0, -1), self._scale_inv, self._fp8_dtype).to(dtype).contiguous()
        return fp8.decode(self.bytes_held(), self._scale_inv, self._fp8_dtype).to(dtype).contiguous()


class MXFP8TensorStorage(QuantizedTensorStorage):
    """Bytes with a power of two for each 32 elements: along the last dimension, along the rows before it, or both.

    The two are quantized apart, so there are bytes for each: ``_rowwise_data`` with ``_rowwise_scale_inv`` [m, n / 32],
    ``_columnwise_data`` with ``_columnwise_scale_inv`` [m / 32, n], both E8M0 bytes. m counts the rows in the order of
    the bytes; or, where ``_order`` says that their dimensions are sbhd or bshd, in the order bhsd.
    """

    _PARTS = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")
    _rowwise_data: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _columnwise_scale_inv: torch.Tensor | None
    _order: str | None = None

    def get_data_tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the bytes by rows and by columns."""
        return self._rowwise_data, self._columnwise_data

    def like(
        self, parts: dict[str, torch.Tensor], dtype: torch.dtype | None = None, requires_grad: bool = False
    ) -> Self:
        """Return another of this class made of other parts, which lie in the same order."""
        other = super().like(parts, dtype, requires_grad)
        other._order = self._order
        return other

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values by rows where there are such, else those by columns."""
        return self.decode_by(columns=self._rowwise_data is None, dtype=dtype)

    def decode_by(self, *, columns: bool, dtype: torch.dtype) -> torch.Tensor:
        """Return the values by columns or by rows; raise RuntimeError where this was not quantized so."""
        data, scale_inv = (
            (self._columnwise_data, self._columnwise_scale_inv)
            if columns
            else (self._rowwise_data, self._rowwise_scale_inv)
        )
        if data is None or scale_inv is None:
            raise RuntimeError(f"{type(self).__name__} holds no data by {'columns' if columns else 'rows'}")
        scales = fp8.block_scales(scale_inv).repeat_interleave(fp8.BLOCK, dim=0 if columns else 1)
        if self._order is None:
            scales = scales.view(data.shape)
        else:
            sizes = dict(zip(self._order, data.shape, strict=True))
            scales = scales.view([sizes[letter] for letter in "bhsd"])
            scales = scales.permute(["bhsd".index(letter) for letter in self._order])
        return fp8.decode(data, scales, self._fp8_dtype).to(dtype).contiguous()


class QuantizedTensor(QuantizedTensorStorage, torch.Tensor):
    """Base of the quantized torch.Tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    shape = torch.Tensor.shape

    @classmethod
    def _blank(cls, outer: torch.Tensor, dtype: torch.dtype, requires_grad: bool) -> Self:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            outer.shape,
            strides=outer.stride(),
            storage_offset=outer.storage_offset(),
            dtype=dtype,
            device=outer.device,
            requires_grad=requires_grad,
        )

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the bytes."""
        return self.bytes_held().untyped_storage()

    def storage_offset(self) -> int:
        """Return where in their storage the bytes start, in elements."""
        return int(self.bytes_held().storage_offset())

    def data_ptr(self) -> int:
        """Return where the bytes lie."""
        return self.bytes_held().data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._fp8_dtype.name}, {self.decode(self._dtype)})"

    def detach(self) -> Self:
        """Return another tensor of the same parts, unknown to autograd."""
        return self.like(self.parts())

    @classmethod
    def make_like(
        cls, tensor: Self, *, dtype: torch.dtype | None = None, requires_grad: bool = False, **parts: torch.Tensor
    ) -> Self:
        """Return a tensor like ``tensor`` in all but the parts that are given, named without the underscore."""
        given = {f"_{name}": part for name, part in parts.items()}
        return tensor.like(tensor.parts() | given, dtype, requires_grad)

    def quantize_(self, tensor: torch.Tensor) -> Self:
        """Overwrite the parts with those of ``tensor``, quantized by what made this."""
        new = self._quantizer.copy()
        new.internal = False
        for name, part in new.quantize(_plain(tensor).detach()).parts().items():
            getattr(self, name).copy_(part)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        own = _OWN.get(func)
        if own is not None:
            result = own(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        plain_args, plain_kwargs = tree_map(_plain, (list(args), kwargs))
        result = func(*plain_args, **plain_kwargs)
        if not func._schema.is_mutable:
            return result
        for argument, before, after in zip(func._schema.arguments, args, plain_args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(before, QuantizedTensor):
                before.quantize_(after)
                result = before
        return result


class Float8Tensor(Float8TensorStorage, QuantizedTensor):
    """A tensor of FP8 bytes with one scale."""


class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor):
    """A tensor of FP8 bytes with a scale for each block."""


def _plain(value: Any) -> Any:
    return value.decode(value._dtype) if isinstance(value, QuantizedTensor) else value


def _detach(func: Any, tensor: QuantizedTensor) -> Any:
    return tensor.detach()


def _clone(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> Any:
    return tensor.like({name: func(part, **kwargs) for name, part in tensor.parts().items()})


def _view(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """View the bytes of a tensor with one scale; blocks do not survive most views."""
    if not isinstance(tensor, Float8Tensor):
        return NotImplemented
    return tensor.like({"_data": func(tensor.bytes_held(), *args, **kwargs), "_scale_inv": tensor._scale_inv})


def _new_empty_strided(func: Any, tensor: QuantizedTensor, size: Any, stride: Any, **kwargs: Any) -> Any:
    """Make room for a gradient; asked for before one is copied."""
    if torch.Size(size) != tensor.shape:
        return NotImplemented
    return tensor.like(
        {
            name: func(part, size, stride) if name == "_data" else torch.empty_like(part)
            for name, part in tensor.parts().items()
        }
    )


def _to_copy(func: Any, tensor: QuantizedTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Move to another device; another dtype is that of a plain tensor."""
    if dtype not in (None, tensor._dtype):
        return NotImplemented
    return tensor.like({name: func(part, **kwargs) for name, part in tensor.parts().items()})


def _copy_into(func: Any, target: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Copy the bytes between tensors that hold the same parts; else quantize or dequantize."""
    if not isinstance(target, QuantizedTensor):
        return func(target, _plain(source), *args, **kwargs)
    alike = type(source) is type(target) and source.parts().keys() == target.parts().keys()
    if not alike:
        return target.quantize_(source)
    for name, part in target.parts().items():
        part.copy_(getattr(source, name))
    target._fp8_dtype = source._fp8_dtype  # type: ignore[attr-defined]
    return target


_OWN: dict[Any, Any] = {
    aten.detach.default: _detach,
    aten.clone.default: _clone,
    aten.copy_.default: _copy_into,
    aten._to_copy.default: _to_copy,
    aten.new_empty_strided.default: _new_empty_strided,
    **dict.fromkeys(
        (
            aten.alias.default,
            aten.as_strided.default,
            aten.permute.default,
            aten.select.int,
            aten.slice.Tensor,
            aten.squeeze.dim,
            aten.transpose.int,
            aten.unsqueeze.default,
            aten.view.default,
            aten._unsafe_view.default,
        ),
        _view,
    ),
}
"""The operations that quantized tensors do themselves; NotImplemented leaves one to the dequantized tensors."""


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


def restore_from_saved(objects: Sequence[Any], saved: Sequence[torch.Tensor | None]) -> list[Any]:
    """Return what ``prepare_for_saving`` was given, from its two results."""
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
    restored = restore_from_saved(objects, ctx.saved_tensors)
    ctx.tensor_objects = None
    return restored
