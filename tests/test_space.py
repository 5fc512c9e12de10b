"""The space says of levels just what the rules of a case and the constraints of the kernels say of its fields."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from harness import constraints
from harness.case import BACKWARD_SCENARIOS, DTYPES, Case, CaseError
from harness.constraints import CONSTRAINTS
from harness.engines.api import get_engine
from harness.execute.pair import Pair
from harness.layouts import LAYOUTS
from harness.space import (
    CLASHES,
    FACTORS,
    RAISING,
    SIZES,
    Box,
    case_of,
    everything,
    excluded,
    fields_of,
    meet,
    refusals,
    row,
    sizes,
    solve,
    why_impossible,
    within,
)
from harness.subjects.source import resolve

NO_SUCH_LEVEL = {"bias-to-leave-out", "offset-to-leave-out"}
"""What no field can state: leaving out the gradient of what is not there."""


def random_rows(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield rows, some random throughout, some random in a few factors only, so that many are nearly valid."""
    draw = random.Random(seed)
    levels = everything()
    for _ in range(count):
        base = solve({name: frozenset({draw.choice(levels[name])}) for name in ("qkv_layout", "fp8_recipe")})
        found = dict(base or solve() or {})
        for name in draw.sample(list(FACTORS), draw.choice((1, 2, 3, 5, 8, len(FACTORS)))):
            found[name] = draw.choice(levels[name])
        yield found


def made(levels: dict[str, str], seed: int, engine: str = "reference") -> Case | None:
    try:
        return case_of(levels, seed, engine)
    except CaseError:
        return None


def test_levels_clash_just_where_the_rules_or_the_constraints_refuse_the_case() -> None:
    seen: Counter[str] = Counter()
    valid = 0
    for seed, levels in enumerate(random_rows(7_000, 0)):
        found = excluded(levels)
        seen.update(clash.id for clash in found)
        if any(clash.id in NO_SUCH_LEVEL for clash in found):
            continue
        case = made(levels, seed)
        assert (case is None) == any(not clash.kernels for clash in found), (levels, found)
        if case is not None:
            assert (constraints.refusal(case) is None) == (not found), (levels, found)
            assert row(case) == levels
            valid += not found
    assert valid > 500, "too few valid rows show that the clashes are not too strict"
    assert set(seen) == {clash.id for clash in CLASHES}, "a clash that no row shows is not tested"


def test_a_level_that_no_field_can_state_is_not_the_level_of_the_case_that_comes_of_it() -> None:
    plain = solve()
    assert plain is not None
    for level in ("without_bias", "without_offset"):
        assert row(case_of({**plain, "requires_grad": level}, 0))["requires_grad"] == "all"


def test_every_constraint_has_its_clash() -> None:
    assert {item.id for item in CONSTRAINTS} == {clash.id for clash in CLASHES if clash.kernels}


def test_ids_of_clashes_are_distinct() -> None:
    ids = [clash.id for clash in (*CLASHES, *RAISING)]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", FACTORS)
def test_every_level_is_of_some_valid_case_and_comes_back_from_it(name: str) -> None:
    for level in FACTORS[name].levels:
        found = solve({name: frozenset({level})})
        if (name, level) == ("bias", "pre_scale_bias"):  # kept to be named: no kernel takes it
            assert found is None
            continue
        assert found is not None
        assert not excluded(found)
        for seed in range(3):
            case = case_of(found, seed)
            assert row(case) == found
            assert constraints.refusal(case) is None


def test_every_field_of_a_case_follows_from_levels_or_is_free() -> None:
    plain = solve()
    assert plain is not None
    fields = fields_of(plain, lambda options: options[0])
    assert {*fields, "seed"} == {field.name for field in dataclasses.fields(Case)}


def test_the_plainest_levels_are_those_of_a_plain_case() -> None:
    plain = solve()
    assert plain == {name: factor.levels[0] for name, factor in FACTORS.items()}
    assert plain["scenario"] == "plain"
    assert plain["fp8_recipe"] == "none"


def test_the_same_levels_and_seed_give_the_same_case_and_another_seed_another() -> None:
    plain = solve()
    assert plain is not None
    assert case_of(plain, 7) == case_of(plain, 7)
    assert case_of(plain, 7) != case_of(plain, 8)


