"""Take out of a source file just the definitions that its autograd function reaches.

Imports are dropped: a name that the file imports is bound to the seam if it is one of the seam's, imported for real if
it comes from the standard library or torch, and reported as missing otherwise. So the same file runs on any engine.
"""

from __future__ import annotations

import ast
import builtins
import copy
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

REAL_PACKAGES = frozenset(sys.stdlib_module_names) | {"torch", "packaging", "numpy", "typing_extensions"}

# Where TransformerEngine 2.20 keeps the seam's names; used to recognise one that a file imports under another name.
SEAM_MODULES = {"dpa_utils": "transformer_engine.pytorch.attention.dot_product_attention.utils"}


MODULE_NAMES = frozenset(
    {"__file__", "__name__", "__doc__", "__spec__", "__package__", "__loader__", "__builtins__", "__class__",
     "__module__", "__qualname__", "__annotations__"}
)  # fmt: skip
"""Names that Python binds in a module, a class body or a method by itself."""

Block = ast.If | ast.Try | ast.TryStar | ast.With


class SliceError(ValueError):
    """A source that cannot be taken apart; the message names the file and what to do."""


@dataclass(frozen=True, slots=True)
class Import:
    """One name bound by an import: ``import module as local`` or ``from module import original as local``.

    ``submodules`` are those that ``import module.sub`` also makes available under ``local``.
    """

    local: str
    module: str
    original: str | None
    level: int = 0
    submodules: tuple[str, ...] = ()

    @property
    def real(self) -> bool:
        """Whether the import can be run as it is on any engine."""
        return self.level == 0 and self.module.split(".")[0] in REAL_PACKAGES

    def __str__(self) -> str:
        return "." * self.level + ".".join(part for part in (self.module, self.original) if part)


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
        return _slice(text, file, name, frozenset(seam), also)
    except RecursionError as error:
        raise SliceError(f"{file}: nested too deeply to be taken apart") from error


def _slice(text: str, file: str, name: str, seam_names: frozenset[str], also: Iterable[str]) -> Slice:
    try:
        tree = ast.parse(text, filename=file)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise SliceError(f"{file}{line}: not valid Python: {reason}") from error
    ending = _ending(tree.body)
    if ending is not None:
        raise SliceError(f"{file}, line {ending.lineno}: the module raises when it is imported")
    definitions, imports, blocks = _bindings(tree.body)
    if not any(isinstance(node, ast.ClassDef) for node in definitions.get(name, ())):
        classes = sorted(key for key, nodes in definitions.items() if any(isinstance(n, ast.ClassDef) for n in nodes))
        listing = f"it defines {', '.join(classes[:8])}" if classes else "it defines no class"
        raise SliceError(f"{file}: no class {name} at top level; {listing}. Name another one with package.module:Name")
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
        own = any(
            isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and not (wanted in imports and id(node) in blocks)  # a stand-in for where the import fails
            for node in nodes
        )
        if seam_name is not None and not own:
            bound[wanted] = seam_name
        elif nodes:
            names.append(wanted)
            for node in nodes:
                reached[id(node)] = node
                own_names = _stored([node]) if isinstance(node, (ast.For, ast.While)) else set[str]()  # loop variables
                pending.extend(sorted(free_names(node) - own_names))
                for block in blocks.get(id(node), ()):
                    pending.extend(sorted(_conditions(block)))
        elif wanted in imports:
            (real if imports[wanted].real else foreign)[wanted] = imports[wanted]
        elif not hasattr(builtins, wanted) and wanted not in MODULE_NAMES:
            raise SliceError(f"{file}: {name} reaches the name {wanted!r}, which nothing in the file binds")
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    taken = {local for local, imported in imports.items() if _seam_name(local, imported, seam_names) is not None}
    module = ast.Module(body=[*future, *_keep(tree.body, reached, taken)], type_ignores=[])
    return Slice(module, bound, tuple(real.values()), tuple(foreign.values()), tuple(sorted(names)))


EXITS = frozenset({"exit", "quit", "sys.exit", "os._exit", "os.abort"})


def _ending(body: Iterable[ast.stmt]) -> ast.stmt | None:
    """Return a statement that is sure to end the import of a module with this body; None where none is.

    Only what its text alone settles counts: ``raise`` and calls that exit, also below a test of a constant.
    """
    for node in body:
        found: ast.stmt | None = None
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Assert) and _constant(node.test) is False):
            found = node
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found = node if ast.unparse(node.value.func) in EXITS else None
        elif isinstance(node, (ast.If, ast.While)) and (settled := _constant(node.test)) is not None:
            found = _ending(node.body if settled else node.orelse)
        elif isinstance(node, ast.With):
            found = _ending(node.body)
        elif isinstance(node, ast.Try):
            found = (None if node.handlers else _ending(node.body)) or _ending(node.finalbody)
        elif isinstance(node, ast.If) and node.orelse:
            found = _ending(node.body) if _ending(node.orelse) else None
        if found is not None:
            return found
    return None


