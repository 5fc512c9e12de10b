"""A whole run without the command line: from what is asked for to the results, and every report on the way."""

from __future__ import annotations

import importlib.util
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import __version__
from harness.execute.campaign import Campaign, plan, started
from harness.execute.journal import Journal, JournalError
from harness.execute.pool import Pool
from harness.execute.result import CaseResult
from harness.judge import INTERRUPTED, STOPPED
from harness.regressions import stored_cases
from harness.report import Results, write_reports
from harness.subjects.source import Source, resolve

CASES = 200
"""How many cases to execute where neither a number nor a covering set is asked for."""

MOST_CRASHES = 10
"""How many cases may end their process before no more are run: each costs a worker, and some cost a time-out."""


class Stopped(KeyboardInterrupt):
    """The process was asked to end by a signal that is no interrupt from the keyboard."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What to run.

    ``layouts`` and ``lanes`` empty stand for all; ``cases`` is how many to execute, and None leaves it to the covering
    set of ``strength``. ``workers`` None is one for each usable core, or GPU. ``case_timeout`` is in seconds, and None
    is the engine's own; ``minutes`` is when to begin no more cases.
    """

    control: str = "legacy"
    candidate: str = "refactored"
    engine: str = "auto"
    layouts: Sequence[str] = ()
    lanes: Sequence[str] = ()
    cases: int | None = None
    strength: int = 0
    min_coverage: float | None = None
    seed: int = 0
    workers: int | None = None
    case_timeout: float | None = None
    minutes: float | None = None
    most_crashes: int = MOST_CRASHES


@dataclass(frozen=True, slots=True)
class Watcher:
    """What is told of a run on its way: a sentence, then how many cases are planned, then each result."""

    note: Callable[[str], None] = lambda text: None
    planned: Callable[[int], None] = lambda size: None
    ended: Callable[[CaseResult], None] = lambda result: None


class ResumeError(ValueError):
    """A run that cannot go on; the message says what is not as it was and what to do."""


def recorded(start: Mapping[str, Any]) -> RunSpec:
    """Return what a run was asked for, given the first event of its journal."""
    asked = start["asked"]
    if "cases" not in asked:
        raise ResumeError("the journal is of an earlier version, which does not say all that was asked for; run again")
    return RunSpec(
        start["control"]["spec"], start["candidate"]["spec"], start["engine"], asked["layouts"], asked["lanes"],
        asked["cases"], asked["strength"], asked["min_coverage"], start["seed"],
    )  # fmt: skip


def execute(
    spec: RunSpec, folder: Path, watcher: Watcher | None = None, *, resumed: Sequence[Mapping[str, Any]] = ()
) -> Results:
    """Run control and candidate over the cases asked for, write the journal and all reports, and return the results.

    The subjects' code runs in worker processes alone. ``folder`` must exist and hold no run. Raises SpecError for a
    spec that names no source, WorkerError where subjects or engine cannot be loaded, JournalError and ReportError where
    the folder cannot be written. An interrupt ends the run, and what was done is reported. ``resumed`` are the events
    of a run in this folder that goes on: cases with an outcome are not run again. Raises ResumeError where the sources
    or the harness are not those of that run.
    """
    watcher = watcher or Watcher()
    sources = resolve(spec.control), resolve(spec.candidate)
    if sources[0].text == sources[1].text:
        watcher.note("note: control and candidate are the same text; this run can show noise alone")
    if resumed:
        _check_same(resumed[0], sources)
    kept = resumed[:-1] if resumed and resumed[-1]["event"] == "end" else resumed
    with (
        open_pool(sources, spec.engine, spec.workers, spec.case_timeout) as pool,
        Journal(folder, kept=[dict(event) for event in kept]) as journal,
    ):
        _record(spec, sources, pool, journal, folder, watcher, kept)
    return write_reports(folder)


def _check_same(start: Mapping[str, Any], sources: tuple[Source, Source]) -> None:
    if start["harness"] != __version__:
        raise ResumeError(f"harness={__version__} cannot go on with a run of harness={start['harness']}; run again")
    for side, source in zip(("control", "candidate"), sources, strict=True):
        if source.sha256 != start[side]["sha256"]:
            raise ResumeError(
                f"the {side} {source.spec} has changed since the run began: sha256={source.sha256[:12]}, then "
                f"{start[side]['sha256'][:12]}; run again"
            )


def open_pool(
    sources: tuple[Source, Source], engine: str, workers: int | None = 1, case_timeout: float | None = None
) -> Pool:
    """Return the pool of workers that runs two sources on an engine, bound to the GPUs that may be used."""
    if engine == "auto" and importlib.util.find_spec("transformer_engine") is None:
        engine = "reference"
    devices = [] if engine == "reference" else gpus()
    if workers is None:
        workers = len(devices) or (1 if engine != "reference" else usable_cores())
    variables = [{"CUDA_VISIBLE_DEVICES": device} for device in devices] or [{}]
    return Pool(*sources, engine, workers=workers, case_timeout=case_timeout, variables=variables)


def gpus() -> list[str]:
    """Return the GPUs that may be used, one by one as CUDA_VISIBLE_DEVICES takes them; empty where it names none."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [device.strip() for device in named.split(",") if device.strip()]


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _record(
    spec: RunSpec,
    sources: tuple[Source, Source],
    pool: Pool,
    journal: Journal,
    folder: Path,
    watcher: Watcher,
    known: Sequence[Mapping[str, Any]],
) -> None:
    begin = time.monotonic()
    engine = pool.loaded
    planned = plan(
        spec.layouts, spec.lanes, spec.seed, engine.dtypes, strength=spec.strength,
        count=spec.cases or (None if spec.strength else CASES), stored=stored_cases(), engine=engine.name,
    )  # fmt: skip
    start = {
        "event": "start",
        "schema": 1,
        "harness": __version__,
        "control": sources[0].describe(),
        "candidate": sources[1].describe(),
        "engine": engine.name,
        "environment": engine.environment,
        "seed": spec.seed,
        "asked": {"layouts": list(spec.layouts), "lanes": list(spec.lanes), "strength": spec.strength,
                  "min_coverage": spec.min_coverage, "cases": spec.cases},
        "cases_asked": planned.size,
        "dtypes": list(engine.dtypes),
        "started": started(),
    }  # fmt: skip
    if not known:
        journal.write(start)
    watcher.planned(planned.size)
    describe = {"control": spec.control, "candidate": spec.candidate, "engine": engine.name}
    campaign = Campaign(
        planned, pool, journal, folder, describe, watcher.ended, most_crashes=spec.most_crashes,
        known=known, until=None if spec.minutes is None else begin + 60 * spec.minutes,
    )  # fmt: skip
    fault: str | None = None
    try:
        campaign.run()
    except JournalError:
        raise
    except Stopped:
        fault = STOPPED
    except KeyboardInterrupt:
        fault = INTERRUPTED
    except Exception as error:  # a fault of the harness: the cases so far stay, and the verdict says so
        (folder / "harness_error.txt").write_text(traceback.format_exc())
        fault = f"{type(error).__name__}: {error} (see harness_error.txt)"
    end: dict[str, Any] = {"event": "end", "seconds": time.monotonic() - begin, "harness_error": fault}
    journal.write(end | {"stopped": campaign.stopped})
