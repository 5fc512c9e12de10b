"""Imports point one way, what must start at once starts without torch, and subjects know nothing of the harness."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness
import legacy_impl
import refactored_impl

ROOT = Path(harness.__file__).parent
HEAVY = ("torch", "hypothesis", "numpy")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(path: Path, *, types_too: bool = True) -> Iterator[str]:
    """Yield the modules that a file imports anywhere in it; imports for type checkers alone may be left out."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FILES else str(node.module)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types_too:
            pending += node.orelse
        else:
            pending += ast.iter_child_nodes(node)


def part(module: str) -> str:
    """Return the part of the harness that a module belongs to: ``harness.report.html`` is of ``report``."""
    return module.split(".")[1] if "." in module else module


# part: the parts that it may import, types left out; a part may import itself
MAY_IMPORT: dict[str, set[str]] = {
    "layouts": set(),
    "constraints": {"layouts"},
    "case": {"layouts"},
    "space": {"case", "constraints", "layouts"},
    "lanes": {"case", "layouts", "space"},
    "covering": {"space"},
    "ledger": {"case", "covering", "judge", "lanes", "space"},
    "quantized": set(),
    "inputs": {"case", "quantized"},
    "engines": {"case", "constraints", "inputs", "layouts"},
    "subjects": {"case", "engines"},
    "terminal": set(),
    "strategies": {"case", "covering", "lanes", "space"},
    "regressions": {"case"},
    "observe": {"case", "inputs", "engines", "quantized", "subjects"},
    "compare": {"observe"},
    "judge": {"compare", "observe"},
    "execute": {"case", "inputs", "engines", "subjects", "observe", "compare", "covering", "judge", "lanes", "layouts",
                "ledger", "space", "strategies"},
    "report": {"case", "judge", "lanes", "layouts", "ledger", "execute"},
    "doctor": {"case", "engines", "lanes", "layouts", "space"},
    "replay": {"case", "execute", "judge", "subjects"},
    "run": {"harness", "execute", "judge", "regressions", "report", "subjects"},
    "cli": {"harness", "case", "doctor", "engines", "execute", "judge", "lanes", "layouts", "ledger", "regressions",
            "replay", "report", "run", "space", "subjects", "terminal"},
    "harness": set(),
}  # fmt: skip

# module: the only modules of another part that it may import, where the part's row would allow more
NARROW: dict[str, set[str]] = {
    "harness.compare": {"harness.observe.values"},
    "harness.judge": {"harness.compare", "harness.observe.values"},
    "harness.execute.journal": {"harness.judge"},
    "harness.observe.values": set(),
}


@pytest.mark.parametrize("module", FILES)
def test_a_module_imports_only_what_lies_below_it(module: str) -> None:
    own = part(module)
    found = {name for name in imported(FILES[module], types_too=False) if name.split(".")[0] == "harness"}
    above = {name for name in found if part(name) != own and part(name) not in MAY_IMPORT[own]}
    assert not above
    if module in NARROW:
        assert {name for name in found if part(name) != own} <= NARROW[module]


def test_the_table_of_layers_is_complete_and_has_no_cycle() -> None:
    assert set(MAY_IMPORT) == {part(module) for module in FILES}
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        ready = {name for name, below in MAY_IMPORT.items() if name not in done and below <= done}
        assert ready, f"a cycle among {set(MAY_IMPORT) - done}"
        done |= ready


@pytest.mark.parametrize(
    "module", ["harness.case", "harness.compare", "harness.judge", "harness.report", "harness.cli", "harness.replay",
               "harness.doctor", "harness.lanes", "harness.layouts", "harness.subjects.source", "harness.space",
               "harness.constraints", "harness.regressions"]
)  # fmt: skip
def test_what_must_start_at_once_is_imported_without_torch(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & sys.modules.keys()))".replace(repr(HEAVY), f"set({HEAVY})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("module", ["harness.covering", "harness.ledger", "harness.report.coverage"])
def test_coverage_is_counted_without_torch_and_without_hypothesis(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'hypothesis'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_only_the_strategies_import_hypothesis() -> None:
    users = {module for module, path in FILES.items() if any(n.split(".")[0] == "hypothesis" for n in imported(path))}
    assert users == {"harness.strategies"}


@pytest.mark.parametrize("package", [legacy_impl, refactored_impl])
def test_an_implementation_imports_nothing_of_the_harness(package: object) -> None:
    files = sorted(Path(str(package.__file__)).parent.rglob("*.py"))  # type: ignore[attr-defined]
    assert len(files) >= 2
    for path in files:
        roots = {name.split(".")[0] for name in imported(path)}
        allowed = {"torch", "transformer_engine", "flash_attn_2_cuda", path.parent.name}
        assert roots <= sys.stdlib_module_names | allowed
