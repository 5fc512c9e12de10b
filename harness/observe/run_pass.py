"""Run a subject once over a case, in the way that its scenario says, and return all that was seen of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from harness.engines.api import Engine
from harness.inputs import Inputs
from harness.observe.recorder import Recorder
from harness.observe.scenarios import SCENARIOS, prepare, variables
from harness.observe.seam import WatchedSeam
from harness.observe.session import FATAL, Session, normalise
from harness.observe.state import environment, watched_state
from harness.observe.values import Observation
from harness.subjects.subject import Subject

__all__ = ["FATAL", "default_generator", "normalise", "observe"]


def observe(subject: Subject, inputs: Inputs, engine: Engine, seam: WatchedSeam) -> Observation:
    """Run a subject once on tensors of its own and return all that was seen.

    Families of paths: ``output``, ``saved``, ``call``, ``calls``, ``aux``, ``backward`` (the raw results against the
    inputs), ``grad`` (raw, by input), ``leaf`` (as accumulated), ``write`` (to the caller's memory), ``generator``,
    ``quantizer``, ``exception``, ``print``, ``state`` (of the process). What a scenario's later passes leave has the
    pass in its path: ``output/pass 2/0``. Raises what FATAL names; every other exception of the subject is part of the
    observation.
    """
    case = inputs.case
    prepare(case)
    own = engine.generator(case.seed + 1) if case.generator == "own" else None
    recorder = Recorder(inputs, inputs.fresh(own, engine), padding_defined=engine.defines_padding, kinds=seam.kinds)
    seen = recorder.observation
    default = default_generator(engine.device)
    session = Session(subject, engine, seam, recorder, default)
    try:
        with (
            environment(variables(case)),
            engine.during(case),
            watched_state(seen),
            _seeded(default, case.seed),
            seam.attached(recorder),
        ):
            SCENARIOS[case.scenario](session)
            session.close()
    finally:
        subject.on_backward.clear()
    return seen


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that ``rng_gen=None`` means on a device."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


@contextmanager
def _seeded(generator: torch.Generator, seed: int) -> Iterator[None]:
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
