"""Every planted fault is found by the command line, where it must be seen and nowhere else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from planted import FAULTS, LINES, NUMBERS, Fault, edited, plant
from typer.testing import CliRunner

from harness.cli import app
from harness.engines.api import get_engine
from harness.execute import campaign
from harness.execute.journal import read_journal
from harness.inputs import build
from harness.observe.run_pass import observe
from harness.observe.seam import WatchedSeam
from harness.strategies import cases, draw_cases
from harness.subjects.source import resolve
from harness.subjects.subject import load


def run(
    folder: Path, control: str, candidate: str, layouts: Sequence[str], lanes: Sequence[str], cases: int, seed: int
) -> tuple[int, dict[str, Any]]:
    """Run the command line; return its exit code and results.json."""
    options = [item for layout in layouts for item in ("--layout", layout)]
    options += [item for lane in lanes for item in ("--lane", lane)]
    done = CliRunner().invoke(
        app,
        ["run", "--control", control, "--candidate", candidate, *options, "--engine", "reference",
         "--cases", str(cases), "--seed", str(seed), "--out", str(folder)],
    )  # fmt: skip
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads((folder / "results.json").read_text())


def family(path: str) -> str:
    return path.split("/")[0]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_planted_fault_is_seen_where_it_must_be_and_its_smallest_case_shows_it_again(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "SHRUNK_FAMILIES", 1)  # shrinking takes longest, and a little of one says it
    monkeypatch.setattr(campaign, "RUNS", 12)
    control, candidate = plant(fault, tmp_path)
    code, results = run(
        tmp_path / "run", control, candidate, fault.layouts, fault.looked_for_in, fault.cases, fault.seed
    )

    assert (code, results["exit_code"], results["verdict"]) == (1, 1, "not neutral")
    assert results["counts"]["error"] == 0
    found = [
        difference
        for difference in results["differences"]
        if difference["kind"] == fault.kind and fault.names(difference["path"])
    ]
    seen = Counter((difference["path"], difference["kind"]) for difference in results["differences"])
    assert found, f"{fault.path} ({fault.kind}) was not seen; seen were {seen}"
    assert {family(path) for path, _ in seen} == fault.families
    if fault.alone:
        assert set(seen) == {(fault.path, fault.kind)}
    if fault.shows is not None:
        assert fault.shows in {str(difference["candidate"]) for difference in found}

    smallest = [event for event in read_journal(tmp_path / "run") if event["event"] == "smallest"]
    assert smallest
    assert len({event["file"] for event in smallest}) == len(smallest)
    for event in smallest:
        file = tmp_path / "run" / event["file"]
        stored = json.loads(file.read_text())
        assert (stored["path"], stored["kind"]) == (event["path"], event["kind"])
        again = CliRunner().invoke(app, ["replay", str(file)])
        assert again.exit_code == 1
        assert f"  {event['path']}  [{event['kind']}]" in again.stdout


UNEDITED = sorted(
    {(fault.control, fault.layouts, fault.looked_for_in, fault.cases, fault.seed) for fault in FAULTS}, key=repr
)


@pytest.mark.parametrize(("shared", "layouts", "lanes", "cases", "seed"), UNEDITED)
def test_the_source_without_the_fault_is_neutral_on_the_same_cases(
    shared: tuple[tuple[str, str], ...], layouts: tuple[str, ...], lanes: tuple[str, ...], cases: int, seed: int,
    tmp_path: Path,
) -> None:  # fmt: skip
    for name in ("control", "candidate"):
        (tmp_path / f"{name}.py").write_text(edited(*shared))
    control = str(tmp_path / "control.py") if shared else "legacy"
    code, results = run(tmp_path / "run", control, str(tmp_path / "candidate.py"), layouts, lanes, cases, seed)
    assert (code, results["verdict"], results["differences"]) == (0, "neutral", [])
    assert results["counts"]["executed"] == cases
    assert results["counts"]["match"] > 0


def test_an_edit_whose_place_is_gone_or_not_unique_fails() -> None:
    for old in ("this text is nowhere in the source", "import"):
        with pytest.raises(AssertionError, match="not once"):
            edited((old, ""))


ALONE = {"output", "saved", "call", "calls", "aux", "backward", "grad", "leaf", "write", "generator", "exception",
         "state", "quantizer", "print"}  # fmt: skip


def families_observed() -> set[str]:
    """Return every family that observations of the legacy implementation have, over a few dozen drawn cases."""
    engine = get_engine("reference")
    seam = WatchedSeam(engine.seam())
    subject = load(resolve("legacy"), engine, seam.names)
    drawn = draw_cases(cases(layouts=("sbh3d", "bshd_bshd_bshd"), lanes=("packed-f16", "fp8-delayed")), 24, 3)
    return {family(path) for case in drawn for path in observe(subject, build(case), engine, seam)}


def test_every_family_that_is_observed_has_a_planted_fault() -> None:
    assert {name for fault in FAULTS for name in fault.families} == ALONE
    assert families_observed() == ALONE - {"print"}  # neither implementation prints: only a fault shows that family


@pytest.mark.parametrize("name", sorted(ALONE))
def test_every_family_has_a_fault_that_no_other_family_shows(name: str) -> None:
    assert [fault.id for fault in FAULTS if fault.families == {name}]


@pytest.mark.parametrize("line", LINES)
def test_every_kind_of_observable_has_faults_and_one_that_numbers_do_not_show_where_it_can(line: str) -> None:
    own = [fault for fault in FAULTS if fault.line == line]
    assert own
    if line not in ("outputs", "gradients"):  # those are numbers themselves
        assert [fault.id for fault in own if fault.hidden]


def test_planted_faults_have_names_of_their_own_and_known_lines() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert {fault.line for fault in FAULTS} == set(LINES)


def test_a_comparison_of_outputs_and_gradients_alone_would_miss_most_of_them() -> None:
    assert sum(fault.hidden for fault in FAULTS) > len(FAULTS) / 2
    assert all(fault.families & NUMBERS for fault in FAULTS if not fault.hidden)
