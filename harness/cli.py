"""The command line. Importing it is cheap: torch comes in only when a command runs cases."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from harness import __version__, terminal
from harness.case import nearest
from harness.engines.api import ENGINE_NAMES
from harness.judge import (
    EXIT_HARNESS,
    EXIT_UNVERIFIED,
    EXIT_USAGE,
    INTERRUPTED,
    SIGNALLED,
    STOPPED,
    counted_as,
    exit_code,
)
from harness.lanes import LANES, OUTSIDE, boxes
from harness.layouts import LAYOUTS
from harness.space import solve, why_impossible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from harness.execute.result import CaseResult
    from harness.run import RunSpec
    from harness.subjects.source import Source

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Show that a change to TransformerEngine's FusedAttnFunc is behaviour-neutral, or where it is not.",
)

EXIT_CODES = (
    "Exit codes: 0 neutral, 1 not neutral, 2 bad usage or input, 3 unverified (nothing executed, or a layout, lane or "
    "coverage asked for and not reached), 4 the harness itself failed, 130 interrupted, 143 stopped by SIGTERM."
)

EVERY = 10.0
"""Seconds between lines that say how far a run is, where there is no terminal for a bar."""

MOST_WORKERS = 512

WORKER_ERRORS = {"LoadError": EXIT_USAGE, "SliceError": EXIT_USAGE, "EngineUnavailable": EXIT_UNVERIFIED}
"""The exit code for what a worker raises while it loads the subjects and the engine."""

Spec = Annotated[str, typer.Option(metavar="SPEC")]
CONTROL_HELP = "The implementation trusted today: legacy, refactored, te, te==VERSION, a path, or package.module:Name."
CANDIDATE_HELP = "The changed implementation; takes what --control takes."


def fail(message: str, code: int = EXIT_USAGE) -> NoReturn:
    """Print one message to standard error and leave with an exit code."""
    terminal.console(stderr=True, soft_wrap=True).print(f"harness: {message.replace('?.', '?')}", markup=False)
    raise typer.Exit(code)


@contextlib.contextmanager
def clear_errors(*, writing: bool = False) -> Iterator[None]:
    """Turn what a user can put right into one message and exit 2, a missing engine into 3, a full disk into 4."""
    from harness.case import CaseError
    from harness.execute.journal import JournalError
    from harness.execute.pool import WorkerError
    from harness.regressions import RegressionError
    from harness.replay import ReplayError
    from harness.report import ReportError
    from harness.run import ResumeError
    from harness.subjects.source import SpecError

    try:
        yield
    except (CaseError, RegressionError, ReplayError, ResumeError, SpecError) as error:
        fail(str(error))
    except (JournalError, ReportError) as error:
        fail(str(error), EXIT_HARNESS if isinstance(error.__cause__, OSError) and writing else EXIT_USAGE)
    except WorkerError as error:
        fail(str(error), WORKER_ERRORS.get(error.kind, EXIT_HARNESS))
    except KeyboardInterrupt as error:
        fail("interrupted", SIGNALLED[STOPPED if type(error).__name__ == "Stopped" else INTERRUPTED])


def _check_layouts(names: list[str]) -> list[str]:
    for name in names:
        if name not in LAYOUTS:
            fail(f"layout={name!r} is unknown{nearest(name, LAYOUTS)}. The layouts are {', '.join(LAYOUTS)}")
    return list(dict.fromkeys(names))


def _check_lanes(names: list[str], layouts: list[str]) -> list[str]:
    """Return the lanes asked for, each once; leave where one is unknown, or no case of it has a layout asked for."""
    for name in names:
        if name not in LANES:
            fail(f"lane={name!r} is unknown{nearest(name, LANES)}. `harness lanes` says what each is; they are "
                 f"{', '.join(LANES)}")  # fmt: skip
    parts = [([name], layouts) for name in names] + [(names, [name]) for name in layouts if names]
    for some_lanes, some_layouts in parts:
        asked = boxes(some_layouts, some_lanes)
        if all(solve(box) is None for box in asked):
            options = [f"--lane {name}" for name in some_lanes] + [f"--layout {name}" for name in some_layouts]
            reasons = dict.fromkeys(reason for box in asked for reason in why_impossible(box))
            fail(f"no case can have {' and '.join(options)}: {'; '.join(reasons)}. Leave one of them out")
    return list(dict.fromkeys(names))


def _check_strength(strength: int | None, cases: int | None, min_coverage: float | None) -> int:
    """Return the strength to run at: as asked for, else 2, or 0 where a number of cases is asked for."""
    if strength is None:
        strength = 2 if cases is None or min_coverage is not None else 0
    if strength not in (0, 2, 3):
        fail(f"strength={strength} is not one of 0, 2, 3: every valid combination of so many levels, or 0 for none")
    if min_coverage is not None and not 0 < min_coverage <= 1:
        fail(f"min-coverage={min_coverage} is out of range; it takes a part of all combinations, above 0 and up to 1")
    if min_coverage is not None and not strength:
        fail(f"min-coverage={min_coverage} needs --strength 2 or 3, which says what is to be covered")
    return strength


def _check_engine(name: str) -> str:
    if name not in ENGINE_NAMES:
        fail(f"engine={name!r} is unknown{nearest(name, ENGINE_NAMES)}. The engines are {', '.join(ENGINE_NAMES)}")
    return name


@app.command(epilog=EXIT_CODES)
def run(
    context: typer.Context,
    control: Annotated[str, typer.Option(metavar="SPEC", help=CONTROL_HELP)] = "legacy",
    candidate: Annotated[str, typer.Option(metavar="SPEC", help=CANDIDATE_HELP)] = "refactored",
    layout: Annotated[list[str] | None, typer.Option(help="A qkv_layout, by its exact name; may be repeated. "
                                                     "Default: all.")] = None,
    lane: Annotated[list[str] | None, typer.Option(help="A lane, as `harness lanes` names it; may be repeated: any of "
                                                   "them. Default: all.")] = None,
    engine: Annotated[str, typer.Option(help="auto, reference or cudnn; auto takes cudnn where it runs.")] = "auto",
    cases: Annotated[int | None, typer.Option(metavar="N", help="How many cases to execute. Default: the stored ones, "
                                              "the covering set, and a tenth as many drawn at random; without a "
                                              "covering set 200.")] = None,
    strength: Annotated[int | None, typer.Option(metavar="T", help="Cover every valid combination of the levels of T "
                                                 "factors, 2 or 3; 0 for none. Default: 2, or 0 with --cases.")] = None,
    min_coverage: Annotated[float | None, typer.Option(metavar="F", help="The part of these combinations, up to 1, "
                                                       "below which the run is unverified.")] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Draws every case and every tensor.")] = 0,
    workers: Annotated[str, typer.Option("--workers", "-n", metavar="N", help="How many cases to run at once, each in "
                                         "a process of its own; auto is one per core, or GPU.")] = "auto",
    case_timeout: Annotated[float | None, typer.Option(metavar="S", help="Seconds that a case may take. Default: 60 on "
                                                       "the reference engine, 300 on cudnn.")] = None,
    minutes: Annotated[float | None, typer.Option(metavar="M", help="Begin no more cases after so long.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with the run in this folder: run what "
                                                "has no outcome yet. What was asked for is as it was.")] = None,
    max_crashes: Annotated[int, typer.Option(metavar="N", min=1, help="Begin no more cases after so many ended or held "
                                             "up their process.")] = 10,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the reports go. "
                                             "Default: a new folder under reports/.")] = None,
) -> None:  # fmt: skip
    """Run control and candidate on stored and generated cases, compare all that can be seen, and give a verdict."""
    layouts = _check_layouts(layout or [])
    lanes = _check_lanes(lane or [], layouts)
    _check_engine(engine)
    if cases is not None and cases < 1:
        fail(f"cases={cases} is out of range; --cases takes 1 or more, since a run of none shows nothing")
    strength = _check_strength(strength, cases, min_coverage)
    if not 0 <= seed < 2**31:
        fail(f"seed={seed} is out of range; --seed takes 0 to {2**31 - 1}")
    for name, value in (("case-timeout", case_timeout), ("minutes", minutes)):
        if value is not None and not 0 < value < float("inf"):
            fail(f"{name}={value} is out of range; --{name} takes a number above 0")
    with clear_errors(writing=True):
        from harness.execute.journal import read_journal
        from harness.run import RunSpec, Watcher, execute, recorded

        spec = RunSpec(
            control, candidate, engine, layouts, lanes, cases, strength, min_coverage, seed, _check_workers(workers),
            case_timeout, minutes, max_crashes,
        )  # fmt: skip
        events: list[dict[str, Any]] = []
        if resume is not None:
            with clear_errors():  # what cannot be read is the user's to put right, what cannot be written is not
                events = read_journal(resume)
            was = recorded(events[0])
            _check_unchanged(context, spec, was)
            spec = replace(
                was, workers=spec.workers, case_timeout=case_timeout, minutes=minutes, most_crashes=max_crashes
            )
        _stop_on_sigterm()
        console = terminal.console()
        progress = _Progress(console)
        watcher = Watcher(lambda text: console.print(text, markup=False), progress.planned, progress.ended)
        try:
            results = execute(spec, resume or _new_folder(out), watcher, resumed=events)
        finally:
            progress.close()
    from harness.report.terminal import print_results

    print_results(results, console)
    raise typer.Exit(int(results["exit_code"]))


def _check_unchanged(context: typer.Context, given: RunSpec, was: RunSpec) -> None:
    """Leave where an option is given that is not as it was in the run that is to go on."""
    for name in (
        "control",
        "candidate",
        "engine",
        "layout",
        "lane",
        "cases",
        "strength",
        "min_coverage",
        "seed",
        "out",
    ):
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        field = name + "s" if name in ("layout", "lane") else name
        if name == "out" or getattr(given, field) != getattr(was, field):
            fail(f"--{name.replace('_', '-')} cannot be given with --resume, unless as it was; leave it out")


def _check_workers(workers: str) -> int | None:
    """Return how many workers are asked for; None where that is left open."""
    if workers == "auto":
        return None
    if workers.isascii() and workers.isdecimal() and 1 <= int(workers) <= MOST_WORKERS:
        return int(workers)
    fail(f"workers={workers!r} is no number of workers; it takes auto, or 1 to {MOST_WORKERS}")


def _new_folder(out: Path | None) -> Path:
    folder = out or _unused(Path("reports") / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "journal.jsonl").exists():
            fail(f"out={folder} holds a run already; name another folder, so that nothing is lost")
        probe = folder / ".write-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        fail(f"out={folder} cannot be written: {error.strerror}; name another folder with --out")
    return folder


def _unused(folder: Path) -> Path:
    """Return the folder, or the first of FOLDER-2, FOLDER-3, ... that does not exist."""
    names = (folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, 1000)))
    return next(name for name in names if not name.exists())


class _Progress:
    """Tells how far a run is: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: Any = None
        self._size = 0
        self._counts: dict[str, int] = {}
        self._begin = self._last = time.monotonic()

    def planned(self, size: int) -> None:
        """Take in how many cases are to be executed."""
        self._size, self._begin = size, time.monotonic()
        if self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
                       TextColumn("{task.description}"))  # fmt: skip
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=size)
            self._bar.start()

    def ended(self, result: CaseResult) -> None:
        """Take in a case's result."""
        from harness.judge import EXECUTED, counted_as

        name = counted_as(result.outcome, result.both_raised).replace("_", " ")
        self._counts[name] = self._counts.get(name, 0) + 1
        now = time.monotonic()
        if self._bar is None and now - self._last < EVERY:
            return
        self._last = now
        rate = sum(self._counts.values()) / max(now - self._begin, 1e-3)
        text = f"{rate:.0f}/s  " + "  ".join(f"{key} {value}" for key, value in self._counts.items())
        if self._bar is not None:
            self._bar.update(self._task, advance=int(result.outcome in EXECUTED), description=text)
        else:
            self._console.print(f"{sum(self._counts.values())} of {self._size} cases, {text}")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


