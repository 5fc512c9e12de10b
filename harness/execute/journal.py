"""The journal of a run: one JSON line per event, written as it happens, from which every report can be made again.

Events: ``start`` first, then ``begun``, ``case`` and ``smallest``, then ``end``. A case is ``begun`` before its worker
has it, so that one which takes everything down with it is known. A journal without an ``end`` is
that of a run that was killed. JSON has no words for numbers that are not finite, so they are the strings ``inf``,
``-inf`` and ``nan``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from harness.judge import OUTCOMES

SCHEMA = 1
FILE_NAME = "journal.jsonl"

Event = dict[str, Any]

FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "start": {
        "schema": (int,),
        "harness": (str,),
        "control": (dict,),
        "candidate": (dict,),
        "engine": (str,),
        "environment": (dict,),
        "seed": (int,),
        "asked": (dict,),
        "cases_asked": (int,),
        "started": (str,),
    },
    "begun": {"case_id": (str,), "case": (dict,)},
    "case": {
        "case_id": (str,),
        "case": (dict,),
        "outcome": (str,),
        "both_raised": (bool,),
        "reason": (str, type(None)),
        "lanes": (list,),
        "differences": (list,),
        "noise": (list,),
        "notes": (list,),
        "seconds": (int, float, str),
    },
    "smallest": {
        "path": (str,),
        "kind": (str,),
        "from_case_id": (str,),
        "case_id": (str,),
        "case": (dict,),
        "file": (str,),
        "differences": (list,),
    },
    "end": {"seconds": (int, float, str), "harness_error": (str, type(None))},
}
"""What each event must hold, and as what."""

OPTIONAL: dict[str, dict[str, tuple[type, ...]]] = {
    "start": {"dtypes": (list, type(None))},
    "case": {"origin": (str, type(None))},
    "end": {"stopped": (str, type(None))},
}
"""What an event may hold besides; a journal of an earlier version lacks it, and it is read as null.

