"""The stored cases: one file per public fault, read from ``cases/regressions``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.case import Case, CaseError, nearest

FOLDER = Path(__file__).parent.parent / "cases" / "regressions"
"""Beside the package, in a checkout and where a wheel is installed alike."""


class RegressionError(ValueError):
    """Stored cases that cannot be read; the message names the file, what is wrong there and what to do."""


@dataclass(frozen=True, slots=True)
class StoredCase:
    """A case that is kept because of a fault that somebody met.

    ``name`` is the file's name and the case's place in it, as in ``0006-dout-strides/1``; ``row`` the fault's number in
    the table of public faults, or None; ``reference`` where it was reported; ``fault`` what it was. ``refused`` is
    whether the case is kept to show that no kernel takes it.
    """

    name: str
    case: Case
    row: int | None
    reference: str
    fault: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class _Key:
    """What a key of a file holds: how its values are called, whether a value is one, whether it may be left out."""

    takes: str
    types: tuple[type, ...]
    optional: bool = False


KEYS: dict[str, _Key] = {
    "schema": _Key("the schema of the cases, a whole number", (int,)),
    "row": _Key("the fault's number in the table of public faults, or null", (int, type(None))),
    "reference": _Key("where the fault was reported", (str,)),
    "fault": _Key("what the fault is", (str,)),
    "kind": _Key("the kind of fault", (str,)),
    "seen_in": _Key("the observables that tell", (str,)),
    "refused": _Key("true where no kernel takes the cases", (bool,), optional=True),
    "cases": _Key("a list of cases", (list,)),
}
"""The keys of a file; every one that is not optional must be there and not be empty."""


def stored_cases(folder: Path | None = None) -> tuple[StoredCase, ...]:
    """Return the cases of every JSON file in a folder, by default this project's own, in the order of their names.

    Cases of an older schema are brought up to the present one. Raises RegressionError.
    """
    folder = FOLDER if folder is None else folder
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise RegressionError(f"{folder} holds no stored cases; give a folder of .json files")
    found: dict[str, StoredCase] = {}
    for path in paths:
        for stored in _read(path):
            same = found.setdefault(stored.case.id, stored)
            if same is not stored:
                raise RegressionError(
                    f"{path}: {stored.name} is the same case as {same.name} (id {stored.case.id}); leave one out"
                )
    return tuple(found.values())


def _read(path: Path) -> list[StoredCase]:
    try:
        data = json.loads(path.read_bytes(), object_pairs_hook=_object)
    except OSError as error:
        raise RegressionError(f"{path}: cannot be read: {error}; correct it or leave it out") from error
    except (ValueError, RecursionError) as error:
        raise RegressionError(f"{path}: not JSON: {error}; correct it or leave it out") from error
    if not isinstance(data, Mapping):
        raise RegressionError(f"{path}: holds {type(data).__name__}; a file is a JSON object with {', '.join(KEYS)}")
    for name in data:
        if name not in KEYS:
            raise RegressionError(
                f"{path}: unknown field {name[:80]!r}{nearest(name[:80], KEYS)}; it takes {', '.join(KEYS)}"
            )
    for name, key in KEYS.items():
        if name not in data:
            if key.optional:
                continue
            raise RegressionError(f"{path}: {name} is missing; give {key.takes}")
        if type(data[name]) not in key.types or data[name] in ("", []):
            raise RegressionError(f"{path}: {name}={data[name]!r:.80}: give {key.takes}")
    return [
        StoredCase(
            name=f"{path.stem}/{index}",
            case=_case(fields, data["schema"], f"{path}: case {index}"),
            row=data["row"],
            reference=data["reference"],
            fault=data["fault"],
            refused=data.get("refused", False),
        )
        for index, fields in enumerate(data["cases"], start=1)
    ]


def _case(fields: Any, schema: int, where: str) -> Case:
    """Read one case by the schema of its file; it may repeat that schema, as a case written out by itself does."""
    if isinstance(fields, Mapping):
        if fields.get("schema", schema) != schema:
            raise RegressionError(
                f"{where}: schema={fields['schema']!r:.80} in a file of schema={schema}; give all its cases the file's"
            )
        fields = {"schema": schema, **fields}
    try:
        return Case.from_dict(fields)
    except CaseError as error:
        raise RegressionError(f"{where}: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; ValueError for a key that is there twice, of which Python would drop one."""
    found = dict(pairs)
    for name, _ in pairs if len(found) < len(pairs) else ():
        if [key for key, _ in pairs].count(name) > 1:
            raise ValueError(f"field {name!r} is given twice")
    return found
