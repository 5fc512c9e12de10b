"""A run that was cut off goes on where it was: what has an outcome is not run again, and nothing is lost or twice."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import faulty, harness, in_process, results
from test_process import running

from harness.execute.journal import read_journal

RUN = ("run", "--engine", "reference", "--layout", "sbh3d", "--layout", "bshd_bshd_bshd", "--lane", "plain")
CUTS = 6


def outcomes(folder: Path) -> Counter[tuple[str, str]]:
    return Counter((event["case_id"], event["outcome"]) for event in read_journal(folder) if event["event"] == "case")


def smallest(folder: Path) -> list[tuple[Any, ...]]:
    return [(e["path"], e["kind"], e["case_id"]) for e in read_journal(folder) if e["event"] == "smallest"]


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run that was not disturbed, of a candidate that differs on some cases."""
    monkeypatch.chdir(tmp_path)
    in_process(monkeypatch)
    text = faulty(tmp_path).read_text()
    (tmp_path / "faulty.py").write_text(text.replace('"attn_scale": 0.3,', '"attn_scale": ctx.attn_scale or 0.3,'))
    assert harness(*RUN, "--candidate", "faulty.py", "--cases", 12, "--seed", 3, "--out", "whole").exit_code == 1
    return tmp_path / "whole"


def test_a_run_cut_off_at_any_byte_goes_on_to_what_it_would_have_been(whole: Path, tmp_path: Path) -> None:
    journal = (whole / "journal.jsonl").read_bytes()
    first = journal.index(b"\n") + 1
    for cut in random.Random(0).sample(range(first, len(journal)), CUTS):
        folder = tmp_path / f"cut-{cut}"
        folder.mkdir()
        (folder / "journal.jsonl").write_bytes(journal[:cut])
        done = outcomes(folder)
        kept = (folder / "journal.jsonl").read_bytes().rpartition(b"\n")[0]
        assert harness("run", "--resume", folder).exit_code == 1
        assert outcomes(folder) == outcomes(whole)
        assert set(outcomes(folder).values()) == {1}, "no case is run twice"
        assert done <= outcomes(folder)
        assert (folder / "journal.jsonl").read_bytes().startswith(kept), "what was written stays"
        assert smallest(folder) == smallest(whole)
        assert results(folder)["counts"] == results(whole)["counts"]


def test_a_run_whose_controller_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with running(tmp_path, "--cases", 60, "--out", "out", "-n", 2, begun=15) as process:
        process.kill()
        process.wait()
    done = outcomes(tmp_path / "out")
    assert 0 < len(done) < 60
    assert harness("report", "out").exit_code == 4
    unfinished = [row["what"] for row in results(tmp_path / "out")["not_checked"] if row["slice"] == "cases"][1:]
    assert 0 < len(unfinished) <= 2
    assert harness("run", "--resume", "out", "-n", 2).exit_code == 0
    assert results(tmp_path / "out")["counts"]["executed"] == 60
    assert done <= outcomes(tmp_path / "out")
    assert set(outcomes(tmp_path / "out").values()) == {1}


def test_a_finished_run_goes_on_to_the_same_verdict(whole: Path) -> None:
    before = outcomes(whole)
    assert harness("run", "--resume", whole).exit_code == 1
    assert outcomes(whole) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seed", 4), "--seed cannot be given"),
        (("--layout", "bs3hd"), "--layout cannot be given"),
        (("--candidate", "legacy"), "--candidate cannot be given"),
        (("--out", "elsewhere"), "--out cannot be given"),
    ],
)
def test_another_question_is_refused(options: tuple[object, ...], words: str, whole: Path) -> None:
    before = (whole / "journal.jsonl").read_bytes()
    done = harness("run", "--resume", whole, *options)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())
    assert (whole / "journal.jsonl").read_bytes() == before


def test_the_options_as_they_were_may_be_given_again(whole: Path) -> None:
    options = ("--seed", 3, "--cases", 12, "--candidate", "faulty.py")
    assert harness("run", "--resume", whole, *options).exit_code == 1


def test_another_source_or_version_is_refused(whole: Path, tmp_path: Path) -> None:
    journal = whole / "journal.jsonl"
    start, rest = journal.read_text().split("\n", 1)
    older = tmp_path / "older"
    shutil.copytree(whole, older)
    (older / "journal.jsonl").write_text(json.dumps(json.loads(start) | {"harness": "0.0.1"}) + "\n" + rest)
    done = harness("run", "--resume", older)
    assert done.exit_code == 2
    assert "a run of harness=0.0.1" in " ".join(done.stderr.split())
    (tmp_path / "faulty.py").write_text((tmp_path / "faulty.py").read_text() + "# changed\n")
    done = harness("run", "--resume", whole)
    assert done.exit_code == 2
    assert "the candidate faulty.py has changed since the run began" in " ".join(done.stderr.split())


def test_what_is_no_run_cannot_go_on(tmp_path: Path) -> None:
    assert harness("run", "--resume", tmp_path).exit_code == 2
