"""Run one case on a control and a candidate, and judge it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from harness.case import Case
from harness.compare import Difference, compare
from harness.engines.api import Engine
from harness.execute.result import CaseResult
from harness.inputs import Inputs, build
from harness.judge import Judgement, judge, unstable
from harness.observe.run_pass import observe
from harness.observe.seam import WatchedSeam
from harness.observe.session import call_values
from harness.observe.state import environment
from harness.observe.values import Json, Observation, Plain
from harness.subjects.source import Source
from harness.subjects.subject import PARAMETERS, Subject, load

NOISE_RUNS = 6
"""Further runs of each side where the candidate differs in the values of tensors alone: two runs of a noisy kernel
often agree by luck, and a difference must not be reported on such luck. Where more than values differs, two more runs
of the control show whether it stands still."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a source finds in its surroundings while it is loaded, and goes by ever after."""

    o_in_f16: bool = True
    offload_v1: bool = False

    @classmethod
    def of(cls, case: Case) -> Variant:
        """Return the one that a case asks for."""
        return cls(case.fp8_cs_o_in_f16, case.scenario == "offload_v1")

    def environment(self) -> dict[str, str]:
        """Return the environment variables that say so."""
        return {"NVTE_DPA_FP8CS_O_in_F16": str(int(self.o_in_f16)), "NVTE_CPU_OFFLOAD_V1": str(int(self.offload_v1))}


@dataclass(frozen=True, slots=True)
class Loaded:
    """Both sides as loaded in one variant, each with a watched seam of its own.

    ``unknown`` are the values that one of them, named with it, has no place for in a call.
    """

    subjects: dict[str, Subject]
    seams: dict[str, WatchedSeam]
    unknown: dict[str, str]


Turn = Callable[[str], None]
"""Told whose code runs from here on: ``control``, ``candidate`` or ``harness``."""


class Pair:
    """A control and a candidate on one engine, loaded once for each variant that cases ask for.

    ``turn`` is told whenever another side's code is about to run.
    """

    def __init__(self, control: Source, candidate: Source, engine: Engine, turn: Turn = lambda side: None) -> None:
        self.engine = engine
        self._turn = turn
        self._sources = {"control": control, "candidate": candidate}
        self._loaded: dict[Variant, Loaded] = {}
        self.subjects = self._load(Variant()).subjects

    def _load(self, variant: Variant) -> Loaded:
        """Return both sides in a variant; raises LoadError and SliceError where a source cannot be loaded in it."""
        if variant not in self._loaded:
            sides = self._sources
            seams = {side: WatchedSeam(self.engine.seam(offload_v1=variant.offload_v1)) for side in sides}
            subjects = {}
            with environment(variant.environment()):
                for side, source in sides.items():
                    self._turn(side)
                    subjects[side] = load(source, self.engine, seams[side].names)
            self._turn("harness")
            unknown = {
                name: source.spec
                for side, source in sides.items()
                for name in PARAMETERS
                if not subjects[side].convention.takes(name)
            }
            self._loaded[variant] = Loaded(subjects, seams, unknown)
        return self._loaded[variant]

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

    def run_side(self, case: Case, side: str) -> None:
        """Run a case on one side alone and forget what was seen; raises what is not the side's own doing."""
        if self.engine.unsupported(case) is None:
            loaded = self._load(Variant.of(case))
            self._observe(loaded, build(case, self.engine.device), side)

    def _observe(self, loaded: Loaded, inputs: Inputs, side: str) -> Observation:
        self._turn(side)
        try:
            return observe(loaded.subjects[side], inputs, self.engine, loaded.seams[side])
        finally:
            self._turn("harness")

    def _run(self, case: Case) -> tuple[Judgement, bool, tuple[str, ...]]:
        inputs = build(case, self.engine.device)
        loaded = self._load(Variant.of(case))
        refusal = self._no_place_for(loaded, inputs)
        if refusal is not None:
            return Judgement("unsupported", reason=refusal), False, ()

        def once(side: str) -> Observation:
            return self._observe(loaded, inputs, side)

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

    def _no_place_for(self, loaded: Loaded, inputs: Inputs) -> str | None:
        """Return what of a case one side has no place for in a call, so that neither is asked; None where both take it.

        What a plain case has too can be left out of any call, and a packed buffer wherever nothing is quantized.
        """
        if not loaded.unknown:
            return None
        case, seam = inputs.case, loaded.seams["control"]
        plain = build(Case(), self.engine.device)
        given = call_values(case, inputs.fresh(engine=self.engine), seam)
        usual = call_values(plain.case, plain.fresh(), seam)
        for name, spec in loaded.unknown.items():
            if name.startswith("packed") and not case.fp8:
                continue
            value = given[name]
            if isinstance(value, torch.Tensor):
                value = f"a tensor {list(value.shape)}"
            if value != usual[name]:
                return f"{spec} takes no {name}, and the case has {name}={value}"
        return None


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
