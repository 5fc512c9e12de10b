"""The coverage of a run names every combination that was not executed, and counts only what was compared."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from made_up import Event, end, packed, ran, start
from rich.console import Console

from harness.case import Case
from harness.judge import EXIT_UNVERIFIED
from harness.ledger import Ledger, ledger
from harness.report import FORMATS, summarise
from harness.report import coverage as report
from harness.report.describe import STATES, coverage_line, origin_words
from harness.report.terminal import print_results

ASKED = {"layouts": ["sbh3d"], "lanes": ["packed-f16"], "strength": 2}


def journal(*cases: Event, **asked: Any) -> list[Event]:
    return [start(asked=len(cases)) | {"asked": ASKED | asked, "dtypes": ["bf16", "fp16"]}, *cases, end()]


def of(*cases: Event) -> Ledger:
    return ledger(journal(*cases))


def test_a_case_whose_numbers_were_compared_is_all_that_counts_as_executed() -> None:
    pairs = of(ran(case=packed())).count("executed")
    assert pairs > 400
    for outcome in ("difference", "noisy", "intended", "crash"):
        assert of(ran(outcome, packed())).count("executed") == pairs
    raised = of(ran(case=packed(), both_raised=True))
    assert (raised.count("executed"), raised.count("raised")) == (0, pairs)
    refused = of(ran("unsupported", packed()))
    assert (refused.count("executed"), refused.count("refused")) == (0, pairs)
    assert of(ran("error", packed())).count("unreached") == of().valid


def test_the_best_of_its_cases_counts_for_a_combination() -> None:
    found = of(ran("unsupported", packed()), ran(case=packed(seed=1), both_raised=True), ran(case=packed(seed=2)))
    assert (found.count("raised"), found.count("refused")) == (0, 0)


def test_every_valid_combination_is_in_one_state() -> None:
    found = of(ran(case=packed()), ran("unsupported", packed(dropout_p=0.1)))
    assert found.count("refused") > 0
    assert sum(found.count(state) for state in ("executed", "raised", "refused", "unreached")) == of().valid
    assert found.valid == of().valid


def test_a_case_outside_what_was_asked_for_adds_nothing() -> None:
    assert of(ran(case=Case(qkv_layout="bs3hd"))).count("executed") < of(ran(case=packed())).count("executed")
    assert of(ran(case=Case(qkv_layout="bs3hd"))).valid == of().valid


def test_the_lines_count_every_state_and_name_a_gap_with_the_engines_reason() -> None:
    found = of(ran(case=packed()), ran("unsupported", packed(dropout_p=0.1), reason="no dropout\non this engine"))
    lines = list(report.lines(found))
    assert lines[0].startswith(
        f"strength 2: {found.count('executed'):,} of {found.valid:,} valid combinations executed"
    )
    text = "\n".join(lines)
    for state in STATES:
        assert f"{found.count(state):,}  {state}: " in text
    assert "- dropout_p=some, " in text
    assert "(no dropout on this engine)" in text
    assert "more pairs; --json has all" in "\n".join(report.lines(found, pairs=3))


def test_a_whole_coverage_names_no_gap() -> None:
    found = of(ran(case=packed()))
    executed = found.states["executed"]
    whole = Ledger(2, {state: executed & (state == "executed") for state in found.states}, ())
    assert whole.share == 1.0
    assert [line for line in report.lines(whole) if line.startswith("- ") or "gaps" in line] == []
    assert [line for line in report.lines(found) if line.startswith("- ")]


def test_a_case_that_this_version_cannot_read_is_said_and_counts_for_nothing() -> None:
    strange = ran(case=packed())
    strange["case"] = strange["case"] | {"qkv_layout": "sbh3d", "dtype": "int7"}
    found = of(strange)
    assert (found.unread, found.count("executed")) == (1, 0)
    assert any("1 cases of the journal cannot be read" in line for line in report.lines(found))


def test_the_json_has_every_gap_and_every_two_factors_and_adds_up() -> None:
    found = of(ran(case=packed()), ran("unsupported", packed(dropout_p=0.1)))
    whole = report.as_json(found)
    assert json.loads(json.dumps(whole)) == whole
    for state in STATES:
        assert sum(gap["count"] for gap in whole["gaps"][state]) == whole[state]
        assert sum(row[state] for row in whole["by_factors"]) == whole[state]
    assert sum(report.missing(row) for row in whole["by_factors"]) == whole["valid"] - whole["executed"]


@pytest.mark.parametrize("least", [None, 0.01, 1.0])
def test_the_verdict_asks_for_no_more_coverage_than_was_asked_for(least: float | None) -> None:
    results = summarise(journal(ran(case=packed()), min_coverage=least))
    assert results["coverage"]["least"] == least
    assert (results["exit_code"] == EXIT_UNVERIFIED) == (least == 1.0)
    assert any("--min-coverage 1 was asked for" in reason for reason in results["reasons"]) == (least == 1.0)
    assert ("asked for" in coverage_line(results)) == (least is not None)


def test_reports_say_how_much_was_covered_and_the_terminal_where_the_cases_came_from() -> None:
    events = journal(ran(case=packed(), origin="stored 0001-x/1"), ran(case=packed(seed=1), origin="covering"),
                     ran(case=packed(seed=2), origin="covering"), ran(case=packed(seed=3), origin=None))  # fmt: skip
    results = summarise(events)
    assert results["origins"] == {"stored": 1, "covering": 2, "unknown": 1}
    assert origin_words(results) == "1 stored, 2 of the covering set"
    terminal = io.StringIO()
    print_results(results, Console(file=terminal, width=80))
    assert "1 stored, 2 of the covering set" in terminal.getvalue()
    for text in (terminal.getvalue(), *(FORMATS[name].render(results, events) for name in ("markdown", "html"))):
        words = f"{results['coverage']['executed']:,} of {results['coverage']['valid']:,} valid combinations"
        assert words in " ".join(text.split())