The origin of a case is ``stored NAME``, ``covering`` or ``explored``; the dtypes are those of the engine; ``stopped``
is why a run began no more cases before it had all.
"""

SUBJECT_FIELDS = ("spec", "resolved", "sha256")
DIFFERENCE_FIELDS = ("path", "kind", "control", "candidate", "message", "distance")


class JournalError(RuntimeError):
    """A journal that cannot be written or read; the message names the file and says what to do."""


class Journal:
    """Write the events of one run, each as one line that is on its way to disk before ``write`` returns.

    ``place`` is the run's folder, which is made where it is missing, or the file itself. A journal that is already
    there is never mixed with a new one: it raises JournalError, or is replaced where ``replace`` is true. ``kept`` are
    the first events of one that goes on after them, as ``read_journal`` gave them: what follows them is cut off.
    """

    def __init__(self, place: str | Path, *, replace: bool = False, kept: Sequence[Event] = ()) -> None:
        self.path = journal_path(place)
        self.events = 0
        self._size = 0
        self._ended = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "r+b" if kept else "wb" if replace else "xb", buffering=0)  # noqa: SIM115
            if kept:
                self.events = len(kept)
                self._size = sum(len(line) for line in self.path.read_bytes().splitlines(keepends=True)[: len(kept)])
                self._file.truncate(self._size)
                self._file.seek(self._size)
        except FileExistsError as error:
            if not self.path.exists():
                self._cannot_write(error, "a file stands where its folder should be; choose another folder")
            self._cannot_write(error, "it holds another run; choose another folder or remove that one")
        except OSError as error:
            self._cannot_write(error, "choose a folder that can be written to")

    def write(self, event: Mapping[str, Any]) -> None:
        """Append one event.

        Raises JournalError for an event that ``read_journal`` would refuse, and where the disk refuses it: what was
        written of the line is then taken back, so that the journal stays whole.
        """
        plain = _plain(event, "event")
        problem = _problem(plain, self.events, self._ended)
        if problem is not None:
            raise JournalError(f"this event does not belong in the journal {self.path}: {problem}")
        line = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError, ValueError):
                self._file.truncate(self._size)
                self._file.seek(self._size)
            self._cannot_write(error, f"its {self.events} events so far are kept; free the disk and run again")
        self._size += len(line)
        self.events += 1
        self._ended = plain["event"] == "end"

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        try:
            self._file.close()
        except OSError as error:
            self._cannot_write(error, "free the disk and run again")

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cannot_write(self, error: Exception, advice: str) -> NoReturn:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise JournalError(f"cannot write the journal {self.path}: {why}; {advice}") from error


def journal_path(place: str | Path) -> Path:
    """Return the journal's file, given that file or the run's folder; a name that ends in .jsonl is a file."""
    path = Path(place)
    return path if path.suffix == ".jsonl" and not path.is_dir() else path / FILE_NAME


def read_journal(place: str | Path) -> list[Event]:
    """Return the events of a journal, given its file or the run's folder.

    A last line that was torn when the run was killed is left out; the journal then has no ``end``. Raises
    JournalError for a missing file, a bad line elsewhere, another schema and events out of order.
    """
    path = journal_path(place) if not Path(place).is_file() else Path(place)
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise JournalError(
            f"there is no journal {path}; give the folder that `harness run --out` wrote, or its {FILE_NAME}"
        ) from error
    except OSError as error:
        raise JournalError(f"cannot read the journal {path}: {error.strerror}; check its rights") from error
    lines = text.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    events: list[Event] = []
    for index, line in enumerate(lines):
        try:
            event = _parse(line)
        except ValueError as error:
            ended = bool(events) and events[-1]["event"] == "end"
            if index == len(lines) - 1 and events and not ended:
                break  # the run was killed while it wrote this line
            raise JournalError(_bad(path, index, f"not JSON ({error})")) from error
        if isinstance(event, dict) and event.get("event") == "start" and event.get("schema") != SCHEMA:
            raise JournalError(
                f"the journal {path} has schema={event.get('schema')!r} and this version reads schema={SCHEMA}; "
                f"report it with the harness that wrote it ({event.get('harness', 'version unknown')!r}), or run again"
            )
        problem = _problem(event, index, bool(events) and events[-1]["event"] == "end")
        if problem is not None:
            raise JournalError(_bad(path, index, problem))
        events.append(event | {name: event.get(name) for name in OPTIONAL.get(event["event"], ())})
    if not events:
        raise JournalError(f"the journal {path} is empty: the run was killed before it started; run again")
    return events


def _bad(path: Path, index: int, problem: str) -> str:
    return (
        f"line {index + 1} of the journal {path} is bad: {problem}; the file was changed after it was written, so "
        "run again or restore it"
    )


def _parse(line: bytes) -> Any:
    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is no JSON number")

    try:
        return json.loads(line.decode("utf-8"), parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _problem(event: Any, index: int, ended: bool) -> str | None:
    """Return what is wrong with an event that stands at a place in the journal, or None."""
    if not isinstance(event, dict):
        return f"an event is a JSON object, not {type(event).__name__}"
    name = event.get("event")
    if not isinstance(name, str) or name not in FIELDS:
        return f"event={name!r} is not one of {', '.join(FIELDS)}"
    if (index == 0) != (name == "start"):
        return f"event='start' comes first and once, and this is event={name!r} at place {index + 1}"
    if ended:
        return f"event={name!r} comes after the end"
    for field, types in (FIELDS[name] | OPTIONAL.get(name, {})).items():
        if field not in event and field in FIELDS[name]:
            return f"event={name!r} lacks {field!r}"
        if field not in event:
            continue
        value = event[field]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
            return f"event={name!r} has {field}={value!r:.80}; it takes {wanted}"
    if name == "start":
        return _start_problem(event)
    if name in ("begun", "case", "smallest"):
        return _case_problem(event)
    return _number_problem("seconds", event["seconds"])


def _start_problem(event: Event) -> str | None:
    if event["schema"] != SCHEMA:
        return f"schema={event['schema']!r}; this version writes schema={SCHEMA}"
    for side in ("control", "candidate"):
        for field in SUBJECT_FIELDS:
            if not isinstance(event[side].get(field), str):
                return f"{side} has {field}={event[side].get(field)!r}; it takes a str"
    asked = event["asked"]
    for kind, names in (("layouts", asked.get("layouts")), ("lanes", asked.get("lanes", []))):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return f"asked has {kind}={names!r:.80}; it takes a list of names"
    strength, least = asked.get("strength", 0), asked.get("min_coverage")
    if type(strength) is not int or strength not in (0, 2, 3):
        return f"asked has strength={strength!r:.80}; it takes 0, 2 or 3"
    if least is not None and (isinstance(least, bool) or not isinstance(least, (int, float))):
        return f"asked has min_coverage={least!r:.80}; it takes a number or null"
    return None


def _case_problem(event: Event) -> str | None:
    if not isinstance(event["case"].get("qkv_layout"), str):
        return f"the case has qkv_layout={event['case'].get('qkv_layout')!r}; it takes a str"
    if event["event"] == "begun":
        return None
    for difference in event["differences"]:
        for field in DIFFERENCE_FIELDS:
            if not isinstance(difference, dict) or field not in difference:
                return f"a difference lacks {field!r}"
    if event["event"] == "smallest":
        return None
    if event["outcome"] not in OUTCOMES:
        return f"outcome={event['outcome']!r} is not one of {', '.join(OUTCOMES)}"
    if not all(isinstance(item, str) for field in ("lanes", "notes") for item in event[field]):
        return "lanes and notes take lists of str"
    for noise in event["noise"]:
        if not isinstance(noise, dict) or "path" not in noise or "spread" not in noise:
            return "noise takes a list of objects with 'path' and 'spread'"
        problem = _number_problem("spread", noise["spread"])
        if problem is not None:
            return problem
    return _number_problem("seconds", event["seconds"])


def _number_problem(field: str, value: Any) -> str | None:
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in ("inf", "-inf", "nan")):
        return f"{field}={value!r:.80} is no number"
    return None


def _plain(value: Any, place: str) -> Any:
    """Return a value as JSON holds it, numbers that are not finite as strings."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else ("nan" if math.isnan(value) else f"{float(value)}")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{place}/{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{place}/{index}") for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise JournalError(f"{place} is a {type(value).__name__}, which JSON does not hold; describe it in plain values")
