"""Run the command line in this process, and make small sources to run it on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import harness.run as harness_run
from harness.case import Case
from harness.cli import app
from harness.engines.api import get_engine
from harness.engines.reference.engine import ReferenceEngine
from harness.execute.pair import Pair
from harness.execute.pool import Loaded
from harness.execute.result import CaseResult
from harness.subjects.source import Source, resolve

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
    """Return the ids of a run's cases, in the order in which they began."""
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [event["case_id"] for event in events if event["event"] == "begun"]


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


class InProcess:
    """Runs cases in this process, where a test can plant faults in the harness itself."""

    def __init__(self, sources: tuple[Source, Source], engine: str, *_: object, **__: object) -> None:
        self.pair = Pair(*sources, get_engine(engine))
        found = self.pair.engine
        self.loaded = Loaded(found.name, found.dtypes, found.environment())

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, case: Case, *, alone: bool = False) -> CaseResult:
        return self.pair.run(case)

    def run_all(
        self,
        cases: Sequence[Case],
        begun: Callable[[Case], None],
        ended: Callable[[CaseResult], None],
        stop: Callable[[], bool],
    ) -> list[CaseResult | None]:
        results: list[CaseResult | None] = []
        for case in cases:
            begun(case)
            results.append(result := self.run(case))
            ended(result)
        return results


def in_process(patch: pytest.MonkeyPatch) -> None:
    """Have the command line run its cases in this process."""
    patch.setattr(harness_run, "open_pool", InProcess)


def refusing(patch: pytest.MonkeyPatch, layout: str, reason: str) -> None:
    """Have the reference engine refuse one layout, for this reason."""
    in_process(patch)
    original = ReferenceEngine.unsupported

    def unsupported(self: ReferenceEngine, case: Case) -> str | None:
        return reason if case.qkv_layout == layout else original(self, case)

    patch.setattr(ReferenceEngine, "unsupported", unsupported)
