"""A case is shown again by file or id, and as a script that needs only torch and the two sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import case_ids, faulty, harness, raising

from harness.case import Case
from harness.replay import describe_subject
from harness.subjects.source import resolve

RUN = ("run", "--engine", "reference", "--layout", "sbh3d", "--lane", "no-grad", "--cases", 3)  # none of them stored
CASE = Case(attn_mask_type="causal", window_size=(-1, 0), dropout_p=0.1, attn_scale=0.5, seed=3)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def stored(folder: Path, **more: str) -> Path:
    path = folder / "case.json"
    path.write_text(json.dumps({"case": CASE.to_dict(), "engine": "reference", **more}))
    return path


def test_a_file_with_a_bare_case_is_replayed_on_the_default_subjects(tmp_path: Path) -> None:
    (tmp_path / "bare.json").write_text(CASE.to_json())
    result = harness("replay", "bare.json", "--engine", "reference")
    assert result.exit_code == 0
    assert f"case {CASE.id}: " in result.output
    assert "control legacy, candidate refactored, engine reference\nmatch\n" in result.output


def test_a_stored_case_is_replayed_on_what_it_was_found_on(tmp_path: Path) -> None:
    faulty(tmp_path)
    path = stored(tmp_path, control="refactored", candidate="faulty.py")
    result = harness("replay", path)
    assert result.exit_code == 1
    assert "control refactored, candidate faulty.py, engine reference\ndifference" in result.output
    assert "call/fused_attn_bwd/0/attn_scale  [value]" in result.output
    assert "    candidate 0.3\n" in result.output
    assert harness("replay", path, "--candidate", "legacy").exit_code == 0, "an option outweighs what is stored"


def test_a_refused_case_is_unverified_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "thd.json").write_text(Case(qkv_layout="thd_thd_thd").to_json())
    result = harness("replay", "thd.json", "--engine", "reference")
    assert result.exit_code == 3
    assert "unsupported: qkv_layout=thd_thd_thd" in result.output


def test_both_sides_raising_is_no_pass(tmp_path: Path) -> None:
    path = raising(tmp_path)
    result = harness("replay", stored(tmp_path, control=str(path), candidate=str(path)))
    assert result.exit_code == 3
    assert "both sides raised alike; no numbers were compared" in result.output


def test_an_id_is_found_in_the_run_that_is_named(tmp_path: Path) -> None:
    harness(*RUN, "--out", "one")
    case_id = case_ids(tmp_path / "one")[1]
    result = harness("replay", case_id, "--run", "one")
    assert result.exit_code == 0
    assert f"case {case_id}: " in result.output
    missing = harness("replay", "0123456789ab", "--run", "one")
    assert missing.exit_code == 2
    assert missing.stderr == "harness: no case '0123456789ab' in one; give a case's JSON file, or the run's folder " \
                             "with --run DIR\n"  # fmt: skip


def test_an_id_is_found_in_the_newest_run_under_reports_that_has_it(tmp_path: Path) -> None:
    for age, (name, control, seed) in enumerate((("b", "legacy", 0), ("a", "refactored", 0), ("c", "legacy", 9))):
        harness(*RUN, "--control", control, "--seed", seed, "--out", f"reports/{name}")
        os.utime(tmp_path / "reports" / name / "journal.jsonl", (1_000_000 + age, 1_000_000 + age))
    case_id = case_ids(tmp_path / "reports" / "a")[-1]
    assert case_id in case_ids(tmp_path / "reports" / "b")
    assert case_id not in case_ids(tmp_path / "reports" / "c")
    assert "control refactored, candidate refactored" in harness("replay", case_id).output
    os.utime(tmp_path / "reports" / "b" / "journal.jsonl", (2_000_000, 2_000_000))
    assert "control legacy, candidate refactored" in harness("replay", case_id).output
    (tmp_path / "reports" / "b" / "journal.jsonl").write_text("damaged\n")
    assert "control refactored, candidate refactored" in harness("replay", case_id).output


# ------------------------------------------------------------------ the script

ALONE = """
import runpy, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("harness", "legacy_impl", "refactored_impl", "hypothesis", "typer", "rich"):
            raise ImportError(name + " is out of reach here")

sys.meta_path.insert(0, Block())
try:
    import harness
except ImportError:
    pass
else:
    raise SystemExit("harness can be imported")
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as done:
    code = done.code
taken = [module for name, module in sys.modules.items() if name.split(".")[0] == "harness"]
assert taken and all(type(module.__loader__).__name__ == "Finder" for module in taken)
sys.exit(code)
"""


def run_alone(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script where this package cannot be imported."""
    return subprocess.run(
        [sys.executable, "-I", "-c", ALONE, script, *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip


def write_script(folder: Path, *arguments: object) -> Path:
    result = harness("replay", *arguments, "--script")
    assert result.exit_code == 0, result.output
    path = folder / "replay.py"
    path.write_text(result.stdout)
    return path


def test_a_script_of_a_matching_case_matches(tmp_path: Path) -> None:
    done = run_alone(write_script(tmp_path, stored(tmp_path)))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("match")


def test_a_script_of_a_difference_shows_the_same_difference(tmp_path: Path) -> None:
    faulty(tmp_path)
    path = stored(tmp_path, candidate="faulty.py")
    shown = harness("replay", path)
    script = write_script(tmp_path, path)
    done = run_alone(script)
    assert (done.returncode, done.stderr) == (shown.exit_code, "") == (1, "")
    assert done.stdout.startswith("difference")
    assert "call/fused_attn_bwd/0/attn_scale [value]" in done.stdout
    assert "candidate: 0.3\n" in done.stdout
    paths = [line.split()[0] for line in shown.output.splitlines() if "  [" in line]
    assert [line.split()[0] for line in done.stdout.splitlines() if " [" in line and line[2] != " "] == paths


@pytest.mark.network
def test_a_script_takes_other_sources_of_any_kind_and_says_that_they_are_others(tmp_path: Path) -> None:
    other = faulty(tmp_path)
    wheel = describe_subject(resolve("te==2.19.0"))["path"]
    assert wheel.partition("!")[0].endswith(".whl")
    done = run_alone(write_script(tmp_path, stored(tmp_path)), wheel, other)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("note: ") == 2
    for place in (wheel, other):
        assert f"note: {place} is not the text that was run" in done.stdout
    assert "call/fused_attn_bwd/0/attn_scale [value]" in done.stdout


def test_a_script_of_sides_that_both_raise_is_no_pass(tmp_path: Path) -> None:
    path = raising(tmp_path)
    done = run_alone(write_script(tmp_path, stored(tmp_path, control=str(path), candidate=str(path))))
    assert (done.returncode, done.stderr) == (3, "")
    assert "both raised alike" in done.stdout
