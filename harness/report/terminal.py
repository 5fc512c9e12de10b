"""The end of a run on the terminal: readable at 80 columns, without colour, and when it is no terminal at all."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.judge import empty_counts
from harness.report import FORMATS
from harness.report.describe import (
    COUNTS,
    VERDICT_SIGNS,
    Results,
    asked_words,
    clip,
    count_words,
    coverage_gaps,
    coverage_line,
    describe_case,
    describe_value,
    engine_line,
    failing,
    further_reasons,
    headline,
    not_checked_groups,
    one_line,
    origin_words,
    plural,
    show_seconds,
    visible,
)

SHOWN = 3
GAPS = 4
REASONS = 3
STYLES = {
    "neutral": "bold green",
    "not neutral": "bold red",
    "unverified": "bold yellow",
    "match": "green",
    "difference": "bold red",
    "crash": "bold red",
    "error": "bold red",
    "noisy": "yellow",
    "intended": "cyan",
    "unsupported": "yellow",
    "both_raised": "yellow",
}


def print_results(results: Results, console: Console) -> None:
    """Print the verdict, what it rests on, the smallest failing cases, the gaps, and where the reports lie."""
    _verdict(results, console)
    _table(console, "layouts", results["layouts"], everything=results["counts"])
    _table(console, "lanes", [row for row in results["lanes"] if row["executed"] or row["unsupported"] or row["error"]])
    if results["unsupported_reasons"]:
        _heading(console, "Unsupported, in the engine's words")
        reasons = results["unsupported_reasons"]
        for row in reasons[:REASONS]:
            _line(console, f"{row['count']} × {clip(row['reason'], 300)}")
        if len(reasons) > REASONS:
            _line(console, f"{plural(len(reasons) - REASONS, 'more reason')} in the reports")
    _failing(results, console)
    _coverage(results, console)
    _not_checked(results, console)
    if results["noise"]:
        _heading(console, "Noise (the same code disagrees with itself from run to run)")
        for row in results["noise"][:SHOWN]:
            _line(console, f"{row['path']}: {plural(row['cases'], 'case')}, spread up to {row['largest_spread']}")
        if len(results["noise"]) > SHOWN:
            _line(console, f"{plural(len(results['noise']) - SHOWN, 'more path')} in the reports")
    _heading(console, "Reports")
    for format_ in FORMATS.values():
        _print(console, f"  {visible(str(Path(results['run']) / format_.file))}", soft_wrap=True)


def _verdict(results: Results, console: Console) -> None:
    verdict, words = results["verdict"], one_line(headline(results))
    console.print()
    for line in textwrap.wrap(f"{VERDICT_SIGNS[verdict]} {words}", _width(console) - 1, subsequent_indent="  "):
        _print(console, line, style=STYLES[verdict])
    for reason in further_reasons(results):
        _line(console, clip(reason, 500))
    for side in ("control", "candidate"):
        subject = results[side]
        _field(console, side, f"{clip(subject['spec'], 300)} (sha256 {subject['sha256'][:12]})")
    _field(console, "engine", f"{results['engine']}. {engine_line(results)}")
    _field(
        console,
        "asked for",
        clip(f"{asked_words(results)}; seed {results['seed']}, took {show_seconds(results['seconds'])}", 500),
    )
    if origins := origin_words(results):
        _field(console, "cases", origins)
    _field(console, "counts", count_words(results["counts"]))


def _table(
    console: Console, title: str, rows: Sequence[Mapping[str, Any]], everything: Mapping[str, int] | None = None
) -> None:
    """Print one row per slice, with the counts that are not zero in every row, and always what was executed."""
    if not rows:
        return
    shown = [name for name in COUNTS if name in ("executed", "match") or any(row[name] for row in rows)]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(Text(title.capitalize(), style="bold"), overflow="fold")
    for name in shown:
        table.add_column(Text(COUNTS[name].short), justify="right", no_wrap=True)

    def add(name: str, counts: Mapping[str, int]) -> None:
        cells = [Text(str(counts[key]), style=STYLES.get(key, "") if counts[key] else "dim") for key in shown]
        table.add_row(Text(clip(one_line(name), 60)), *cells)

    for row in rows:
        add(row["name"], row)
    if everything is not None and len(rows) > 1:
        add("all", {name: everything[name] for name in empty_counts()})
    console.print()
    console.print(table, highlight=False)


def _failing(results: Results, console: Console) -> None:
    cases = failing(results)
    if cases:
        _heading(console, "Smallest failing cases" if results["smallest"] else "Failing cases")
    for item in cases[:SHOWN]:
        _line(console, f"{item['path']} ({item['kind']}): {clip(item['message'], 300)}")
        control, candidate = (describe_value(item[side], item["kind"]) for side in ("control", "candidate"))
        if control != candidate:
            _field(console, "control", clip(control, 200))
            _field(console, "candidate", clip(candidate, 200))
        _field(console, "case", clip(describe_case(item["case"]), 500))
        _print(console, f"    {visible(item['replay'])}", soft_wrap=True, style="bold")
    if len(cases) > SHOWN:
        _line(console, f"{plural(len(cases) - SHOWN, 'more way')} to differ in the reports")
    if results["errors"]:
        _heading(console, "Errors of the harness or the machine")
        for row in results["errors"][:SHOWN]:
            _line(console, clip(row["reason"], 300))
            _print(console, f"    {visible(row['replay'])}", soft_wrap=True, style="bold")
        if len(results["errors"]) > SHOWN:
            _line(console, f"{len(results['errors']) - SHOWN} more in the reports")


def _coverage(results: Results, console: Console) -> None:
    _heading(console, "Coverage")
    _line(console, coverage_line(results))
    for gap in coverage_gaps(results, GAPS):
        _line(console, clip(gap, 300))
    if any(results["coverage"]["gaps"].values()):
        _print(console, f"    harness coverage {visible(shlex.quote(results['run']))}", soft_wrap=True)


def _not_checked(results: Results, console: Console) -> None:
    groups = not_checked_groups(results)
    if not groups:
        return
    _heading(console, "Not checked")
    for reason, slices in groups:
        parts = []
        for slice_, names in slices:
            few = len(names) <= (4 if slice_ == "layouts" else 8)
            parts.append(f"{slice_} {', '.join(names)}".strip() if few else f"{len(names)} {slice_}")
        _line(console, f"{clip(reason, 200)}: {clip('; '.join(parts), 500)}")


def _heading(console: Console, text: str) -> None:
    console.print()
    _print(console, text, style="bold")


def _line(console: Console, text: str) -> None:
    """Print text as an item of a list, its further lines under its first."""
    _wrapped(console, text, "  - ", "    ")


def _field(console: Console, name: str, text: str) -> None:
    """Print a name and a text beside it, its further lines under its first."""
    _wrapped(console, text, f"    {name:<11}", " " * 15)


def _wrapped(console: Console, text: str, first: str, further: str) -> None:
    width = max(len(further) + 20, _width(console) - 1)
    for line in textwrap.wrap(
        one_line(text), width, initial_indent=first, subsequent_indent=further, break_on_hyphens=False
    ) or [first.rstrip()]:
        _print(console, line)


def _width(console: Console) -> int:
    return min(console.width, 100)


def _print(console: Console, text: str, style: str = "", soft_wrap: bool = False) -> None:
    console.print(Text(text, style=style), highlight=False, soft_wrap=soft_wrap)
