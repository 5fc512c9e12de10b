"""CPU offload: what is saved comes back in other memory and changes no gradient, by the present path and the first."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fp8_problem import ENGINE, QUANTIZED, SEAM, Setup, for_recipe, make_call, run, spied

from harness.case import Case

SPECS = [
    "legacy",
    "refactored",
    *(pytest.param(spec, marks=pytest.mark.network) for spec in ("te==2.19.0", "te==2.20.2")),
]
RECIPES = ("none", "delayed", "current", "mxfp8")
SEPARATE = {"bs3hd": "bshd_bshd_bshd", "sbh3d": "sbhd_sbhd_sbhd", "bshd_bsh2d": "bshd_bshd_bshd",
            "bshd_bshd_bshd": "bshd_bshd_bshd"}  # fmt: skip


def during(scenario: str) -> Any:
    return ENGINE.during(Case(scenario=scenario))


def same(one: Any, other: Any) -> bool:
    plain = [tensor.dequantize() if isinstance(tensor, QUANTIZED) else tensor for tensor in (one, other)]
    return type(one) is type(other) and torch.equal(*plain)


def memory(tensors: dict[str, Any]) -> set[int]:
    """Return the storages of tensors and their parts."""
    found = [part for tensor in tensors.values() if isinstance(tensor, QUANTIZED) for part in tensor.parts().values()]
    found += [tensor for tensor in tensors.values() if isinstance(tensor, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in found}


COMBINATIONS = [
    each
    for each in itertools.product(("offload", "offload_v1"), RECIPES, SEPARATE, ("1", "0"))
    if each not in [("offload_v1", "mxfp8", layout, "0") for layout in SEPARATE if layout != "bshd_bshd_bshd"]
]
"""All but what no source gets right: see the next test."""


@pytest.mark.parametrize(("scenario", "recipe", "layout", "bwd"), COMBINATIONS)
@pytest.mark.parametrize("spec", SPECS)
def test_offload_changes_no_gradient(spec: str, scenario: str, recipe: str, layout: str, bwd: str) -> None:
    setup = for_recipe(Setup(layout=layout), recipe)
    changes = {"softmax_type": "learnable", "softmax_offset": torch.linspace(-1, 1, setup.h).view(1, -1, 1, 1)}
    setup = setup.with_(changes=changes)
    without, with_offload = make_call(setup), make_call(setup)
    run(spied(spec), without, bwd=bwd)
    loaded = spied(spec, offload_v1=scenario == "offload_v1")
    with during(scenario):
        run(loaded, with_offload, bwd=bwd)
    for name, leaf in with_offload.leaves.items():
        assert same(leaf.grad, without.leaves[name].grad)
    (given,) = loaded.of("fused_attn_bwd")
    q, k, v = given["q"], given["k"], given["v"]
    if recipe == "none" or bwd == "0":
        assert not memory({"q": q, "k": k, "v": v}) & memory(with_offload.values)
    if scenario == "offload_v1":
        assert loaded.of("start_offload")
        assert len(loaded.of("mark_activation_offload")) == 2
        if recipe != "mxfp8" or bwd == "0":
            assert given["qkv_layout"] == SEPARATE[layout]
            assert all(tensor.is_contiguous() for tensor in (q, k, v))
    else:
        assert not loaded.of("mark_activation_offload")
        if recipe == "none":  # views of one base are views of one base again
            assert [tensor.stride() for tensor in (q, k, v)] == [with_offload.values[name].stride() for name in "qkv"]
            pointers = [tensor.untyped_storage().data_ptr() for tensor in (q, k, v)]
            assert len(set(pointers)) == layout.count("_") + 1
    assert given["dqkv_layout"] == layout


@pytest.mark.parametrize("spec", SPECS)
def test_no_source_gives_backward_the_callers_layout_after_mxfp8_and_offload_by_the_first_path(spec: str) -> None:
    """All have the layout that MXFP8 changed to taken apart, where q, k and v come back as the caller had them."""
    call = make_call(for_recipe(Setup(layout="bs3hd"), "mxfp8"))
    loaded = spied(spec, offload_v1=True)
    with during("offload_v1"), pytest.raises(RuntimeError, match=r"aux_ctx_tensors\[0\] has shape"):
        run(loaded, call, bwd="0")
    (given,) = loaded.of("fused_attn_bwd")
    assert given["qkv_layout"] == "bhsd_bhsd_bhsd"
    assert given["q"].shape == call.values["q"].shape


def fail_inside(scenario: str) -> None:
    with during(scenario):
        assert SEAM["is_cpu_offload_enabled"]() is True
        assert SEAM["is_current_layer_offloaded"]() is (scenario == "offload_v1")
        raise ZeroDivisionError


@pytest.mark.parametrize("scenario", ["offload", "offload_v1"])
def test_offload_is_on_inside_the_block_alone_even_if_it_fails(scenario: str) -> None:
    assert SEAM["is_cpu_offload_enabled"]() is False
    with pytest.raises(ZeroDivisionError):
        fail_inside(scenario)
    assert SEAM["is_cpu_offload_enabled"]() is False
    assert SEAM["is_current_layer_offloaded"]() is False


def saved_and_back(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Save tensors for a backward, and return what that gets."""
    seen: list[torch.Tensor] = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*tensors)
            return leaf.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.extend(ctx.saved_tensors)
            return gradient

    Saves.apply(torch.zeros(1, requires_grad=True)).backward()
    return seen


def pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_the_present_path_takes_what_is_contiguous_and_of_some_size() -> None:
    large, small, strided = torch.randn(8, 8), torch.arange(3), torch.randn(8, 4, 8)[:, 1]
    with during("offload"):
        back = saved_and_back(large, small, strided)
    assert [torch.equal(*pair) for pair in zip(back, (large, small, strided), strict=True)] == [True] * 3
    assert [pointer(one) == pointer(other) for one, other in zip(back, (large, small, strided), strict=True)] == [
        False, True, True,
    ]  # fmt: skip


def test_marked_views_of_one_base_share_the_memory_that_it_comes_back_in() -> None:
    base = torch.randn(500)[20:].data.view(4, 5, 3, 8)  # its base starts late in its own storage
    assert base._base is not None
    assert base._base.storage_offset() == 20
    views = [base.select(2, index) for index in range(3)]
    with during("offload"):
        SEAM["start_offload"](*views, None, offload_base_tensor=True)
        back = saved_and_back(*views)
    for one, other in zip(back, views, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    assert len({pointer(tensor) for tensor in back}) == 1
    assert pointer(back[0]) != pointer(base)


def test_a_view_whose_base_is_not_to_go_stays() -> None:
    view = torch.randn(4, 3, 8)[:, 1]
    with during("offload"):
        SEAM["start_offload"](view)
        (back,) = saved_and_back(view)
    assert pointer(back) == pointer(view)


def test_the_first_path_takes_what_is_marked_and_brings_it_back_contiguous() -> None:
    marked, unmarked = (torch.randn(4, 3, 8)[:, 1].t() for _ in range(2))
    quantizer = ENGINE.quantizer("delayed", "E4M3", 8.0)
    quantizer.set_usage(columnwise=False)
    whole = quantizer(torch.randn(4, 3, 8)).detach()
    marked8, unmarked8 = whole[:, 0], whole[:, 1]
    quantizer.internal = True
    bare = quantizer(torch.randn(4, 8))
    with during("offload_v1"):
        SEAM["start_offload"](unmarked, offload_base_tensor=True)
        SEAM["mark_activation_offload"](marked, None, marked8, bare)
        back = saved_and_back(marked, unmarked, marked8, unmarked8, bare._data)
    given = (marked, unmarked, marked8, unmarked8, bare._data)
    assert all(same(one, other) for one, other in zip(back, given, strict=True))
    assert [pointer(one) == pointer(other) for one, other in zip(back, given, strict=True)] == [
        False, True, False, True, False,
    ]  # fmt: skip
    assert [tensor.is_contiguous() for tensor in back] == [True, False, True, False, True]
    assert same(whole[:, 0], marked8)  # the caller's is not emptied


def test_marks_of_the_other_path_and_outside_do_nothing() -> None:
    tensor = torch.randn(4, 3, 8)[:, 1]
    SEAM["mark_activation_offload"](tensor)
    SEAM["start_offload"](tensor, offload_base_tensor=True)
    with during("offload"):
        SEAM["mark_activation_offload"](tensor)
    with during("offload_v1"):
        SEAM["start_offload"](tensor, offload_base_tensor=True)
    assert not hasattr(tensor, "activation_offloading")
    assert not hasattr(tensor, "offload_base_tensor")


def test_a_saved_tensor_comes_back_as_it_was_when_it_was_saved() -> None:
    tensor = torch.randn(8, 8)
    before = tensor.clone()
    seen: list[Any] = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(tensor)
            return leaf.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.extend(ctx.saved_tensors)
            return gradient

    with during("offload"):
        output = Saves.apply(torch.zeros(1, requires_grad=True))
    tensor.zero_()
    output.backward()
    assert torch.equal(seen[0], before)


def test_the_constant_of_the_seam_says_which_path_the_source_was_loaded_for() -> None:
    assert ENGINE.seam()["NVTE_CPU_OFFLOAD_V1"] is False
    assert ENGINE.seam(offload_v1=True)["NVTE_CPU_OFFLOAD_V1"] is True
    assert ENGINE.seam(offload_v1=True).keys() == ENGINE.seam().keys()


def test_other_scenarios_switch_on_no_offload() -> None:
    for scenario in ("plain", "nvtx", "debug_prints", "hooks_copy"):
        with ENGINE.during(SimpleNamespace(scenario=scenario, layer_number=1)):  # type: ignore[arg-type]
            assert SEAM["is_cpu_offload_enabled"]() is False
