"""A run: stored cases, the covering set, then drawn ones; each on both subjects and into the journal as it ends."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.case import Case
from harness.covering import LEVELS, Bools, cover, covering_set, named, one_hot, space
from harness.execute.journal import Journal
from harness.execute.pair import Pair
from harness.execute.result import CaseResult
from harness.judge import EXECUTED, counted_as
from harness.lanes import boxes
from harness.layouts import LAYOUTS
from harness.ledger import State, level_numbers, tally
from harness.space import CLASHES, RAISING, Clash, Row, case_of, row, within
from harness.strategies import CaseStrategy, cases, cases_between, draw_cases, smallest

SHRUNK_FAMILIES = 5
"""How many different first differences are shrunk to a smallest case."""

HOPELESS = 12
"""How many cases of a layout, a level or two levels may come to nothing, with none executed, before no more are run."""

TRIES = 2
"""In how many more rows of the covering set a combination is run of which only refused cases came."""

EXPLORED = 0.1
"""How many cases are drawn after the covering set, as a part of it, where no number of cases is given."""

ROUNDS = 40
BETWEEN = 200


class Named(Protocol):
    """A stored case: regressions.StoredCase, or anything with a name and a case."""

    @property
    def name(self) -> str: ...

    @property
    def case(self) -> Case: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, of these layouts, lanes (none: of any) and dtypes.

    First the stored cases, then the rows of the covering set, then cases drawn evenly from the layouts, until ``count``
    are executed; where it is None, all of them and ``explored`` drawn ones. A layout that the engine refuses throughout
    leaves its share to the others. ``seed`` draws everything; ``engine`` names the sizes.
    """

    layouts: Sequence[str]
    count: int | None
    seed: int
    dtypes: Sequence[str]
    lanes: Sequence[str] = ()
    strength: int = 0
    stored: Sequence[Named] = ()
    rows: Sequence[Row] = ()
    engine: str = "reference"
    explored: int = 0

    @property
    def size(self) -> int:
        """How many cases are to be executed; a little more where some must be run again in other company."""
        return len(self.stored) + len(self.rows) + self.explored if self.count is None else self.count


def plan(
    layouts: Sequence[str],
    lanes: Sequence[str],
    seed: int,
    dtypes: Sequence[str],
    *,
    strength: int,
    count: int | None = None,
    stored: Iterable[Named] = (),
    engine: str = "reference",
) -> Plan:
    """Return the plan of a run.

    Stored cases that lie outside what is asked for are left out. ``count`` None is all of them, the whole covering set
    and a tenth as many drawn cases.
    """
    asked = boxes(layouts, lanes, dtypes)
    kept = [item for item in stored if any(within(row(item.case), box) for box in asked)]
    rows = covering_set(strength, asked, seed) if strength else []
    explored = round(EXPLORED * len(rows)) if count is None else 0
    return Plan(layouts or tuple(LAYOUTS), count, seed, dtypes, lanes, strength, kept, rows, engine, explored)


