"""A run: stored cases, the covering set, then drawn ones; each on both subjects and into the journal as it ends."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.case import Case
from harness.compare import Difference
from harness.covering import LEVELS, Bools, cover, covering_set, named, one_hot, space
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

RUNS, CRASHING_RUNS = 200, 12
"""How many cases are run at the most to find the smallest; each that crashes costs three processes."""

Event = Mapping[str, Any]

ROUNDS = 40
BETWEEN = 200

BATCH = 64
"""How many cases are handed out at the most before their results are looked at together, in the order of the cases.

What comes next follows from results in that order alone, so any number of workers runs the same cases.
"""

DRAWN = 500
"""How many cases are drawn at once at the most."""


class Runner(Protocol):
    """What runs cases: pool.Pool, or anything that runs them in the same way."""

    def run(self, case: Case, *, alone: bool = False) -> CaseResult: ...

    def run_all(
        self,
        cases: Sequence[Case],
        begun: Callable[[Case], None],
        ended: Callable[[CaseResult], None],
        stop: Callable[[], bool],
    ) -> list[CaseResult | None]: ...


class Log(Protocol):
    """What takes the events of a run: journal.Journal."""

    def write(self, event: Mapping[str, Any]) -> None: ...


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


@dataclass(frozen=True, slots=True)
class Item:
    """A case that is to be run: where it came from, and what to shrink it with if it differs."""

    case: Case
    origin: str
    found: Found


@dataclass(slots=True)
class Campaign:
    """One run of a plan.

    ``folder`` takes ``failures/ID.json``; ``describe`` is what such a file says of the run (subjects and engine);
    ``ended`` is called with every result. After ``most_crashes`` crashes, or at ``until`` on the monotonic clock, no
    more cases are begun, and ``stopped`` says why. ``known`` are events of an earlier part of the same run: what is in
    them is not run again.
    """

    plan: Plan
    runner: Runner
    journal: Log
    folder: Path
    describe: dict[str, Any]
    ended: Callable[[CaseResult], None] = lambda result: None
    most_crashes: int | None = None
    until: float | None = None
    known: Sequence[Event] = ()
    stopped: str | None = None
    _executed: int = 0
    _crashes: int = 0
    _known: dict[str, CaseResult] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _first: dict[tuple[str, str], tuple[Found, CaseResult]] = field(default_factory=dict)
    _rows: dict[State, list[list[int]]] = field(default_factory=lambda: {"executed": [], "raised": [], "refused": []})

    def run(self) -> None:
        """Run the plan: each case is in the journal as it begins and as it ends, the smallest failing ones at last."""
        self._known = {
            event["case_id"]: CaseResult.from_event(event) for event in self.known if event["event"] == "case"
        }
        shrunk = {(event["path"], event["kind"]) for event in self.known if event["event"] == "smallest"}
        self._run_many([self._item(item.case, f"stored {item.name}") for item in self.plan.stored])
        self._run_many([self._row(levels, number) for number, levels in enumerate(self.plan.rows)])
        if self.plan.rows and not self._done():
            self._retry()
        if self.plan.count is None:
            self._explore(self.plan.explored)
        else:
            self._explore(self.plan.count - self._executed)
        for signature, (found, result) in list(self._first.items())[:SHRUNK_FAMILIES]:
            if signature not in shrunk:
                self._shrink(signature, found, result)

    def _done(self) -> bool:
        return self._stop() or (self.plan.count is not None and self._executed >= self.plan.count)

    def _stop(self) -> bool:
        """Whether no more cases are to be begun, for a reason that is kept."""
        if self.stopped is None and self.most_crashes is not None and self._crashes >= self.most_crashes:
            self.stopped = f"{self._crashes} cases ended or held up their process"
        if self.stopped is None and self.until is not None and time.monotonic() >= self.until:
            self.stopped = "the time was up"
        return self.stopped is not None

    def _item(self, case: Case, origin: str) -> Item:
        between = Found(case, lambda: cases_between(case, self.plan.engine), BETWEEN, self.plan.seed, drawn=False)
        return Item(case, origin, between)

    def _row(self, levels: Row, number: int) -> Item:
        return self._item(case_of(levels, _seed(self.plan.seed, len(LAYOUTS), number), self.plan.engine), "covering")

    def _run_many(self, items: Sequence[Item]) -> None:
        """Run these cases, as many of them as are still wanted."""
        left = deque(items)
        while left and not self._done():
            wanted = BATCH if self.plan.count is None else min(BATCH, self.plan.count - self._executed)
            self._run([left.popleft() for _ in range(min(wanted, len(left)))])

    def _run(self, items: Sequence[Item]) -> list[CaseResult]:
        """Run cases that did not run before; remember what each held, and the first of each difference."""
        fresh: dict[str, Item] = {}
        for item in items:
            if item.case.id not in self._seen:
                self._seen.add(item.case.id)
                fresh[item.case.id] = item

        def ended(result: CaseResult) -> None:
            self._crashes += result.outcome == "crash"
            self.journal.write({**result.event(), "origin": fresh[result.case.id].origin})
            self.ended(result)

        known = {name: self._known[name] for name in fresh if name in self._known}
        for result in known.values():
            self._crashes += result.outcome == "crash"
            self.ended(result)
        cases = [item.case for name, item in fresh.items() if name not in known]
        run = self.runner.run_all(cases, self._begun, ended, self._stop) if cases else []
        found = known | {result.case.id: result for result in run if result is not None}
        results = [found[name] for name in fresh if name in found]
        for result in results:
            self._executed += result.outcome in EXECUTED
            for difference in result.differences[:1]:
                self._first.setdefault(difference.signature, (fresh[result.case.id].found, result))
            state: State = "refused"  # or an error: either way it came to nothing
            if result.outcome in EXECUTED:
                raised = counted_as(result.outcome, result.both_raised) == "both_raised"
                state = "raised" if raised else "executed"
            self._rows[state].append(level_numbers(result.case))
        return results

    def _begun(self, case: Case) -> None:
        self.journal.write({"event": "begun", "case_id": case.id, "case": case.to_dict()})

    def _retry(self) -> None:
        """Run what came in cases that were refused, or raised, in other company: it need not be what they were for.

        A level, or two levels, of which enough cases came to nothing are given up. Each case follows from the one
        before, so they run one by one.
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
            results = self._run([self._row(named(levels), number)])
            settled = any(result.outcome in EXECUTED and not result.both_raised for result in results)

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
        size = min(max(left // len(self.plan.layouts) + 2, HOPELESS), DRAWN)
        drawn = {layout: self._draw(layout, size) for layout in self.plan.layouts}
        tried = dict.fromkeys(drawn, 0)
        executed = dict.fromkeys(drawn, 0)
        while drawn and left > 0 and not self._stop():
            wanted = self._shares(min(left, BATCH), drawn, executed)
            items: list[Item] = []
            for layout, number in wanted.items():
                if executed[layout] == 0:
                    number = min(number, HOPELESS - tried[layout])
                own = list(itertools.islice(drawn[layout], number))
                items += own
                if len(own) < number:
                    del drawn[layout]
            for result in self._run(items):
                layout = result.case.qkv_layout
                tried[layout] += 1
                executed[layout] += result.outcome in EXECUTED
                left -= result.outcome in EXECUTED
            for layout in list(drawn):
                if executed[layout] == 0 and tried[layout] >= HOPELESS:
                    del drawn[layout]  # what an exhausted or refused layout leaves over goes to the others

    def _shares(self, number: int, layouts: Iterable[str], executed: Mapping[str, int]) -> dict[str, int]:
        """Return how many cases of each layout come next, so that all have as many executed as the others."""
        counts = {layout: executed[layout] for layout in layouts}
        shares = dict.fromkeys(counts, 0)
        for _ in range(number):
            least = min(counts, key=counts.__getitem__)
            counts[least] += 1
            shares[least] += 1
        return {layout: share for layout, share in shares.items() if share}

    def _draw(self, layout: str, size: int) -> Iterator[Item]:
        """Yield cases of a layout that did not run before, until Hypothesis finds no more."""
        strategy = cases((layout,), self.plan.dtypes, self.plan.lanes, self.plan.engine)
        for number in range(ROUNDS):
            seed = _seed(self.plan.seed, list(LAYOUTS).index(layout), number)
            drawn = [case for case in draw_cases(strategy, size, seed) if case.id not in self._seen]
            if not drawn:
                return
            for case in drawn:
                if case.id not in self._seen:
                    yield Item(case, "explored", Found(case, lambda: strategy, size, seed, drawn=True))

    def _shrink(self, signature: tuple[str, str], found: Found, seen: CaseResult) -> None:
        """Find the smallest case with the same difference, store it and journal it.

        A case that hangs is stored as it is, for each try would take as long; so is one that shows the difference only
        after others, which a process of its own shows.
        """
        path, kind = signature

        def fails(case: Case) -> bool:
            return signature in self.runner.run(case).signatures

        result = seen
        if not path.startswith("hang/") and not self._stop():
            result = self.runner.run(found.case, alone=True)
            if signature in result.signatures:
                runs = CRASHING_RUNS if kind == "crash" else RUNS
                case = smallest(
                    found.strategy(), found.count, found.seed, found.case, fails, drawn=found.drawn, runs=runs
                )
                result = self.runner.run(case)
            else:
                result = dataclasses.replace(seen, differences=tuple(map(_only_after_others, seen.differences)))
        case = result.case
        folder = self.folder / "failures"
        folder.mkdir(parents=True, exist_ok=True)
        # Two differences may shrink to one case: each keeps a file of its own.
        names = itertools.chain((case.id,), (f"{case.id}-{number}" for number in itertools.count(2)))
        place = next(file for name in names if not (file := folder / f"{name}.json").exists())
        stored = {**self.describe, "path": path, "kind": kind, "case": case.to_dict()}
        place.write_text(json.dumps(stored, indent=1) + "\n")
        event = result.event()
        self.journal.write({
            "event": "smallest",
            "path": path,
            "kind": kind,
            "from_case_id": found.case.id,
            "case_id": case.id,
            "case": event["case"],
            "file": f"failures/{place.name}",
            "differences": event["differences"],
        })  # fmt: skip


def _only_after_others(difference: Difference) -> Difference:
    words = f"{difference.message} (only after other cases: in a process of its own the case does not show it)"
    return dataclasses.replace(difference, message=words)


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