def _stop_on_sigterm() -> None:
    """Have a signal that asks this process to end do so after the reports are written."""
    from harness.run import Stopped

    def stop(number: int, frame: Any) -> NoReturn:
        raise Stopped

    with contextlib.suppress(ValueError):  # not in the main thread: whoever called has signals of their own
        signal.signal(signal.SIGTERM, stop)


@app.command(epilog=EXIT_CODES)
def replay(
    what: Annotated[str, typer.Argument(metavar="FILE_OR_ID", help="A case's JSON file, or the id of a case.")],
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="The run that an id belongs to. "
                                             "Default: the newest under reports/ that has it.")] = None,
    control: Annotated[str | None, typer.Option(metavar="SPEC", help="Default: as in the run, else legacy.")] = None,
    candidate: Annotated[str | None, typer.Option(metavar="SPEC", help="Default: as in the run, else "
                                                  "refactored.")] = None,
    engine: Annotated[str | None, typer.Option(help="Default: as in the run, else auto.")] = None,
    case_timeout: Annotated[float | None, typer.Option(metavar="S", help="Seconds that the case may take. Default: 60 "
                                                       "on the reference engine, 300 on cudnn.")] = None,
    script: Annotated[bool, typer.Option("--script", help="Print a Python script that shows the case with torch and "
                                         "the two sources alone.")] = False,
) -> None:  # fmt: skip
    """Run one case again and show every difference."""
    from harness.replay import describe_subject, find
    from harness.replay import script as write_script
    from harness.run import open_pool
    from harness.subjects.source import resolve

    with clear_errors():
        stored = find(what, run)
        chosen = _check_engine(engine or stored.engine or "auto")
        sources = (
            resolve(control or stored.control or "legacy"),
            resolve(candidate or stored.candidate or "refactored"),
        )
        with open_pool(sources, chosen, case_timeout=case_timeout) as pool:
            if script:
                subjects = [describe_subject(source) for source in sources]
                terminal.echo(write_script(stored.case, subjects[0], subjects[1], pool.loaded.name))
                return
            result = pool.run(stored.case)
    same = control is None and candidate is None and engine is None
    raise typer.Exit(_show(result, sources, pool.loaded.name, only_after_others=same and stored.failed))


