"""From the events of a journal to the content of results.json. Pure: no clock, no files, no torch."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.judge import FINDINGS, SIGNALLED, Coverage, count, empty_counts, reached, verdict
from harness.lanes import LANES
from harness.layouts import LAYOUTS
from harness.report.describe import Results, case_effort, number

SCHEMA = 1
NOT_ENDED = "the run did not end"
STOPPED = "the run began no more: {}"
NO_CASE = "no case was drawn"
NOT_ASKED = "not asked for"
NO_REASON = "no reason was given"


class Slice:
    """The counts of a part of the run, and why cases of it were not compared."""

    def __init__(self) -> None:
        self.counts = empty_counts()
        self.unsupported: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    def add(self, event: Mapping[str, Any]) -> None:
        """Add one case."""
        count(self.counts, event["outcome"], event["both_raised"])
        if event["outcome"] == "unsupported":
            self.unsupported[event["reason"] or NO_REASON] += 1
        elif event["outcome"] == "error":
            self.errors[event["reason"] or NO_REASON] += 1

    def row(self, name: str, engine: str) -> dict[str, Any]:
        """Return the row of results.json."""
        return {
            "name": name,
            "engine": engine,
            "verdict": verdict(self.counts, {}).name,
            **self.counts,
            "unsupported_reasons": _reasons(self.unsupported),
        }

    def gap(self) -> str | None:
        """Return why nothing was compared here, or None where something was."""
        if reached(self.counts):
            return None
        parts = []
        if self.unsupported:
            parts.append(_most(self.unsupported))
        if self.errors:
            parts.append(f"error: {_most(self.errors)}")
        if self.counts["both_raised"]:
            parts.append("both sides raised")
        return "; ".join(parts) or NO_CASE


def _reasons(reasons: Counter[str]) -> list[dict[str, Any]]:
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return [{"reason": reason, "count": number_} for reason, number_ in ordered]


def _most(reasons: Counter[str]) -> str:
    first, *rest = sorted(reasons, key=lambda reason: (-reasons[reason], reason))
    return first + (f" (and {len(rest)} more)" if rest else "")


def replay_command(case_id: str, directory: str | Path) -> str:
    """Return the command that shows a case again, quoted for a POSIX shell."""
    return f"harness replay {shlex.quote(case_id)} --run {shlex.quote(str(directory))}"


def summarise(events: Sequence[Mapping[str, Any]], directory: str | Path = ".") -> Results:
    """Return the content of results.json, given the events of ``read_journal``.

    ``directory`` is the run's folder as it shall stand in the replay commands. A journal without an end is that of a
    killed run: it is a fault of the harness, so the verdict is never neutral.
    """
    start = events[0]
    cases = [event for event in events if event["event"] == "case"]
    end = events[-1] if events[-1]["event"] == "end" else None
    engine = start["engine"]

    total, lanes, layouts = Slice(), {name: Slice() for name in LANES}, {name: Slice() for name in LAYOUTS}
    for event in cases:
        total.add(event)
        layouts.setdefault(event["case"]["qkv_layout"], Slice()).add(event)
        for lane in dict.fromkeys(event["lanes"]):
            lanes.setdefault(lane, Slice()).add(event)

    asked = {
        "layout": list(dict.fromkeys(start["asked"]["layouts"])),
        "lane": list(dict.fromkeys(start["asked"].get("lanes", ()))),
    }
    harness_error = end["harness_error"] if end is not None else NOT_ENDED
    coverage = _coverage(events)
    judged = verdict(
        total.counts,
        {
            f"--{kind} {name}": slices.get(name, Slice()).counts
            for kind, slices in (("lane", lanes), ("layout", layouts))
            for name in asked[kind]
        },
        harness_error,
        _asked_coverage(coverage),
    )
    drawn = {event["case"]["qkv_layout"] for event in cases}
    seconds = end["seconds"] if end is not None else sum(number(event["seconds"]) for event in cases)
    return {
        "schema": SCHEMA,
        "verdict": judged.name,
        "exit_code": SIGNALLED.get(harness_error or "", judged.exit_code),
        "reasons": list(judged.reasons),
        "harness_error": harness_error,
        "run": str(directory),
        "control": start["control"],
        "candidate": start["candidate"],
        "engine": engine,
        "environment": start["environment"],
        "seed": start["seed"],
        "seconds": _finite(seconds),
        "started": start["started"],
        "harness": start["harness"],
        "asked": start["asked"],
        "cases_asked": start["cases_asked"],
        "counts": total.counts,
        "unsupported_reasons": _reasons(total.unsupported),
        "lanes": [slice_.row(name, engine) for name, slice_ in lanes.items()],
        "layouts": [slice_.row(name, engine) for name, slice_ in layouts.items() if name in drawn],
        "origins": _origins(cases),
        "coverage": coverage,
        "smallest": _smallest(events, directory),
        "differences": [row for event in cases for row in _differences(event, directory)],
        "intended": _intended(cases),
        "errors": _errors(cases, directory),
        "noise": _noise(cases),
        "notes": _notes(cases),
        "not_checked": _not_checked(start, cases, events, lanes, layouts, asked),
        "tables": {"lane": len(lanes), "layout": len(layouts)},
    }


def _coverage(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    from harness.ledger import ledger, summary  # numpy takes its time, and nothing else here needs it

    return {"least": events[0]["asked"].get("min_coverage"), **summary(ledger(events))}


def _asked_coverage(coverage: Mapping[str, Any]) -> Coverage | None:
    if coverage["least"] is None:
        return None
    return Coverage(*(coverage[name] for name in ("strength", "executed", "valid", "least")))


def _origins(cases: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many cases were stored, of the covering set and explored; an older journal does not say."""
    return dict(Counter(str(event.get("origin") or "unknown").partition(" ")[0] for event in cases))


