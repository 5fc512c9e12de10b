"""From differences to outcomes, from outcomes to a verdict and an exit code. Pure: no torch, no clock, no files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.compare import Difference
from harness.observe.values import is_kernel_result

Outcome = Literal["match", "difference", "intended", "noisy", "unsupported", "crash", "error"]
OUTCOMES: tuple[Outcome, ...] = ("match", "difference", "intended", "noisy", "unsupported", "crash", "error")
EXECUTED: frozenset[Outcome] = frozenset({"match", "difference", "intended", "noisy", "crash"})
FINDINGS: frozenset[Outcome] = frozenset({"difference", "crash"})

VerdictName = Literal["neutral", "not neutral", "unverified"]
EXIT_NEUTRAL, EXIT_NOT_NEUTRAL, EXIT_USAGE, EXIT_UNVERIFIED, EXIT_HARNESS = 0, 1, 2, 3, 4

EXIT_CODES: dict[str, int] = {
    "match": EXIT_NEUTRAL,
    "noisy": EXIT_NEUTRAL,
    "intended": EXIT_NEUTRAL,
    "difference": EXIT_NOT_NEUTRAL,
    "crash": EXIT_NOT_NEUTRAL,
    "both_raised": EXIT_UNVERIFIED,
    "unsupported": EXIT_UNVERIFIED,
    "error": EXIT_HARNESS,
}
"""What one case alone comes to, by the count that it belongs to; see ``counted_as``."""

INTERRUPTED, STOPPED = "the run was interrupted", "the run was stopped by a signal"
SIGNALLED = {INTERRUPTED: 130, STOPPED: 143}
"""The exit codes of a run that a signal ended, whatever it had found by then."""

NOISE_FACTOR = 8.0
"""How many times the control's own spread the candidate may be away on a noisy path before it is a difference.

The spread is the largest seen over a handful of runs of the control, so it is an underestimate; on a path where the
control does not repeat itself, eight times its spread is still far below what a wrong argument does to the value.
"""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far a subject was from itself on a path: the largest absolute distance over its own runs.

    ``side`` is ``candidate`` where the control was never seen to vary.
    """

    path: str
    spread: float
    side: Literal["control", "candidate"] = "control"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one case came to: the outcome, what differs beyond noise, what was noise, and why where that needs words."""

    outcome: Outcome
    differences: tuple[Difference, ...] = ()
    noise: tuple[Noise, ...] = ()
    reason: str | None = None


def unstable(control_against_itself: Iterable[Sequence[Difference]]) -> list[Difference]:
    """Return where the control disagrees with itself in more than the values of tensors.

    Such a control is no ground to stand on: an alias, a shape or an exception that comes and goes is not noise.
    """
    return [
        difference
        for differences in control_against_itself
        for difference in differences
        if difference.kind != "value" or difference.distance is None
    ]


def judge(
    differences: Sequence[Difference],
    control_against_itself: Sequence[Sequence[Difference]],
    candidate_against_itself: Sequence[Sequence[Difference]] = (),
) -> Judgement:
    """Return the outcome of one case.

    ``differences`` are the candidate's against the control, ``control_against_itself`` those of each further run of
    the control against its first. On a path where the control was noisy the candidate may be as far from the control
    as NOISE_FACTOR times the control's own spread, and the case is ``noisy``, never ``match``.

    Noise that comes once in many runs can miss every run of the control and hit the candidate. The candidate's own
    spread counts too, but only where the seam shows that the noise is the kernels': every difference beyond the
    control's noise lies in a tensor that a kernel made and both sides handed on as it is, so that every call was made
    with the same arguments. Noise that the candidate adds itself, to a result or to an argument, stays a difference.
    """
    shaky = unstable(control_against_itself)
    if shaky:
        return Judgement(
            "error",
            reason=f"the control disagrees with itself on {shaky[0].path} ({shaky[0].kind}: {shaky[0].message}), so "
            "nothing can be said about the candidate",
        )
    own = _spread(control_against_itself)
    spread = dict(own)
    real = tuple(difference for difference in differences if not _within_noise(difference, spread))
    if real and all(map(_made_by_a_kernel, real)) and not unstable(candidate_against_itself):
        for path, value in _spread(candidate_against_itself).items():
            spread[path] = max(spread.get(path, 0.0), value)
        real = tuple(difference for difference in real if not _within_noise(difference, spread))
    noise = tuple(Noise(path, value, "control" if path in own else "candidate") for path, value in spread.items())
    if real:
        return Judgement("difference", real, noise)
    return Judgement("noisy" if noise else "match", (), noise)


def _spread(runs: Iterable[Sequence[Difference]]) -> dict[str, float]:
    """Return the largest absolute distance of each path over runs of one subject against its first."""
    spread: dict[str, float] = {}
    for differences in runs:
        for difference in differences:
            if difference.distance is not None and math.isfinite(difference.distance.largest_absolute):
                spread[difference.path] = max(spread.get(difference.path, 0.0), difference.distance.largest_absolute)
    return spread


def _made_by_a_kernel(difference: Difference) -> bool:
    return (
        difference.kind == "value"
        and difference.distance is not None
        and is_kernel_result(difference.control)
        and is_kernel_result(difference.candidate)
    )


def _within_noise(difference: Difference, spread: Mapping[str, float]) -> bool:
    if difference.kind != "value" or difference.distance is None or difference.path not in spread:
        return False
    gap = difference.distance.largest_absolute  # infinite where one side alone is NaN: that is never noise
    return math.isfinite(gap) and gap <= NOISE_FACTOR * spread[difference.path]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of a run, its exit code and the reasons in words, the weightiest first."""

    name: VerdictName
    exit_code: int
    reasons: tuple[str, ...]


