"""Run one case on a control and a candidate, and judge it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from harness.case import Case
from harness.compare import Difference, compare
from harness.engines.api import Engine
from harness.inputs import build
from harness.judge import Judgement, Noise, Outcome, judge, unstable
from harness.lanes import lanes_of
from harness.observe.run_pass import observe
from harness.observe.seam import WatchedSeam
from harness.observe.values import Json, Observation, Plain
from harness.subjects.source import Source
from harness.subjects.subject import Subject, load

NOISE_RUNS = 6
"""Further runs of each side where the candidate differs in the values of tensors alone: two runs of a noisy kernel
often agree by luck, and a difference must not be reported on such luck. Where more than values differs, two more runs
of the control show whether it stands still."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What one case came to.

    ``notes`` are breaches of a subject's own duties that both sides share, so that they are no difference.
    """

    case: Case
    outcome: Outcome
    both_raised: bool = False
    reason: str | None = None
    differences: tuple[Difference, ...] = ()
    noise: tuple[Noise, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def signatures(self) -> frozenset[tuple[str, str]]:
        """Path and kind of every difference."""
        return frozenset(difference.signature for difference in self.differences)

    def event(self) -> dict[str, Any]:
        """Return the journal's line for the case."""
        return {
            "event": "case",
            "case_id": self.case.id,
            "case": self.case.to_dict(),
            "outcome": self.outcome,
            "both_raised": self.both_raised,
            "reason": self.reason,
            "lanes": list(lanes_of(self.case)),
            "differences": [asdict(difference) for difference in self.differences],
            "noise": [asdict(noise) for noise in self.noise],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 6),
        }


class Pair:
    """A control and a candidate loaded onto one engine, each with a watched seam of its own."""

    def __init__(self, control: Source, candidate: Source, engine: Engine) -> None:
        self.engine = engine
        self._seams = {"control": WatchedSeam(engine.seam()), "candidate": WatchedSeam(engine.seam())}
        self.subjects: dict[str, Subject] = {
            side: load(source, engine, self._seams[side].names)
            for side, source in (("control", control), ("candidate", candidate))
        }

    def run(self, case: Case) -> CaseResult:
        """Run a case: control, candidate and control again, in an order drawn from the case's seed, and judge it."""
        start = time.perf_counter()
        both_raised = False
        notes: tuple[str, ...] = ()
        refusal = self.engine.unsupported(case)
        if refusal is not None:
            judgement = Judgement("unsupported", reason=refusal)
        else:
            try:
                judgement, both_raised, notes = self._run(case)
            except (torch.OutOfMemoryError, MemoryError) as error:
                judgement = Judgement("error", reason=f"out of memory: {error}")
            except Exception as error:  # a subject's own exceptions are part of its observation: this one is ours
                judgement = Judgement("error", reason=f"the harness failed: {type(error).__name__}: {error}")
        return CaseResult(
            case,
            judgement.outcome,
            both_raised,
            judgement.reason,
            judgement.differences,
            judgement.noise,
            notes,
            time.perf_counter() - start,
        )

    def _run(self, case: Case) -> tuple[Judgement, bool, tuple[str, ...]]:
        inputs = build(case, self.engine.device)

        def once(side: str) -> Observation:
            return observe(self.subjects[side], inputs, self.engine, self._seams[side])

        order = ["control", "candidate", "control"]
        random.Random(case.seed).shuffle(order)
        seen: dict[str, list[Observation]] = {"control": [], "candidate": []}
        for side in order:
            seen[side].append(once(side))
        control, again = seen["control"]
        candidate = seen["candidate"][0]
        refusals = [_refusal(observation) for observation in (control, candidate)]
        if all(refusals):
            return Judgement("unsupported", reason=refusals[0]), False, ()
        differences = compare(control, candidate)
        own = {"control": [compare(control, again)], "candidate": list[list[Difference]]()}
        if differences:
            values_only = not unstable([differences])
            own["control"] += [compare(control, once("control")) for _ in range(NOISE_RUNS if values_only else 2)]
            if values_only and not self.engine.repeatable:
                own["candidate"] += [compare(candidate, once("candidate")) for _ in range(NOISE_RUNS)]
        judgement = judge(differences, own["control"], own["candidate"])
        raised = control.exception()
        both_raised = raised is not None and candidate.exception() is not None
        if both_raised and judgement.outcome == "match":
            assert raised is not None
            judgement = replace(judgement, reason=f"{raised['type']} in {raised['stage']}: {raised['message']}")
        return judgement, both_raised, _shared_breaches(control, candidate)


def _refusal(observation: Observation) -> str | None:
    """Return why the engine refused, where it did so only when called."""
    raised = observation.exception()
    return str(raised["message"]) if raised is not None and raised["type"] == "EngineUnsupported" else None


DUTIES: tuple[tuple[str, Callable[[Json], bool], str], ...] = (
    ("backward/results beyond the inputs", lambda value: value == 0, "backward returns {} values beyond the inputs"),
    ("backward/gradients for what has none", lambda value: value == [], "backward returns gradients for {}"),
    ("write/", lambda value: value == "unchanged", "{path}: the caller's memory was {}"),
)
"""What each subject must obey by itself: path (or its start), whether a value obeys, what a breach is called."""


def _shared_breaches(control: Observation, candidate: Observation) -> tuple[str, ...]:
    """Return the breaches of duty that both sides share: no difference, and still something to know."""
    found = []
    for path in control:
        value = control[path]
        for start, obeys, words in DUTIES:
            if (
                path.startswith(start)
                and isinstance(value, Plain)
                and not obeys(value.value)
                and path in candidate
                and candidate[path] == value
            ):
                found.append("both sides: " + words.format(value.value, path=path))
    return tuple(found)
