"""Worker processes as the judging process sees them: cases go out, results come back, and a death is a result too.

Plain ``multiprocessing`` processes, each with a pipe: a worker that died must be known by its case and its exit status,
and one that hangs must be killed. ``concurrent.futures`` fails every pending case when one worker dies and names none;
execnet talks over the standard streams, to which a subject may print, and tells no exit status.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.case import Case
from harness.compare import Difference
from harness.execute import worker
from harness.execute.result import CaseResult
from harness.execute.worker import SIDES, Setup, Side, Task
from harness.subjects.source import Source

CASE_TIMEOUT = {"reference": 60.0, "cudnn": 300.0}
"""Seconds that a case may take on an engine before its worker is killed, where none are given."""

LOAD_TIMEOUT = 600.0
"""Seconds until a worker that does not come up is killed: the first import of TransformerEngine can take minutes."""

GRACE = 1.0
"""Seconds that a worker which hangs is given to write down where it does, before it is killed."""

LAST_WORDS = 600

STILLBORN = 3
"""How many workers in a row may fail to come up, once one did, before the pool gives up."""

PRELOADED = ("harness.execute.pair", "harness.engines.reference")
"""What every forked worker has imported from the start."""


class WorkerError(RuntimeError):
    """Workers that cannot be had; the message says what happened.

    ``kind`` names what a worker raised while it loaded the subjects or the engine, or is ``Death`` where it ended.
    """

    def __init__(self, message: str, kind: str = "Death") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine that the workers run on: its name, the dtypes that it is worth drawing, and its environment."""

    name: str
    dtypes: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker ended that did not come back: whose code ran, in which stage, and what is known of the end."""

    side: str
    stage: str
    how: str
    words: str = ""
    hung: bool = False

    def __str__(self) -> str:
        where = f" in {self.stage}" if self.stage else ""
        return f"the {self.side} {self.how}{where}{': ' + self.words if self.words else ''}"


@dataclass(slots=True)
class _Inquest:
    """A case whose worker died: how it did, and how each side, and both, fare in fresh workers."""

    first: Death
    alone: dict[Task, Death | CaseResult | None] = field(default_factory=dict)


@dataclass(slots=True)
class _Job:
    """A case on its way, and what is asked for; one of an inquest goes to a worker that has run nothing yet."""

    index: int
    case: Case
    task: Task = "pair"
    inquest: _Inquest | None = None


@dataclass(slots=True)
class _Worker:
    process: Any
    connection: Connection
    folder: Path
    since: float
    """When it was started, or sent its job."""
    loaded: bool = False
    used: bool = False
    job: _Job | None = None
    serial: int = 0


Outcome = Death | CaseResult | None
"""What came of a job: how its worker died, the pair's result, or None where a side ran alone and lived."""


