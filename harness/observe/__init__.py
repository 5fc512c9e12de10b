"""What was seen of one subject on one case."""

from __future__ import annotations

from harness.observe.values import Array, Observation, Plain, Value

__all__ = ["Array", "Observation", "Plain", "Value"]
