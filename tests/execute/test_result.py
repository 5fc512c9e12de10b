"""A result comes back from its line in the journal as it was, and is of a bounded length."""

from __future__ import annotations

import dataclasses
import json
import math

from harness.case import Case
from harness.compare import Difference, Distance
from harness.execute.result import CaseResult
from harness.judge import Noise

WHOLE = CaseResult(
    Case(seed=3), "difference", True, "because",
    (
        Difference("grad/q", "value", {"is": "fresh"}, [1, None], "differs", Distance(4, 2, (0, 1), math.inf, 0.5)),
        Difference("saved/k", "missing", "input k", None, "only the control has it"),
    ),
    (Noise("grad/k", 1e-6, "candidate"),), ("both sides: so",), 0.25,
)  # fmt: skip


def test_a_result_comes_back_from_its_event_as_it_was() -> None:
    again = CaseResult.from_event(WHOLE.event())
    assert again == WHOLE
    assert [item.distance for item in again.differences] == [item.distance for item in WHOLE.differences]


def test_what_a_subject_says_at_length_is_cut_and_told_apart() -> None:
    def size_and_text(value: object) -> tuple[int, str]:
        difference = Difference("call/x", "value", value, ["x"] * 100_000, "m" * 1_000_000)  # type: ignore[arg-type]
        text = json.dumps(dataclasses.replace(WHOLE, differences=(difference,)).event())
        return len(text), text

    (small, one), (_, other) = (
        size_and_text({"label": "a" * 2_000_000}),
        size_and_text({"label": "a" * 1_999_999 + "b"}),
    )
    assert small < 40_000
    assert one != other, "texts that differ behind the cut differ still"
