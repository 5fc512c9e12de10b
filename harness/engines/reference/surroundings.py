"""What surrounds the kernels besides CPU offload: the recipe in force, NVTX ranges, graph capture."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """An FP8 recipe: ``kind`` and ``fp8_format`` as a case has them; ``hybrid`` answers as what QKV has, current."""

    kind: str = "delayed"
    fp8_format: str = "HYBRID"

    def delayed(self) -> bool:
        """Whether scales come from earlier steps."""
        return self.kind == "delayed"

    def float8_current_scaling(self) -> bool:
        """Whether scales come from each tensor."""
        return self.kind in ("current", "hybrid")

    def mxfp8(self) -> bool:
        """Whether scales belong to blocks of 32 elements."""
        return self.kind == "mxfp8"


_recipe = Recipe()  # where no autocast is, delayed scaling is in force


class FP8GlobalStateManager:
    """Holder of the global FP8 state, of which only the recipe is asked for."""

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Return the recipe in force."""
        return _recipe


@contextlib.contextmanager
def recipe_in_force(recipe: Recipe) -> Iterator[None]:
    """Make a recipe the global one inside the block."""
    global _recipe
    before, _recipe = _recipe, recipe
    try:
        yield
    finally:
        _recipe = before


def is_graph_capturing() -> bool:
    """Whether a CUDA graph is being captured: never here."""
    return False


_ranges: list[str] = []


def nvtx_enabled() -> bool:
    """Whether NVTE_NVTX_ENABLED asks for ranges; read at each call."""
    return bool(int(os.environ.get("NVTE_NVTX_ENABLED", "0")))


def open_ranges() -> tuple[str, ...]:
    """Return the labels of the ranges that are open, outermost first."""
    return tuple(_ranges)


def nvtx_range_push(msg: str) -> None:
    """Open a profiler range, if ranges are enabled."""
    if nvtx_enabled():
        _ranges.append(msg)


def nvtx_range_pop(msg: str | None = None) -> None:
    """Close the innermost profiler range, if ranges are enabled.

    Raises RuntimeError where none is open, ValueError where it is open under another label than ``msg``.
    """
    if not nvtx_enabled():
        return
    if not _ranges:
        raise RuntimeError("no NVTX range is open to be popped")
    last = _ranges.pop()
    if msg is not None and msg != last:
        raise ValueError(f"msg={msg!r} was to be popped, and the innermost NVTX range is {last!r}")


def get_nvtx_range_context(msg: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that is a profiler range; only a profiler sees it, so here it does nothing.

    It is not among the ranges that are popped.
    """
    return contextlib.nullcontext()


@contextlib.contextmanager
def fresh_ranges() -> Iterator[None]:
    """Let no range be open at the start of the block, and restore those that were at its end."""
    before = list(_ranges)
    _ranges.clear()
    try:
        yield
    finally:
        _ranges[:] = before
