"""results.json says what the journal says, and nothing kinder."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import made_up
import pytest
from made_up import JOURNALS, difference, end, packed, ran, smallest, start

from harness.case import Case
from harness.judge import empty_counts
from harness.lanes import LANES, lanes_of
from harness.layouts import LAYOUTS
from harness.report import summarise


def row(results: dict[str, Any], table: str, name: str) -> dict[str, Any]:
    return next(row for row in results[table] if row["name"] == name)


def counts_of(row: dict[str, Any]) -> dict[str, int]:
    return {name: row[name] for name in empty_counts()}


def not_checked(results: dict[str, Any]) -> dict[str, str]:
    return {item["what"]: item["reason"] for item in results["not_checked"]}


def test_the_promised_keys_are_there() -> None:
    results = summarise(made_up.different())
    assert results["schema"] == 1
    assert set(results) >= {
        "schema", "verdict", "exit_code", "reasons", "control", "candidate", "engine", "environment", "seed",
        "seconds", "started", "harness", "asked", "counts", "lanes", "layouts", "differences", "smallest", "noise",
        "notes", "not_checked", "origins", "coverage", "cases_asked", "run", "tables",
    }  # fmt: skip
    assert set(results["counts"]) == set(empty_counts())
    for table in ("lanes", "layouts"):
        for slice_ in results[table]:
            assert set(slice_) == {"name", "engine", "verdict", "unsupported_reasons", *empty_counts()}
    for item in results["differences"]:
        assert set(item) == {
            "case_id", "case", "path", "kind", "control", "candidate", "message", "distance", "replay",
        }  # fmt: skip


@pytest.mark.parametrize("name", list(JOURNALS))
def test_executed_is_the_sum_of_what_was_executed_in_every_row(name: str) -> None:
    events = JOURNALS[name]()
    results = summarise(events)
    for counts in (results["counts"], *results["lanes"], *results["layouts"]):
        executed = ("match", "both_raised", "difference", "intended", "noisy", "crash")
        assert counts["executed"] == sum(counts[outcome] for outcome in executed)
    cases = sum(event["event"] == "case" for event in events)
    for slice_ in (*results["lanes"], *results["layouts"]):
        assert sum(reason["count"] for reason in slice_["unsupported_reasons"]) == slice_["unsupported"]
    total = results["counts"]
    assert sum(reason["count"] for reason in results["unsupported_reasons"]) == total["unsupported"]
    assert total["executed"] + total["unsupported"] + total["error"] == cases
    for key in empty_counts():
        assert sum(layout[key] for layout in results["layouts"]) == total[key]


def test_every_lane_of_the_table_has_a_row_with_its_own_counts() -> None:
    case = Case(dropout_p=0.5, seed=3)
    results = summarise([start(), ran("difference", case), ran(case=packed()), end()])
    assert [lane["name"] for lane in results["lanes"]] == list(LANES)
    for lane in results["lanes"]:
        assert lane["difference"] == (lane["name"] in lanes_of(case))
        assert lane["match"] == (lane["name"] in lanes_of(packed()))


def test_nothing_executed_is_unverified() -> None:
    for events in ([start(), end()], [start(), ran("unsupported"), end()]):
        results = summarise(events)
        assert (results["verdict"], results["exit_code"]) == ("unverified", 3)
        assert "no case was executed" in results["reasons"]


def test_both_raised_alone_is_unverified() -> None:
    results = summarise([start(), ran(both_raised=True), end()])
    assert (results["verdict"], results["exit_code"]) == ("unverified", 3)
    assert results["counts"]["both_raised"] == results["counts"]["executed"] == 1
    assert results["counts"]["match"] == 0
    assert "both sides raised" in not_checked(results)["layout sbhd_sbhd_sbhd"]
    assert summarise([start(), ran(both_raised=True), ran(case=packed()), end()])["verdict"] == "neutral"


def test_an_asked_layout_that_was_not_reached_makes_the_run_unverified() -> None:
    events = [start(["sbh3d", "t3hd"]), ran(case=packed()), end()]
    results = summarise(events)
    assert (results["verdict"], results["exit_code"]) == ("unverified", 3)
    assert results["reasons"] == ["--layout t3hd was asked for and not reached"]
    assert not_checked(results)["layout t3hd"] == "no case was drawn"
    refused = ran("unsupported", Case(qkv_layout="t3hd"), reason="no THD")
    assert summarise([*events[:-1], refused, end()])["verdict"] == "unverified"
    assert summarise([*events[:-1], ran(case=Case(qkv_layout="t3hd")), end()])["verdict"] == "neutral"


@pytest.mark.parametrize(("found", "verdict", "code"), [("match", "unverified", 4), ("difference", "not neutral", 1)])
def test_a_killed_run_is_never_neutral(found: str, verdict: str, code: int) -> None:
    results = summarise([start(asked=5), ran(found)])
    assert (results["verdict"], results["exit_code"]) == (verdict, code)
    assert "the run did not end" in results["reasons"]
    assert results["harness_error"] == "the run did not end"
    assert not_checked(results)["4 of the 5 cases asked for"] == "the run did not end"
    assert results["seconds"] == 0.125


def test_a_fault_of_the_harness_is_exit_4() -> None:
    for events in ([start(), ran(), end("worker lost")], [start(), ran(), ran("error", reason="OOM"), end()]):
        results = summarise(events)
        assert (results["verdict"], results["exit_code"]) == ("unverified", 4)
        assert summarise([start(), ran(), end()])["exit_code"] == 0
    assert results["errors"][0]["reason"] == "OOM"


def test_a_difference_shows_in_the_row_of_its_own_layout_only() -> None:
    others = [
        ran(case=Case(qkv_layout=name, page_size=16 if layout.paged else None))
        for name, layout in LAYOUTS.items()
        if name != "bs3hd"
    ]
    results = summarise([start(), ran("difference", Case(qkv_layout="bs3hd")), *others, end()])
    assert {layout["name"]: layout["difference"] for layout in results["layouts"]} == {
        name: int(name == "bs3hd") for name in LAYOUTS
    }
    assert [item["case"]["qkv_layout"] for item in results["differences"]] == ["bs3hd"]


def test_only_layouts_with_a_case_have_a_row_and_the_others_are_not_checked() -> None:
    results = summarise([start(), ran(case=packed()), end()])
    assert [layout["name"] for layout in results["layouts"]] == ["sbh3d"]
    gaps = {what.removeprefix("layout ") for what in not_checked(results) if what.startswith("layout ")}
    assert gaps == set(LAYOUTS) - {"sbh3d"}
    lanes = {what.removeprefix("lane ") for what in not_checked(results) if what.startswith("lane ")}
    assert lanes == set(LANES) - set(lanes_of(packed()))


def test_a_gap_gives_the_engines_most_frequent_reason() -> None:
    thd = Case(qkv_layout="thd_thd_thd")
    refused = [ran("unsupported", thd.replace(seed=i), reason=f"reason {min(i, 1)}") for i in range(3)]
    results = summarise([start(["sbh3d", "thd_thd_thd"]), ran(case=packed()), *refused, end()])
    gaps = not_checked(results)
    assert gaps["layout thd_thd_thd"] == gaps["lane thd"] == "reason 1 (and 1 more)"
    assert gaps["lane paged"] == "no case was drawn"
    assert gaps["layout bs3hd"] == "not asked for"
    reasons = [{"reason": "reason 1", "count": 2}, {"reason": "reason 0", "count": 1}]
    assert row(results, "layouts", "thd_thd_thd")["unsupported_reasons"] == reasons
    assert row(results, "lanes", "thd")["unsupported_reasons"] == reasons
    assert row(results, "lanes", "packed-f16")["unsupported_reasons"] == []


def test_a_lane_and_a_layout_that_only_this_journal_knows_have_rows() -> None:
    event = ran()
    event["case"]["qkv_layout"], event["lanes"] = "new_layout", ["new lane"]
    results = summarise([start(), event, end()])
    assert row(results, "lanes", "new lane")["match"] == row(results, "layouts", "new_layout")["match"] == 1


def test_only_findings_are_differences() -> None:
    declared = ran("intended", packed(), differences=[difference("saved/q", "alias")])
    noisy = ran("noisy", packed(seed=1), differences=[difference()])
    results = summarise([start(), declared, noisy, end()])
    assert results["differences"] == []
    assert results["intended"] == [{"path": "saved/q", "kind": "alias", "cases": 1}]


def test_a_crash_that_left_nothing_to_compare_still_has_a_row() -> None:
    results = summarise([start(), ran("crash", reason="signal 11"), end()])
    assert [(item["kind"], item["message"]) for item in results["differences"]] == [("crash", "signal 11")]
    assert results["exit_code"] == 1


def test_replay_is_a_command_that_a_shell_reads_back() -> None:
    case, folder = packed(), "my reports/it's; rm -rf"
    results = summarise([start(), ran("difference", case), smallest("grad/q", "value", "x", case), end()], folder)
    for item in (results["differences"][0], results["smallest"][0]):
        assert shlex.split(item["replay"]) == ["harness", "replay", case.id, "--run", folder]


def test_a_smallest_case_carries_the_values_of_its_own_difference() -> None:
    event = smallest("saved/q", "alias", "0123456789ab", packed())
    event["differences"] = [
        difference("saved/q", "shape", control="no"),
        difference("saved/q", "alias", control="yes", candidate="too"),
    ]
    [item] = summarise([start(), ran("difference"), event, end()])["smallest"]
    assert (item["control"], item["candidate"], item["file"]) == ("yes", "too", f"failures/{packed().id}.json")


def test_smallest_cases_come_easiest_first() -> None:
    hard, easy = packed(seed=5, num_heads=8, num_gqa_groups=8), packed()
    events = [smallest("a", "value", "x", hard), smallest("b", "value", "x", easy)]
    assert [item["path"] for item in summarise([start(), *events, end()])["smallest"]] == ["b", "a"]


@pytest.mark.parametrize(
    ("spreads", "largest"), [([0.5, 2, 1], 2), ([1.0, "inf"], "inf"), (["nan", 1.0], "nan"), ([3.0, math.nan], "nan")]
)
def test_noise_keeps_the_largest_spread_of_a_path(spreads: list[Any], largest: Any) -> None:
    cases = [ran("noisy", packed(seed=i), noise=[{"path": "grad/v", "spread": s}]) for i, s in enumerate(spreads)]
    results = summarise([start(), *cases, ran("noisy", noise=[{"path": "grad/k", "spread": 0.0}]), end()])
    assert results["noise"] == [
        {"path": "grad/v", "cases": len(spreads), "largest_spread": largest},
        {"path": "grad/k", "cases": 1, "largest_spread": 0.0},
    ]


def test_notes_are_counted_once_per_case() -> None:
    results = summarise([start(), ran(notes=["a", "a"]), ran(notes=["b", "a"]), end()])
    assert results["notes"] == [{"note": "a", "cases": 2}, {"note": "b", "cases": 1}]


@pytest.mark.parametrize("name", list(JOURNALS))
def test_results_are_valid_json(name: str, tmp_path: Path) -> None:
    json.dumps(summarise(JOURNALS[name]()), allow_nan=False)
