"""Whatever is wrong with what a user typed: exit 2, one clear message, no traceback, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import Result, harness

from harness.case import Case


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(result: Result, *parts: str, code: int = 2) -> None:
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert result.stderr.startswith("harness: ")
    assert result.stderr.count("\n") == 1, "one message, on one line"
    for part in parts:
        assert part in result.stderr


def test_an_unknown_layout_is_refused_with_the_nearest_names() -> None:
    refused(harness("run", "--layout", "sbh3"), "layout='sbh3' is unknown; did you mean 'sbh3d'")


@pytest.mark.parametrize("name", ["SBH3D", "sbh3d ", "", "bhsd_bhsd_bhsd", "sbh"])
def test_a_layout_is_matched_by_its_exact_name(name: str) -> None:
    refused(harness("run", "--layout", name), f"layout={name!r} is unknown", "The layouts are sb3hd, sbh3d, ")


def test_a_wrong_layout_among_right_ones_is_refused() -> None:
    refused(harness("run", "--layout", "sbh3d", "--layout", "sb3h"), "layout='sb3h' is unknown")


@pytest.mark.parametrize("option", ["--control", "--candidate"])
def test_an_unknown_spec_is_refused(option: str) -> None:
    refused(harness("run", option, "legcy"), "spec='legcy' names no subject; did you mean 'legacy'")


@pytest.mark.parametrize("option", ["--control", "--candidate"])
def test_a_missing_file_is_refused(option: str) -> None:
    refused(harness("run", option, "no/such/backends.py"), "spec='no/such/backends.py' cannot be read: No such file")


def test_a_file_without_the_function_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Other:\n    pass\n")
    refused(harness("run", "--candidate", "mine.py"), "no class FusedAttnFunc at top level; it defines Other")


def test_a_file_with_a_syntax_error_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\n\ndef f(:\n")
    refused(harness("run", "--candidate", "mine.py"), "mine.py, line 3: not valid Python")


def test_a_file_that_raises_when_loaded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("X = {}['a']\nclass FusedAttnFunc:\n    x = X\n")
    refused(harness("run", "--candidate", "mine.py"), "its definitions cannot be run: KeyError: 'a'")


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(b"\xff\xfe\x00")
    refused(harness("run", "--candidate", "mine.py"), "is no Python source: not UTF-8 at byte 0")


@pytest.mark.parametrize("count", [0, -1])
def test_a_run_of_no_cases_is_refused(count: int) -> None:
    refused(harness("run", "--cases", count), f"cases={count} is out of range", "a run of none shows nothing")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--strength", 1), "strength=1 is not one of 0, 2, 3"),
        (("--min-coverage", 0), "min-coverage=0.0 is out of range"),
        (("--min-coverage", 1.5), "min-coverage=1.5 is out of range"),
        (("--min-coverage", 0.5, "--strength", 0), "min-coverage=0.5 needs --strength 2 or 3"),
    ],
)
def test_a_coverage_that_cannot_be_reached_is_refused(options: tuple[object, ...], words: str) -> None:
    refused(harness("run", *options), words)


def test_an_unknown_lane_is_refused_with_the_nearest_names() -> None:
    refused(harness("run", "--lane", "dropuot"), "lane='dropuot' is unknown; did you mean 'dropout'", "`harness lanes`")


def test_a_lane_that_no_case_of_a_layout_can_be_of_is_refused_with_the_reason() -> None:
    refused(
        harness("run", "--lane", "paged", "--lane", "dropout", "--layout", "sbh3d"),
        "no case can have --lane paged and --layout sbh3d: ",
        "Leave one of them out",
    )


def test_a_coverage_of_another_strength_or_of_no_run_is_refused(tmp_path: Path) -> None:
    refused(harness("coverage", "out", "--strength", 4), "strength=4 is not one of 2, 3")
    refused(harness("coverage", "out"), "there is no journal out/journal.jsonl; give the folder")


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    refused(harness("run", "--seed", seed), f"seed={seed} is out of range")


def test_an_unknown_engine_is_refused_with_the_nearest_names() -> None:
    refused(harness("run", "--engine", "cudn"), "engine='cudn' is unknown; did you mean 'cudnn'")
    refused(harness("replay", "x.json", "--engine", "cudn"), "x.json does not exist")


@pytest.mark.parametrize("out", ["file", "file/below", "file/below/deeper"])
def test_an_out_that_cannot_be_written_is_refused(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("mine")
    refused(harness("run", "--out", out), f"out={out} cannot be written: ", "name another folder with --out")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_out_with_a_run_in_it_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "journal.jsonl").write_text("precious")
    refused(harness("run", "--out", "old"), "out=old holds a run already; name another folder")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["journal.jsonl"]
    assert (tmp_path / "old" / "journal.jsonl").read_text() == "precious"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cudnn_asked_for_by_name_without_a_gpu_is_unverified(tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text(Case().to_json())
    for arguments in (("run",), ("replay", "case.json")):
        refused(harness(*arguments, "--engine", "cudnn"), "engine=cudnn needs a CUDA GPU", code=3)


# ------------------------------------------------------------------ replay and report


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"num_head": 4}, "unknown field 'num_head'; did you mean 'num_heads'"),
        ({"batch_size": -2}, "batch_size=-2 is out of range"),
        ({"batch_size": True}, "batch_size=True has the wrong type"),
        ({"schema": 3}, "schema=3 is not one that this version reads"),
        ({"case": {"num_head": 4}}, "unknown field 'num_head'"),
        ({"case": {}, "control": 5}, "control=5 is no spec"),
        ({"case": {}, "engine": "cudn"}, "engine='cudn' is unknown"),
        ({"case": {}, "candidate": "legcy"}, "spec='legcy' names no subject"),
        ([], "a case is a JSON object, not list"),
        ({"\ud800": 1}, "unknown field '\\ud800'"),
    ],
)
def test_a_bad_case_file_is_refused(tmp_path: Path, content: object, message: str) -> None:
    (tmp_path / "case.json").write_text(json.dumps(content))
    refused(harness("replay", "case.json"), message)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "case.json").write_bytes(content)
    refused(harness("replay", "case.json"), "case.json is no case: ")


def test_a_missing_case_file_is_refused() -> None:
    refused(harness("replay", "missing.json"), "missing.json does not exist; give a case's JSON file")


def test_an_unknown_id_is_refused() -> None:
    refused(harness("replay", "0123456789ab"), "no case '0123456789ab' in the 0 runs under reports/")


def test_a_run_that_is_none_is_refused(tmp_path: Path) -> None:
    refused(harness("replay", "0123456789ab", "--run", "nowhere"), "there is no journal nowhere")
    refused(harness("report", "nowhere"), "there is no journal nowhere")


def test_a_journal_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("nonsense\n")
    refused(harness("report", "."), "line 1 of the journal", "not JSON")


def test_an_option_that_does_not_exist_is_refused_by_the_parser() -> None:
    for arguments in (("run", "--layouts", "sbh3d"), ("run", "--cases", "many"), ("rum",), ("replay",), ("report",)):
        result = harness(*arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


def test_no_command_shows_the_help() -> None:
    result = harness()
    assert "run" in result.output
    assert "doctor" in result.output
    assert result.exit_code == 2
