"""What a subject may change outside its call, and must not: the process's own state, watched and put back.

Put back, since control and candidate share a process: what one leaves behind would make the other behave like it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from harness.observe.values import Observation


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the process's state: how it is read, as something to compare, and how it is put back."""

    read: Callable[[], Any]
    restore: Callable[[Any], Any]


def _restore_environment(values: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(values)


def _numpy_state() -> tuple[Any, ...]:
    state: Any = numpy.random.get_state(legacy=True)
    name, keys, *rest = state
    return name, keys.tobytes(), *rest


def _restore_numpy_state(state: tuple[Any, ...]) -> None:
    name, keys, *rest = state
    numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE")
    if hasattr(signal, name)
)  # fmt: skip


def _restore_signals(handlers: list[Any]) -> None:
    for number, handler in zip(_SIGNALS, handlers, strict=True):
        if handler is not None:  # None: it was not set from Python
            signal.signal(number, handler)


_TINY = torch.tensor([2.0**-1060], dtype=torch.float64)


def _flushes_denormals() -> bool:
    """Return whether numbers too small to be normal become zero: torch has no other way to tell."""
    return (_TINY * 0.5).item() == 0.0


_AUTOCAST_DEVICES = ("cpu", "cuda")


def _autocast() -> tuple[Any, ...]:
    enabled = (torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES)
    dtypes = (torch.get_autocast_dtype(device) for device in _AUTOCAST_DEVICES)
    return (*enabled, *dtypes, torch.is_autocast_cache_enabled())


def _restore_autocast(values: tuple[Any, ...]) -> None:
    for index, device in enumerate(_AUTOCAST_DEVICES):
        torch.set_autocast_enabled(device, values[index])
        torch.set_autocast_dtype(device, values[index + 2])
    torch.set_autocast_cache_enabled(values[4])


_BACKENDS = (
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    (torch.backends.cudnn, "enabled"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.mkldnn, "enabled"),
)


def _restore_backends(values: list[Any]) -> None:
    for (module, name), value in zip(_BACKENDS, values, strict=True):
        setattr(module, name, value)


def _logging() -> tuple[Any, ...]:
    root = logging.getLogger()
    return root.level, list(root.handlers), root.manager.disable


def _restore_logging(values: tuple[Any, ...]) -> None:
    root = logging.getLogger()
    root.setLevel(values[0])
    root.handlers[:] = values[1]
    root.manager.disable = values[2]


def _child_processes() -> int:
    """Return how many children this process has; where the system does not list them, whether it has any."""
    try:
        tasks = os.listdir("/proc/self/task")
        return sum(len(Path(f"/proc/self/task/{task}/children").read_bytes().split()) for task in tasks)
    except OSError:
        pass
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):
        return 0
    return 1


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
    "numpy.random": Part(_numpy_state, _restore_numpy_state),
    "flush denormal": Part(_flushes_denormals, torch.set_flush_denormal),
    "autocast": Part(_autocast, _restore_autocast),
    "anomaly mode": Part(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    "backend flags": Part(lambda: [getattr(module, name) for module, name in _BACKENDS], _restore_backends),
    "default device": Part(torch.get_default_device, lambda value: torch.set_default_device(None)),
    "warning filters": Part(lambda: list(warnings.filters), lambda value: _replace(warnings.filters, value)),
    "logging": Part(_logging, _restore_logging),
    "signal handlers": Part(lambda: [signal.getsignal(number) for number in _SIGNALS], _restore_signals),
    "garbage collector": Part(gc.isenabled, lambda value: gc.enable() if value else gc.disable()),
    "recursion limit": Part(sys.getrecursionlimit, sys.setrecursionlimit),
    "import path": Part(lambda: list(sys.path), lambda value: _replace(sys.path, value)),
    "exception hooks": Part(
        lambda: (sys.excepthook, sys.unraisablehook),
        lambda value: vars(sys).update(excepthook=value[0], unraisablehook=value[1]),
    ),
    "running threads": Part(threading.active_count, lambda value: None),
    "child processes": Part(_child_processes, lambda value: None),
}
"""What cannot be put back is left to whoever ends the process: a thread, a child."""


def _replace(items: Any, values: list[Any]) -> None:
    items[:] = values


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block; one that changes in it stays as it is, for others to report."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if os.environ.get(name) == variables[name]:
                os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def watched_state(seen: Observation) -> Iterator[None]:
    """Record under ``state/`` which parts the block changed, and put every part back."""
    before = {name: part.read() for name, part in PARTS.items()}
    failed: list[str] = []
    hook = threading.excepthook
    threading.excepthook = lambda info: failed.append(f"{info.exc_type.__name__}: {info.exc_value}")
    try:
        yield
    finally:
        if threading.active_count() > before["running threads"]:
            _settle()
        threading.excepthook = hook
        seen.plain("state/threads that raised", failed or "unchanged")
        for name, part in PARTS.items():
            after = part.read()
            changed = after != before[name]
            seen.plain(f"state/{name}", _change(before[name], after) if changed else "unchanged")
            if changed:
                part.restore(before[name])


def _settle(seconds: float = 0.2) -> None:
    """Give threads a moment to end that are about to: what they raise belongs to the block that started them."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            with contextlib.suppress(RuntimeError):
                thread.join(seconds)


def _change(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        return "changed: " + ", ".join(sorted(key for key in before | after if before.get(key) != after.get(key)))
    short = not isinstance(before, (list, tuple))
    return f"changed: {before} became {after}" if short else "changed"