def test_sizes_are_pairwise_different_where_their_levels_let_them() -> None:
    found = solve({name: frozenset({level}) for name, level in (
        ("heads", "gqa"), ("lengths", "longer"), ("head_dims", "v_larger"), ("batch_size", "several"))})  # fmt: skip
    assert found is not None
    distinct = 0
    for seed in range(60):
        case = case_of(found, seed)
        numbers = [case.batch_size, case.num_heads, case.num_gqa_groups, case.max_seqlen_q, case.max_seqlen_kv,
                   case.head_dim_qk, case.head_dim_v]  # fmt: skip
        distinct += len(set(numbers)) == len(numbers)
    assert distinct >= 58


@pytest.mark.parametrize(
    ("fields", "levels"),
    [
        ({"max_seqlen_kv": 8}, {"lengths": "shorter"}),
        ({"max_seqlen_q": 1}, {"lengths": "one_query"}),
        ({"max_seqlen_q": 1, "max_seqlen_kv": 1}, {"lengths": "self"}),
        ({"num_gqa_groups": 1}, {"heads": "mqa"}),
        ({"num_heads": 1, "num_gqa_groups": 1}, {"heads": "mha"}),
        ({"window_size": (-1, 3)}, {"window_size": None}),
        ({"window_size": (4, -1)}, {"window_size": None}),
        ({"attn_mask_type": "causal", "window_size": (-1, 0)}, {"window_size": "none"}),
        ({"attn_bias_type": "post_scale_bias", "requires_grad": ("attn_bias",)}, {"requires_grad": None}),
        ({"attn_bias_type": "post_scale_bias"}, {"bias": "1hss", "requires_grad": "without_bias"}),
        ({"softmax_type": "learnable"}, {"requires_grad": "without_offset"}),
        ({"softmax_type": "off-by-one"}, {"requires_grad": "all"}),
        ({"requires_grad": ("q", "v")}, {"requires_grad": "q"}),
        ({"requires_grad": ("v",)}, {"requires_grad": "kv"}),
        ({"requires_grad": ()}, {"requires_grad": "none"}),
        ({"attn_bias_type": "pre_scale_bias"}, {"bias": "pre_scale_bias"}),
        ({"qkv_layout": "paged_kv_bshd_bshd_bshd", "page_size": 16}, {"page_size": "one"}),
        ({"qkv_layout": "paged_kv_bshd_bshd_bshd", "page_size": 4}, {"page_size": "several"}),
    ],
)
def test_a_case_has_the_levels_that_its_values_belong_to(fields: dict[str, Any], levels: dict[str, str | None]) -> None:
    found = row(Case(**fields))
    assert {name: found[name] for name in levels} == levels


# ------------------------------------------------------------------ sizes


def test_every_engine_and_recipe_has_sizes_and_every_row_of_the_table_is_used() -> None:
    recipes = FACTORS["fp8_recipe"].levels
    used = {id(sizes(engine, recipe)) for engine in ("reference", "cudnn") for recipe in recipes}
    assert used == {id(found) for _, _, found in SIZES}


@pytest.mark.parametrize("recipe", FACTORS["fp8_recipe"].levels)
@pytest.mark.parametrize("engine", ["reference", "cudnn"])
def test_sizes_fit_what_the_kernels_of_a_recipe_take(recipe: str, engine: str) -> None:
    for lengths in ("self", "shorter", "longer"):
        found = solve({"fp8_recipe": frozenset({recipe}), "lengths": frozenset({lengths})})
        assert found is not None
        for seed in range(8):
            case = case_of(found, seed, engine)
            if recipe == "mxfp8" or (engine == "cudnn" and case.fp8):
                assert case.max_seqlen_q % 128 == case.max_seqlen_kv % 128 == 0
                assert case.head_dim_qk % 32 == 0
            if recipe == "delayed" and engine == "cudnn":
                assert case.head_dim_qk == case.head_dim_v == 128


# ------------------------------------------------------------------ what excludes what


