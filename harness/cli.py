"""The command line. Importing it is cheap: torch comes in only when a command runs cases."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from harness import __version__
from harness.case import nearest
from harness.engines.api import ENGINE_NAMES
from harness.judge import EXIT_HARNESS, EXIT_NEUTRAL, EXIT_NOT_NEUTRAL, EXIT_UNVERIFIED, EXIT_USAGE
from harness.lanes import LANES, OUTSIDE, boxes
from harness.layouts import LAYOUTS
from harness.space import solve, why_impossible

if TYPE_CHECKING:
    from harness.engines.api import Engine
    from harness.execute.campaign import Plan
    from harness.execute.journal import Journal
    from harness.execute.pair import Pair
    from harness.execute.result import CaseResult

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Show that a change to TransformerEngine's FusedAttnFunc is behaviour-neutral, or where it is not.",
)

EXIT_CODES = (
    "Exit codes: 0 neutral, 1 not neutral, 2 bad usage or input, 3 unverified (nothing executed, or a layout, lane or "
    "coverage asked for and not reached), 4 the harness itself failed."
)

CASES = 200
"""How many cases to execute where neither a number nor a covering set is asked for."""

Spec = Annotated[str, typer.Option(metavar="SPEC")]
CONTROL_HELP = "The implementation trusted today: legacy, refactored, te, te==VERSION, a path, or package.module:Name."
CANDIDATE_HELP = "The changed implementation; takes what --control takes."


def fail(message: str, code: int = EXIT_USAGE) -> NoReturn:
    """Print one message to standard error and leave with an exit code."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"harness: {message.replace('?.', '?')}", markup=False)
    raise typer.Exit(code)


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Turn what a user can put right into one message and exit 2, and a missing engine into exit 3."""
    from harness.case import CaseError
    from harness.engines.api import EngineUnavailable
    from harness.execute.journal import JournalError
    from harness.regressions import RegressionError
    from harness.replay import ReplayError
    from harness.report import ReportError
    from harness.subjects.slicer import SliceError
    from harness.subjects.source import SpecError

    try:
        yield
    except (CaseError, JournalError, RegressionError, ReplayError, ReportError, SliceError, SpecError) as error:
        fail(str(error))
    except EngineUnavailable as error:
        fail(str(error), EXIT_UNVERIFIED)


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
    with clear_errors():
        pair, sources, chosen = _load(control, candidate, engine)
        from harness.execute.campaign import plan
        from harness.regressions import stored_cases

        folder = _new_folder(out)
        planned = plan(
            layouts, lanes, seed, chosen.dtypes, strength=strength, count=cases or (None if strength else CASES),
            stored=stored_cases(), engine=chosen.name,
        )  # fmt: skip
    asked = {"layouts": layouts, "lanes": lanes, "strength": strength, "min_coverage": min_coverage}
    raise typer.Exit(_execute(pair, sources, chosen, folder, planned, asked))


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


def _load(control: str, candidate: str, engine_name: str) -> tuple[Pair, dict[str, Any], Engine]:
    from harness.engines.api import get_engine
    from harness.subjects.source import resolve

    sources = {"control": resolve(control), "candidate": resolve(candidate)}  # before torch: a wrong spec fails at once
    from harness.execute.pair import Pair
    from harness.subjects.subject import LoadError

    engine = get_engine(engine_name)
    if engine.device.type == "cpu":
        import torch

        torch.set_num_threads(1)  # the tensors are tiny: threads cost more than they bring, and order no sums anew
    try:
        return Pair(sources["control"], sources["candidate"], engine), sources, engine
    except LoadError as error:
        fail(str(error))


def _execute(
    pair: Pair, sources: dict[str, Any], engine: Engine, folder: Path, planned: Plan, asked: dict[str, Any]
) -> int:
    from harness.execute.journal import Journal, JournalError
    from harness.report import ReportError, write_reports
    from harness.report.terminal import print_results

    console = Console(highlight=False)
    if sources["control"].text == sources["candidate"].text:
        console.print("note: control and candidate are the same text; this run can show noise alone", markup=False)
    try:
        with Journal(folder) as journal:
            _journal_run(journal, pair, sources, engine, folder, planned, asked, console)
        results = write_reports(folder)
    except (JournalError, ReportError) as error:  # a full disk, say: the run's end, not a finding
        fail(str(error), EXIT_HARNESS)
    print_results(results, console)
    return int(results["exit_code"])


def _journal_run(
    journal: Journal, pair: Pair, sources: dict[str, Any], engine: Engine, folder: Path, planned: Plan,
    asked: dict[str, Any], console: Console,
) -> None:  # fmt: skip
    from harness.execute.campaign import Campaign, started
    from harness.execute.journal import JournalError

    begin = time.monotonic()
    harness_error: str | None = None
    journal.write({
        "event": "start",
        "schema": 1,
        "harness": __version__,
        "control": sources["control"].describe(),
        "candidate": sources["candidate"].describe(),
        "engine": engine.name,
        "environment": engine.environment(),
        "seed": planned.seed,
        "asked": asked,
        "cases_asked": planned.size,
        "dtypes": list(engine.dtypes),
        "started": started(),
    })  # fmt: skip
    describe = {side: source.spec for side, source in sources.items()} | {"engine": engine.name}
    try:
        with _progress(console, planned.size) as progress:
            Campaign(planned, pair, journal, folder, describe, progress).run()
    except JournalError:
        raise
    except KeyboardInterrupt:
        harness_error = "the run was interrupted"
    except Exception as error:  # a fault of the harness: the cases so far stay, and the verdict says so
        import traceback

        (folder / "harness_error.txt").write_text(traceback.format_exc())
        harness_error = f"{type(error).__name__}: {error} (see harness_error.txt)"
    journal.write({"event": "end", "seconds": time.monotonic() - begin, "harness_error": harness_error})


@contextlib.contextmanager
def _progress(console: Console, wanted: int) -> Iterator[Any]:
    """Give a function that takes each result: a bar with counts on a terminal, now and then a plain line elsewhere."""
    from harness.judge import EXECUTED, counted_as

    counts: dict[str, int] = {}

    def tally(result: CaseResult) -> str:
        name = counted_as(result.outcome, result.both_raised).replace("_", " ")
        counts[name] = counts.get(name, 0) + 1
        return "  ".join(f"{key} {value}" for key, value in counts.items())

    if console.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("drawing cases", total=wanted)

            def advance(result: CaseResult) -> None:
                bar.update(task, advance=int(result.outcome in EXECUTED), description=tally(result))

            yield advance
        return
    last = time.monotonic()

    def line(result: CaseResult) -> None:
        nonlocal last
        text = tally(result)
        if time.monotonic() - last >= 5:
            last = time.monotonic()
            console.print(text)

    yield line


@app.command(epilog=EXIT_CODES)
def replay(
    what: Annotated[str, typer.Argument(metavar="FILE_OR_ID", help="A case's JSON file, or the id of a case.")],
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="The run that an id belongs to. "
                                             "Default: the newest under reports/ that has it.")] = None,
    control: Annotated[str | None, typer.Option(metavar="SPEC", help="Default: as in the run, else legacy.")] = None,
    candidate: Annotated[str | None, typer.Option(metavar="SPEC", help="Default: as in the run, else "
                                                  "refactored.")] = None,
    engine: Annotated[str | None, typer.Option(help="Default: as in the run, else auto.")] = None,
    script: Annotated[bool, typer.Option("--script", help="Print a Python script that shows the case with torch and "
                                         "the two sources alone.")] = False,
) -> None:  # fmt: skip
    """Run one case again and show every difference."""
    from harness.replay import describe_subject, find
    from harness.replay import script as write_script

    with clear_errors():
        stored = find(what, run)
        chosen = _check_engine(engine or stored.engine or "auto")
        pair, sources, loaded = _load(
            control or stored.control or "legacy", candidate or stored.candidate or "refactored", chosen
        )
        if script:
            subjects = [describe_subject(source) for source in sources.values()]
            sys.stdout.write(write_script(stored.case, subjects[0], subjects[1], loaded.name))
            return
        result = pair.run(stored.case)
    raise typer.Exit(_show(result, sources, loaded))


def _show(result: CaseResult, sources: dict[str, Any], engine: Engine) -> int:
    from harness.report.describe import describe_case

    console = Console(highlight=False, soft_wrap=True)

    def say(text: str, style: str | None = None) -> None:
        console.print(text, markup=False, style=style)

    say(f"case {result.case.id}: {describe_case(result.case.to_dict())}")
    say(f"control {sources['control'].spec}, candidate {sources['candidate'].spec}, engine {engine.name}")
    if result.both_raised and result.outcome == "match":
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
    codes = {"match": EXIT_NEUTRAL, "noisy": EXIT_NEUTRAL, "intended": EXIT_NEUTRAL, "unsupported": EXIT_UNVERIFIED,
             "error": EXIT_HARNESS}  # fmt: skip
    if result.both_raised and result.outcome == "match":
        return EXIT_UNVERIFIED
    return codes.get(result.outcome, EXIT_NOT_NEUTRAL)


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, with its journal.jsonl.")],
) -> None:
    """Make all reports of a run again, from its journal alone, and show the verdict."""
    from harness.report import write_reports
    from harness.report.terminal import print_results

    with clear_errors():
        results = write_reports(directory)
        print_results(results, Console(highlight=False))
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
        typer.echo(json.dumps(report_coverage.as_json(found), indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
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
    console = Console(highlight=False)
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

    console = Console(highlight=False, soft_wrap=True)
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
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
