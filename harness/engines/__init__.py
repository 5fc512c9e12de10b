"""The engines a subject can run on, by name."""

from __future__ import annotations

from harness.engines.api import Engine, EngineUnavailable, get_engine

__all__ = ["Engine", "EngineUnavailable", "get_engine"]
