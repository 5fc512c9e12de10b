"""The reference engine: fused attention's kernels and their surroundings in pure PyTorch, on CPU or GPU."""

from __future__ import annotations

from harness.engines.reference.engine import ReferenceEngine
from harness.engines.reference.errors import EngineUnsupported

__all__ = ["EngineUnsupported", "ReferenceEngine"]
