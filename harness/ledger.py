"""The ledger of a run: which combinations of levels it executed, and what became of the others.

It is made from the journal's cases alone. A combination counts as executed where a case that holds it ran to a
comparison of numbers: not where it was generated, refused, or made both sides raise.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from harness.case import DTYPES, Case, CaseError
from harness.covering import LEVELS, Bools, Space, held, level_number, numbers, space
from harness.judge import EXECUTED, counted_as
from harness.lanes import LANES, boxes
from harness.space import FACTORS, row

State = Literal["executed", "raised", "refused", "unreached"]
STATES: dict[State, str] = {
    "executed": "in a case whose numbers were compared",
    "raised": "only in cases on which both sides raised alike",
    "refused": "only in cases that the engine refused",
    "unreached": "in no case that ran",
}
"""What can become of a valid combination, the best first: the best of its cases counts."""

REASONS = 30
"""How many of the engine's reasons are told apart, the most frequent ones."""

REST = "for another reason"
DEFAULT_STRENGTH = 2


@dataclass(frozen=True, eq=False)
class Ledger:
    """What became of every valid combination of levels of ``strength`` factors.

    ``states`` are symmetric arrays [levels, levels(, levels)] that have no combination in common and together are all
    valid ones. ``reasons`` are the engine's, most frequent first, each with the refused combinations that it stands
    for. ``unread`` is how many cases of the journal this version cannot read, which count for nothing.
    """

    strength: int
    states: Mapping[State, Bools]
    reasons: tuple[tuple[str, Bools], ...]
    unread: int = 0

    def count(self, state: State) -> int:
        """Return how many combinations are in a state."""
        return _number(self.states[state])

    @property
    def valid(self) -> int:
        """How many valid combinations there are."""
        return sum(map(self.count, self.states))

    @property
    def share(self) -> float:
        """The part of the valid combinations that was executed, 0 to 1; 1 where there are none."""
        return self.count("executed") / self.valid if self.valid else 1.0

    @property
    def missing(self) -> Bools:
        """The valid combinations that were not executed."""
        return self.states["raised"] | self.states["refused"] | self.states["unreached"]


def _number(found: Bools) -> int:
    return int(found.sum()) // (2 if found.ndim == 2 else 6)


def ledger(events: Sequence[Mapping[str, Any]], strength: int | None = None) -> Ledger:
    """Return the ledger of a journal's events.

    ``strength`` left out is that of the run, or 2. Only the part of the space that the run was asked for counts.
    """
    start = events[0]
    asked = start["asked"]
    known = [name for name in asked.get("lanes", ()) if name in LANES]
    dtypes = start.get("dtypes") or DTYPES if start["engine"] == "reference" else ("bf16", "fp16")
    within = space(boxes(asked["layouts"], known, dtypes))
    rows: dict[State, list[list[int]]] = {"executed": [], "raised": [], "refused": []}
    reasons: list[str] = []
    unread = 0
    for event in events:
        if event["event"] != "case":
            continue
        state = _state(event)
        if state == "unreached":
            continue
        try:
            rows[state].append(level_numbers(Case.from_dict(event["case"])))
        except CaseError:
            unread += 1
            continue
        if state == "refused":
            reasons.append(event["reason"] or "no reason was given")
    return tally(within, strength or asked.get("strength") or DEFAULT_STRENGTH, rows, reasons, unread)


def _state(event: Mapping[str, Any]) -> State:
    if event["outcome"] == "unsupported":
        return "refused"
    if event["outcome"] not in EXECUTED:
        return "unreached"
    return "raised" if counted_as(event["outcome"], event["both_raised"]) == "both_raised" else "executed"


def level_numbers(case: Case) -> list[int]:
    """Return the numbers of the levels that a case has; a value of no level has none."""
    return [level_number(name, level) for name, level in row(case).items() if level is not None]


def tally(
    within: Space,
    strength: int,
    rows: Mapping[State, Sequence[Sequence[int]]],
    reasons: Sequence[str] = (),
    unread: int = 0,
) -> Ledger:
    """Return the ledger of cases given by the numbers of their levels; ``reasons`` belong to the refused ones."""
    left = within.valid(strength)
    states: dict[State, Bools] = {}
    for state in STATES:
        found = held(rows.get(state, ()), strength) & left if state != "unreached" else left
        states[state], left = found, left & ~found
    told: list[tuple[str, Bools]] = []
    open_ = states["refused"]
    refused = rows.get("refused", ())
    for reason, _ in Counter(reasons).most_common(REASONS):
        if not open_.any():
            break
        own = [levels for levels, words in zip(refused, reasons, strict=True) if words == reason]
        found = held(own, strength) & open_
        told.append((reason, found))
        open_ = open_ & ~found
    if open_.any():
        told.append((REST, open_))
    return Ledger(strength, states, tuple((reason, found) for reason, found in told if found.any()), unread)


