"""Settings of the harness's own do not show as changes of the process's state, and a subject's do."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable

import numpy
import pytest
import torch

from harness.observe.state import PARTS, environment, watched_state
from harness.observe.values import Observation, Plain

NAME = "HARNESS_TEST_VARIABLE"


def seen(action: Callable[[], object]) -> dict[str, object]:
    observation = Observation()
    with watched_state(observation):
        action()
    return {path: value.value for path in observation if isinstance(value := observation[path], Plain)}


def test_a_variable_is_set_inside_the_block_and_is_what_it_was_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    with environment({NAME: "1"}):
        assert os.environ[NAME] == "1"
        with environment({NAME: "2"}):
            assert os.environ[NAME] == "2"
        assert os.environ[NAME] == "1"
    assert NAME not in os.environ


def test_a_variable_that_others_change_stays_changed_for_the_watch_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)

    def change() -> None:
        with environment({NAME: "1"}):
            os.environ[NAME] = "3"

    assert seen(change)["state/environment"] == f"changed: {NAME}"
    assert NAME not in os.environ


def test_the_harness_own_setting_around_the_watch_is_no_change() -> None:
    with environment({NAME: "1"}):
        assert set(seen(lambda: None).values()) == {"unchanged"}


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("random", random.random),
        ("numpy.random", numpy.random.random),
        ("default dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("flush denormal", lambda: torch.set_flush_denormal(True)),
        ("autocast", lambda: torch.set_autocast_enabled("cpu", True)),
        ("autocast", lambda: torch.set_autocast_dtype("cuda", torch.float32)),
        ("anomaly mode", lambda: torch.set_anomaly_enabled(True)),
        ("backend flags", lambda: setattr(torch.backends.cudnn, "benchmark", True)),
        ("default device", lambda: torch.set_default_device("meta")),
        ("warning filters", lambda: warnings.simplefilter("ignore")),
        ("logging", lambda: logging.getLogger().addHandler(logging.NullHandler())),
        ("logging", lambda: logging.disable(50)),
        ("signal handlers", lambda: signal.signal(signal.SIGALRM, lambda *_: None)),
        ("garbage collector", gc.disable),
        ("recursion limit", lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1)),
        ("import path", lambda: sys.path.append("elsewhere")),
        ("exception hooks", lambda: setattr(sys, "excepthook", print)),
        ("threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        ("working directory", lambda: os.chdir("/")),
    ],
)
def test_a_changed_part_is_reported_and_put_back(part: str, change: Callable[[], object]) -> None:
    before = PARTS[part].read()
    found = seen(change)
    assert str(found.pop(f"state/{part}")).startswith("changed")
    assert set(found.values()) == {"unchanged"}
    assert PARTS[part].read() == before


def test_a_thread_that_is_left_running_is_reported() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=True)
    try:
        found = seen(thread.start)
    finally:
        stop.set()
        thread.join()
    assert str(found["state/running threads"]).startswith("changed")


def test_what_a_thread_raises_is_reported() -> None:
    found = seen(lambda: threading.Thread(target=lambda: [][0]).start())
    assert found["state/threads that raised"] == ["IndexError: list index out of range"]
    assert found["state/running threads"] == "unchanged"


def test_a_child_process_that_is_left_is_reported() -> None:
    children: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0)
        children.append(child)

    found = seen(fork)
    os.waitpid(children[0], 0)
    assert str(found["state/child processes"]).startswith("changed")