def _constant(test: ast.expr) -> bool | None:
    """Return whether a test of constants holds; None where more than its text decides."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _constant(test.operand)
        return None if inner is None else not inner
    return bool(test.value) if isinstance(test, ast.Constant) else None


def _seam_name(local: str, imported: Import | None, seam: frozenset[str]) -> str | None:
    if imported is None:
        return local if local in seam else None
    if imported.original in seam:
        return imported.original
    for name, module in SEAM_MODULES.items():
        if str(imported) == module:
            return name
    return local if local in seam and not imported.real else None


def _bindings(
    body: Iterable[ast.stmt],
) -> tuple[dict[str, list[ast.stmt]], dict[str, Import], dict[int, tuple[Block, ...]]]:
    """Return what the statements bind at module level, and the blocks that a statement stands in, by its id.

    Definitions of a name are all the statements that bind or change it, those under ``if``, ``try`` and ``with``
    included.
    """
    definitions: dict[str, list[ast.stmt]] = {}
    imports: dict[str, Import] = {}
    blocks: dict[int, tuple[Block, ...]] = {}
    for node, around in _statements(body):
        if around:
            blocks[id(node)] = around
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.split(".")[0]
                known = imports[local].submodules if local in imports and not alias.asname else ()
                inner = (alias.name,) if "." in alias.name and not alias.asname else ()
                imports[local] = Import(local, alias.name if alias.asname else local, None, 0, known + inner)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                local = alias.asname or alias.name
                imports[local] = Import(local, node.module or "", alias.name, node.level)
        else:
            for target in _targets(node):
                definitions.setdefault(target, []).append(node)
            for target in _changed(node):
                if target in definitions:
                    definitions[target].append(node)
    return definitions, imports, blocks


def _statements(
    body: Iterable[ast.stmt], around: tuple[Block, ...] = ()
) -> Iterator[tuple[ast.stmt, tuple[Block, ...]]]:
    for node in body:
        if isinstance(node, Block):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, []), (*around, node))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body, (*around, node))
        else:
            yield node, around


def _conditions(block: Block) -> set[str]:
    """Return the free names of what decides which statements of a block run."""
    if isinstance(block, ast.If):
        return free_names(block.test)
    if isinstance(block, ast.With):
        return set().union(*(free_names(item) for item in block.items))
    return set().union(*(free_names(handler.type) for handler in block.handlers if handler.type is not None))


def _keep(body: Iterable[ast.stmt], reached: Collection[int], taken: Collection[str]) -> list[ast.stmt]:
    """Return the reached statements, each inside the blocks that it stands in, so that conditions decide as they did.

    In such a block imports stay too, since whether they succeed may be what decides; those of the seam's names are
    taken to succeed.
    """
    kept: list[ast.stmt] = []
    for node in body:
        if id(node) in reached:
            kept.append(node)
        elif isinstance(node, Block) and any(id(inner) in reached for inner, _ in _statements([node])):
            block = copy.copy(node)
            for field in ("body", "orelse", "finalbody"):
                if getattr(node, field, None):
                    setattr(block, field, _branch(getattr(node, field), reached, taken))
            if isinstance(block, (ast.Try, ast.TryStar)):
                block.handlers = [copy.copy(handler) for handler in block.handlers]
                for handler in block.handlers:
                    handler.body = _branch(handler.body, reached, taken)
            kept.append(block)
    return kept


def _branch(body: list[ast.stmt], reached: Collection[int], taken: Collection[str]) -> list[ast.stmt]:
    kept: list[ast.stmt] = []
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bare = copy.copy(node)
            bare.names = [alias for alias in node.names if (alias.asname or alias.name.split(".")[0]) not in taken]
            if bare.names:
                kept.append(bare)
        else:
            kept += _keep([node], reached, taken)
    return kept or [ast.copy_location(ast.Pass(), body[0])]


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [name.id for target in targets for name in ast.walk(target)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]  # fmt: skip
    return []


def _changed(node: ast.stmt) -> list[str]:
    """Return the names whose objects a statement may change: ``name[0] = ...``, ``name.x = ...``, ``f(name)``.

    A bare call, a loop or a ``del`` may do anything to what it mentions, so it changes all of that.
    """
    if isinstance(node, (ast.Expr, ast.For, ast.While, ast.Delete)):
        return sorted(free_names(node) | _stored([node]))
    found: list[str] = []
    if not isinstance(node, (ast.Assign, ast.AugAssign)):
        return found
    for place in node.targets if isinstance(node, ast.Assign) else [node.target]:
        base = place
        while isinstance(base, (ast.Attribute, ast.Subscript)):
            base = base.value
        if base is not place and isinstance(base, ast.Name):
            found.append(base.id)
    return found


def free_names(node: ast.AST) -> set[str]:
    """Return the names that a definition takes from the module around it, annotations and decorators included."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return set().union(*_function_names(node))
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    if isinstance(node, ast.Global):
        return set(node.names)
    if isinstance(node, ast.ClassDef):
        found = set().union(*(free_names(part) for part in (*node.bases, *node.keywords, *node.decorator_list)))
        own = set[str]()  # visible to the class's own statements from there on, not to the bodies of its methods
        for part in node.body:
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                header, inside = _function_names(part)
                found |= (header - own) | inside
            else:
                found |= free_names(part) - own
            own |= _stored([part])
        return found
    found = set().union(*(free_names(child) for child in ast.iter_child_nodes(node)))
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        found -= {name.id for generator in node.generators for name in ast.walk(generator.target)
                  if isinstance(name, ast.Name)}  # fmt: skip
        found |= free_names(node.generators[0].iter)  # this one is evaluated outside
    return found


def _function_names(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> tuple[set[str], set[str]]:
    """Return the free names of what is evaluated where the function is defined, and those of its body."""
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
    return set().union(*(free_names(part) for part in header if part is not None)), inside - local


def _stored(body: Iterable[ast.AST]) -> set[str]:
    """Return the names that statements of one scope bind, nested scopes left out, ``global`` ones left out."""
    stored, elsewhere = set[str](), set[str]()
    pending = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            stored.add(node.name)
        elif isinstance(node, ast.Global):
            elsewhere |= set(node.names)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                stored.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            stored |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            stored |= {name.target.id for name in ast.walk(node) if isinstance(name, ast.NamedExpr)}
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
                stored.add(node.name)
            if isinstance(node, ast.MatchMapping) and node.rest:
                stored.add(node.rest)
            pending += ast.iter_child_nodes(node)
    return stored - elsewhere
