"""The exit code of the process says what the run found, wherever its output goes and however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import faulty

from harness.execute.journal import read_journal
from harness.subjects.source import resolve

RUN = ("run", "--engine", "reference", "--layout", "bshd_bshd_bshd", "--lane", "plain", "--cases", "4", "-n", "1")
LINE = "        # Kernels read d_out by the layout's name, not by its strides.\n"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "harness.cli", *map(str, arguments)]


def finish(folder: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, env=os.environ | environment, timeout=120
    )


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"NO_COLOR": "1"}],
    ids=str,
)
def test_an_encoding_without_signs_changes_no_exit_code(environment: dict[str, str], tmp_path: Path) -> None:
    done = finish(tmp_path, *RUN, "--out", "out", **environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Behaviour-neutral" in done.stdout
    if "NO_COLOR" not in environment:
        assert done.stdout.isascii()
        assert b"ok Behaviour-neutral" in done.stdout


@pytest.mark.parametrize("candidate", ["refactored", "faulty.py"])
def test_a_reader_that_leaves_changes_no_exit_code(candidate: str, tmp_path: Path) -> None:
    faulty(tmp_path)
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(
            command(*RUN, "--candidate", candidate, "--out", "out"), cwd=tmp_path, stdout=pipe,
            stderr=subprocess.PIPE, timeout=120,
        )  # fmt: skip
    assert done.returncode == (0 if candidate == "refactored" else 1)
    assert done.stderr == b""
    assert json.loads((tmp_path / "out" / "results.json").read_text())["exit_code"] == done.returncode


def test_a_coverage_read_by_one_that_leaves_is_no_fault(tmp_path: Path) -> None:
    assert finish(tmp_path, *RUN, "--out", "out").returncode == 0
    for option in ((), ("--json",)):
        line = " ".join(command("coverage", "out", *option))
        done = subprocess.run(f"{line} | head -c 1; exit ${{PIPESTATUS[0]}}", shell=True, executable="/bin/bash",
                              cwd=tmp_path, capture_output=True, timeout=60)  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self").exists(), reason="needs a folder that refuses files")
def test_a_folder_that_cannot_be_written_is_one_line_and_exit_2(tmp_path: Path) -> None:
    done = finish(tmp_path, *RUN, "--out", "/proc/self/out")
    assert done.returncode == 2
    assert b"cannot be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the size of files stands for a full disk")
def test_a_full_disk_ends_the_run_with_exit_4_and_a_journal_that_can_be_read(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000));"
        "from harness.cli import main; sys.argv[0] = 'harness'; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *RUN[:-4], "--cases", "40", "--out", "out"], cwd=tmp_path,
                          capture_output=True, timeout=120)  # fmt: skip
    assert done.returncode == 4
    assert b"cannot write the journal" in done.stderr
    assert b"Traceback" not in done.stderr
    assert len(read_journal(tmp_path / "out")) > 5


@contextmanager
def running(folder: Path, *arguments: object, begun: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run in the background and go on once so many of its cases have begun."""
    process = subprocess.Popen(command(*RUN[:-4], *arguments), cwd=folder, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    journal = folder / "out" / "journal.jsonl"
    end = time.monotonic() + 60
    while not journal.exists() or journal.read_bytes().count(b'"begun"') < begun:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_with_a_verdict_on_what_was_done(number: int, code: int, tmp_path: Path) -> None:
    with running(tmp_path, "--cases", 5000, "--out", "out", "-n", 2, begun=20) as process:
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, b"")
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (found["verdict"], found["exit_code"]) == ("unverified", code)
    assert found["counts"]["executed"] > 0
    assert b"Unverified" in output


@pytest.mark.parametrize("deed", ["os._exit(0)", "__import__('sys').exit(0)", "os.kill(os.getppid(), 9)"])
def test_a_candidate_that_ends_its_process_is_never_neutral(deed: str, tmp_path: Path) -> None:
    text = resolve("legacy").text
    (tmp_path / "ending.py").write_text(text.replace(LINE, f"        {deed}\n{LINE}"))
    done = finish(tmp_path, *RUN, "--candidate", "ending.py", "--out", "out")
    assert done.returncode not in (0, 3)


def test_a_candidate_that_hangs_is_named_and_the_run_ends(tmp_path: Path) -> None:
    text = resolve("legacy").text
    hang = "        while ctx.max_seqlen_q == 32:\n            pass\n"
    (tmp_path / "hanging.py").write_text(text.replace(LINE, hang + LINE))
    options = ("--candidate", "hanging.py", "--cases", 16, "--case-timeout", 3, "-n", 2)
    done = finish(tmp_path, *RUN[:-4], *options, "--out", "out")
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert done.returncode == 1
    assert found["counts"]["crash"] > 0
    assert found["counts"]["match"] > 0
    assert {row["path"] for row in found["differences"]} == {"hang/backward"}
    assert "did not end within 3 s" in found["differences"][0]["message"]
    assert {row["case"]["max_seqlen_q"] for row in found["differences"]} == {32}


def test_too_many_crashes_end_the_run_and_it_says_so(tmp_path: Path) -> None:
    text = resolve("legacy").text
    (tmp_path / "ending.py").write_text(text.replace(LINE, f"        os._exit(0)\n{LINE}"))
    done = finish(tmp_path, *RUN[:-4], "--candidate", "ending.py", "--cases", 100, "--max-crashes", 2, "--out", "out")
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (done.returncode, found["verdict"]) == (1, "not neutral")
    assert found["counts"]["executed"] < 20
    assert "cases ended or held up their process" in str(found["not_checked"])


def test_a_run_ends_in_time_and_says_what_was_not_reached(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = finish(tmp_path, *RUN[:-4], "--cases", 10**12, "--minutes", 0.03, "--out", "out")
    assert time.monotonic() - begin < 60
    assert done.returncode == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["not_checked"][0]["reason"] == "the run began no more: the time was up"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
