"""Take out of a source file just the definitions that its autograd function reaches.

Imports are dropped: a name that the file imports is bound to the seam if it is one of the seam's, imported for real if
it comes from the standard library or torch, and reported as missing otherwise. So the same file runs on any engine.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

REAL_PACKAGES = frozenset(sys.stdlib_module_names) | {"torch", "packaging", "numpy", "typing_extensions"}

# Where TransformerEngine 2.20 keeps the seam's names; used to recognise one that a file imports under another name.
SEAM_MODULES = {"dpa_utils": "transformer_engine.pytorch.attention.dot_product_attention.utils"}


class SliceError(ValueError):
    """A source that cannot be taken apart; the message names the file and what to do."""


@dataclass(frozen=True, slots=True)
class Import:
    """One name bound by an import: ``import module as local`` or ``from module import original as local``."""

    local: str
    module: str
    original: str | None
    level: int = 0

    @property
    def real(self) -> bool:
        """Whether the import can be run as it is on any engine."""
        return self.level == 0 and self.module.split(".")[0] in REAL_PACKAGES

    def __str__(self) -> str:
        return f"{'.' * self.level}{self.module}{'.' + self.original if self.original else ''}"


@dataclass(frozen=True, slots=True)
class Slice:
    """What to run of a source: a module of the reached definitions, and what its free names are bound to.

    ``seam`` maps a local name to the seam's name; ``real`` are imports to run; ``foreign`` are imports that belong to
    the source's own package and are not part of the seam.
    """

    tree: ast.Module
    seam: dict[str, str]
    real: tuple[Import, ...]
    foreign: tuple[Import, ...]
    reached: tuple[str, ...]


def slice_source(text: str, file: str, name: str, seam: Iterable[str], also: Iterable[str] = ()) -> Slice:
    """Return the slice of a source text that the top-level class ``name`` reaches.

    ``seam`` are the seam's names; ``also`` are definitions to take along where the file has them.
    Raises SliceError for text that does not parse, for a file without ``name``, and for a name that nothing binds.
    """
    try:
        tree = ast.parse(text, filename=file)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise SliceError(f"{file}{line}: not valid Python: {reason}") from error
    except RecursionError as error:
        raise SliceError(f"{file}: nested too deeply to be parsed") from error
    definitions, imports = _bindings(tree.body)
    if not any(isinstance(node, ast.ClassDef) for node in definitions.get(name, ())):
        classes = sorted(key for key, nodes in definitions.items() if any(isinstance(n, ast.ClassDef) for n in nodes))
        listing = f"it defines {', '.join(classes[:8])}" if classes else "it defines no class"
        raise SliceError(f"{file}: no class {name} at top level; {listing}. Name another one with package.module:Name")
    seam_names = frozenset(seam)
    reached: dict[int, ast.stmt] = {}
    names: list[str] = []
    bound: dict[str, str] = {}
    real: dict[str, Import] = {}
    foreign: dict[str, Import] = {}
    pending, done = [name, *(extra for extra in also if extra in definitions)], set[str]()
    while pending:
        wanted = pending.pop()
        if wanted in done:
            continue
        done.add(wanted)
        nodes = definitions.get(wanted, [])
        seam_name = _seam_name(wanted, imports.get(wanted), seam_names)
        own = any(isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes)
        if seam_name is not None and not own:
            bound[wanted] = seam_name
        elif nodes:
            names.append(wanted)
            for node in nodes:
                reached[id(node)] = node
                pending.extend(sorted(free_names(node)))
        elif wanted in imports:
            (real if imports[wanted].real else foreign)[wanted] = imports[wanted]
        elif not hasattr(builtins, wanted) and wanted not in ("__file__", "__name__", "__doc__"):
            raise SliceError(f"{file}: {name} reaches the name {wanted!r}, which nothing in the file binds")
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    body = future + [node for node in tree.body if id(node) in reached]
    nested = [node for node in reached.values() if not any(node is top for top in tree.body)]
    module = ast.Module(body=sorted(body + nested, key=lambda node: node.lineno), type_ignores=[])
    return Slice(module, bound, tuple(real.values()), tuple(foreign.values()), tuple(sorted(names)))


def _seam_name(local: str, imported: Import | None, seam: frozenset[str]) -> str | None:
    if imported is None:
        return local if local in seam else None
    if imported.original in seam:
        return imported.original
    for name, module in SEAM_MODULES.items():
        if str(imported) == module:
            return name
    return local if local in seam and not imported.real else None


def _bindings(body: Iterable[ast.stmt]) -> tuple[dict[str, list[ast.stmt]], dict[str, Import]]:
    """Return what the statements bind at module level, statements under ``if``, ``try`` and ``with`` included."""
    definitions: dict[str, list[ast.stmt]] = {}
    imports: dict[str, Import] = {}
    for node in _statements(body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.split(".")[0]
                imports[local] = Import(local, alias.name if alias.asname else local, None)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                local = alias.asname or alias.name
                imports[local] = Import(local, node.module or "", alias.name, node.level)
        else:
            for target in _targets(node):
                definitions.setdefault(target, []).append(node)
    return definitions, imports


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)
        else:
            yield node


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [name.id for target in targets for name in ast.walk(target)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]  # fmt: skip
    return []


def free_names(node: ast.AST) -> set[str]:
    """Return the names that a definition takes from the module around it, annotations and decorators included."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        arguments = node.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        parameters += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
        header: list[ast.AST | None] = [*arguments.defaults, *arguments.kw_defaults]
        header += [parameter.annotation for parameter in parameters]
        if isinstance(node, ast.Lambda):
            body: list[ast.AST] = [node.body]
        else:
            header += [*node.decorator_list, node.returns]
            body = list(node.body)
        inside = set().union(*(free_names(statement) for statement in body))
        local = {parameter.arg for parameter in parameters} | _stored(body)
        outside = set().union(*(free_names(part) for part in header if part is not None))
        return outside | (inside - local)
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    if isinstance(node, ast.ClassDef):
        own = _stored(node.body)  # visible to the class's own statements, not to its methods
        found = set[str]()
        for part in ast.iter_child_nodes(node):
            names = free_names(part)
            found |= names if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) else names - own
        return found
    found = set().union(*(free_names(child) for child in ast.iter_child_nodes(node)))
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        found -= {name.id for generator in node.generators for name in ast.walk(generator.target)
                  if isinstance(name, ast.Name)}  # fmt: skip
    return found


def _stored(body: Iterable[ast.AST]) -> set[str]:
    """Return the names that statements of one scope bind, nested scopes left out, ``global`` ones left out."""
    stored: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            stored.add(node.name)
        elif isinstance(node, ast.Global):
            stored -= set(node.names)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                stored.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            stored |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            stored |= ({node.name} if node.name else set()) | _stored(ast.iter_child_nodes(node))
        elif not isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            stored |= _stored(ast.iter_child_nodes(node))
    return stored