def _show(result: CaseResult, sources: Sequence[Source], engine: str, *, only_after_others: bool) -> int:
    """Print a case's result and return its exit code.

    ``only_after_others`` is whether the case differed in the run that it is from: then a match is no pass.
    """
    from harness.report.describe import describe_case

    console = terminal.console(soft_wrap=True)

    def say(text: str, style: str | None = None) -> None:
        console.print(text, markup=False, style=style)

    counted = counted_as(result.outcome, result.both_raised)
    say(f"case {result.case.id}: {describe_case(result.case.to_dict())}")
    say(f"control {sources[0].spec}, candidate {sources[1].spec}, engine {engine}")
    if counted == "both_raised":
        say(f"match: both sides raised alike; no numbers were compared ({result.reason})", "yellow")
    else:
        style = {"match": "green", "difference": "red", "crash": "red"}.get(result.outcome, "yellow")
        say(f"{result.outcome}{': ' + result.reason if result.reason else ''}", style)
    for noise in result.noise:
        say(f"  the {noise.side} disagrees with itself on {noise.path}: by up to {noise.spread:.3g}")
    for difference in result.differences:
        say(f"  {difference.path}  [{difference.kind}]  {difference.message}")
        say(f"    control   {json.dumps(difference.control)}")
        say(f"    candidate {json.dumps(difference.candidate)}")
    for note in result.notes:
        say(f"  note: {note}")
    if only_after_others and counted in ("match", "noisy"):
        say("  in its run the case differed: it does so only after other cases, or not every time", "yellow")
        return EXIT_UNVERIFIED
    return exit_code(result.outcome, result.both_raised)


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, with its journal.jsonl.")],
) -> None:
    """Make all reports of a run again, from its journal alone, and show the verdict."""
    from harness.report import write_reports
    from harness.report.terminal import print_results

    with clear_errors():
        results = write_reports(directory)
        print_results(results, terminal.console())
    raise typer.Exit(int(results["exit_code"]))


