"""Reports of a run: everything after the journal, made again from the journal alone."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.execute.journal import journal_path, read_journal
from harness.report import html, junit, markdown
from harness.report.describe import Results
from harness.report.summary import summarise

__all__ = ["FORMATS", "Format", "ReportError", "Results", "summarise", "write_reports"]


class ReportError(RuntimeError):
    """A report that cannot be written; the message names the file and says what to do."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of the report: its file name, and the function from results and events to the file's text."""

    file: str
    render: Callable[[Results, Sequence[Mapping[str, Any]]], str]


def render_json(results: Results, events: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return results.json: JSON without numbers that are not finite, which are strings, in ASCII."""
    return json.dumps(results, indent=1, allow_nan=False) + "\n"


FORMATS: dict[str, Format] = {
    "html": Format("report.html", html.render),
    "junit": Format("junit.xml", junit.render),
    "markdown": Format("summary.md", markdown.render),
    "json": Format("results.json", render_json),
}
"""One row per format, in the order of writing: results.json comes last, so whoever waits for it finds the rest."""


def write_reports(directory: str | Path, *, run: str | Path | None = None) -> Results:
    """Read the run's journal, write every format beside it, and return the content of results.json.

    ``run`` is the folder as it shall stand in the replay commands; left out, it is ``directory``. Each file appears
    whole or not at all, and no file is touched before all are rendered. Raises JournalError as ``read_journal`` does,
    and ReportError where a file cannot be written.
    """
    folder = journal_path(directory).parent
    events = read_journal(directory)
    results = summarise(events, folder if run is None else run)
    texts = {format_.file: format_.render(results, events) for format_ in FORMATS.values()}
    for file, text in texts.items():
        _write(folder / file, text)
    return results


def _write(path: Path, text: str) -> None:
    """Write a file by writing another and renaming it; what UTF-8 does not hold is written as its escape."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8", errors="backslashreplace"))
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ReportError(
            f"cannot write {path}: {error.strerror}; free the disk or choose a folder that can be written to, then "
            f"`harness report {path.parent}`"
        ) from error
