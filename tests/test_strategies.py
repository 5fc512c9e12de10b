"""What is drawn is valid, repeatable and reaches every option; what is shrunk still fails and is smaller."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from hypothesis import given, settings

from harness.case import BIAS_SHAPES, DTYPES, MASKS, Case, padding
from harness.engines.api import get_engine
from harness.layouts import LAYOUTS
from harness.space import DROPOUTS, FACTORS, LAYERS, SCALES, row
from harness.strategies import cases, cases_between, draw_cases, smallest


@functools.cache
def drawn() -> list[Case]:
    return draw_cases(cases(dtypes=DTYPES), 1000, seed=0)


NOT_DRAWN = {"bias": {"pre_scale_bias"}}  # no kernel takes it
REACHED: dict[str, set[object]] = {
    "dropout_p": {0.0, *DROPOUTS},
    "attn_scale": {None, *SCALES},
    "layer_number": set(LAYERS),
    "bias_shape": set(BIAS_SHAPES),
}


@pytest.mark.parametrize("factor", FACTORS)
def test_every_level_is_drawn_and_no_other(factor: str) -> None:
    wanted = set(FACTORS[factor].levels) - NOT_DRAWN.get(factor, set())
    assert {row(case)[factor] for case in drawn()} == wanted


@pytest.mark.parametrize("field", REACHED)
def test_every_value_of_a_field_is_drawn_and_no_other(field: str) -> None:
    assert {getattr(case, field) for case in drawn()} == REACHED[field]


@pytest.mark.parametrize("layout", [name for name, row in LAYOUTS.items() if row.thd])
def test_a_ragged_layout_is_drawn_with_gaps_and_without_and_no_other_has_gaps(layout: str) -> None:
    assert {case.pad_between_seqs for case in drawn() if case.qkv_layout == layout} == {False, True}
    assert not any(case.pad_between_seqs for case in drawn() if not case.layout.thd)


def test_ragged_and_paged_layouts_are_drawn_with_every_mask_that_they_can_have() -> None:
    needing = [case for case in drawn() if case.layout.thd or case.layout.paged]
    assert {case.attn_mask_type for case in needing} == {mask for mask in MASKS if padding(mask)}
    free = [case for case in drawn() if not case.layout.thd and not case.layout.paged]
    assert {case.attn_mask_type for case in free} == set(MASKS)


def test_the_reference_engine_takes_everything_that_is_drawn_but_what_needs_a_gpu() -> None:
    engine = get_engine("reference")
    assert {case.scenario for case in drawn() if engine.unsupported(case) is not None} == {"graph_capture"}


def test_every_field_varies() -> None:
    for field in Case.__dataclass_fields__:
        assert len({getattr(case, field) for case in drawn()}) > 1, field


def test_bias_shapes_reach_a_real_bias() -> None:
    assert {case.bias_shape for case in drawn() if case.has_bias} == set(BIAS_SHAPES)


@pytest.mark.parametrize("name", ["q", "k", "v", "attn_bias", "softmax_offset"])
def test_every_gradient_is_asked_for_in_some_case_and_left_out_in_another(name: str) -> None:
    able = {
        "attn_bias": [case for case in drawn() if case.has_bias],
        "softmax_offset": [case for case in drawn() if case.softmax_type == "learnable"],
    }.get(name, drawn())
    assert {name in case.requires_grad for case in able} == {True, False}


def test_deliberate_coincidences_of_sizes_are_drawn_and_are_not_the_rule() -> None:
    for coincidence in (
        lambda case: case.num_heads == case.max_seqlen_q,
        lambda case: case.batch_size == 3,
        lambda case: case.num_heads == 3,
        lambda case: case.max_seqlen_q == 1,
        lambda case: case.max_seqlen_kv == 1,
    ):
        share = sum(map(coincidence, drawn())) / len(drawn())
        assert 0 < share < 0.5


@given(cases(layouts=("sbhd_sbh2d", "thd_thd_thd"), dtypes=("fp16",)))
@settings(max_examples=100, deadline=None)
def test_draws_keep_to_the_layouts_and_dtypes_asked_for_and_are_valid(case: Case) -> None:
    assert case.qkv_layout in ("sbhd_sbh2d", "thd_thd_thd")
    assert case.dtype == "fp16"
    assert Case.from_dict(case.to_dict()) == case


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_the_same_seed_draws_the_same_cases(seed: int) -> None:
    first = draw_cases(cases(), 40, seed)
    assert draw_cases(cases(), 40, seed) == first
    assert len(first) > 20


def test_another_seed_draws_other_cases() -> None:
    first, second = ({case.id for case in draw_cases(cases(), 40, seed)} for seed in (0, 1))
    assert len(first & second) < 10


def test_drawn_cases_are_distinct_and_not_more_than_asked_for() -> None:
    drawn = draw_cases(cases(), 50, seed=3)
    assert len({case.id for case in drawn}) == len(drawn) <= 50


# ------------------------------------------------------------------ shrinking

STRATEGY = cases(layouts=("sbhd_sbhd_sbhd",))
FAULTS: dict[str, Callable[[Case], bool]] = {
    "long queries": lambda case: case.max_seqlen_q >= 16,
    "dropout": lambda case: case.dropout_p > 0,
    "groups and padding": lambda case: case.num_heads != case.num_gqa_groups and "padding" in case.attn_mask_type,
    "bias in training": lambda case: case.has_bias and case.is_training and case.batch_size > 1,
    "everything": lambda case: True,
}


def size(case: Case) -> int:
    return (
        case.batch_size * case.num_heads * case.num_gqa_groups * case.max_seqlen_q * case.max_seqlen_kv
        * case.head_dim_qk * case.head_dim_v
    )  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("seed", [0, 5])
def test_the_smallest_case_fails_and_is_not_larger(what: str, seed: int) -> None:
    fails = FAULTS[what]
    failing = next(case for case in draw_cases(STRATEGY, 50, seed) if fails(case))
    found = smallest(STRATEGY, 50, seed, failing, fails)
    assert fails(found)
    assert size(found) <= size(failing)


def test_shrinking_ends_at_the_plainest_levels_and_the_smallest_sizes_of_them() -> None:
    failing = next(case for case in draw_cases(STRATEGY, 50, 0) if FAULTS["long queries"](case))
    found = smallest(STRATEGY, 50, 0, failing, FAULTS["long queries"], runs=1000, seconds=60)
    assert found.replace(seed=0) == Case(
        qkv_layout="sbhd_sbhd_sbhd", batch_size=1, num_heads=1, num_gqa_groups=1, max_seqlen_q=16, max_seqlen_kv=16,
        head_dim_qk=8, head_dim_v=8,
    )  # fmt: skip


def test_what_is_drawn_between_a_case_and_the_plainest_has_a_level_of_one_of_them() -> None:
    case = next(case for case in drawn() if case.fp8 and case.scenario != "plain")
    between = draw_cases(cases_between(case), 100, 0)
    assert len(between) > 20
    own = row(case)
    for found in map(row, between):
        assert all(found[name] in (own[name], factor.levels[0]) for name, factor in FACTORS.items())
    assert any(row(found) != own for found in between)


@pytest.mark.parametrize("runs", [0, 1, 5])
def test_shrinking_keeps_to_its_budget_of_runs(runs: int) -> None:
    calls: list[Case] = []

    def fails(case: Case) -> bool:
        calls.append(case)
        return case.max_seqlen_q >= 16

    failing = next(case for case in draw_cases(STRATEGY, 50, 0) if case.max_seqlen_q >= 40)
    found = smallest(STRATEGY, 50, 0, failing, fails, runs=runs)
    assert len(calls) <= runs
    assert found.max_seqlen_q >= 16
    assert len({case.id for case in calls}) == len(calls), "a case that is known is not run again"


def test_shrinking_keeps_to_its_budget_of_time() -> None:
    failing = draw_cases(STRATEGY, 50, 0)[10]
    calls: list[Case] = []

    def fails(case: Case) -> bool:
        calls.append(case)
        return True

    assert smallest(STRATEGY, 50, 0, failing, fails, seconds=0.0) == failing
    assert calls == []


def test_the_given_case_comes_back_when_nothing_smaller_fails() -> None:
    failing = draw_cases(STRATEGY, 50, 0)[20]
    assert smallest(STRATEGY, 50, 0, failing, lambda case: case == failing) == failing


def test_the_given_case_comes_back_when_the_seed_does_not_draw_it() -> None:
    failing = Case(qkv_layout="sbhd_sbhd_sbhd", batch_size=17)  # no draw has this size
    calls: list[Case] = []

    def fails(case: Case) -> bool:
        calls.append(case)
        return True

    assert smallest(STRATEGY, 50, 0, failing, fails) == failing
    assert calls == []


def test_a_fault_while_shrinking_is_not_taken_for_a_failing_case() -> None:
    failing = draw_cases(STRATEGY, 50, 0)[10]

    def fails(case: Case) -> bool:
        raise ZeroDivisionError("the harness is broken")

    with pytest.raises(ZeroDivisionError, match="the harness is broken"):
        smallest(STRATEGY, 50, 0, failing, fails)