class Pool:
    """Runs cases on a control and a candidate in processes of their own; a context manager.

    ``workers`` is how many cases run at once and ``case_timeout`` the seconds that one may take; ``variables`` are set
    in the environment of each worker before it imports torch, in turn. Entering the context starts a worker and raises
    WorkerError where the subjects or the engine cannot be loaded.
    """

    loaded: Loaded

    def __init__(
        self,
        control: Source,
        candidate: Source,
        engine: str = "auto",
        *,
        workers: int = 1,
        case_timeout: float | None = None,
        variables: Sequence[Mapping[str, str]] = ({},),
    ) -> None:
        self._sources = control, candidate
        self._engine = engine
        self._size = workers
        self._timeout = case_timeout
        self._variables = itertools.cycle(variables)
        self._folder = Path(tempfile.mkdtemp(prefix="harness-"))
        self._workers: list[_Worker] = []
        self._serial = itertools.count(1)
        self._stillborn = 0
        # A fork of a process that has imported torch is up in a tenth of the time; CUDA does not survive one.
        self._context: Any = multiprocessing.get_context("forkserver" if engine == "reference" else "spawn")
        if engine == "reference":
            self._context.set_forkserver_preload(list(PRELOADED))

    def __enter__(self) -> Pool:
        try:
            first = self._start()
            while not first.loaded:
                list(self._listen())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every worker at once, and remove what they left."""
        while self._workers:
            self._end(self._workers[0])
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def timeout(self) -> float:
        """Seconds that a case may take."""
        return CASE_TIMEOUT[self.loaded.name] if self._timeout is None else self._timeout

    # ------------------------------------------------------------------ cases

    def run(self, case: Case, *, alone: bool = False) -> CaseResult:
        """Run one case, ``alone`` in a process that ran no other before."""
        if alone:
            for one in [one for one in self._workers if one.used]:
                self._end(one)
        (result,) = self.run_all([case])
        assert result is not None
        return result

    def run_all(
        self,
        cases: Sequence[Case],
        begun: Callable[[Case], None] = lambda case: None,
        ended: Callable[[CaseResult], None] = lambda result: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[CaseResult | None]:
        """Run cases, as many at once as there are workers, and return their results in the order of the cases.

        ``begun`` is called as each is handed out, ``ended`` as each comes back, in whatever order that is. Once
        ``stop`` is true no more are begun, and those left out have None.
        """
        results: dict[int, CaseResult] = {}
        jobs = deque(_Job(index, case) for index, case in enumerate(cases))
        left_out = 0
        while len(results) + left_out < len(cases):
            if stop():
                kept = [job for job in jobs if job.inquest is not None]
                left_out += len(jobs) - len(kept)
                jobs = deque(kept)
                if len(results) + left_out == len(cases):
                    break
            for job in self._hand_out(jobs):
                if job.inquest is None:
                    begun(job.case)
            for job, outcome in self._listen():
                if job.inquest is None and isinstance(outcome, CaseResult):
                    result: CaseResult | None = outcome
                else:
                    more, result = _inquire(job, outcome)
                    jobs.extendleft(more)
                if result is not None:
                    results[job.index] = result
                    ended(result)
        return [results.get(index) for index in range(len(cases))]

    def _hand_out(self, jobs: deque[_Job]) -> Iterator[_Job]:
        """Give jobs to the workers that wait for one, start more where there are too few, and yield what was given."""
        for one in list(self._workers):
            if not jobs or not one.loaded or one.job is not None:
                continue
            if jobs[0].inquest is not None and one.used:
                self._end(one)
                continue
            job = jobs.popleft()
            one.job, one.used, one.serial, one.since = job, True, next(self._serial), time.monotonic()
            with contextlib.suppress(OSError):  # it died in between: its end is heard next
                one.connection.send((job.task, one.serial, job.case.to_dict()))
            yield job
        coming = sum(one.job is None for one in self._workers)
        for _ in range(min(len(jobs) - coming, self._size - len(self._workers))):
            self._start()

    # ------------------------------------------------------------------ workers

    def _start(self) -> _Worker:
        number = next(self._serial)
        ours, theirs = self._context.Pipe()
        setup = Setup(*self._sources, self._engine, self._folder / str(number), next(self._variables))
        process = self._context.Process(target=worker.main, args=(theirs, setup), name=f"worker {number}")
        with _main_left_out():
            process.start()
        theirs.close()
        self._workers.append(one := _Worker(process, ours, setup.folder, time.monotonic()))
        return one

    def _listen(self) -> Iterator[tuple[_Job, Outcome]]:
        """Wait until some worker says something, ends or is out of time; yield each job that is over."""
        deadlines = {id(one): one.since + self._patience(one) for one in self._workers if one.job or not one.loaded}
        if not self._workers:
            return
        ready = wait(
            [thing for one in self._workers for thing in (one.connection, one.process.sentinel)],
            max(0.0, min(deadlines.values(), default=time.monotonic() + 1) - time.monotonic()),
        )
        for one in list(self._workers):
            job = one.job
            if one.connection in ready or one.process.sentinel in ready:
                dead, outcome = self._hear(one)
            elif id(one) in deadlines and time.monotonic() >= deadlines[id(one)]:
                dead, outcome = True, self._post_mortem(one, f"did not end within {self._patience(one):g} s")
            else:
                continue
            if dead and job is None:
                self._lost(one, outcome)
            elif job is not None and (dead or one.job is None):
                yield job, outcome

    def _patience(self, one: _Worker) -> float:
        return self.timeout if one.loaded else LOAD_TIMEOUT

    def _hear(self, one: _Worker) -> tuple[bool, Outcome]:
        """Take in what a worker said: whether it is dead, and the outcome of its job where that is over."""
        outcome: Outcome = None
        try:
            while one.connection.poll():
                said = json.loads(one.connection.recv_bytes())
                if said["is"] == "loaded":
                    one.loaded, self._stillborn = True, 0
                    self.loaded = Loaded(said["name"], tuple(said["dtypes"]), said["environment"])
                elif said["is"] == "unloaded":
                    raise WorkerError(said["message"], said["kind"])
                elif said["is"] == "done" and said["serial"] == one.serial:
                    outcome = CaseResult.from_event(said["event"]) if said["event"] else None
                    one.job = None
                    if said["left"]:  # a thread that still runs would be part of whatever comes next
                        self._end(one)
                        return False, outcome
        except (
            EOFError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # the pipe is closed, or something else wrote to it
            return True, self._post_mortem(one)
        if one.process.exitcode is not None and one.job is not None:
            return True, self._post_mortem(one)
        return False, outcome

    def _post_mortem(self, one: _Worker, hung: str | None = None) -> Death:
        """End a worker and say how it died; one that hangs first writes down where."""
        if hung:
            with contextlib.suppress(OSError):
                os.kill(one.process.pid, signal.SIGABRT)
        one.process.join(GRACE)
        code = one.process.exitcode
        self._end(one)
        how = hung or _ending(code)
        words = _stack(one.folder / "stack") or _tail(one.folder / "stderr")
        side, _, stage = (_tail(one.folder / worker.WHERE) or "harness").partition(" ")
        return Death(side, stage, how, words, hung is not None)

    def _lost(self, one: _Worker, death: Outcome) -> None:
        """Note that a worker died which had no case: at the first one, or at the third in a row, give up."""
        self._stillborn += 1
        if not one.loaded and (self._stillborn >= STILLBORN or not hasattr(self, "loaded")):
            raise WorkerError(f"no worker comes up: {death}")

    def _end(self, one: _Worker) -> None:
        """Kill a worker with all that it started, and let go of it."""
        with contextlib.suppress(OSError):
            os.killpg(one.process.pid, signal.SIGKILL)  # it leads a group of its own from its first step on
        one.process.kill()
        one.process.join()
        one.connection.close()
        one.process.close()
        self._workers.remove(one)


@contextlib.contextmanager
def _main_left_out() -> Iterator[None]:
    """Have a process that starts in the block not run this one's main script again, as multiprocessing would."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _inquire(job: _Job, outcome: Outcome) -> tuple[Iterable[_Job], CaseResult | None]:
    """Take in what came of a job after a death; return what else is to be run, or the case's result.

    A suspect is run again alone before it is blamed: each side by itself, then both, in fresh workers.
    """
    if job.inquest is None:
        assert isinstance(outcome, Death)
        inquest = _Inquest(outcome)
        return [_Job(job.index, job.case, side, inquest) for side in SIDES], None
    inquest = job.inquest
    inquest.alone[job.task] = outcome
    if not set(SIDES) <= set(inquest.alone):
        return (), None
    died: dict[Side, Death] = {side: found for side in SIDES if isinstance(found := inquest.alone[side], Death)}
    if len(died) == 2:
        both = "; ".join(str(death) for death in died.values())
        return (), CaseResult(job.case, "error", reason=f"both sides end the process: {both}")
    if len(died) == 1:
        (side,) = died
        return (), _crash(job.case, side, died[side])
    if "pair" not in inquest.alone:
        return [_Job(job.index, job.case, "pair", inquest)], None
    again = inquest.alone["pair"]
    if isinstance(again, Death) and again.side in SIDES:
        return (), _crash(job.case, "control" if again.side == "control" else "candidate", again)
    if isinstance(again, Death):
        return (), CaseResult(job.case, "error", reason=f"the harness fails: {again}")
    return (), CaseResult(
        job.case,
        "error",
        reason=f"{inquest.first}; not again when the case was run alone, so an earlier case or the machine is to blame",
    )


def _crash(case: Case, side: Side, death: Death) -> CaseResult:
    """Return the finding that one side alone ends or holds up the process."""
    death = replace(death, side=side)  # it may have come back first
    seen = {name: death.how if name == side else "comes back" for name in SIDES}
    path = f"{'hang' if death.hung else 'crash'}/{death.stage or 'before it starts'}"
    difference = Difference(path, "crash", seen["control"], seen["candidate"], str(death))
    return CaseResult(case, "crash", reason=str(death), differences=(difference,))


def _ending(code: int | None) -> str:
    if code is None:
        return "cut the connection to its process"
    if code == worker.DEVICE_LOST:
        return "left the device unusable"
    if code >= 0:
        return f"ended the process with exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    memory = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"ended the process by {name}{memory}"


def _stack(path: Path) -> str:
    """Return the innermost three frames of a stack that was written as the process died; empty where none was."""
    frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', _tail(path, 1 << 16))
    return " < ".join(f"{name} ({Path(file).name}:{line})" for file, line, name in frames[:3])


def _tail(path: Path, most: int = LAST_WORDS) -> str:
    try:
        return path.read_bytes()[-most:].decode(errors="backslashreplace").strip()
    except OSError:
        return ""
