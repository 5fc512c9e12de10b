"""A run: draw cases, run each on both subjects, journal each as it ends, shrink what differs."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.case import Case
from harness.execute.journal import Journal
from harness.execute.pair import CaseResult, Pair
from harness.judge import EXECUTED
from harness.layouts import LAYOUTS
from harness.strategies import CaseStrategy, cases, draw_cases, smallest

SHRUNK_FAMILIES = 5
"""How many different first differences are shrunk to a smallest case."""

HOPELESS = 12
"""How many cases of a layout the engine may refuse, with none executed, before no more of it are drawn."""

ROUNDS = 40


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: ``count`` cases to execute, spread evenly over ``layouts``, drawn from ``seed``.

    A layout that the engine refuses throughout leaves its share to the others.
    """

    layouts: Sequence[str]
    count: int
    seed: int
    dtypes: Sequence[str]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A case and how it was drawn, so that Hypothesis can draw it again to shrink it."""

    case: Case
    layout: str
    seed: int
    count: int


@dataclass(slots=True)
class Campaign:
    """One run of a plan on a pair of subjects.

    ``folder`` takes ``failures/ID.json``; ``describe`` is what such a file says of the run (subjects and engine);
    ``progress`` is called with every result.
    """

    plan: Plan
    pair: Pair
    journal: Journal
    folder: Path
    describe: dict[str, Any]
    progress: Callable[[CaseResult], None] = lambda result: None
    _first: dict[tuple[str, str], Drawn] = field(default_factory=dict)

    def run(self) -> None:
        """Run the plan: every case is in the journal before the next starts, the smallest failing ones at the end."""
        draws = {layout: self._run_layout(layout) for layout in self.plan.layouts}
        left = self.plan.count
        while draws and left > 0:  # what an exhausted or refused layout leaves over goes to the others
            quota, extra = divmod(left, len(draws))
            for index, layout in enumerate(list(draws)):
                for _ in range(quota + (index < extra)):
                    if next(draws[layout], None) is None:
                        del draws[layout]
                        break
                    left -= 1
        for signature, drawn in list(self._first.items())[:SHRUNK_FAMILIES]:
            self._shrink(signature, drawn)

    def _run_layout(self, layout: str) -> Iterator[CaseResult]:
        """Yield each executed case of a layout, until Hypothesis finds no more or the engine refuses all."""
        executed, seen = 0, set[str]()
        size = max(2 * self.plan.count // len(self.plan.layouts), 2 * HOPELESS)
        for number in range(ROUNDS):
            seed = self.plan.seed * 1_000_003 + list(LAYOUTS).index(layout) * 1_009 + number
            for case in draw_cases(self._strategy(layout), size, seed):
                if executed == 0 and len(seen) >= HOPELESS:
                    return
                if case.id in seen:
                    continue
                seen.add(case.id)
                result = self.pair.run(case)
                self.journal.write(result.event())
                self.progress(result)
                if result.differences:
                    signature = result.differences[0].signature
                    self._first.setdefault(signature, Drawn(case, layout, seed, size))
                if result.outcome in EXECUTED:
                    executed += 1
                    yield result

    def _strategy(self, layout: str) -> CaseStrategy:
        return cases(layouts=(layout,), dtypes=self.plan.dtypes)

    def _shrink(self, signature: tuple[str, str], drawn: Drawn) -> None:
        """Find the smallest case with the same difference, store it and journal it."""

        def fails(case: Case) -> bool:
            return signature in self.pair.run(case).signatures

        case = smallest(self._strategy(drawn.layout), drawn.count, drawn.seed, drawn.case, fails)
        result = self.pair.run(case)
        folder = self.folder / "failures"
        folder.mkdir(parents=True, exist_ok=True)
        # Two differences may shrink to one case: each keeps a file of its own.
        names = itertools.chain((case.id,), (f"{case.id}-{number}" for number in itertools.count(2)))
        path = next(file for name in names if not (file := folder / f"{name}.json").exists())
        stored = {**self.describe, "path": signature[0], "kind": signature[1], "case": case.to_dict()}
        path.write_text(json.dumps(stored, indent=1) + "\n")
        event = result.event()
        self.journal.write({
            "event": "smallest",
            "path": signature[0],
            "kind": signature[1],
            "from_case_id": drawn.case.id,
            "case_id": case.id,
            "case": event["case"],
            "file": f"failures/{path.name}",
            "differences": event["differences"],
        })  # fmt: skip


def started() -> str:
    """Return the time now as ISO 8601 in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