def _finite(value: Any) -> Any:
    """Return a number as the journal writes it: not a finite one, then a string."""
    if isinstance(value, str) or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else str(float(value))


_UNNAMED = "the journal names no difference"


def _differences(event: Mapping[str, Any], directory: str | Path) -> list[dict[str, Any]]:
    if event["outcome"] not in FINDINGS:
        return []
    found: list[Mapping[str, Any]] = list(event["differences"])
    if not found:  # a subject that ended the process left nothing to compare; the finding must still have a row
        kind = "crash" if event["outcome"] == "crash" else "value"
        message = event["reason"] or _UNNAMED
        found = [{"path": kind, "kind": kind, "control": None, "candidate": None, "message": message, "distance": None}]
    return [
        {"case_id": event["case_id"], "case": event["case"]}
        | {name: difference[name] for name in ("path", "kind", "control", "candidate", "message", "distance")}
        | {"replay": replay_command(event["case_id"], directory)}
        for difference in found
    ]


def _smallest(events: Iterable[Mapping[str, Any]], directory: str | Path) -> list[dict[str, Any]]:
    rows = []
    for event in events:
        if event["event"] != "smallest":
            continue
        own = {"control": None, "candidate": None, "message": _UNNAMED, "distance": None}
        for difference in event["differences"]:
            if (difference["path"], difference["kind"]) == (event["path"], event["kind"]):
                own = {name: difference[name] for name in own}
                break
        rows.append(
            {name: event[name] for name in ("case_id", "case", "path", "kind")}
            | own
            | {name: event[name] for name in ("from_case_id", "file", "differences")}
            | {"replay": replay_command(event["case_id"], directory)}
        )
    return sorted(rows, key=lambda row: case_effort(row["case"]))


def _intended(cases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: Counter[tuple[str, str]] = Counter()
    for event in cases:
        if event["outcome"] == "intended":
            found.update({(difference["path"], difference["kind"]) for difference in event["differences"]})
    return [{"path": path, "kind": kind, "cases": number_} for (path, kind), number_ in sorted(found.items())]


def _errors(cases: Iterable[Mapping[str, Any]], directory: str | Path) -> list[dict[str, Any]]:
    return [
        {
            "case_id": event["case_id"],
            "case": event["case"],
            "reason": event["reason"] or NO_REASON,
            "replay": replay_command(event["case_id"], directory),
        }
        for event in cases
        if event["outcome"] == "error"
    ]


def _noise(cases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, tuple[int, float]] = {}
    for event in cases:
        for item in event["noise"]:
            cases_, largest = found.get(item["path"], (0, 0.0))
            spread = number(item["spread"])
            worst = math.nan if math.isnan(spread) or math.isnan(largest) else max(spread, largest)
            found[item["path"]] = (cases_ + 1, worst)
    return [
        {"path": path, "cases": cases_, "largest_spread": _finite(spread)} for path, (cases_, spread) in found.items()
    ]


def _notes(cases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = Counter(note for event in cases for note in dict.fromkeys(event["notes"]))
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return [{"note": note, "cases": number_} for note, number_ in ordered]


def _why_not(last: Mapping[str, Any]) -> str:
    """Return why a run did not have all the cases that it was asked for, given its last event."""
    if last["event"] != "end":
        return NOT_ENDED
    if last["harness_error"] in SIGNALLED:
        return str(last["harness_error"])
    return STOPPED.format(last["stopped"]) if last.get("stopped") else NO_CASE


def _not_checked(
    start: Mapping[str, Any],
    cases: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    lanes: Mapping[str, Slice],
    layouts: Mapping[str, Slice],
    asked: Mapping[str, Sequence[str]],
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def gap(slice_: str, name: str, what: str, reason: str | None) -> None:
        if reason is not None:
            rows.append({"what": what, "reason": reason, "slice": slice_, "name": name})

    missing = start["cases_asked"] - len(cases)
    if missing > 0:
        what = f"{missing} of the {start['cases_asked']} cases asked for"
        gap("cases", "cases", what, _why_not(events[-1]))
    over = {event["case_id"] for event in cases}
    for event in events:
        if event["event"] == "begun" and event["case_id"] not in over:
            gap("cases", event["case_id"], f"case {event['case_id']}", "it had begun when the run ended")
    for kind, slices in (("lane", lanes), ("layout", layouts)):
        for name in dict.fromkeys([*slices, *asked[kind]]):
            reason = slices[name].gap() if name in slices else NO_CASE
            if reason == NO_CASE and asked[kind] and name not in asked[kind]:
                reason = NOT_ASKED
            gap(kind, name, f"{kind} {name}", reason)
    return rows