@dataclass(frozen=True, slots=True)
class Found:
    """A case that differs, and what to shrink it with: see ``strategies.smallest``."""

    case: Case
    strategy: Callable[[], CaseStrategy]
    count: int
    seed: int
    drawn: bool


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
    _executed: int = 0
    _seen: set[str] = field(default_factory=set)
    _first: dict[tuple[str, str], Found] = field(default_factory=dict)
    _rows: dict[State, list[list[int]]] = field(default_factory=lambda: {"executed": [], "raised": [], "refused": []})

    def run(self) -> None:
        """Run the plan: every case is in the journal before the next starts, the smallest failing ones at the end."""
        for item in self.plan.stored:
            if not self._done():
                self._run_one(item.case, f"stored {item.name}")
        for number, levels in enumerate(self.plan.rows):
            if not self._done():
                self._run_row(levels, number)
        if self.plan.rows and not self._done():
            self._retry()
        self._explore(self.plan.explored if self.plan.count is None else self.plan.count - self._executed)
        for signature, found in list(self._first.items())[:SHRUNK_FAMILIES]:
            self._shrink(signature, found)

    def _done(self) -> bool:
        return self.plan.count is not None and self._executed >= self.plan.count

    def _run_one(self, case: Case, origin: str, found: Found | None = None) -> CaseResult | None:
        """Run and journal a case, unless it ran before; remember what it held, and the first of each difference."""
        if case.id in self._seen:
            return None
        self._seen.add(case.id)
        result = self.pair.run(case)
        self.journal.write({**result.event(), "origin": origin})
        self.progress(result)
        if result.differences:
            between = Found(case, lambda: cases_between(case, self.plan.engine), BETWEEN, self.plan.seed, drawn=False)
            self._first.setdefault(result.differences[0].signature, found or between)
        self._executed += result.outcome in EXECUTED
        state: State = "refused"  # or an error: either way it came to nothing
        if result.outcome in EXECUTED:
            raised = counted_as(result.outcome, result.both_raised) == "both_raised"
            state = "raised" if raised else "executed"
        self._rows[state].append(level_numbers(case))
        return result

    def _run_row(self, levels: Row, number: int) -> CaseResult | None:
        case = case_of(levels, _seed(self.plan.seed, len(LAYOUTS), number), self.plan.engine)
        return self._run_one(case, "covering")

    def _retry(self) -> None:
        """Run what came in cases that were refused, or raised, in other company: it need not be what they were for.

        A level, or two levels, of which enough cases came to nothing are given up.
        """
        asked = boxes(self.plan.layouts, self.plan.lanes, self.plan.dtypes)
        possible = space(asked, (*CLASHES, *RAISING, *self._hopeless()))
        rows = cover(possible, tally(space(asked), self.plan.strength, self._rows).missing, self.plan.seed, TRIES)
        settled: bool | None = None
        for number in itertools.count(len(self.plan.rows)):
            try:
                levels = rows.send(settled)
            except StopIteration:
                return
            if self._done():
                return
            result = self._run_row(named(levels), number)
            settled = result is not None and result.outcome in EXECUTED and not result.both_raised

    def _hopeless(self) -> list[Clash]:
        """Return, as clashes, the levels and pairs of levels of which no case was executed and many came to nothing."""
        held = {state: one_hot(rows).astype(np.int64) for state, rows in self._rows.items()}
        nothing = np.concatenate([held["refused"], held["raised"]])
        alone = (nothing.sum(axis=0) >= HOPELESS) & (held["executed"].sum(axis=0) == 0)
        both: Bools = (nothing.T @ nothing >= HOPELESS) & (held["executed"].T @ held["executed"] == 0)
        both[alone] = both[:, alone] = False
        found = [_clash(int(level)) for level in np.flatnonzero(alone)]
        return found + [_clash(int(one), int(other)) for one, other in np.argwhere(np.triu(both, 1))]

    def _explore(self, left: int) -> None:
        """Run drawn cases, evenly from the layouts, until so many are executed or no more can be."""
        size = max(2 * left // len(self.plan.layouts), 2 * HOPELESS)
        draws = {layout: self._run_layout(layout, size) for layout in self.plan.layouts}
        while draws and left > 0:  # what an exhausted or refused layout leaves over goes to the others
            quota, extra = divmod(left, len(draws))
            for index, layout in enumerate(list(draws)):
                for _ in range(quota + (index < extra)):
                    if next(draws[layout], None) is None:
                        del draws[layout]
                        break
                    left -= 1

    def _run_layout(self, layout: str, size: int) -> Iterator[CaseResult]:
        """Yield each executed case of a layout, until Hypothesis finds no more or the engine refuses all."""
        executed, drawn = 0, 0
        strategy = cases((layout,), self.plan.dtypes, self.plan.lanes, self.plan.engine)
        for number in range(ROUNDS):
            seed = _seed(self.plan.seed, list(LAYOUTS).index(layout), number)
            for case in draw_cases(strategy, size, seed):
                if executed == 0 and drawn >= HOPELESS:
                    return
                result = self._run_one(case, "explored", Found(case, lambda: strategy, size, seed, drawn=True))
                if result is None:
                    continue
                drawn += 1
                if result.outcome in EXECUTED:
                    executed += 1
                    yield result

    def _shrink(self, signature: tuple[str, str], found: Found) -> None:
        """Find the smallest case with the same difference, store it and journal it."""

        def fails(case: Case) -> bool:
            return signature in self.pair.run(case).signatures

        case = smallest(found.strategy(), found.count, found.seed, found.case, fails, drawn=found.drawn)
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
            "from_case_id": found.case.id,
            "case_id": case.id,
            "case": event["case"],
            "file": f"failures/{path.name}",
            "differences": event["differences"],
        })  # fmt: skip


def _seed(seed: int, part: int, number: int) -> int:
    """Return a seed of its own for each part of a run and each number in it."""
    return seed * 1_000_003 + part * 1_009 + number


def _clash(*levels: int) -> Clash:
    names = tuple(LEVELS[level] for level in levels)
    given_up = tuple(level for _, level in names)
    return Clash("given up", tuple(factor for factor, _ in names), lambda *others: others == given_up)


def started() -> str:
    """Return the time now as ISO 8601 in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
