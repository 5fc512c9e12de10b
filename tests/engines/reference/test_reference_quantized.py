"""Quantized tensors behave as tensors: they have a place in memory, views, copies, gradients, and can be saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_problem import ENGINE, QUANTIZED, SEAM

KINDS = ("delayed", "current", "mxfp8")


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def quantized(kind: str, *shape: int, fmt: str = "E4M3") -> Any:
    quantizer = ENGINE.quantizer(kind, fmt, 32.0)
    if kind != "mxfp8":
        quantizer.set_usage(columnwise=False)
    return quantizer(values(*shape)).detach()


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantizer_gives_a_tensor_of_the_nominal_dtype_or_a_bare_storage(kind: str) -> None:
    quantizer = ENGINE.quantizer(kind, "E5M2", 8.0)
    tensor = quantizer(values(64, 32))
    assert isinstance(tensor, torch.Tensor)
    assert isinstance(tensor, QUANTIZED)
    assert (tensor.shape, tensor.dtype, tensor._dtype) == ((64, 32), torch.bfloat16, torch.bfloat16)
    assert tensor._fp8_dtype is tensor._quantizer.dtype
    assert tensor._fp8_dtype.name == "kFloat8E5M2"
    assert tensor._quantizer is not quantizer
    assert type(tensor._quantizer) is type(quantizer)
    quantizer.internal = True
    bare = quantizer(values(64, 32))
    assert isinstance(bare, QUANTIZED)
    assert not isinstance(bare, torch.Tensor)
    assert (bare.shape, bare._dtype) == ((64, 32), torch.bfloat16)
    assert torch.equal(bare.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_a_bare_storage_is_emptied_for_saving_and_takes_its_parts_back(kind: str) -> None:
    quantizer = ENGINE.quantizer(kind, "E4M3")
    quantizer.internal = True
    bare = quantizer(values(64, 32))
    before = bare.dequantize()
    parts = list(bare.parts().values())
    (saved, objects) = SEAM["prepare_for_saving"](None, bare, parts[0])
    assert len(saved) == {"mxfp8": 4}.get(kind, 3) + 2
    assert {id(part) for part in saved[1:-1]} == {id(part) for part in parts}
    assert objects == [None, bare, None]
    with pytest.raises(RuntimeError, match="holds no data"):
        bare.bytes_held()
    assert bare.restore_from_saved([*saved[1:-1], "rest"]) == ["rest"]
    assert torch.equal(bare.dequantize(), before)


def test_the_transpose_is_there_where_it_is_used_and_stands_in_for_the_bytes() -> None:
    quantizer = ENGINE.quantizer("delayed", "E4M3", 16.0)
    tensor = quantizer(values(2, 3, 4))
    assert torch.equal(tensor._transpose, tensor._data.movedim(-1, 0))
    wanted = tensor.dequantize()
    tensor._data = None
    assert torch.equal(tensor.dequantize(), wanted)
    quantizer.set_usage(columnwise=False)
    assert quantizer(values(2, 3, 4))._transpose is None


def test_a_tensor_lies_where_its_bytes_lie() -> None:
    whole = quantized("delayed", 2, 5, 3, 4)
    part = whole.select(2, 1)
    assert type(part) is type(whole)
    assert part.untyped_storage().data_ptr() == whole._data.untyped_storage().data_ptr() == whole.data_ptr()
    assert (
        (part.stride(), part.storage_offset()) == (part._data.stride(), part._data.storage_offset()) == ((60, 12, 1), 4)
    )
    assert not part.is_contiguous()
    assert part.contiguous().is_contiguous()
    assert torch.equal(part.contiguous()._data, part._data)
    assert part._scale_inv is whole._scale_inv
    moved = torch.zeros(200, dtype=torch.uint8)[7:].as_strided(part.shape, part.stride(), 9)
    part._data = moved
    assert part.storage_offset() == 9


def view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(10, 12)


VIEWS = {
    "view": view,
    "reshape": lambda tensor: tensor.reshape(2, -1),
    "slice": lambda tensor: tensor[:, 1:4],
    "select": lambda tensor: tensor[1],
    "transpose": lambda tensor: tensor.transpose(0, 2),
    "permute": lambda tensor: tensor.permute(2, 0, 1, 3),
    "unsqueeze": lambda tensor: tensor.unsqueeze(1),
    "squeeze": lambda tensor: tensor[:1].squeeze(0),
    "as_strided": lambda tensor: tensor.as_strided((3, 4), (40, 1), 8),
    "a reshape that copies": lambda tensor: tensor.transpose(0, 1).reshape(10, 12),
    "clone": lambda tensor: tensor.clone(),
    "contiguous": lambda tensor: tensor.transpose(0, 1).contiguous(),
    "to the CPU": lambda tensor: tensor.to("cpu", copy=True),
}


@pytest.mark.parametrize("what", VIEWS)
def test_views_and_copies_stay_quantized_and_mean_the_same(what: str) -> None:
    tensor = quantized("current", 2, 5, 3, 4)
    found = VIEWS[what](tensor)
    assert type(found) is type(tensor)
    assert torch.equal(found.dequantize(), VIEWS[what](tensor.dequantize()))
    assert found.stride() == found._data.stride()
    assert tensor.detach()._data is tensor._data


@pytest.mark.parametrize("kind", KINDS)
def test_copies_have_memory_of_their_own_and_a_detached_one_shares_it(kind: str) -> None:
    tensor = quantized(kind, 64, 32)
    for copy in (tensor.clone(), tensor.to("cpu", copy=True)):
        assert torch.equal(copy.dequantize(), tensor.dequantize())
        assert all(copy.parts()[name].data_ptr() != part.data_ptr() for name, part in tensor.parts().items())
    assert all(tensor.detach().parts()[name] is part for name, part in tensor.parts().items())


@pytest.mark.parametrize("kind", KINDS)
def test_any_other_operation_works_on_the_values(kind: str) -> None:
    tensor = quantized(kind, 64, 32)
    plain = tensor.dequantize()
    for operation in (
        lambda x: x * 2, lambda x: x @ x.t(), lambda x: x.sum(-1), lambda x: x.float(), torch.zeros_like, torch.abs,
        lambda x: torch.cat([x, x]),
    ):  # fmt: skip
        found = operation(tensor)
        assert type(found) is torch.Tensor
        assert torch.equal(found, operation(plain))
    assert type(tensor).__name__ in repr(tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_writing_in_place_quantizes_again_and_is_seen_by_the_version_counter(kind: str) -> None:
    tensor = quantized(kind, 64, 32)
    plain, version = tensor.dequantize(), tensor._version
    assert tensor.mul_(0.5) is tensor
    assert tensor._version > version
    wanted = ENGINE.quantizer(kind, "E4M3", 32.0)((plain * 0.5).float()).dequantize().bfloat16()
    assert torch.equal(tensor.dequantize(), wanted)
    other = quantized(kind, 64, 32, fmt="E4M3").mul_(3.0)
    tensor.copy_(other)
    assert all(torch.equal(part, other.parts()[name]) for name, part in tensor.parts().items())
    wide = quantized(kind, 64, 32, fmt="E5M2")
    assert torch.equal(tensor.clone().copy_(wide).dequantize(), wide.dequantize())
    plain_target = torch.zeros(64, 32, dtype=torch.bfloat16)
    plain_target.copy_(tensor)
    assert torch.equal(plain_target, tensor.dequantize())
    tensor.copy_(plain_target * 0.5)
    assert torch.allclose(tensor.dequantize().float(), (plain_target * 0.5).float(), rtol=0.1, atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_quantizing_and_dequantizing_pass_gradients_straight_through(kind: str) -> None:
    leaf = values(64, 32).requires_grad_()
    quantizer = ENGINE.quantizer(kind, "E4M3")
    tensor = quantizer(leaf)
    weights = values(64, 32)
    (tensor.dequantize() * weights).sum().backward()
    assert torch.equal(leaf.grad, weights)
    with torch.no_grad():
        assert not quantizer(leaf).requires_grad


class Scaled(torch.autograd.Function):
    """Save a quantized input and output; hand back quantized gradients, and keep what was seen."""

    seen: list[Any] = []  # noqa: RUF012 - a place to look at, not a setting

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        output = tensor.clone()
        saved, ctx.tensor_objects = SEAM["prepare_for_saving"](tensor, output, None)
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        Scaled.seen[:] = [*SEAM["restore_from_func_ctx"](ctx), gradient]
        return gradient.clone()


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_leaf_is_saved_and_its_gradient_accumulates_quantized(kind: str) -> None:
    leaf = quantized(kind, 64, 32).requires_grad_()
    assert leaf.is_leaf
    gradient = quantized(kind, 64, 32, fmt="E5M2")
    output = Scaled.apply(leaf)
    assert type(output) is type(leaf)
    torch.autograd.backward([output], [gradient])
    saved_input, saved_output, nothing, seen_gradient = Scaled.seen
    assert saved_input is leaf
    assert all(saved_output.parts()[name] is part for name, part in output.parts().items())
    assert nothing is None
    assert seen_gradient._fp8_dtype.name == "kFloat8E5M2"
    assert type(leaf.grad) is type(leaf)
    assert torch.equal(leaf.grad.dequantize(), gradient.dequantize())
    Scaled.apply(leaf).backward(gradient)
    assert type(leaf.grad) is type(leaf)
    assert torch.allclose(leaf.grad.dequantize(), 2 * gradient.dequantize(), rtol=0.3, atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_somebody_holds_is_copied_and_stays_quantized(kind: str) -> None:
    held: list[Any] = []

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Any) -> Any:
            return tensor.dequantize()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            held.append(ENGINE.quantizer(kind, "E5M2", 4.0)(gradient))
            return held[-1]

    leaf = quantized(kind, 64, 32).requires_grad_()
    Held.apply(leaf).backward(values(64, 32))
    assert type(leaf.grad) is type(held[0])
    assert leaf.grad._fp8_dtype.name == "kFloat8E5M2"
    assert torch.equal(leaf.grad.dequantize(), held[0].dequantize())
    assert leaf.grad.data_ptr() != held[0].data_ptr()


def test_a_strided_leaf_takes_a_strided_gradient() -> None:
    whole = quantized("delayed", 4, 3, 2, 8)
    leaf = whole.select(1, 2).requires_grad_()
    gradient = quantized("delayed", 4, 3, 2, 8, fmt="E5M2").select(1, 0)
    Scaled.apply(leaf).backward(gradient)
    assert type(leaf.grad) is type(leaf)
    assert torch.equal(leaf.grad.dequantize(), gradient.dequantize())


def test_saved_quantized_tensors_pass_through_hooks() -> None:
    packed: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor.clone()

    leaf = quantized("delayed", 4, 8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = Scaled.apply(leaf)
    assert [type(tensor) for tensor in packed] == [type(leaf)] * 2
    output.backward(quantized("delayed", 4, 8))
    assert Scaled.seen[0]._data is not leaf._data
    assert torch.equal(Scaled.seen[0]._data, leaf._data)


def test_editing_a_saved_quantized_tensor_in_place_is_an_error() -> None:
    leaf = quantized("delayed", 4, 8).requires_grad_()
    output = Scaled.apply(leaf)
    with torch.no_grad():
        leaf.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(quantized("delayed", 4, 8))


def test_a_tensor_like_another_takes_other_parts_and_another_dtype() -> None:
    tensor = quantized("current", 4, 8)
    data = torch.arange(6, dtype=torch.uint8).view(2, 3)
    found = type(tensor).make_like(tensor, data=data, dtype=torch.float16, requires_grad=True)
    assert found._data is data
    assert found._scale_inv is tensor._scale_inv
    assert (found.shape, found.dtype, found.requires_grad) == ((2, 3), torch.float16, True)
    assert found._quantizer is not tensor._quantizer


def test_a_copied_quantizer_shares_its_state_and_has_flags_of_its_own() -> None:
    quantizer = ENGINE.quantizer("delayed", "E4M3", 2.0)
    other = quantizer.copy()
    other.internal = True
    other.set_usage(rowwise=False)
    assert other.scale is quantizer.scale
    assert other.amax is quantizer.amax
    assert (quantizer.internal, quantizer.rowwise_usage, quantizer.columnwise_usage) == (False, True, True)
    assert other.dtype is quantizer.dtype


def test_amax_grows_in_place_and_the_scale_never_changes() -> None:
    quantizer = ENGINE.quantizer("delayed", "E4M3", 2.0)
    amax, scale = quantizer.amax, quantizer.scale
    assert (amax.shape, scale.shape, amax.dtype, scale.dtype) == ((1,), (), torch.float32, torch.float32)
    for value, wanted in ((3.0, 3.0), (-5.0, 5.0), (1.0, 5.0)):
        quantizer(torch.tensor([value, 0.5]))
        assert quantizer.amax is amax
        assert float(amax) == wanted
    assert quantizer.scale is scale
    assert float(scale) == 2.0
    quantizer(torch.zeros(0))
    assert float(amax) == 5.0


@pytest.mark.parametrize(("kind", "fmt", "error"), [("block", "E4M3", ValueError), ("delayed", "E3M4", KeyError)])
def test_another_quantizer_is_refused(kind: str, fmt: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        ENGINE.quantizer(kind, fmt)
