"""report.html: one self-contained page, for a desk and a phone, light and dark, without a script or the network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from harness.report.describe import (
    COUNTS,
    VERDICT_SIGNS,
    Results,
    asked_words,
    changed_fields,
    clip,
    compared,
    coverage_gaps,
    coverage_line,
    describe_case,
    describe_value,
    engine_line,
    failing,
    families,
    further_reasons,
    headline,
    not_checked_groups,
    not_checked_line,
    plural,
    show_number,
    show_seconds,
    visible,
)

TEMPLATES = Path(__file__).parent / "templates"
SMALLEST = 40
FAMILIES = 200
IDS = 60
ERRORS = 40
GAPS = 40
VALUE = 1500


def render(results: Results, events: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return report.html.

    Text from the run is shown, never run: it is escaped, and characters that act without being seen (bidirectional
    marks, control characters) are written as their escapes. Long lists and values are cut, with what was cut said.
    """
    ways = families(results)
    cases = failing(results)
    return (
        _environment()
        .get_template("report.html")
        .render(
            results=results,
            headline=headline(results),
            reasons=further_reasons(results),
            not_checked_line=not_checked_line(results),
            not_checked=not_checked_groups(results),
            engine_line=engine_line(results),
            sign=VERDICT_SIGNS[results["verdict"]],
            counts=COUNTS,
            compared=compared(results["counts"]),
            coverage=coverage_line(results),
            gaps=coverage_gaps(results, GAPS),
            asked=asked_words(results),
            shown_lanes=[row for row in results["lanes"] if row["executed"] or row["unsupported"] or row["error"]],
            failing=cases[:SMALLEST],
            failing_left=max(0, len(cases) - SMALLEST),
            families=ways[:FAMILIES],
            families_left=max(0, len(ways) - FAMILIES),
            errors=results["errors"][:ERRORS],
            errors_left=max(0, len(results["errors"]) - ERRORS),
            ids=IDS,
        )
    )


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        case=describe_case,
        changed=changed_fields,
        clip=lambda text, limit=VALUE: clip(text, limit),
        pretty=_pretty,
        number=show_number,
        seconds=show_seconds,
    )
    environment.globals.update(describe_value=describe_value, plural=plural)
    return environment


def _shown(value: Any) -> Any:
    """Make what acts without being seen visible, in everything that a template prints."""
    return visible(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)
