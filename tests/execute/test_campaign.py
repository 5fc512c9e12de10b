"""A run executes as many cases as asked, the same ones for the same seed, and shrinks what differs to the same."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.case import Case
from harness.cli import app
from harness.compare import Difference
from harness.execute.campaign import HOPELESS, Campaign, Plan, plan
from harness.execute.journal import read_journal
from harness.execute.pair import CaseResult
from harness.judge import EXECUTED, Outcome
from harness.ledger import ledger

Judge = Callable[[Case], CaseResult]
DTYPES = ("bf16", "fp16")


def match(case: Case) -> CaseResult:
    return CaseResult(case, "match")


def ends(outcome: Outcome) -> Judge:
    return lambda case: CaseResult(case, outcome, reason="because")


def differing(*signatures: tuple[str, str]) -> Callable[[Case], CaseResult]:
    found = tuple(Difference(path, kind, 1, 2, "") for path, kind in signatures)  # type: ignore[arg-type]
    return lambda case: CaseResult(case, "difference", differences=found)


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored case."""

    name: str
    case: Case


class FakePair:
    """Stands for a pair of subjects: judges a case by a rule."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.ran: list[Case] = []

    def run(self, case: Case, *, alone: bool = False) -> CaseResult:
        self.ran.append(case)
        return self.judge(case)

    def run_all(
        self,
        cases: Sequence[Case],
        begun: Callable[[Case], None],
        ended: Callable[[CaseResult], None],
        stop: Callable[[], bool],
    ) -> list[CaseResult | None]:
        results: list[CaseResult | None] = []
        for case in cases:
            if stop():
                results.append(None)
                continue
            begun(case)
            results.append(result := self.run(case))
            ended(result)
        return results


class Log:
    """Stands for a journal."""

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []

    def write(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)

    def of(self, name: str) -> list[Mapping[str, Any]]:
        return [event for event in self.events if event["event"] == name]


def campaign(
    judge: Judge, folder: Path, count: int = 20, layouts: Sequence[str] = ("sbh3d", "sbhd_sbhd_sbhd"), seed: int = 0
) -> Log:
    log = Log()
    plan = Plan(layouts, count, seed, DTYPES)
    Campaign(plan, FakePair(judge), log, folder, {"control": "a", "candidate": "b"}).run()  # type: ignore[arg-type]
    return log


def planned(judge: Judge, folder: Path, *lanes: str, strength: int = 0, **options: Any) -> Log:
    """Run what ``plan`` makes of a request for some lanes of two layouts, in bf16 alone."""
    log = Log()
    made = plan(("sbh3d", "bs3hd"), lanes, 0, ("bf16",), strength=strength, **options)
    Campaign(made, FakePair(judge), log, folder, {}).run()  # type: ignore[arg-type]
    return log


def origins(log: Log) -> list[str]:
    return [event["origin"] for event in log.of("case")]


def executed(log: Log) -> Counter[str]:
    return Counter(event["case"]["qkv_layout"] for event in log.of("case") if event["outcome"] in EXECUTED)


@pytest.mark.parametrize("count", [1, 2, 7, 60])
def test_exactly_as_many_cases_as_asked_are_executed_spread_evenly(count: int, tmp_path: Path) -> None:
    layouts = ("sbh3d", "bs3hd", "sbhd_sbhd_sbhd")
    found = executed(campaign(match, tmp_path, count, layouts))
    assert found.total() == count
    assert max(found.values()) - min(found[layout] for layout in layouts) <= 1


def test_the_same_seed_runs_the_same_cases_and_another_seed_others(tmp_path: Path) -> None:
    runs = [[event["case_id"] for event in campaign(match, tmp_path, seed=seed).of("case")] for seed in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert len(set(runs[0]) & set(runs[2])) < len(runs[0]) / 2


def test_no_case_runs_twice(tmp_path: Path) -> None:
    ids = [event["case_id"] for event in campaign(match, tmp_path, 120, ("sbh3d",)).of("case")]
    assert len(ids) == len(set(ids)) == 120


def test_cases_of_one_layout_do_not_depend_on_which_others_are_asked_for(tmp_path: Path) -> None:
    alone = campaign(match, tmp_path, 10, ("sbh3d",)).of("case")
    beside = campaign(match, tmp_path, 20, ("bs3hd", "sbh3d")).of("case")
    assert [event["case_id"] for event in alone] == [
        event["case_id"] for event in beside if event["case"]["qkv_layout"] == "sbh3d"
    ]


def test_the_share_of_a_layout_that_is_refused_goes_to_the_others(tmp_path: Path) -> None:
    def judge(case: Case) -> CaseResult:
        return match(case) if case.qkv_layout == "sbh3d" else ends("unsupported")(case)

    log = campaign(judge, tmp_path, 20, ("t3hd", "sbh3d", "th3d"))
    assert executed(log) == {"sbh3d": 20}
    refused = Counter(event["case"]["qkv_layout"] for event in log.of("case")) - executed(log)
    assert refused == {"t3hd": HOPELESS, "th3d": HOPELESS}


@pytest.mark.parametrize("outcome", ["unsupported", "error"])
def test_a_run_in_which_nothing_can_be_executed_ends(outcome: Outcome, tmp_path: Path) -> None:
    log = campaign(ends(outcome), tmp_path, 20)
    assert executed(log).total() == 0
    assert 0 < len(log.of("case")) <= 2 * HOPELESS


def test_what_is_not_executed_is_journalled_and_made_up_for(tmp_path: Path) -> None:
    def judge(case: Case) -> CaseResult:
        return match(case) if case.dtype == "bf16" else ends("unsupported")(case)

    log = campaign(judge, tmp_path, 40)
    assert executed(log).total() == 40
    assert Counter(event["outcome"] for event in log.of("case"))["unsupported"] > 5


@pytest.mark.parametrize("outcome", sorted(EXECUTED))
def test_every_executed_outcome_counts(outcome: Outcome, tmp_path: Path) -> None:
    assert executed(campaign(ends(outcome), tmp_path, 6)).total() == 6


def test_every_case_is_journalled_before_the_next_one_starts(tmp_path: Path) -> None:
    log, journalled = Log(), []
    pair = FakePair(match)

    def judge(case: Case) -> CaseResult:
        journalled.append([event["event"] for event in log.events])
        return match(case)

    pair.judge = judge
    seen: list[CaseResult] = []
    plan = Plan(("sbh3d",), 5, 0, DTYPES)
    Campaign(plan, pair, log, tmp_path, {}, seen.append).run()  # type: ignore[arg-type]
    assert journalled == [["begun", "case"] * number + ["begun"] for number in range(5)]
    assert [result.case.id for result in seen] == [event["case_id"] for event in log.of("case")]


def test_a_failing_case_shrinks_to_the_smallest_with_the_same_difference(tmp_path: Path) -> None:
    def judge(case: Case) -> CaseResult:
        return differing(("grad/k", "value"))(case) if case.max_seqlen_kv > 6 and case.dropout_p else match(case)

    (event,) = campaign(judge, tmp_path, 40, ("sbhd_sbhd_sbhd",)).of("smallest")
    assert (event["path"], event["kind"]) == ("grad/k", "value")
    plainest = Case(
        batch_size=1, num_heads=1, num_gqa_groups=1, max_seqlen_q=16, max_seqlen_kv=16, dropout_p=0.1
    )  # lengths that are equal are plainer than a short one beside a long one
    assert Case.from_dict(event["case"]) == plainest.replace(seed=event["case"]["seed"])


def test_shrinking_never_slips_to_another_difference(tmp_path: Path) -> None:
    def judge(case: Case) -> CaseResult:
        signature = ("grad/q", "value") if case.batch_size >= 3 else ("output/0", "alias")
        return differing(signature)(case)

    events = {event["path"]: event for event in campaign(judge, tmp_path, 40).of("smallest")}
    assert set(events) == {"grad/q", "output/0"}
    assert events["grad/q"]["case"]["batch_size"] == 3
    assert events["output/0"]["case"]["batch_size"] == 1
    for path, event in events.items():
        assert {item["path"] for item in event["differences"]} == {path}


def test_the_smallest_case_is_stored_with_the_run_that_it_belongs_to(tmp_path: Path) -> None:
    (event,) = campaign(differing(("grad/q", "value")), tmp_path).of("smallest")
    stored = json.loads((tmp_path / event["file"]).read_text())
    assert stored["case"] == event["case"]
    assert {key: stored[key] for key in ("control", "candidate", "path", "kind")} == {
        "control": "a", "candidate": "b", "path": "grad/q", "kind": "value",
    }  # fmt: skip
    assert Case.from_dict(stored["case"]).id == event["case_id"]


def test_two_differences_that_shrink_to_one_case_keep_a_file_each(tmp_path: Path) -> None:
    def judge(case: Case) -> CaseResult:
        both = [("grad/q", "value"), ("grad/k", "value")]
        found = differing(*(both if case.num_heads % 2 else reversed(both)))
        return found(case) if case.batch_size >= 3 else match(case)

    events = campaign(judge, tmp_path, 30, ("sbh3d",)).of("smallest")
    assert len(events) == 2
    assert len({event["case_id"] for event in events}) == 1
    assert {json.loads((tmp_path / event["file"]).read_text())["path"] for event in events} == {"grad/q", "grad/k"}


STORED = (
    Stored("0001-one/1", Case(qkv_layout="sbh3d", seed=11)),
    Stored("0002-elsewhere/1", Case(seed=12)),
    Stored("0003-two/1", Case(qkv_layout="bs3hd", seed=13)),
)
NARROW = "nvtx"
NARROW_START = {
    "event": "start", "engine": "reference", "dtypes": ["bf16"],
    "asked": {"layouts": ["sbh3d", "bs3hd"], "lanes": [NARROW], "strength": 2},
}  # fmt: skip
"""What ``planned`` is asked for, of one lane."""


def test_stored_cases_run_first_then_the_covering_set_then_drawn_ones_and_each_says_which(tmp_path: Path) -> None:
    log = planned(match, tmp_path, strength=2, stored=STORED)
    found = origins(log)
    assert found[:2] == ["stored 0001-one/1", "stored 0003-two/1"], "the one outside the layouts is left out"
    drawn = len(found) - 2 - found.count("covering")
    assert found[2:] == ["covering"] * found.count("covering") + ["explored"] * drawn
    assert drawn == round(0.1 * found.count("covering")) > 0


def test_a_number_of_cases_stops_the_stored_ones_and_the_covering_set(tmp_path: Path) -> None:
    assert origins(planned(match, tmp_path, strength=2, stored=STORED, count=1)) == ["stored 0001-one/1"]
    found = origins(planned(match, tmp_path, strength=2, stored=STORED, count=6))
    assert found[2:] == ["covering"] * 4


def test_a_stored_case_outside_the_lanes_asked_for_is_left_out(tmp_path: Path) -> None:
    assert not [name for name in origins(planned(match, tmp_path, NARROW, stored=STORED, count=3)) if "stored" in name]


def test_every_case_of_a_run_is_of_a_lane_asked_for(tmp_path: Path) -> None:
    cases = planned(match, tmp_path, NARROW, "no-grad", strength=2, count=40).of("case")
    assert {event["case"]["scenario"] for event in cases} == {"nvtx", "no_grad"}
    assert {event["origin"] for event in cases} == {"covering"}


def test_a_covering_set_that_ran_leaves_no_valid_combination_out(tmp_path: Path) -> None:
    log = planned(match, tmp_path, NARROW, strength=2)
    found = ledger([NARROW_START, *log.events])
    assert found.valid > 100
    assert (found.count("executed"), found.share) == (found.valid, 1.0)
    fewer = [event for event in log.events if event["case"]["dropout_p"] == 0.0]
    assert ledger([NARROW_START, *fewer]).share < 1.0


def test_what_came_in_refused_cases_alone_is_run_again_in_other_company(tmp_path: Path) -> None:
    first = planned(match, tmp_path, NARROW, strength=2).of("case")
    refused = {event["case_id"] for event in first[:3]}

    def judge(case: Case) -> CaseResult:
        return ends("unsupported")(case) if case.id in refused else match(case)

    again = planned(judge, tmp_path, NARROW, strength=2)
    assert origins(again).count("covering") > [event["origin"] for event in first].count("covering")
    assert ledger([NARROW_START, *again.events]).share == 1.0


def test_a_level_that_is_refused_throughout_is_given_up(tmp_path: Path) -> None:
    def judge(case: Case) -> CaseResult:
        return ends("unsupported")(case) if case.dropout_p else match(case)

    log = planned(judge, tmp_path, NARROW, strength=2)
    plain = len(planned(match, tmp_path, NARROW, strength=2).of("case"))
    assert len(log.of("case")) < 2 * plain
    assert executed(log).total() > 0


def test_a_stored_case_that_differs_is_shrunk_too(tmp_path: Path) -> None:
    hard = Case(qkv_layout="sbh3d", dropout_p=0.1, attn_scale=0.5, attn_mask_type="padding", seed=5)

    def judge(case: Case) -> CaseResult:
        return differing(("grad/k", "value"))(case) if case.dropout_p else match(case)

    (event,) = planned(judge, tmp_path, stored=[Stored("0009/1", hard)], count=1).of("smallest")
    assert event["from_case_id"] == hard.id
    small = Case.from_dict(event["case"])
    assert (small.attn_mask_type, small.attn_scale, small.dropout_p > 0) == ("no_mask", None, True)


def test_nothing_is_shrunk_where_nothing_differs(tmp_path: Path) -> None:
    assert campaign(ends("noisy"), tmp_path).of("smallest") == []
    assert not (tmp_path / "failures").exists()


def run(folder: Path, seed: int, workers: int) -> list[dict[str, Any]]:
    """Run the command line and return its journal without times, in an order that does not depend on them."""
    options = [
        "--layout",
        "sbh3d",
        "--layout",
        "bshd_bs2hd",
        "--engine",
        "reference",
        "--cases",
        "16",
        "-n",
        str(workers),
    ]
    done = CliRunner().invoke(app, ["run", *options, "--seed", str(seed), "--out", str(folder)])
    assert done.exit_code == 0
    events = read_journal(folder)
    for event in events:
        event.pop("seconds", None)
        event.pop("started", None)
    return sorted(events, key=lambda event: (event["event"], event.get("case_id", "")))


def test_a_second_run_with_the_same_seed_gives_the_same_journal_apart_from_times_for_any_number_of_workers(
    tmp_path: Path,
) -> None:
    first = run(tmp_path / "first", 5, 1)
    assert first == run(tmp_path / "second", 5, 3)
    assert first != run(tmp_path / "third", 6, 1)
    assert Counter(event["event"] for event in first) == {"start": 1, "begun": 16, "case": 16, "end": 1}
