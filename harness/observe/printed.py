"""What a subject prints and warns of, by whatever way, kept from the terminal and told as text of a bounded length."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 4000
"""How many bytes of what was printed are told; of the rest its length and hash."""

STREAMS = ("stdout", "stderr")


@dataclass(slots=True)
class Printed:
    """What was printed inside a block, by stream, once it has ended; and each warning, as ``Category: message``."""

    text: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Sink:
    """A file that takes what goes to one stream, both through Python's object and through the file descriptor."""

    descriptor: int
    stream: io.TextIOWrapper
    target: int
    _terminal: int | None = None

    def take(self) -> None:
        with contextlib.suppress(OSError):  # whoever closed the descriptor prints nothing
            self._terminal = os.dup(self.target)
        os.dup2(self.descriptor, self.target)

    def give_back(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()
        if self._terminal is None:
            os.close(self.target)
            return
        os.dup2(self._terminal, self.target)
        os.close(self._terminal)
        self._terminal = None

    def read(self) -> str:
        size = os.lseek(self.descriptor, 0, os.SEEK_END)
        if not size:
            return ""
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        text = os.read(self.descriptor, LIMIT).decode(errors="backslashreplace")
        rest, digest = size - LIMIT, hashlib.sha256()
        while block := os.read(self.descriptor, 1 << 20):
            digest.update(block)
        os.ftruncate(self.descriptor, 0)
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        text = re.sub(r"0x[0-9a-fA-F]+", "0x…", text)  # an address differs from run to run
        return text if rest <= 0 else f"{text}… ({rest} more bytes, sha256 {digest.hexdigest()[:12]})"


_sinks: dict[str, _Sink] = {}


def keep_in(folder: Path | None = None) -> None:
    """Have what is printed kept in the files ``stdout`` and ``stderr`` of a folder while a block runs.

    Whoever finds this process dead can read there what the block printed last. Without a folder nobody can.
    """
    for sink in _sinks.values():
        with contextlib.suppress(OSError):
            os.close(sink.descriptor)
    for number, name in enumerate(STREAMS, start=1):
        if folder is not None:
            descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        stream = io.TextIOWrapper(
            io.FileIO(descriptor, "w", closefd=False), "utf-8", errors="backslashreplace", write_through=True
        )
        _sinks[name] = _Sink(descriptor, stream, number)


@contextmanager
def captured() -> Iterator[Printed]:
    """Keep what the block prints and warns of from the terminal, and tell it when the block has ended."""
    if not _sinks:
        keep_in()
    found = Printed()
    before = sys.stdout, sys.stderr
    for own in before:
        _flush(own)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")  # else a warning shows the first time only, to whichever side came first
        for sink in _sinks.values():
            sink.take()
        sys.stdout, sys.stderr = (_sinks[name].stream for name in STREAMS)
        try:
            yield found
        finally:
            changed = sys.stdout, sys.stderr
            for own in changed:
                _flush(own)
            sys.stdout, sys.stderr = before
            for sink in _sinks.values():
                sink.give_back()
            found.text = {name: text for name, sink in _sinks.items() if (text := sink.read())}
    found.warnings = list(dict.fromkeys(f"{item.category.__name__}: {item.message}"[:LIMIT] for item in warned or ()))


def _flush(stream: object) -> None:
    with contextlib.suppress(Exception):  # a subject may have closed it or put anything in its place
        stream.flush()  # type: ignore[attr-defined]
