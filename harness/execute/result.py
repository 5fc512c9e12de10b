"""What one case came to, and its line in the journal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.case import Case
from harness.compare import Difference, Distance
from harness.judge import Noise, Outcome
from harness.lanes import lanes_of


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
            "differences": [_bounded(asdict(difference)) for difference in self.differences],
            "noise": [asdict(noise) for noise in self.noise],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 6),
        }

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> CaseResult:
        """Read a result back from its line in the journal."""
        return cls(
            Case.from_dict(event["case"]),
            event["outcome"],
            event["both_raised"],
            event["reason"],
            tuple(_difference(fields) for fields in event["differences"]),
            tuple(Noise(**{**fields, "spread": float(fields["spread"])}) for fields in event["noise"]),
            tuple(event["notes"]),
            float(event["seconds"]),
        )


LONGEST_TEXT, LONGEST_LIST = 4000, 400


def _bounded(value: Any) -> Any:
    """Return a JSON value with long texts and lists cut, and what was cut said: what is in it is a subject's choice."""
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        digest = hashlib.sha256(value.encode(errors="backslashreplace")).hexdigest()[:12]
        return f"{value[:LONGEST_TEXT]}… ({len(value) - LONGEST_TEXT} more characters, sha256 of all {digest})"
    if isinstance(value, Mapping):
        return {name: _bounded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        rest = len(value) - LONGEST_LIST
        return [*map(_bounded, value[:LONGEST_LIST]), *([f"… ({rest} more)"] if rest > 0 else [])]
    return value


def _difference(fields: Mapping[str, Any]) -> Difference:
    distance = fields["distance"]
    if distance is not None:
        numbers = {name: float(distance[name]) for name in ("largest_absolute", "largest_relative")}
        distance = Distance(**{**distance, **numbers, "first": tuple(distance["first"])})
    return Difference(**{**fields, "distance": distance})
