"""Printing that cannot go wrong: a closed pipe is quiet, and a sign that the encoding lacks has one in its place."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from typing import Any

from rich.console import Console

SIGNS = {"✓": "ok", "✕": "x", "≠": "!=", "≈": "~", "≐": "=", "‖": "||", "Σ": "n", "–": "-", "—": "-", "…": "...",
         "×": "x", "·": ".", "≥": ">=", "≤": "<=", "─": "-", "│": "|", "━": "-", "╸": "-", "╺": "-"}  # fmt: skip
ERRORS = "harness-signs"


def _in_its_place(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(SIGNS.get(char) or char.encode("ascii", "backslashreplace").decode() for char in text), error.end


codecs.register_error(ERRORS, _in_its_place)


def fit_streams() -> None:
    """Have the standard streams write every text, whatever their encoding."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors=ERRORS)  # type: ignore[union-attr]


class QuietConsole(Console):
    """A console whose reader may leave: the rest is not printed, and the command goes on to its own exit code."""

    def on_broken_pipe(self) -> None:
        """Send the rest nowhere."""
        self.quiet = True
        deafen(self.file)


def deafen(stream: Any) -> None:
    """Send what a stream of this process still holds, and all that follows, nowhere."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console for one of the standard streams, which colours no numbers."""
    return QuietConsole(stderr=stderr, soft_wrap=soft_wrap, highlight=False)


def echo(text: str) -> None:
    """Print text as it is."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        deafen(sys.stdout)
