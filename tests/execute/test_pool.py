"""Whatever a subject does to its process, its case has an outcome and so have the others, and nothing gets out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from deeds import BAD, CRASHES, doing

from harness.case import Case
from harness.execute.pool import Pool, WorkerError
from harness.execute.result import CaseResult
from harness.subjects.source import Source, resolve

LEGACY = resolve("legacy")


def case(length: int, seed: int = 0) -> Case:
    return Case(max_seqlen_q=length, max_seqlen_kv=length, seed=seed)


def outcomes(
    candidate: Source, *cases: Case, control: Source = LEGACY, workers: int = 1, timeout: float = 1
) -> list[CaseResult]:
    with Pool(control, candidate, "reference", workers=workers, case_timeout=timeout) as pool:
        found = pool.run_all(cases or (case(3), case(BAD), case(4)))
    assert None not in found
    return [result for result in found if result is not None]


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("deed", CRASHES)
def test_what_ends_the_process_is_a_crash_of_its_side_and_stage_and_the_other_cases_are_judged(
    deed: str, stage: str
) -> None:
    statement, words = CRASHES[deed]
    before, crash, after = outcomes(doing(statement, stage))
    assert (before.outcome, after.outcome) == ("match", "match")
    assert crash.outcome == "crash"
    assert crash.reason is not None
    assert crash.reason.startswith("the candidate ")
    assert words in crash.reason
    assert f" in {stage}" in crash.reason
    (difference,) = crash.differences
    assert (difference.path.split("/")[1], difference.kind, difference.control) == (stage, "crash", "comes back")


def test_a_crash_of_the_control_alone_is_told_of_the_control() -> None:
    _, crash, _ = outcomes(LEGACY, control=doing("os._exit(0)"))
    assert crash.outcome == "crash"
    assert str(crash.reason).startswith("the control ended the process")


def test_a_stack_names_the_line_that_crashed() -> None:
    _, crash, _ = outcomes(doing(CRASHES["segfault"][0]))
    line = doing(CRASHES["segfault"][0]).text.splitlines().index(f"            {CRASHES['segfault'][0]}") + 1
    assert f"backward (planted.py:{line})" in str(crash.reason)


def test_what_both_sides_do_to_their_process_is_an_error_and_no_finding() -> None:
    bad = doing("os._exit(0)")
    before, error, after = outcomes(bad, control=bad)
    assert (before.outcome, error.outcome, after.outcome) == ("match", "error", "match")
    assert "both sides end the process" in str(error.reason)


def test_a_case_is_not_blamed_for_what_an_earlier_one_did_and_is_no_pass_either() -> None:
    late = doing("vars(torch)['harness_test_mark'] = 1")
    line = "        nominal_dtype = q.dtype\n"
    bomb = "        if hasattr(torch, 'harness_test_mark') and max_seqlen_q != 5:\n            os._exit(0)\n"
    both = Source("late", "late.py", late.text.replace(line, bomb + line))
    _, first, suspect = outcomes(both)
    assert first.outcome == "match"
    assert suspect.outcome == "error"
    assert "not again when the case was run alone" in str(suspect.reason)


DEEDS = {
    "sys.exit": ("raise SystemExit(0)", "exception/type"),
    "an interrupt": ("raise KeyboardInterrupt", "exception/type"),
    "1 MB printed": ("print('x' * 1_000_000)", "print/backward/stdout"),
    "printed below Python": ("os.write(1, b'x' * 1_000_000)", "print/backward/stdout"),
    "complaints": ("os.write(2, b'so it goes')", "print/backward/stderr"),
    "a warning": ("__import__('warnings').warn('look out')", "print/backward/warnings"),
    "environment emptied": ("os.environ.clear()", "state/environment"),
    "more memory than there is": ("torch.empty(1 << 50)", "exception/type"),
    "a thread that raises": (
        "__import__('threading').Thread(target=lambda: [][0]).start()", "state/threads that raised",
    ),
    "a thread left": (
        "__import__('threading').Thread(target=__import__('time').sleep, args=(60,)).start()", "state/running threads",
    ),
    "a child left": ("__import__('subprocess').Popen(['sleep', '60'])", "state/child processes"),
    "a forked copy": ("os.fork()", "state/child processes"),
}  # fmt: skip


@pytest.mark.parametrize("deed", DEEDS)
def test_what_leaves_the_process_alive_is_seen_in_its_place_and_reaches_neither_terminal_nor_other_cases(
    deed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    statement, path = DEEDS[deed]
    before, found, after = outcomes(doing(statement), timeout=20)
    assert (before.outcome, after.outcome) == ("match", "match")
    assert found.outcome == ("difference"), found.reason
    if found.differences:
        assert path in {difference.path for difference in found.differences}
        assert len(str(found.event())) < 60_000
    assert capfd.readouterr() == ("", "")


def test_results_are_in_the_order_of_the_cases_and_the_same_for_any_number_of_workers() -> None:
    cases = [case(3 + seed % 4, seed) for seed in range(12)]
    bad = doing("os._exit(1)")
    runs = [outcomes(bad, *cases, workers=workers) for workers in (1, 3)]
    assert [result.case for result in runs[0]] == cases
    assert [(result.case, result.outcome) for result in runs[0]] == [
        (result.case, result.outcome) for result in runs[1]
    ]
    assert {result.outcome for result in runs[0]} == {"match", "crash"}


def test_no_more_cases_begin_once_it_is_told_to_stop() -> None:
    begun: list[Case] = []
    cases = [case(3, seed) for seed in range(20)]
    with Pool(LEGACY, LEGACY, "reference") as pool:
        found = pool.run_all(cases, begun.append, stop=lambda: len(begun) >= 5)
    assert begun == cases[:5]
    assert [result is None for result in found] == [False] * 5 + [True] * 15


def test_a_case_alone_runs_in_a_process_that_ran_no_other() -> None:
    remembers = doing("vars(torch)['harness_test_mark'] = 1", always=True)
    line = "        nominal_dtype = q.dtype\n"
    differs = "        attn_scale = 0.3 if hasattr(torch, 'harness_test_mark') else attn_scale\n"
    candidate = Source("stateful", "stateful.py", remembers.text.replace(line, differs + line))
    with Pool(LEGACY, candidate, "reference") as pool:
        assert [pool.run(case(3, seed)).outcome for seed in range(3)] == ["match", "difference", "difference"]
        assert pool.run(case(3, 2), alone=True).outcome == "match"


METHOD = "    @staticmethod\n    def forward"
UNLOADABLE = {
    "SliceError": "class FusedAttnFunc(:",
    "LoadError": LEGACY.text.replace(METHOD, f"    1 / 0\n\n{METHOD}", 1),
    "Death": LEGACY.text.replace(METHOD, f"    __import__('os')._exit(0)\n\n{METHOD}", 1),
}


@pytest.mark.parametrize("kind", UNLOADABLE)
def test_a_subject_that_cannot_be_loaded_is_refused_with_the_reason(kind: str) -> None:
    candidate = Source("broken", "broken.py", UNLOADABLE[kind])
    with pytest.raises(WorkerError) as caught, Pool(LEGACY, candidate, "reference"):
        pass
    assert caught.value.kind == kind
    if kind == "Death":
        assert "the candidate ended the process with exit status 0 in load" in str(caught.value)


KILLED = """
import sys, threading, time
sys.path.insert(0, {here!r})
from deeds import doing
from test_pool import LEGACY, case
from harness.execute.pool import Pool
if __name__ == "__main__":
    with Pool(LEGACY, doing("[0 for _ in iter(int, 1)]"), "reference") as pool:
        print(pool._workers[0].process.pid, flush=True)
        pool.run(case(5))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_no_worker_outlives_a_controller_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(here=str(Path(__file__).parent)))
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    time.sleep(0.5)
    os.kill(pid, 0)
    process.kill()
    process.wait()
    process.stdout.close()
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_a_closed_pool_leaves_no_process_and_no_folder() -> None:
    with Pool(LEGACY, LEGACY, "reference", workers=2) as pool:
        pool.run_all([case(3, seed) for seed in range(8)])
        pids = [one.process.pid for one in pool._workers]
        folder = pool._folder
        assert len(pids) == 2
        assert folder.is_dir()
    assert not folder.exists()
    assert eventually(lambda: not any(alive(pids)))


def alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def eventually(holds: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()
