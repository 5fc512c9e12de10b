"""What a subject may change outside its call, and must not: the process's own state, watched and put back.

Put back, since control and candidate share a process: what one leaves behind would make the other behave like it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from harness.observe.values import Observation


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the process's state: how it is read, and how it is put back."""

    read: Callable[[], Any]
    restore: Callable[[Any], Any]


def _restore_environment(values: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(values)


PARTS: dict[str, Part] = {
    "environment": Part(lambda: dict(os.environ), _restore_environment),
    "working directory": Part(os.getcwd, os.chdir),
    "default dtype": Part(torch.get_default_dtype, torch.set_default_dtype),
    "grad mode": Part(torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic algorithms": Part(
        torch.are_deterministic_algorithms_enabled, lambda value: torch.use_deterministic_algorithms(bool(value))
    ),
    "matmul precision": Part(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "threads": Part(torch.get_num_threads, torch.set_num_threads),
    "random": Part(random.getstate, random.setstate),
    "numpy.random": Part(lambda: numpy.random.get_state(legacy=True), numpy.random.set_state),
}


@contextmanager
def watched_state(seen: Observation) -> Iterator[None]:
    """Record under ``state/`` which parts the block changed, and put every part back."""
    before = {name: part.read() for name, part in PARTS.items()}
    try:
        yield
    finally:
        for name, part in PARTS.items():
            after = part.read()
            changed = repr(after) != repr(before[name])
            seen.plain(f"state/{name}", _change(before[name], after) if changed else "unchanged")
            if changed:
                part.restore(before[name])


def _change(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        return "changed: " + ", ".join(sorted(key for key in before | after if before.get(key) != after.get(key)))
    short = not isinstance(before, (list, tuple))
    return f"changed: {before} became {after}" if short else "changed"
