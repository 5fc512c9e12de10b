"""A process of its own for subjects: it loads them, runs one case at a time, and notes in a file how far it is.

What comes back is JSON, so that nothing a subject made is ever built again in the process that judges.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.case import Case
from harness.subjects.source import Source

if TYPE_CHECKING:
    from harness.execute.pair import Pair

Side = Literal["control", "candidate"]
SIDES: tuple[Side, ...] = ("control", "candidate")
Task = Literal["pair", "control", "candidate"]
"""What a worker is asked to do with a case: run it on both sides and judge it, or run one side and see if it lives."""

WHERE, WIDTH = "where", 64
"""The file in a worker's folder that says whose code runs and in which stage, and how many bytes that takes."""

DEVICE_LOST = 77
"""The exit status of a worker whose device works no more."""

LARGEST_FILE = 1 << 28
"""How many bytes a file may grow to that a worker writes: what a subject prints without end must not fill the disk."""

MEMORY_SHARE = 0.8
"""The part of this machine's memory that a worker on the CPU may take, so that asking for more is an error in it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker needs: the two sources, the engine's name, a folder of its own, and variables of its environment.

    ``folder`` takes what is printed, and the stack of a process that dies by a signal.
    """

    control: Source
    candidate: Source
    engine: str
    folder: Path
    variables: Mapping[str, str]


class _Turn:
    """Notes whose code runs, and in which stage; after each side's it sees that the device still works.

    The note is a file, which outlives the process and wakes nobody.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._note = os.open(folder / WHERE, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._side = "harness"
        self.on_gpu = False

    def __call__(self, side: str) -> None:
        if self.on_gpu and side != self._side != "harness":
            self._check_device()
        self._side = side
        self.step("" if side == "harness" else "load")

    def step(self, stage: str) -> None:
        """Note that a stage of the side begins whose code runs."""
        with contextlib.suppress(OSError):  # a subject may have closed it: then the last note stays
            os.pwrite(self._note, f"{self._side} {stage}".ljust(WIDTH)[:WIDTH].encode(), 0)

    def _check_device(self) -> None:
        """End the process where the device does: nothing that runs here afterwards would be the next one's doing."""
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            (self._folder / "stderr").write_text(str(error).partition("\n")[0])
            os._exit(DEVICE_LOST)


class Wire:
    """The worker's end of the pipe; only the process that opened it may speak, not one that a subject forked."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._owner = os.getpid()

    def say(self, what: str, **fields: Any) -> None:
        """Send one message; a forked copy of the process ends here."""
        if os.getpid() != self._owner:
            os._exit(0)
        self._connection.send_bytes(json.dumps({"is": what} | fields).encode())

    def receive(self) -> Any:
        """Return the next command."""
        return self._connection.recv()


def main(connection: Connection, setup: Setup) -> None:
    """Load the subjects, then run what is asked for until the other end closes the pipe."""
    _prepare(setup)
    wire = Wire(connection)
    from harness.observe import printed, session

    printed.keep_in(setup.folder)
    turn = _Turn(setup.folder)
    session.on_step = turn.step
    try:
        pair = _load(setup, turn)
    except Exception as error:
        wire.say("unloaded", kind=type(error).__name__, message=str(error))
        return
    turn("harness")
    engine = pair.engine
    wire.say("loaded", name=engine.name, dtypes=list(engine.dtypes), environment=engine.environment())
    while True:
        try:
            task, serial, fields = wire.receive()
        except (EOFError, OSError):
            os._exit(0)  # no thread that a subject left may keep the process
        result = _run(pair, task, Case.from_dict(fields))
        turn("harness")
        wire.say("done", serial=serial, left=_left_behind(), **result)


def _run(pair: Pair, task: Task, case: Case) -> dict[str, Any]:
    if task == "pair":
        return {"event": pair.run(case).event()}
    pair.run_side(case, task)
    return {"event": None}


def _load(setup: Setup, turn: _Turn) -> Pair:
    from harness.engines.api import get_engine
    from harness.execute.pair import Pair

    engine = get_engine(setup.engine)
    turn.on_gpu = engine.device.type == "cuda"
    if engine.device.type == "cpu":
        import torch

        torch.set_num_threads(1)  # the tensors are tiny: threads cost more than they bring, and order no sums anew
        _limit_memory()
    return Pair(setup.control, setup.candidate, engine, turn)


def _prepare(setup: Setup) -> None:
    """Make the process die with its parent, print nowhere, and leave its stack where the parent finds it."""
    os.environ.update(setup.variables)
    os.setsid()  # so that it can be killed with all that a subject starts, and a terminal's interrupt passes it by
    _thread.start_new_thread(_die_with_the_controller, ())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides what an interrupt means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing more raises OSError instead
    setup.folder.mkdir(parents=True, exist_ok=True)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    stacks = os.open(setup.folder / "stack", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    faulthandler.enable(stacks, all_threads=False)


def _die_with_the_controller() -> None:
    """Wait for the process that judges to end, however it does; whatever runs here then is of no use."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.killpg(os.getpid(), signal.SIGKILL)


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        resource.setrlimit(resource.RLIMIT_DATA, (int(machine * MEMORY_SHARE),) * 2)


def _left_behind() -> list[str]:
    """Return what a case left running in this process, which nobody can end but with the process."""
    return sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