@app.command()
def coverage(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, with its journal.jsonl.")],
    strength: Annotated[int | None, typer.Option(metavar="T", help="Of how many factors, 2 or 3. Default: as in the "
                                                 "run, else 2.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:  # fmt: skip
    """Show which combinations of levels a run executed, and what became of the others, from its journal alone."""
    if strength not in (None, 2, 3):
        fail(f"strength={strength} is not one of 2, 3")
    from harness.execute.journal import read_journal

    with clear_errors():
        events = read_journal(directory)
    from harness.ledger import ledger
    from harness.report import coverage as report_coverage

    found = ledger(events, strength)
    if as_json:
        terminal.echo(json.dumps(report_coverage.as_json(found), indent=1) + "\n")
        return
    console = terminal.console(soft_wrap=True)
    for line in report_coverage.lines(found):
        console.print(line, markup=False)


@app.command()
def lanes() -> None:
    """List the lanes that --lane takes: what each is, and which engine here can run it."""
    from rich.table import Table

    from harness.doctor import diagnose

    diagnoses = [diagnose(name) for name in ("reference", "cudnn")]
    here = [diagnosis for diagnosis in diagnoses if diagnosis.available.works]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("lane", "what it is", *(diagnosis.engine for diagnosis in here)):
        table.add_column(title, no_wrap=title != "what it is", overflow="fold")
    for index, lane in enumerate(LANES.values()):
        table.add_row(lane.name, lane.title, *("yes" if item.lanes[index].works else "no" for item in here))
    console = terminal.console()
    console.print(table, markup=False)
    for diagnosis in here:
        for finding in diagnosis.lanes:
            if not finding.works:
                console.print(f"{diagnosis.engine} cannot run {finding.what}: {finding.reason}", markup=False)
    for diagnosis in diagnoses:
        if diagnosis not in here:
            console.print(
                f"what {diagnosis.engine} can run is not known here: {diagnosis.available.reason}", markup=False
            )
    console.print(OUTSIDE, markup=False)


@app.command()
def doctor() -> None:
    """Show what this machine can check, engine by engine, and what stands in the way of the rest."""
    from harness.doctor import diagnose

    console = terminal.console(soft_wrap=True)
    working = []
    for name in ("reference", "cudnn"):
        diagnosis = diagnose(name)
        console.print(f"engine {name}: {'works' if diagnosis.available.works else 'not here'}",
                      style="green" if diagnosis.available.works else "yellow", markup=False)  # fmt: skip
        if not diagnosis.available.works:
            console.print(f"  {diagnosis.available.reason}", markup=False)
            continue
        working.append(name)
        if name == "reference":
            console.print("  shows what the code around the kernels does; it is no evidence about kernels")
        for key, value in diagnosis.environment.items():
            console.print(f"  {key}: {value}", markup=False)
        for title, findings in (("layouts", diagnosis.layouts), ("lanes", diagnosis.lanes)):
            can = [finding.what for finding in findings if finding.works]
            console.print(f"  {title}, {len(can)} of {len(findings)}: {', '.join(can)}", markup=False)
            for finding in findings:
                if not finding.works:
                    console.print(f"    not {finding.what}: {finding.reason}", markup=False, style="dim")
    console.print(OUTSIDE, markup=False)
    console.print(f"`harness run` uses {'cudnn' if 'cudnn' in working else 'reference'} by default", markup=False)
    if not working:
        raise typer.Exit(EXIT_HARNESS)


def _version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]
    = False,
) -> None:  # fmt: skip
    """Show that a change to TransformerEngine's FusedAttnFunc is behaviour-neutral, or where it is not."""


def main() -> None:
    """Run the command line; what nobody foresaw is a fault of the harness, and has its exit code."""
    terminal.fit_streams()
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(SIGNALLED[INTERRUPTED])
    except Exception:
        traceback.print_exc()
        terminal.console(stderr=True).print("harness: this is a fault of the harness; please report it", markup=False)
        sys.exit(EXIT_HARNESS)


if __name__ == "__main__":
    main()
