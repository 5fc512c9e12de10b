"""Say what this machine can check, engine by engine, layout by layout and lane by lane, and why not the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from harness.case import Case
from harness.engines.api import Engine, EngineUnavailable, get_engine
from harness.lanes import LANES
from harness.layouts import LAYOUTS
from harness.space import Box, case_of, solve

TRIED = 24
"""How many kinds of case of a lane are asked about before it counts as refused."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether one thing can be checked here; ``reason`` says what stands in the way."""

    what: str
    works: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What one engine can check on this machine."""

    engine: str
    available: Finding
    environment: dict[str, str]
    layouts: tuple[Finding, ...] = ()
    lanes: tuple[Finding, ...] = ()


def diagnose(name: str) -> Diagnosis:
    """Return what an engine can check here: of each layout and each lane, whether it takes some plain case."""
    try:
        engine = get_engine(name)
    except EngineUnavailable as error:
        return Diagnosis(name, Finding(name, False, str(error)), {})
    return Diagnosis(
        name,
        Finding(name, True),
        engine.environment(),
        tuple(_check(engine, layout, {"qkv_layout": frozenset({layout})}) for layout in LAYOUTS),
        tuple(_check(engine, lane.name, lane.box) for lane in LANES.values()),
    )


def _check(engine: Engine, what: str, box: Box) -> Finding:
    if not box.get("dtype", frozenset(engine.dtypes)) & frozenset(engine.dtypes):
        return Finding(what, False, f"the engine has no dtype={' or '.join(sorted(box['dtype']))}")
    reasons = []
    for case in itertools.islice(_plain_cases(engine, box), TRIED):
        reason = engine.unsupported(case)
        if reason is None:
            return Finding(what, True)
        reasons.append(reason)
    return Finding(what, False, reasons[0])


def _plain_cases(engine: Engine, box: Box) -> Iterator[Case]:
    """Yield the plainest case of each choice of levels in the box."""
    for levels in itertools.product(*(sorted(allowed) for allowed in box.values())):
        row = solve({name: frozenset({level}) for name, level in zip(box, levels, strict=True)})
        if row is not None:
            yield case_of(row, 0, engine.name)
