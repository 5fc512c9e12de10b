"""summary.md: what a reviewer reads first, short enough for a pull request's comment or a job's summary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.report.describe import (
    COUNTS,
    VERDICT_SIGNS,
    Results,
    asked_words,
    clip,
    coverage_gaps,
    coverage_line,
    describe_case,
    describe_value,
    engine_line,
    failing,
    further_reasons,
    headline,
    not_checked_groups,
    not_checked_line,
    one_line,
    plural,
    show_seconds,
    visible,
)

LIMIT = 60_000
CELL = 300
SHOWN = 3
GAPS = 8
ROWS = 60
CUT = "\n\n… cut here; report.html and results.json hold the rest.\n"


def escape(text: str, limit: int = CELL) -> str:
    """Return text that Markdown shows as it is, on one line and at most about ``limit`` characters long."""
    text = clip(one_line(text), limit)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", text)
    return text.replace("@", "&#64;").replace("://", "&#58;//")


def fence(text: str) -> str:
    """Return a code block that the text cannot leave."""
    text = visible(text, keep="\n")
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}text\n{text}\n{marks}"


def render(results: Results, events: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return summary.md, shorter than LIMIT characters whatever the input."""
    text = "\n\n".join(block for block in _blocks(results) if block) + "\n"
    if len(text) < LIMIT:
        return text
    kept = text[: LIMIT - len(CUT) - 100].rsplit("\n", 1)[0]
    return kept + _closing(kept) + CUT


def _closing(text: str) -> str:
    """Return the fence that closes a code block left open, or an empty string."""
    marks = ""
    for line in text.split("\n"):
        found = re.match(r"(`{3,})(text)?$", line)
        if found and not marks:
            marks = found[1]
        elif found and found[1] == marks:
            marks = ""
    return f"\n{marks}" if marks else ""


def _blocks(results: Results) -> Iterable[str]:
    yield f"# {VERDICT_SIGNS[results['verdict']]} {escape(headline(results))}"
    yield escape(not_checked_line(results), 1000)
    yield _list(further_reasons(results))
    yield _table(
        ("", "asked for", "is", "sha256"),
        [
            (side, results[side]["spec"], results[side]["resolved"], results[side]["sha256"])
            for side in ("control", "candidate")
        ],
    )
    yield f"**Engine: {escape(results['engine'])}.** {escape(engine_line(results), 1000)}"
    yield (
        f"Seed {results['seed']}, {escape(asked_words(results), 1000)} asked for, "
        f"{show_seconds(results['seconds'])}, harness {escape(results['harness'])}, exit code {results['exit_code']}."
    )
    yield "## Counts"
    yield _counts([("all", results["counts"])])
    yield _counts([(row["name"], row) for row in results["layouts"]], "layout")
    yield from _failing(results)
    yield from _errors(results)
    yield "## Lanes"
    yield _counts([(f"{row['name']}: {row['verdict']}", row) for row in results["lanes"] if _cases(row)], "lane")
    if not any(_cases(row) for row in results["lanes"]):
        yield "No case reached a lane."
    if results["unsupported_reasons"]:
        yield "Unsupported, in the engine's words:"
        yield _list(f"{row['count']} × {row['reason']}" for row in results["unsupported_reasons"])
    yield "## Coverage"
    yield escape(coverage_line(results), 1000) + "."
    yield _list(coverage_gaps(results, GAPS))
    yield "## Not checked"
    yield (
        _list(f"{clip(reason, CELL)}: {_slices(slices)}" for reason, slices in not_checked_groups(results))
        or "Every lane and layout had a comparison."
    )
    if results["noise"]:
        yield "## Noise"
        yield _table(
            ("path", "cases", "largest spread"),
            [(row["path"], str(row["cases"]), str(row["largest_spread"])) for row in results["noise"]],
        )
    if results["notes"]:
        yield "## Notes"
        yield _list(f"{row['cases']} × {row['note']}" for row in results["notes"])


def _slices(slices: Sequence[tuple[str, Sequence[str]]]) -> str:
    return "; ".join(f"{slice_} {', '.join(names)}".strip() for slice_, names in slices)


def _failing(results: Results) -> Iterable[str]:
    cases = failing(results)
    if not cases:
        return
    yield "## Smallest failing cases"
    for item in cases[:SHOWN]:
        yield f"### {escape(item['path'])} ({escape(item['kind'])})"
        yield escape(item["message"])
        yield _list(
            [
                f"case: {describe_case(item['case'])}",
                f"control: {describe_value(item['control'], item['kind'])}",
                f"candidate: {describe_value(item['candidate'], item['kind'])}",
            ]
        )
        yield fence(clip(item["replay"], 1000))
    if len(cases) > SHOWN:
        yield f"{plural(len(cases) - SHOWN, 'more way')} to differ in report.html."


def _errors(results: Results) -> Iterable[str]:
    if results["errors"]:
        yield "## Errors"
        shown = results["errors"][:SHOWN]
        yield _list(f"{row['case_id']} ({describe_case(row['case'])}): {row['reason']}" for row in shown)
        if len(results["errors"]) > SHOWN:
            yield f"{len(results['errors']) - SHOWN} more in results.json."


def _cases(row: Mapping[str, Any]) -> int:
    cases: int = row["executed"] + row["unsupported"] + row["error"]
    return cases


def _counts(rows: Sequence[tuple[str, Mapping[str, Any]]], head: str = "") -> str:
    heads = (head, *(words.label for words in COUNTS.values()))
    return _table(heads, [(name, *(str(row[key]) for key in COUNTS)) for name, row in rows], number=True)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], number: bool = False) -> str:
    if not rows:
        return ""
    rule = ["---", *("---:" if number else "---" for _ in heads[1:])]
    lines = [heads, rule, *([escape(cell) for cell in row] for row in rows[:ROWS])]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return text + (f"\n\n{len(rows) - ROWS} more rows in results.json." if len(rows) > ROWS else "")


def _list(items: Iterable[str]) -> str:
    found = list(items)
    lines = [f"- {escape(item, 1000)}" for item in found[:ROWS]]
    if len(found) > ROWS:
        lines.append(f"- {len(found) - ROWS} more in results.json")
    return "\n".join(lines)
