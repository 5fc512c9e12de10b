"""Outcomes follow from differences and noise, verdicts from counts, and nothing is ever green for want of evidence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import get_args

import pytest

from harness.compare import KINDS, Difference, Distance, Kind
from harness.judge import (
    EXECUTED,
    EXIT_HARNESS,
    EXIT_NEUTRAL,
    EXIT_NOT_NEUTRAL,
    EXIT_UNVERIFIED,
    FINDINGS,
    NOISE_FACTOR,
    OUTCOMES,
    Outcome,
    count,
    empty_counts,
    judge,
    reached,
    unstable,
    verdict,
)
from harness.observe.values import made_by


def away(absolute: float, path: str = "grad/q") -> Difference:
    """Return a difference in the elements of a tensor, this far away."""
    return Difference(path, "value", None, None, "", Distance(4, 1, (0,), absolute, absolute))


def by_kernel(absolute: float, path: str = "grad/q", kernel: str = "fused_attn_bwd") -> Difference:
    """Return such a difference in a tensor that a kernel made on both sides."""
    made = {"is": made_by(kernel, "dq")}
    return dataclasses.replace(away(absolute, path), control=made, candidate=made)


def other(kind: Kind = "alias", path: str = "grad/q") -> Difference:
    return Difference(path, kind, None, None, "something else")


def counts(**numbers: int) -> dict[str, int]:
    """Return counts as a run would have them: ``executed`` follows from the rest unless given."""
    executed = sum(number for name, number in numbers.items() if name in EXECUTED or name == "both_raised")
    return empty_counts() | {"executed": executed} | numbers


def test_no_difference_and_no_noise_is_a_match() -> None:
    assert judge([], [[]]).outcome == "match"


@pytest.mark.parametrize("kind", KINDS)
def test_a_difference_of_any_kind_is_a_difference_and_is_kept(kind: Kind) -> None:
    judgement = judge([other(kind)], [[]])
    assert (judgement.outcome, judgement.differences) == ("difference", (other(kind),))


def test_a_difference_in_numbers_is_a_difference_where_the_control_repeats_itself() -> None:
    assert judge([away(1e-30)], [[], [], []]).outcome == "difference"


def test_noise_of_the_control_alone_is_noisy_and_never_a_match() -> None:
    judgement = judge([], [[away(1.0)]])
    assert judgement.outcome == "noisy"
    assert [(noise.path, noise.spread) for noise in judgement.noise] == [("grad/q", 1.0)]


@pytest.mark.parametrize(
    ("distance", "outcome"),
    [
        (0.0, "noisy"),
        (0.5, "noisy"),
        (NOISE_FACTOR * 0.5, "noisy"),
        (math.nextafter(NOISE_FACTOR * 0.5, math.inf), "difference"),
        (math.inf, "difference"),
    ],
)
def test_the_candidate_may_be_as_far_as_the_factor_times_the_spread_and_no_further(
    distance: float, outcome: Outcome
) -> None:
    assert judge([away(distance)], [[away(0.5)]]).outcome == outcome


def test_the_spread_is_the_largest_over_all_runs_of_the_control() -> None:
    own = [[away(0.25)], [], [away(1.0)], [away(0.5)]]
    assert judge([away(NOISE_FACTOR)], own).outcome == "noisy"
    assert judge([away(NOISE_FACTOR)], own[:1]).outcome == "difference"
    assert judge([], own).noise[0].spread == 1.0


def test_noise_on_one_path_excuses_no_other_path() -> None:
    judgement = judge([away(0.1), away(0.1, "grad/k")], [[away(1.0)]])
    assert judgement.outcome == "difference"
    assert [difference.path for difference in judgement.differences] == ["grad/k"]
    assert [noise.path for noise in judgement.noise] == ["grad/q"]


def test_noise_in_numbers_excuses_no_other_kind_and_no_plain_value() -> None:
    assert judge([other("alias")], [[away(1.0)]]).outcome == "difference"
    assert judge([other("value")], [[away(1.0)]]).outcome == "difference"


@pytest.mark.parametrize("kind", KINDS)
def test_a_control_that_disagrees_with_itself_in_more_than_numbers_is_an_error(kind: Kind) -> None:
    for differences in ([], [other(kind)], [away(1.0)]):
        judgement = judge(differences, [[], [away(1.0), other(kind)]])
        assert judgement.outcome == "error"
        assert judgement.differences == ()
        assert judgement.reason is not None
        assert "grad/q" in judgement.reason


def test_only_distances_between_tensors_are_stable_disagreements() -> None:
    assert unstable([[away(1.0)], [away(2.0)]]) == []
    assert unstable([[away(1.0), other("value")]]) == [other("value")]


def test_rare_noise_of_a_kernel_may_show_in_the_candidate_alone() -> None:
    assert judge([by_kernel(1.0)], [[]], [[], [by_kernel(1.0)]]).outcome == "noisy"
    assert judge([by_kernel(NOISE_FACTOR)], [[]], [[by_kernel(1.0)]]).outcome == "noisy"
    assert judge([by_kernel(NOISE_FACTOR * 1.01)], [[]], [[by_kernel(1.0)]]).outcome == "difference"


def test_noise_of_the_candidate_counts_only_where_it_has_some() -> None:
    assert judge([by_kernel(1.0)], [[]], [[], []]).outcome == "difference"
    assert judge([by_kernel(1.0)], [[]]).outcome == "difference"
    assert judge([by_kernel(1.0)], [[]], [[by_kernel(1.0, "grad/k")]]).outcome == "difference"


@pytest.mark.parametrize(
    "difference",
    [
        away(1.0),
        dataclasses.replace(by_kernel(1.0), control={"is": "fresh"}),
        dataclasses.replace(by_kernel(1.0), candidate={"is": "fresh"}),
        dataclasses.replace(by_kernel(1.0), distance=None),
        dataclasses.replace(by_kernel(1.0), kind="alias"),
    ],
)
def test_noise_that_is_not_shown_to_be_a_kernels_is_no_excuse(difference: Difference) -> None:
    assert judge([difference], [[]], [[difference], [away(1.0)]]).outcome == "difference"


def test_one_difference_that_no_kernel_made_takes_the_excuse_from_all() -> None:
    judgement = judge([by_kernel(1.0), other("alias", "call/x")], [[]], [[by_kernel(1.0)]])
    assert [difference.path for difference in judgement.differences] == ["grad/q", "call/x"]


def test_a_candidate_that_disagrees_with_itself_in_more_than_numbers_has_no_excuse() -> None:
    assert judge([by_kernel(1.0)], [[]], [[by_kernel(1.0)], [other()]]).outcome == "difference"


def test_every_outcome_is_counted_once_and_executed_only_where_a_comparison_was_reached() -> None:
    for outcome in OUTCOMES:
        tally = empty_counts()
        count(tally, outcome, both_raised=False)
        assert tally == empty_counts() | {outcome: 1, "executed": int(outcome in EXECUTED)}


def test_both_raising_alike_is_executed_and_no_match() -> None:
    tally = empty_counts()
    count(tally, "match", both_raised=True)
    assert tally == empty_counts() | {"both_raised": 1, "executed": 1}
    assert not reached(tally)


def test_both_raising_with_a_difference_is_a_difference() -> None:
    tally = empty_counts()
    count(tally, "difference", both_raised=True)
    assert tally == empty_counts() | {"difference": 1, "executed": 1}


def test_the_table_of_outcomes_is_whole() -> None:
    assert set(OUTCOMES) == set(get_args(Outcome))
    assert set(empty_counts()) == {"executed", "both_raised", *OUTCOMES}
    assert FINDINGS < EXECUTED < set(OUTCOMES)
    assert set(OUTCOMES) - EXECUTED == {"unsupported", "error"}


@pytest.mark.parametrize(
    ("numbers", "name", "code"),
    [
        ({"match": 5}, "neutral", EXIT_NEUTRAL),
        ({"match": 5, "noisy": 1, "intended": 1, "both_raised": 2, "unsupported": 9}, "neutral", EXIT_NEUTRAL),
        ({"noisy": 1}, "neutral", EXIT_NEUTRAL),
        ({"match": 5, "difference": 1}, "not neutral", EXIT_NOT_NEUTRAL),
        ({"match": 5, "crash": 1}, "not neutral", EXIT_NOT_NEUTRAL),
        ({"difference": 1, "error": 3}, "not neutral", EXIT_NOT_NEUTRAL),
        ({"match": 5, "error": 1}, "unverified", EXIT_HARNESS),
        ({"error": 1}, "unverified", EXIT_HARNESS),
        ({}, "unverified", EXIT_UNVERIFIED),
        ({"unsupported": 9}, "unverified", EXIT_UNVERIFIED),
        ({"both_raised": 9}, "unverified", EXIT_UNVERIFIED),
        ({"both_raised": 9, "unsupported": 9}, "unverified", EXIT_UNVERIFIED),
    ],
)
def test_verdict_and_exit_code_follow_from_the_counts(numbers: Mapping[str, int], name: str, code: int) -> None:
    found = verdict(counts(**numbers), {})
    assert (found.name, found.exit_code) == (name, code)
    assert found.reasons


@pytest.mark.parametrize("slice_", [{}, {"unsupported": 3}, {"both_raised": 3}, {"error": 1}])
def test_what_was_asked_for_and_not_reached_makes_the_run_unverified(slice_: Mapping[str, int]) -> None:
    found = verdict(counts(match=5), {"layout sbh3d": counts(match=5), "layout t3hd": counts(**slice_)})
    assert (found.name, found.exit_code) == ("unverified", EXIT_UNVERIFIED)
    assert any("layout t3hd" in reason for reason in found.reasons)
    assert not any("sbh3d" in reason for reason in found.reasons)


def test_a_slice_is_reached_by_one_comparison_of_numbers() -> None:
    for outcome in EXECUTED:
        assert reached(counts(**{outcome: 1, "both_raised": 7}))


def test_a_fault_of_the_harness_is_no_finding_and_no_pass_and_a_finding_outweighs_it() -> None:
    assert verdict(counts(match=5), {}, "out of disk").exit_code == EXIT_HARNESS
    assert verdict(counts(match=5), {}, "out of disk").reasons == ("out of disk",)
    assert verdict(counts(difference=1), {}, "out of disk").exit_code == EXIT_NOT_NEUTRAL
    assert "out of disk" in verdict(counts(difference=1), {}, "out of disk").reasons


def test_every_reason_is_given_and_the_weightiest_first() -> None:
    found = verdict(counts(difference=2, error=1), {"lane x": counts()}, "interrupted")
    assert len(found.reasons) == 4
    assert "2 of 2 executed cases differ" in found.reasons[0]
    assert "lane x" in found.reasons[-1]


def test_a_verdict_is_neutral_exactly_where_its_exit_code_is_zero() -> None:
    for numbers in ({"match": 1}, {"difference": 1}, {"error": 1}, {}, {"both_raised": 1}):
        found = verdict(counts(**numbers), {})
        assert (found.name == "neutral") == (found.exit_code == 0)
