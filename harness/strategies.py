"""Hypothesis strategies over Case: the only place that draws cases, and the only importer of hypothesis.

Hypothesis draws levels, sizes and seeds; tensors come from ``harness.inputs``. What is plain and small stands first, so
that a failing case shrinks towards small sizes and switched-off options.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import hypothesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from harness.case import Case
from harness.covering import Space, level_number, numbers, space
from harness.lanes import boxes
from harness.space import FACTORS, Box, fields_of, row

# Hypothesis keeps files of its own; they have no place in the folder of whoever runs this.
set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "fused-attn-harness-hypothesis")

CaseStrategy: TypeAlias = st.SearchStrategy[Case]

OFTEN: Mapping[str, Mapping[str, int]] = {
    "scenario": {"plain": 45},
    "fp8_recipe": {"none": 24},
    "bias": {"no_bias": 5},
    "requires_grad": {"all": 8},
    "window_size": {"none": 4},
    "softmax_type": {"vanilla": 2},
    "batch_size": {"several": 3},
    "is_training": {"true": 7},
    "return_max_logit": {"false": 7},
    "pad_between_seqs": {"true": 2},
    "packed_given": {"true": 3},
    "fp8_dpa_bwd": {"true": 3},
}
"""How many times as often as another a level is drawn. Most cases are plain ones in F16; none is too rare to be met."""


def cases(
    layouts: Sequence[str] = (),
    dtypes: Sequence[str] = ("bf16", "fp16"),
    lanes: Sequence[str] = (),
    engine: str = "reference",
) -> CaseStrategy:
    """Return the strategy of valid cases of these layouts and lanes (none: of any), with the sizes for an engine.

    Each of the lanes is drawn from as often as the next. Where no case can be of them, nothing can be drawn.
    """
    return _of_any([space([box]) for box in boxes(layouts, lanes, dtypes)], engine)


def cases_between(case: Case, engine: str = "reference") -> CaseStrategy:
    """Return the strategy of cases that lie between a case and the plainest: each level is its own or the plainest."""
    return _of_any([space([_between(case)])], engine)


def _between(case: Case) -> Box:
    return {name: frozenset({level, FACTORS[name].levels[0]}) for name, level in row(case).items() if level is not None}


def _of_any(spaces: Sequence[Space], engine: str) -> CaseStrategy:
    possible = [found for found in spaces if found.allowed.size]
    return st.one_of([_cases(found, engine) for found in possible]) if possible else st.nothing()


@functools.lru_cache(4096)  # a strategy is checked whenever it is new
def _one_of(options: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    return st.sampled_from(options)


@st.composite
def _cases(draw: st.DrawFn, within: Space, engine: str) -> Case:
    """Draw a valid case, level by level: each is one that some valid case with those before it has."""

    def choose(options: Sequence[Any]) -> Any:
        return draw(_one_of(tuple(options))) if len(options) > 1 else options[0]

    products = within.start()
    levels: dict[str, str] = {}
    for name, factor in FACTORS.items():
        possible = within.open(products)[numbers(name)]
        options = [
            level
            for level, fits in zip(factor.levels, possible, strict=True)
            for _ in range(OFTEN.get(name, {}).get(level, 1))
            if fits
        ]
        levels[name] = choose(options)
        products = within.choose(products, level_number(name, levels[name]))
    return Case(**fields_of(levels, choose, engine), seed=draw(st.integers(0, 2**31 - 1)))


def _settings(count: int, *phases: Phase) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=count,
        phases=phases,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )


def draw_cases(strategy: CaseStrategy, count: int, seed: int) -> list[Case]:
    """Return up to ``count`` distinct cases; the same arguments give the same cases."""
    found: dict[str, Case] = {}
    if strategy.is_empty:
        return []

    @hypothesis.seed(seed)
    @_settings(count, Phase.generate)
    @given(strategy)
    def collect(case: Case) -> None:
        found.setdefault(case.id, case)

    collect()
    return list(found.values())


class _Failing(Exception):
    """Raised to have Hypothesis shrink."""


def smallest(
    strategy: CaseStrategy,
    count: int,
    seed: int,
    failing: Case,
    fails: Callable[[Case], bool],
    *,
    drawn: bool = True,
    runs: int = 200,
    seconds: float = 30.0,
) -> Case:
    """Return the smallest case found that ``fails``, starting from one that does.

    Hypothesis shrinks only what it drew itself. Where ``drawn``, by ``draw_cases`` with the same arguments, the draw is
    repeated: nothing fails until the known case comes up. Else one that fails is looked for among what is drawn, so
    the strategy should be ``cases_between`` the failing case and the plainest. ``fails`` is called at most ``runs``
    times and for about ``seconds``; after that nothing new fails. At worst the case given comes back.
    """
    best = failing
    known = {failing.id: True}
    stop = time.monotonic() + seconds
    found = not drawn

    def check(case: Case) -> bool:
        if case.id not in known:
            if not found or len(known) > runs or time.monotonic() > stop:
                return False
            known[case.id] = fails(case)
        return known[case.id]

    @hypothesis.seed(seed)
    @_settings(count, Phase.generate, Phase.shrink)
    @given(strategy)
    def shrink(case: Case) -> None:
        nonlocal best, found
        if check(case):
            best, found = case, True
            raise _Failing

    with contextlib.suppress(_Failing):
        shrink()
    return best