@pytest.mark.parametrize(
    ("box", "says"),
    [
        ({"fp8_recipe": "delayed", "qkv_layout": "thd_thd_thd"}, "fp8_recipe=delayed takes dense layouts"),
        ({"fp8_recipe": "mxfp8", "lengths": "one_query"}, "needs sequences of a multiple of 128"),
        ({"bias": "pre_scale_bias"}, "attn_bias_type=pre_scale_bias is not supported by any kernel"),
        ({"bias": "alibi", "attn_mask_type": "padding"}, "attn_bias_type=alibi needs a causal mask"),
        ({"qkv_layout": "paged_kv_bshd_bshd_bshd", "scenario": "offload"}, "scenario=offload needs a backward pass"),
        ({"qkv_layout": "sb3hd", "heads": "gqa"}, "qkv_layout=sb3hd holds q, k and v in one buffer"),
        ({"scenario": "fav2_backward", "qkv_layout": "sb3hd", "softmax_type": "learnable"}, "scenario=fav2_backward"),
    ],
)
def test_what_keeps_every_case_out_is_told_in_the_words_of_the_rule(box: dict[str, str], says: str) -> None:
    asked = {name: frozenset({level}) for name, level in box.items()}
    assert solve(asked) is None
    told = why_impossible(asked)
    assert len(told) == 1
    assert says in told[0]


def test_nothing_keeps_a_case_out_of_a_box_that_holds_one() -> None:
    assert why_impossible({}) == []
    assert why_impossible({"fp8_recipe": frozenset({"mxfp8"}), "fp8_input": frozenset({"true"})}) == []


def test_an_empty_box_is_impossible_and_says_so() -> None:
    assert solve({"dtype": frozenset()}) is None
    assert why_impossible({"dtype": frozenset()}) == ["nothing has all the levels asked for"]


def test_all_rules_that_levels_break_are_told() -> None:
    plain = solve()
    assert plain is not None
    assert refusals(plain) == []
    told = refusals({**plain, "qkv_layout": "sb3hd", "heads": "gqa", "lengths": "longer"})
    assert len(told) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scenario", FACTORS["scenario"].levels)
def test_the_solver_agrees_with_a_search_through_random_rows(layout: str, scenario: str) -> None:
    found = solve({"qkv_layout": frozenset({layout}), "scenario": frozenset({scenario})})
    needs_gradients = scenario in BACKWARD_SCENARIOS
    possible = not (needs_gradients and LAYOUTS[layout].paged)
    if scenario in ("scale_changed", "recipe_changed"):  # need FP8, which is dense
        possible &= not LAYOUTS[layout].thd and LAYOUTS[layout].q_format == LAYOUTS[layout].kv_format
    if scenario == "fav2_backward":
        possible &= "sbhd" not in (LAYOUTS[layout].q_format, LAYOUTS[layout].kv_format)
    assert (found is not None) == possible


def test_boxes_meet_in_what_both_hold() -> None:
    one: Box = {"dtype": frozenset({"bf16", "fp16"}), "heads": frozenset({"mha"})}
    two: Box = {"dtype": frozenset({"fp16", "fp32"}), "lengths": frozenset({"self"})}
    both = meet(one, two)
    assert both == {"dtype": {"fp16"}, "heads": {"mha"}, "lengths": {"self"}}
    levels = row(Case(dtype="fp16"))
    assert within(levels, both)
    assert not within(row(Case()), both)
    assert set(DTYPES) == set(FACTORS["dtype"].levels)


# ------------------------------------------------------------------ what raises


@pytest.mark.parametrize("clash", RAISING, ids=lambda clash: str(clash.id))
def test_levels_that_are_said_to_raise_do_raise_on_both_sides(clash: Any) -> None:
    pair = Pair(resolve("legacy"), resolve("refactored"), get_engine("reference"))
    choices = [
        {name: frozenset({level}) for name, level in zip(clash.factors, levels, strict=True)}
        for levels in itertools.product(*(FACTORS[name].levels for name in clash.factors))
        if clash.excludes(*levels)
    ]
    random.Random(0).shuffle(choices)
    rows = [found for box in choices if (found := solve(box)) is not None]
    assert rows
    for seed, levels in enumerate(rows[:6]):
        result = pair.run(case_of(levels, seed))
        assert (result.outcome, result.both_raised) == ("match", True), (levels, result)


@pytest.mark.parametrize("asked", FACTORS["requires_grad"].levels)
def test_a_bias_beside_an_offset_raises_just_where_the_table_says_so(asked: str) -> None:
    pair = Pair(resolve("legacy"), resolve("refactored"), get_engine("reference"))
    levels = solve({name: frozenset({level}) for name, level in (
        ("bias", "1hss"), ("softmax_type", "learnable"), ("requires_grad", asked))})  # fmt: skip
    assert levels is not None
    assert pair.run(case_of(levels, 0)).both_raised == bool(excluded(levels, RAISING))
