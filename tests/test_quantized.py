"""The caller's quantizers are of the kinds that each recipe has, no two scale alike, and what becomes of them shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.case import FP8_FORMATS, FP8_RECIPES, Case
from harness.engines.api import get_engine
from harness.quantized import LARGEST, SIZES, SLOTS, Quantizers, fp8_dtype, kind, parts, scales, state_tensors

ENGINE = get_engine("reference")
SEAM: dict[str, Any] = ENGINE.seam()
CLASSES = {
    "delayed": SEAM["Float8Quantizer"],
    "current": SEAM["Float8CurrentScalingQuantizer"],
    "mxfp8": SEAM["MXFP8Quantizer"],
}
RECIPES = [name for name in FP8_RECIPES if name != "none"]
AMAX = {"qkv": 4.5, "v": 4.0, "output_grad": 4.2}


def case_of(recipe: str = "delayed", **changes: Any) -> Case:
    return Case(fp8_recipe=recipe, **changes)


def made(recipe: str = "delayed", **changes: Any) -> Quantizers:
    return Quantizers.make(case_of(recipe, **changes), ENGINE, AMAX)


@pytest.mark.parametrize(
    ("recipe", "forward", "backward"),
    [
        ("delayed", "d" * 9, "d" * 6),
        ("current", "cccccc" + "ddd", "cccc" + "dd"),
        ("mxfp8", "m" * 9, "m" * 6),
        ("hybrid", "dd" + "c" + "dddddd", "ddd" + "c" + "dd"),
    ],
)
def test_each_place_of_the_lists_has_the_kind_of_its_recipe(recipe: str, forward: str, backward: str) -> None:
    quantizers = made(recipe)
    for group, letters in (("scaling_fwd", forward), ("scaling_bwd", backward)):
        assert "".join(kind(recipe, group, index)[0] for index in range(SIZES[group])) == letters
        assert [type(item) for item in quantizers.lists[group]] == [
            next(cls for name, cls in CLASSES.items() if name[0] == letter) for letter in letters
        ]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fp8_format", FP8_FORMATS)
def test_only_a_hybrid_format_goes_backward_in_e5m2(recipe: str, fp8_format: str) -> None:
    quantizers = made(recipe, fp8_format=fp8_format)
    assert {fp8_dtype(item) for item in quantizers.lists["scaling_fwd"]} == {"E4M3"}
    assert {fp8_dtype(item) for item in quantizers.lists["scaling_bwd"]} == {
        "E5M2" if fp8_format == "HYBRID" else "E4M3"
    }


def test_the_six_quantizers_stand_where_attention_looks_for_them() -> None:
    quantizers = made()
    found = SEAM["dpa_utils"].get_attention_quantizers(True, quantizers.lists)
    assert list(found) == [quantizers.named()[name] for name in ("QKV", "O", "S", "dQKV", "dO", "dP")]


@pytest.mark.parametrize("fp8_format", FP8_FORMATS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("head_dim_v", [8, 128])
def test_every_scale_is_a_power_of_two_of_its_own_under_which_what_is_bounded_does_not_saturate(
    fp8_format: str, dropout_p: float, head_dim_v: int
) -> None:
    case = case_of(fp8_format=fp8_format, dropout_p=dropout_p, head_dim_v=head_dim_v, head_dim_qk=head_dim_v)
    found = scales(case, AMAX)
    assert set(found) == set(SLOTS)
    assert len(set(found.values())) == len(found)
    assert all(math.log2(scale).is_integer() for scale in found.values())
    kept, backward = 1 / (1 - dropout_p), LARGEST["E5M2" if fp8_format == "HYBRID" else "E4M3"]
    for name, limit, bound in (
        ("QKV", 448, AMAX["qkv"]), ("S", 448, kept), ("O", 448, AMAX["v"] * kept), ("dO", backward, AMAX["output_grad"])
    ):  # fmt: skip
        assert found[name] * bound <= limit
    all_scales = [float(item.scale) for items in Quantizers.make(case, ENGINE, AMAX).lists.values() for item in items]
    assert len(set(all_scales)) == sum(SIZES.values())


def test_fresh_quantizers_share_nothing() -> None:
    tensors = [id(tensor) for quantizers in (made(), made()) for state in quantizers.made.values()
               for tensor in state.tensors.values()]  # fmt: skip
    assert len(set(tensors)) == 2 * 2 * sum(SIZES.values())


def test_scales_are_updated_in_place_and_that_is_no_change() -> None:
    quantizers = made()
    s = quantizers.named()["S"]
    scale, before = s.scale, float(s.scale)
    quantizers.update_scales()
    assert s.scale is scale
    assert float(scale) == 1.5 * before
    assert quantizers.changes() == "unchanged"


def _replace(quantizers: Quantizers) -> None:
    quantizers.lists["scaling_fwd"][8] = ENGINE.quantizer("delayed", "E4M3")


def _lengthen(quantizers: Quantizers) -> None:
    quantizers.lists["scaling_bwd"].append(None)


def _add_list(quantizers: Quantizers) -> None:
    quantizers.lists["scaling_hybrid"] = []


def _shorten(quantizers: Quantizers) -> None:
    del quantizers.lists["scaling_bwd"][5]


def _other_scale(quantizers: Quantizers) -> None:
    quantizers.named()["S"].scale = quantizers.named()["S"].scale.clone()


def _unused_flag(quantizers: Quantizers) -> None:
    quantizers.lists["scaling_fwd"][0].internal = True


def _unused_amax(quantizers: Quantizers) -> None:
    quantizers.lists["scaling_fwd"][0].amax.fill_(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_replace, "scaling_fwd[8] replaced"),
        (_lengthen, "scaling_bwd longer"),
        (_shorten, "scaling_bwd[5] replaced"),
        (_add_list, "the names of the lists"),
        (_other_scale, "scaling_fwd[8] given other tensors"),
        (_unused_flag, "scaling_fwd[0] changed"),
        (_unused_amax, "scaling_fwd[0] changed"),
    ],
)
def test_what_became_of_the_lists_and_of_what_nobody_uses_is_told(
    change: Callable[[Quantizers], None], words: str
) -> None:
    quantizers = made()
    assert quantizers.changes() == "unchanged"
    change(quantizers)
    assert quantizers.changes() == words


def test_an_amax_that_a_pass_writes_is_no_change_of_the_lists() -> None:
    quantizers = made()
    quantizers.named()["QKV"](torch.ones(4))
    quantizers.named()["QKV"].internal = True
    assert quantizers.changes() == "unchanged"


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("delayed", ["data", "transpose", "scale_inv"]),
        ("mxfp8", ["rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"]),
    ],
)
@pytest.mark.parametrize("internal", [False, True])
def test_a_quantized_tensor_is_made_of_the_parts_that_it_has(recipe: str, names: list[str], internal: bool) -> None:
    quantizer = ENGINE.quantizer(recipe, "E4M3")
    quantizer.internal = internal
    tensor = quantizer(torch.ones(32, 32))
    assert list(parts(tensor)) == names
    assert fp8_dtype(tensor) == "E4M3"
    quantizer.set_usage(columnwise=False)
    assert list(parts(quantizer(torch.ones(32, 32)))) == [
        name for name in names if name != "transpose" and not name.startswith("columnwise")
    ]


def test_only_a_quantizer_with_a_state_has_state_tensors() -> None:
    assert list(state_tensors(ENGINE.quantizer("delayed", "E4M3"))) == ["scale", "amax"]
    assert state_tensors(ENGINE.quantizer("current", "E4M3")) == {}