# ------------------------------------------------------------------ in words


@dataclass(frozen=True, slots=True)
class Group:
    """Combinations of one state that belong together.

    ``what`` names a level, or two levels, that they share and no executed combination has; where there are none it
    names their factors, and ``some`` the levels of the first of them. ``reason`` is the engine's.
    """

    what: str
    count: int
    some: tuple[str, ...] = ()
    reason: str | None = None


def groups(found: Ledger, state: State, some: int | None = 6) -> list[Group]:
    """Return the combinations in a state, most first: by levels never executed, else by factors.

    ``some`` is how many combinations are named where only the factors are common; None names all.
    """
    executed = found.states["executed"]
    left = found.states[state].copy()
    result: list[Group] = []

    def take(*levels: int) -> None:
        own = np.zeros_like(left)
        for axes in itertools.permutations(range(left.ndim), len(levels)):
            at: list[Any] = [slice(None)] * left.ndim
            for axis, level in zip(axes, levels, strict=True):
                at[axis] = level
            own[tuple(at)] = left[tuple(at)]
        if own.any():
            result.append(Group(", ".join(map(_level, levels)), _number(own), (), _reason(found, own)))
            left[own] = False

    for level in np.flatnonzero(_never_executed(found.states[state], executed, 1)):
        take(int(level))
    if left.ndim == 3:
        for one, other in np.argwhere(np.triu(_never_executed(found.states[state], executed, 2))):
            take(int(one), int(other))
    result += _by_factors(found, left, some)
    return sorted(result, key=lambda group: -group.count)


def _never_executed(own: Bools, executed: Bools, levels: int) -> Bools:
    """Return which levels, or pairs of levels, have combinations of this state and none that was executed."""
    rest = tuple(range(levels, own.ndim))
    return np.asarray(own.any(axis=rest) & ~executed.any(axis=rest))


def _by_factors(found: Ledger, left: Bools, some: int | None) -> list[Group]:
    by: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for levels in np.argwhere(left):
        if (np.diff(levels) > 0).all():
            by.setdefault(tuple(LEVELS[level][0] for level in levels), []).append(tuple(map(int, levels)))
    result = []
    for factors, combinations in by.items():
        own = np.zeros_like(left)
        own[tuple(np.array(combinations).T)] = True
        names = tuple(" × ".join(LEVELS[level][1] for level in levels) for levels in combinations[:some])
        result.append(Group(" × ".join(factors), len(combinations), names, _reason(found, own)))
    return result


def _level(number: int) -> str:
    factor, level = LEVELS[number]
    return f"{factor}={level}"


def _reason(found: Ledger, own: Bools) -> str | None:
    """Return the engine's most frequent reason for these combinations; None where there is none."""
    return next((reason for reason, combinations in found.reasons if (combinations & own).any()), None)


def by_factors(found: Ledger) -> list[dict[str, Any]]:
    """Return for every two factors how many combinations with levels of both are in each state."""
    of = np.zeros((len(LEVELS), len(FACTORS)), dtype=np.int64)
    for index, name in enumerate(FACTORS):
        of[numbers(name), index] = 1
    sums = {}
    for state, combinations in found.states.items():
        pairs = combinations.sum(axis=2) if combinations.ndim == 3 else combinations.astype(np.int64)
        sums[state] = of.T @ pairs @ of
    names = list(FACTORS)
    return [
        {"factors": [names[one], names[other]]} | {state: int(sums[state][one, other]) for state in STATES}
        for one in range(len(names))
        for other in range(one + 1, len(names))
    ]


def summary(found: Ledger, most: int | None = 40, some: int | None = 6) -> dict[str, Any]:
    """Return the ledger as JSON values: the counts, and what was not executed in at most ``most`` groups a state."""
    return {
        "strength": found.strength,
        "valid": found.valid,
        **{state: found.count(state) for state in STATES},
        "share": round(found.share, 6),
        "unread": found.unread,
        "gaps": {
            state: [
                dataclasses.asdict(group) | {"some": list(group.some)} for group in groups(found, state, some)[:most]
            ]
            for state in STATES
            if state != "executed"
        },
    }
