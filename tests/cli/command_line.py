"""Run the command line in this process, and make small sources to run it on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.case import Case
from harness.cli import app
from harness.engines.reference.engine import ReferenceEngine
from harness.subjects.source import resolve

FILES = ("journal.jsonl", "junit.xml", "report.html", "results.json", "summary.md")


@dataclass(frozen=True, slots=True)
class Result:
    """What one command came to."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Everything that was printed."""
        return self.stdout + self.stderr


def harness(*arguments: object) -> Result:
    """Run ``harness ARGUMENTS``; what it raises other than an exit is a failure of the test."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Result(result.exit_code, result.stdout, result.stderr)


def results(folder: Path) -> dict[str, Any]:
    """Return results.json of a run."""
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def case_ids(folder: Path) -> list[str]:
    """Return the ids of a run's cases, in the order of its journal."""
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [event["case_id"] for event in events if event["event"] == "case"]


def faulty(folder: Path) -> Path:
    """Write the legacy implementation with another scale in its backward call."""
    text = resolve("legacy").text
    right = '"attn_scale": ctx.attn_scale,'
    assert text.count(right) == 1
    path = folder / "faulty.py"
    path.write_text(text.replace(right, '"attn_scale": 0.3,'))
    return path


def raising(folder: Path) -> Path:
    """Write the legacy implementation with a backward that always raises."""
    text = resolve("legacy").text
    right = '"attn_scale": ctx.attn_scale,'
    path = folder / "raising.py"
    path.write_text(text.replace(right, '"attn_scale": [][0],'))
    return path


def refusing(patch: pytest.MonkeyPatch, layout: str, reason: str) -> None:
    """Have the reference engine refuse one layout, for this reason."""
    original = ReferenceEngine.unsupported

    def unsupported(self: ReferenceEngine, case: Case) -> str | None:
        return reason if case.qkv_layout == layout else original(self, case)

    patch.setattr(ReferenceEngine, "unsupported", unsupported)
