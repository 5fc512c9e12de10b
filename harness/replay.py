"""Show a stored case again: find it by file or id, run it, or write it as a script that needs only torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.case import Case, CaseError
from harness.execute.journal import FILE_NAME, JournalError, read_journal
from harness.judge import FINDINGS

RUNS = Path("reports")


class ReplayError(ValueError):
    """A case that cannot be found or read; the message says what was looked for and what to do."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A case, and what it was run on where that is known: control, candidate and engine as their specs.

    ``failed`` is whether control and candidate were seen to differ on it.
    """

    case: Case
    control: str | None = None
    candidate: str | None = None
    engine: str | None = None
    failed: bool = False


def find(what: str, run: Path | None = None) -> Stored:
    """Return the case that a file name or an id names.

    A file holds a case, or a stored difference with a case in it. An id is looked up in the journal of ``run``, or of
    the newest run under ``reports/`` that has it. Raises ReplayError and CaseError.
    """
    path = Path(what)
    if path.is_file():
        return _from_file(path)
    if path.suffix == ".json" or "/" in what:
        raise ReplayError(f"{what} does not exist; give a case's JSON file, or an id with --run DIR")
    if run is not None:
        return _from_journals(what, [run])
    runs = sorted((entry.parent for entry in RUNS.glob(f"*/{FILE_NAME}")), key=_age) if RUNS.is_dir() else []
    return _from_journals(what, runs)


def _age(folder: Path) -> float:
    return -(folder / FILE_NAME).stat().st_mtime


def _from_file(path: Path) -> Stored:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ReplayError(f"{path} is no case: {error}") from error
    try:
        if isinstance(data, Mapping) and "case" in data:
            specs = {name: data.get(name) for name in ("control", "candidate", "engine")}
            wrong = [name for name, spec in specs.items() if not isinstance(spec, str | None)]
            if wrong:
                raise ReplayError(f"{path}: {wrong[0]}={specs[wrong[0]]!r} is no spec; it takes a string")
            return Stored(Case.from_dict(data["case"]), **specs, failed="kind" in data)
        return Stored(Case.from_dict(data))
    except CaseError as error:
        raise ReplayError(f"{path}: {error}") from error


def _from_journals(case_id: str, runs: Sequence[Path]) -> Stored:
    for folder in runs:
        try:
            events = read_journal(folder)
        except JournalError as error:
            if len(runs) == 1:
                raise ReplayError(str(error)) from error
            continue
        for event in events:
            if event["event"] in ("case", "smallest") and event["case_id"] == case_id:
                start = events[0]
                return Stored(
                    Case.from_dict(event["case"]),
                    start["control"]["spec"],
                    start["candidate"]["spec"],
                    start["engine"],
                    failed=event["event"] == "smallest" or event.get("outcome") in FINDINGS,
                )
    where = f"{runs[0]}" if len(runs) == 1 else f"the {len(runs)} runs under {RUNS}/"
    raise ReplayError(f"no case {case_id!r} in {where}; give a case's JSON file, or the run's folder with --run DIR")


def script(case: Case, control: Mapping[str, str], candidate: Mapping[str, str], engine: str) -> str:
    """Return a Python script that runs the case again with torch, the two sources and nothing else.

    ``control`` and ``candidate`` give ``spec``, ``path`` (a file, or ``WHEEL!MEMBER``), ``sha256`` and ``name``. The
    parts of this package that the case needs are in the script as text.
    """
    modules = {name: _module_text(name) for name in _needed("harness.execute.pair", f"harness.engines.{engine}")}
    parts = [
        f'"""Replay case {case.id}: {control["spec"]} against {candidate["spec"]} on the {engine} engine.\n\n'
        "Needs torch, and the two source files: by default where they were found, else named on the command line:\n"
        '    python replay.py [CONTROL] [CANDIDATE]\n"""',
        "import importlib.abc, importlib.util, json, sys, zipfile",
        f"CASE = json.loads({case.to_json()!r})",
        f"SUBJECTS = {json.dumps([dict(control), dict(candidate)], indent=1)}",
        f"ENGINE = {engine!r}",
        _RUN,
        "# What follows is the text of the modules that run and compare the case.\nMODULES = {\n"
        + "\n".join(f"{name!r}: {text!r}," for name, text in modules.items())
        + "\n}",
        "if __name__ == '__main__':\n    sys.exit(main(sys.argv[1:]))",
    ]
    return "\n\n".join(parts) + "\n"


_RUN = '''
class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import the modules from MODULES below."""

    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            package = any(other.startswith(name + ".") for other in MODULES)
            return importlib.util.spec_from_loader(name, self, is_package=package)

    def exec_module(self, module):
        exec(compile(MODULES[module.__name__], module.__name__, "exec"), module.__dict__)


def read(where):
    wheel, _, member = where.partition("!")
    if member:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(member).decode()
    with open(wheel, "rb") as file:
        return file.read().decode()


def main(arguments):
    sys.meta_path.insert(0, Finder())
    from harness.case import Case
    from harness.engines.api import get_engine
    from harness.execute.pair import Pair
    from harness.judge import exit_code
    from harness.subjects.source import Source

    sources = []
    for index, subject in enumerate(SUBJECTS):
        where = arguments[index] if index < len(arguments) else subject["path"]
        source = Source(subject["spec"], where, read(where), subject["name"])
        if source.sha256 != subject["sha256"]:
            print(f"note: {where} is not the text that was run (sha256 {source.sha256}, then {subject['sha256']})")
        sources.append(source)
    result = Pair(*sources, get_engine(ENGINE)).run(Case.from_dict(CASE))
    alike = "both raised alike, " if result.both_raised and result.outcome == "match" else ""
    print(f"{result.outcome}: {alike}{result.reason or ''}")
    for difference in result.differences:
        print(f"  {difference.path} [{difference.kind}] {difference.message}")
        print(f"    control:   {json.dumps(difference.control)}")
        print(f"    candidate: {json.dumps(difference.candidate)}")
    return exit_code(result.outcome, result.both_raised)
'''


def _needed(*roots: str) -> list[str]:
    """Return the names of this package's modules that the roots import, packages first, by their import statements."""
    import ast

    found: dict[str, None] = {}
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name in found or not name.startswith("harness") or _module_path(name) is None:
            continue
        if "." in name:
            pending.append(name.rpartition(".")[0])
        found[name] = None
        for node in ast.walk(ast.parse(_module_text(name))):
            if isinstance(node, ast.Import):
                pending += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                pending += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return sorted(found)


def _module_path(name: str) -> Path | None:
    base = Path(__file__).parent.parent.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _module_text(name: str) -> str:
    path = _module_path(name)
    assert path is not None
    return path.read_text()


def describe_subject(source: Any) -> dict[str, str]:
    """Return what ``script`` says of a source: spec, path, sha256 and the function's name."""
    from harness.subjects.wheels import cache_folder

    path = source.resolved
    if "!" in path:
        path = str((cache_folder() / path).resolve())
    return {"spec": source.spec, "path": path, "sha256": source.sha256, "name": source.name}
