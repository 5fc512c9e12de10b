"""The commands do what they say, with the exit code that says it, and leave all files behind."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from command_line import FILES, case_ids, faulty, harness, in_process, raising, refusing, results

from harness import __version__, cli
from harness.execute import campaign
from harness.execute.campaign import Campaign
from harness.judge import OUTCOMES
from harness.lanes import LANES
from harness.layouts import LAYOUTS
from harness.observe import results as observed
from harness.observe.recorder import Recorder
from harness.regressions import stored_cases
from harness.run import Stopped

COUNTS = {"executed", "both_raised", *OUTCOMES}
KEYS = {
    "schema", "verdict", "exit_code", "control", "candidate", "engine", "environment", "seed", "seconds", "counts",
    "lanes", "differences",
}  # fmt: skip
RUN = ("run", "--engine", "reference", "--layout", "sbh3d", "--cases")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ------------------------------------------------------------------ help


@pytest.mark.parametrize("arguments", [(), ("run",), ("replay",), ("report",), ("coverage",), ("lanes",), ("doctor",)])
def test_help_comes_without_torch(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom harness.cli import main\n"
        f"sys.argv = ['harness', *{arguments!r}, '--help']\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code\n"
        "print('loaded:', *sorted({'torch', 'hypothesis', 'pandas', 'numpy', 'jinja2'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage" in done.stdout
    assert done.stdout.splitlines()[-1].strip() == "loaded:"


def test_the_exit_codes_are_in_the_help() -> None:
    for command in ("run", "replay"):
        text = " ".join(harness(command, "--help").output.split())
        for number in range(5):
            assert re.search(rf"\b{number} \w", text)


def test_the_version_is_shown() -> None:
    assert harness("--version").output == f"{__version__}\n"


# ------------------------------------------------------------------ run


def test_a_neutral_run_exits_0_and_leaves_all_files(tmp_path: Path) -> None:
    result = harness(*RUN, 12, "--lane", "packed-f16", "--out", "out")
    assert result.exit_code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)
    assert all((tmp_path / "out" / name).stat().st_size > 0 for name in FILES)
    found = results(tmp_path / "out")
    assert found.keys() >= KEYS
    assert (found["schema"], found["verdict"], found["exit_code"]) == (1, "neutral", 0)
    for side, spec in (("control", "legacy"), ("candidate", "refactored")):
        assert found[side]["spec"] == spec
        assert found[side]["resolved"].endswith("backends.py")
        assert re.fullmatch("[0-9a-f]{64}", found[side]["sha256"])
    assert found["engine"] == "reference"
    assert found["environment"]["torch"]
    assert found["seconds"] > 0
    assert set(found["counts"]) == COUNTS
    assert found["counts"]["executed"] == found["counts"]["match"] + found["counts"]["both_raised"] == 12
    lanes = {lane["name"]: lane for lane in found["lanes"]}
    for lane in lanes.values():
        assert set(lane) >= COUNTS | {"name", "engine", "verdict", "unsupported_reasons"}
        assert lane["engine"] == "reference"
    assert {name for name in lanes if lanes[name]["executed"] == 12} == {"packed-f16"}
    assert found["differences"] == []


def test_a_run_with_a_difference_exits_1_and_stores_the_smallest_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(tmp_path)
    monkeypatch.setattr(campaign, "SHRUNK_FAMILIES", 1)
    result = harness(*RUN, 6, "--out", "out", "--candidate", "faulty.py")
    assert result.exit_code == 1
    found = results(tmp_path / "out")
    assert (found["verdict"], found["exit_code"]) == ("not neutral", 1)
    assert found["counts"]["difference"] > 0
    difference = found["differences"][0]
    assert {"case_id", "case", "path", "kind", "control", "candidate", "message", "replay"} <= set(difference)
    assert difference["path"].startswith(("call/fused_attn_bwd/0/attn_scale", "grad/"))
    assert difference["case_id"] in difference["replay"]
    stored = sorted((tmp_path / "out" / "failures").glob("*.json"))
    assert stored
    replayed = harness("replay", stored[0])
    assert replayed.exit_code == 1
    content = json.loads(stored[0].read_text())
    assert f"{content['path']}  [{content['kind']}]" in replayed.output
    smallest = content["case"]
    assert (smallest["batch_size"], smallest["num_heads"], smallest["max_seqlen_q"]) == (1, 1, 1)


def test_the_same_seed_makes_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    for name, seed in (("one", 5), ("two", 5), ("three", 6)):
        harness(*RUN, 12, "--seed", seed, "--out", name)  # the first are stored ones, the same for every seed
    one, two, three = (case_ids(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two
    assert one != three
    assert results(tmp_path / "one")["counts"] == results(tmp_path / "two")["counts"]


# ------------------------------------------------------------------ stored cases, the covering set, lanes

NARROW = ("run", "--engine", "reference", "--layout", "sbh3d", "--layout", "bs3hd", "--lane", "debug-prints")


def test_a_run_without_a_number_runs_stored_cases_then_a_covering_set_that_leaves_nothing_out(tmp_path: Path) -> None:
    result = harness(*NARROW, "--out", "out")
    assert result.exit_code == 0
    found = results(tmp_path / "out")
    assert found["asked"] == {
        "layouts": ["sbh3d", "bs3hd"], "lanes": ["debug-prints"], "cases": None, "strength": 2, "min_coverage": None,
    }  # fmt: skip
    covering = found["origins"]["covering"]
    assert found["origins"]["explored"] == round(0.1 * covering) > 0
    assert sum(found["origins"].values()) >= found["cases_asked"]
    coverage = found["coverage"]
    assert coverage["executed"] + coverage["raised"] == coverage["valid"] > 500, "the reference engine refuses none"
    assert coverage["executed"] > 0.95 * coverage["valid"]
    assert {lane["name"]: lane["verdict"] for lane in found["lanes"]}["debug-prints"] == "neutral"


def test_a_number_of_cases_runs_the_stored_ones_first_and_no_covering_set(tmp_path: Path) -> None:
    assert harness(*RUN, 6, "-n", 1, "--out", "out").exit_code == 0
    journal = (tmp_path / "out" / "journal.jsonl").read_text().splitlines()
    origins = [event["origin"] for event in map(json.loads, journal) if event["event"] == "case"]
    stored = [item for item in stored_cases() if item.case.qkv_layout == "sbh3d"]
    assert origins[: len(stored)] == [f"stored {item.name}" for item in stored]
    assert set(origins[len(stored) :]) == {"explored"}
    assert results(tmp_path / "out")["asked"]["strength"] == 0


def test_a_coverage_asked_for_and_not_reached_leaves_the_run_unverified(tmp_path: Path) -> None:
    options = ("--cases", 6, "--strength", 2, "--min-coverage")
    result = harness(*NARROW, *options, 0.9, "--out", "out")
    assert result.exit_code == 3
    found = results(tmp_path / "out")
    assert found["verdict"] == "unverified"
    [reason] = found["reasons"]
    coverage = found["coverage"]
    assert f"{coverage['executed']} of {coverage['valid']} valid combinations of 2 levels" in reason
    assert "--min-coverage 0.9 was asked for" in " ".join(result.output.split())
    assert harness("report", "out").exit_code == 3
    assert harness(*NARROW, *options, 0.1, "--out", "less").exit_code == 0


def test_a_lane_asked_for_and_refused_leaves_the_run_unverified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, "sbh3d", "planted")
    refusing(monkeypatch, "bs3hd", "planted")
    assert harness(*NARROW, "--cases", 3, "--out", "out").exit_code == 3
    reasons = results(tmp_path / "out")["reasons"]
    assert "--lane debug-prints was asked for and not reached" in reasons


def test_the_coverage_of_a_run_is_shown_from_its_journal_alone(tmp_path: Path) -> None:
    harness(*NARROW, "--cases", 6, "--strength", 2, "--out", "out")
    found = results(tmp_path / "out")["coverage"]
    for path in (tmp_path / "out").iterdir():
        if path.name != "journal.jsonl":
            path.unlink()
    shown = harness("coverage", "out")
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"strength 2: {found['executed']:,} of {found['valid']:,} valid combinations")
    whole = json.loads(harness("coverage", "out", "--json").stdout)
    assert {name: whole[name] for name in ("strength", "valid", "executed", "unreached")} == {
        name: found[name] for name in ("strength", "valid", "executed", "unreached")
    }
    assert json.loads(harness("coverage", "out", "--json", "--strength", 3).stdout)["valid"] > found["valid"]


def test_every_lane_is_listed_with_what_it_is_and_which_engine_can_run_it() -> None:
    result = harness("lanes")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[0] == "lane"
    rows = {line.split()[0]: line for line in lines[1:] if line.strip()}
    assert set(LANES) <= set(rows)
    assert rows["dropout"].split()[:3] == ["dropout", "dropout", "yes"]
    assert "no" in rows["graph-capture"].split()
    assert "reference cannot run graph-capture: " in " ".join(result.stdout.split())
    assert "Context parallelism does not pass through FusedAttnFunc" in " ".join(result.stdout.split())


# ------------------------------------------------------------------ what is refused

REFUSED = "qkv_layout=thd_thd_thd: no ragged batches on this planted engine"


def test_a_layout_that_the_engine_refuses_leaves_the_run_unverified_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, "thd_thd_thd", REFUSED)
    result = harness("run", "--engine", "reference", "--layout", "thd_thd_thd", "--cases", 3, "--out", "out")
    assert result.exit_code == 3
    found = results(tmp_path / "out")
    assert (found["verdict"], found["exit_code"]) == ("unverified", 3)
    assert found["counts"]["executed"] == 0
    assert found["counts"]["unsupported"] > 0
    reasons = next(lane for lane in found["lanes"] if lane["name"] == "thd")["unsupported_reasons"]
    assert reasons == [{"reason": REFUSED, "count": found["counts"]["unsupported"]}]
    assert REFUSED in " ".join(result.output.split())


def test_one_refused_layout_among_two_leaves_the_run_unverified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, "thd_thd_thd", REFUSED)
    result = harness(*RUN, 4, "--layout", "thd_thd_thd", "--out", "out")
    assert result.exit_code == 3
    found = results(tmp_path / "out")
    assert found["counts"]["executed"] == found["counts"]["match"] + found["counts"]["both_raised"] == 4
    assert any("thd_thd_thd was asked for and not reached" in reason for reason in found["reasons"])


def test_a_layout_given_twice_is_asked_for_once(tmp_path: Path) -> None:
    assert harness(*RUN, 2, "--layout", "sbh3d", "--out", "out").exit_code == 0
    assert results(tmp_path / "out")["asked"]["layouts"] == ["sbh3d"]


def test_a_run_whose_subjects_only_raise_is_no_pass(tmp_path: Path) -> None:
    path = raising(tmp_path)
    result = harness(*RUN, 3, "--control", path, "--candidate", path, "--out", "out")
    found = results(tmp_path / "out")
    raised = found["counts"]["both_raised"]
    assert raised > 0
    assert (result.exit_code == 3) == (raised == found["counts"]["executed"])


def test_the_default_folder_is_a_new_one_under_reports(tmp_path: Path) -> None:
    assert harness(*RUN, 1).exit_code == 0
    assert harness(*RUN, 1).exit_code == 0
    folders = list((tmp_path / "reports").iterdir())
    assert len(folders) == 2
    assert all(re.fullmatch(r"\d{8}T\d{6}Z(-\d+)?", folder.name) for folder in folders)
    assert all(set(FILES) <= {path.name for path in folder.iterdir()} for folder in folders)
    assert [path.name for path in tmp_path.iterdir()] == ["reports"]


def test_two_runs_of_one_second_do_not_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    assert cli._unused(tmp_path / "run") == tmp_path / "run-3"
    assert cli._unused(tmp_path / "other") == tmp_path / "other"


def test_progress_is_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(step=11)  # each look at the clock finds eleven seconds gone
    clock = types.SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr(cli, "time", clock)
    result = harness(*RUN, 3, "--out", "out")
    lines = [line for line in result.output.splitlines() if re.match(r"\d of 3 cases, \d+/s ", line)]
    assert len(lines) == 3
    assert lines[-1].startswith("3 of 3")
    assert "\x1b" not in result.output
    assert "\r" not in result.output


# ------------------------------------------------------------------ a harness that fails


@pytest.mark.parametrize(
    ("fault", "words", "code"),
    [
        (KeyboardInterrupt(), "the run was interrupted", 130),
        (Stopped(), "the run was stopped by a signal", 143),
        (ZeroDivisionError("planted"), "ZeroDivisionError: planted", 4),
    ],
)
def test_a_run_that_breaks_off_is_not_neutral_and_keeps_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, words: str, code: int
) -> None:
    original = Campaign.run

    def run(self: Campaign) -> None:
        original(self)
        raise fault

    monkeypatch.setattr(Campaign, "run", run)
    result = harness(*RUN, 2, "-n", 1, "--out", "out")
    assert result.exit_code == code
    found = results(tmp_path / "out")
    assert (found["verdict"], found["exit_code"]) == ("unverified", code)
    assert words in found["harness_error"]
    assert words in " ".join(result.output.split())
    assert found["counts"]["executed"] == 2, "the cases so far stay"
    events = [json.loads(line)["event"] for line in (tmp_path / "out" / "journal.jsonl").read_text().splitlines()]
    assert events == ["start", "begun", "case", "begun", "case", "end"]
    traceback = tmp_path / "out" / "harness_error.txt"
    assert traceback.exists() == isinstance(fault, Exception)
    if traceback.exists():
        assert "ZeroDivisionError: planted" in traceback.read_text()
    assert harness("report", "out").exit_code == code


def test_a_bug_in_the_recorder_is_an_error_of_every_case_and_the_run_exits_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        raise ZeroDivisionError("planted")

    in_process(monkeypatch)
    monkeypatch.setattr(Recorder, "meaning", broken)
    result = harness(*RUN, 3, "--out", "out")
    assert result.exit_code == 4
    found = results(tmp_path / "out")
    assert (found["verdict"], found["exit_code"]) == ("unverified", 4)
    counts = found["counts"]
    assert counts.pop("error") > 0
    assert set(counts.values()) == {0}
    assert found["differences"] == []
    assert all("the harness failed" in error["reason"] for error in found["errors"])
    assert all("ZeroDivisionError: planted" in error["reason"] for error in found["errors"])


def test_a_bug_in_the_recorder_on_a_few_cases_outweighs_all_that_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = observed.see_saved

    def broken(recorder: Recorder, *rest: Any) -> None:
        if recorder.inputs.case.softmax_type == "learnable":
            raise ZeroDivisionError("planted")
        original(recorder, *rest)

    in_process(monkeypatch)
    monkeypatch.setattr(observed, "see_saved", broken)
    result = harness(*RUN, 16, "--out", "out")
    found = results(tmp_path / "out")
    assert (result.exit_code, found["verdict"], found["differences"]) == (4, "unverified", [])
    assert found["counts"]["match"] > 0
    assert found["counts"]["error"] > 0
    assert {error["case"]["softmax_type"] for error in found["errors"]} == {"learnable"}


# ------------------------------------------------------------------ report


@pytest.mark.parametrize("candidate", ["refactored", "faulty.py"])
def test_reports_come_back_identical_from_the_journal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, candidate: str
) -> None:
    faulty(tmp_path)
    monkeypatch.setattr(campaign, "SHRUNK_FAMILIES", 1)
    first = harness(*RUN, 4, "--candidate", candidate, "--out", "out")
    assert first.exit_code == (0 if candidate == "refactored" else 1)
    made = {name: (tmp_path / "out" / name).read_bytes() for name in FILES}
    for name in FILES:
        if name != "journal.jsonl":
            (tmp_path / "out" / name).unlink()
    second = harness("report", "out")
    assert second.exit_code == first.exit_code
    assert {name: (tmp_path / "out" / name).read_bytes() for name in FILES} == made
    assert second.output in first.output


def test_the_report_of_a_killed_run_says_so(tmp_path: Path) -> None:
    harness(*RUN, 2, "--out", "out")
    journal = tmp_path / "out" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    assert harness("report", "out").exit_code == 4
    assert results(tmp_path / "out")["harness_error"] == "the run did not end"


# ------------------------------------------------------------------ doctor


def test_doctor_lists_the_engines_and_what_each_can_check() -> None:
    result = harness("doctor")
    assert result.exit_code == 0
    assert "engine reference: works" in result.output
    assert re.search(r"engine cudnn: (works|not here)", result.output)
    assert "no evidence about kernels" in result.output
    reference = result.output.partition("engine reference: works")[2].partition("engine cudnn")[0]
    words = reference.replace(",", " ").split()
    assert "layouts, 25 of 25: " in reference
    assert set(LAYOUTS) <= set(words)
    assert re.findall(r"\bnot (\S+): ", reference) == ["graph-capture"]
    assert set(LANES) - {"graph-capture"} <= set(words)
    assert re.search(r"`harness run` uses (reference|cudnn) by default", result.output)


def test_doctor_gives_the_reason_for_a_layout_that_cannot_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, "thd_thd_thd", REFUSED)
    output = " ".join(harness("doctor").output.split())
    assert "layouts, 24 of 25: " in output
    assert f"not thd_thd_thd: {REFUSED}" in output


def test_doctor_without_any_engine_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import doctor

    def nothing(name: str) -> doctor.Diagnosis:
        return doctor.Diagnosis(name, doctor.Finding(name, False, "planted reason"), {})

    monkeypatch.setattr(doctor, "diagnose", nothing)
    result = harness("doctor")
    assert result.exit_code == 4
    assert result.output.count("planted reason") == 2
