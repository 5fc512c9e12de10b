"""From a spec to a loaded subject: where its source is, what of it is needed, how it is called."""

from __future__ import annotations

from harness.subjects.source import Source, SpecError, resolve

__all__ = ["Source", "SpecError", "resolve"]