def empty_counts() -> dict[str, int]:
    """Return the counts of a run or a lane, all zero: ``executed``, ``both_raised`` and one per outcome."""
    return {"executed": 0, "match": 0, "both_raised": 0} | {name: 0 for name in OUTCOMES if name != "match"}


def counted_as(outcome: Outcome, both_raised: bool) -> str:
    """Return the count that a case belongs to: where both sides raised alike that is ``both_raised``, not match."""
    return "both_raised" if both_raised and outcome in ("match", "noisy") else outcome


def exit_code(outcome: Outcome, both_raised: bool) -> int:
    """Return the exit code of one case alone."""
    return EXIT_CODES[counted_as(outcome, both_raised)]


def count(counts: dict[str, int], outcome: Outcome, both_raised: bool) -> None:
    """Add one case to the counts."""
    counts[counted_as(outcome, both_raised)] += 1
    counts["executed"] += outcome in EXECUTED


def reached(counts: Mapping[str, int]) -> bool:
    """Whether numbers were compared: two sides that raise alike show that errors agree, and nothing about numbers."""
    return counts["executed"] - counts["both_raised"] > 0


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many valid combinations of ``strength`` levels were executed, and the part of them that was asked for."""

    strength: int
    executed: int
    valid: int
    least: float

    @property
    def share(self) -> float:
        """The part that was executed, rounded down: what falls short never reads as reached."""
        return math.floor(1e4 * self.executed / self.valid) / 1e4 if self.valid else 1.0


def verdict(
    counts: Mapping[str, int],
    asked: Mapping[str, Mapping[str, int]],
    harness_error: str | None = None,
    coverage: Coverage | None = None,
) -> Verdict:
    """Return the verdict of a run, or of a lane of it.

    ``counts`` are the run's, ``asked`` those of each slice that was asked for by name, ``coverage`` what was asked of
    it. A finding outweighs all; then a fault of the harness; then anything asked for and not reached; only then is the
    change neutral.
    """
    reasons: list[str] = []
    if found := counts["difference"] + counts["crash"]:
        reasons.append(f"{found} of {_cases(counts['executed'], 'executed ')} {'differs' if found == 1 else 'differ'}")
    faults = ([harness_error] if harness_error else []) + (
        [f"{_cases(counts['error'])} ended in a fault of the harness or the machine"] if counts["error"] else []
    )
    gaps = [f"{name} was asked for and not reached" for name, slice_ in asked.items() if not reached(slice_)]
    if not counts["executed"]:
        gaps.insert(0, "no case was executed")
    elif not reached(counts):
        gaps.insert(0, "both sides raised on every executed case, so no numbers were compared")
    if coverage is not None and coverage.executed < coverage.least * coverage.valid:
        gaps.append(
            f"--min-coverage {coverage.least:g} was asked for and {coverage.share:.4f} reached: {coverage.executed} of "
            f"{coverage.valid} valid combinations of {coverage.strength} levels were executed"
        )
    reasons += faults + gaps
    if found:
        return Verdict("not neutral", EXIT_NOT_NEUTRAL, tuple(reasons))
    if faults:
        return Verdict("unverified", EXIT_HARNESS, tuple(reasons))
    if gaps:
        return Verdict("unverified", EXIT_UNVERIFIED, tuple(reasons))
    noisy = f", {counts['noisy']} of them equal within a kernel's noise only" if counts["noisy"] else ""
    return Verdict("neutral", EXIT_NEUTRAL, (f"no difference on {_cases(counts['executed'], 'executed ')}{noisy}",))


def _cases(number: int, kind: str = "") -> str:
    return f"{number} {kind}case{'' if number == 1 else 's'}"
