"""A slice holds what the function reaches, bound to what the file meant, and says clearly what it cannot bind."""

from __future__ import annotations

import ast
import textwrap
import types
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.subjects.slicer import Slice, SliceError, free_names, slice_source

SEAM = ("fused_attn_fwd", "fused_attn_bwd", "dpa_utils", "prepare_for_saving", "flash_attn_cuda_bwd")
UTILS = "transformer_engine.pytorch.attention.dot_product_attention.utils"
USES = "class FusedAttnFunc:\n    def forward(ctx):\n        return {}\n"


def sliced(text: str, also: Iterable[str] = ()) -> Slice:
    return slice_source(text, "mine.py", "FusedAttnFunc", SEAM, also)


def run(text: str, **bound: object) -> Any:
    """Return what ``FusedAttnFunc.forward`` returns; seam names stand for themselves in capitals."""
    part = sliced(text)
    assert part.foreign == ()
    module = types.ModuleType("sliced")
    module.__package__ = ""
    for local, name in part.seam.items():
        setattr(module, local, name.upper())
    for wanted in part.real:
        found = __import__(wanted.module, fromlist=["x"]) if wanted.original else __import__(wanted.module)
        setattr(module, wanted.local, getattr(found, wanted.original) if wanted.original else found)
    vars(module).update(bound)
    exec(compile(part.tree, "mine.py", "exec", dont_inherit=True), module.__dict__)
    return module.FusedAttnFunc.forward(None)


def user(expression: str) -> str:
    return USES.format(expression)


# ------------------------------------------------------------------ what is taken


def test_helpers_constants_and_decorated_classes_that_are_reached_are_taken_in_their_order() -> None:
    text = """
        from dataclasses import dataclass
        SCALE = 3
        def outer():
            return inner() * SCALE
        def inner():
            return Bag(7).value
        @dataclass(frozen=True)
        class Bag:
            value: int
        def unused():
            return nothing_binds_this
        """
    text = textwrap.dedent(text) + user("outer()")
    assert run(text) == 21
    assert sliced(text).reached == ("Bag", "FusedAttnFunc", "SCALE", "inner", "outer")


def test_what_is_not_reached_needs_nothing() -> None:
    part = sliced("import not_installed_anywhere\nfrom . import sibling\nX = not_installed_anywhere.f()\n" + user("1"))
    assert (part.real, part.foreign, part.seam) == ((), (), {})


def test_definitions_asked_for_are_taken_where_the_file_has_them() -> None:
    text = "class Bag:\n    pass\n" + user("1")
    assert sliced(text, also=("Bag", "Other")).reached == ("Bag", "FusedAttnFunc")
    assert sliced(text).reached == ("FusedAttnFunc",)


@pytest.mark.parametrize(
    ("imports", "local", "name"),
    [
        ("from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_fwd", "fused_attn_fwd", None),
        ("from some.where.new import fused_attn_fwd as fwd", "fwd", "fused_attn_fwd"),
        ("from .relative import fused_attn_bwd as bwd", "bwd", "fused_attn_bwd"),
        (f"import {UTILS} as du", "du", "dpa_utils"),
        (f"import {UTILS} as dpa_utils", "dpa_utils", None),
        (f"from {UTILS.rpartition('.')[0]} import utils as du", "du", "dpa_utils"),
        ("from flash_attn_2_cuda import varlen_bwd as flash_attn_cuda_bwd", "flash_attn_cuda_bwd", None),
        ("flash_attn_cuda_bwd = None", "flash_attn_cuda_bwd", None),
    ],
)
def test_a_seam_name_is_recognised_however_it_is_imported(imports: str, local: str, name: str | None) -> None:
    assert sliced(f"{imports}\n" + user(local)).seam == {local: name or local}


@pytest.mark.parametrize(
    "imports",
    [
        "try:\n    from x.y import varlen_bwd as flash_attn_cuda_bwd\nexcept OSError:\n    flash_attn_cuda_bwd = None",
        "flash_attn_cuda_bwd = None\nif 1:\n    from x.y import varlen_bwd as flash_attn_cuda_bwd",
        "try:\n    from x.y import flash_attn_cuda_bwd\nexcept OSError:\n    def flash_attn_cuda_bwd():\n        pass",
    ],
)
def test_a_seam_name_with_a_stand_in_for_where_its_import_fails_is_the_seams(imports: str) -> None:
    assert run(f"{imports}\n" + user("flash_attn_cuda_bwd")) == "FLASH_ATTN_CUDA_BWD"


def test_a_definition_of_the_file_wins_over_the_seam() -> None:
    text = "def prepare_for_saving():\n    return 5\n" + user("prepare_for_saving()")
    assert run(text) == 5
    assert run("from x.y import prepare_for_saving\n" + text) == 5


def test_an_import_from_the_standard_library_is_real_even_under_a_seam_name() -> None:
    part = sliced("from math import floor as fused_attn_fwd\nimport torch\nimport os.path\n"
                  + user("(fused_attn_fwd, torch, os)"))  # fmt: skip
    assert part.seam == {}
    assert {(each.local, each.module, each.original) for each in part.real} == {
        ("fused_attn_fwd", "math", "floor"), ("torch", "torch", None), ("os", "os", None)
    }  # fmt: skip
    assert {each.submodules for each in part.real} == {(), ("os.path",)}


def test_an_import_that_is_reached_and_is_neither_real_nor_the_seams_is_foreign() -> None:
    part = sliced("from transformer_engine.pytorch.new import helper as h\nfrom . import sibling\n"
                  + user("h(sibling)"))  # fmt: skip
    assert {str(each) for each in part.foreign} == {"transformer_engine.pytorch.new.helper", ".sibling"}


# ------------------------------------------------------------------ conditions decide as they did


@pytest.mark.parametrize(
    ("block", "value"),
    [
        ("if 1 > 2:\n    X = 1\nelse:\n    X = 2", 2),
        ("if 1 < 2:\n    X = 1\nelse:\n    X = 2", 1),
        ("if FLAG:\n    def X(): return 0\n    X = X()\nelif not FLAG:\n    X = 2\nelse:\n    X = 3\n", 2),
        ("if 1:\n    if FLAG:\n        X = 1\n    else:\n        X = 2", 2),
        ("try:\n    from math import floor\n    X = 1\nexcept ImportError:\n    X = 2", 1),
        ("try:\n    from math import no_such_name\n    X = 1\nexcept ImportError:\n    X = 2", 2),
        ("try:\n    import no_such_module_here\n    X = 1\nexcept ImportError:\n    X = 2", 2),
        ("try:\n    from .here import no_such_thing\n    X = 1\nexcept ImportError:\n    X = 2", 2),
        ("try:\n    from x.y import fused_attn_fwd\n    X = 1\nexcept ImportError:\n    X = 2", 1),
        ("try:\n    X = missing_dict['a']\nexcept (KeyError, OSError):\n    X = 2\nfinally:\n    unused = 1", 2),
        ("try:\n    unused = 1\nexcept ImportError:\n    X = 0\nelse:\n    X = 1", 1),
        ("X = 0\nfrom contextlib import suppress\nwith suppress(ValueError):\n    X = int('no')\n", 0),
        ("X = 1\nif not FLAG:\n    X += 4", 5),
        ("import typing\nif typing.TYPE_CHECKING:\n    import no_such_module_here\nelse:\n    X = 3", 3),
        ("try:\n    pass\nexcept* ValueError:\n    X = 2\nelse:\n    X = 3", 3),
    ],
)
def test_a_name_under_a_condition_has_the_value_that_the_condition_gives_it(block: str, value: int) -> None:
    assert run(f"FLAG = False\nmissing_dict = {{}}\n{block}\n" + user("X")) == value


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("TABLE['b'] = 2", {"a": 1, "b": 2}),
        ("TABLE.update(b=2)", {"a": 1, "b": 2}),
        ("TABLE['a'] += 5", {"a": 6}),
        ("print_nothing = 1", {"a": 1}),
    ],
)
def test_a_statement_that_changes_what_is_reached_is_taken(statement: str, value: dict[str, int]) -> None:
    assert run(f"TABLE = {{'a': 1}}\n{statement}\n" + user("TABLE")) == value


def test_a_method_set_after_the_class_is_taken() -> None:
    text = user("1") + "def other(ctx):\n    return 2\nFusedAttnFunc.forward = staticmethod(other)\n"
    assert run(text) == 2


def test_an_import_of_a_whole_module_is_not_a_definition_to_change() -> None:
    assert run("import math\nmath.floor(2.5)\n" + user("math.ceil(1.5)")) == 2


# ------------------------------------------------------------------ scopes

SCOPES: tuple[tuple[str, set[str]], ...] = (
    ("def f(a, b=B, *c, d: D = E, **g) -> R:\n    return a + b + c + d + g + free", {"B", "D", "E", "R", "free"}),
    ("@decorator(arg)\ndef f(): pass", {"decorator", "arg"}),
    ("def f():\n    return [x for x in xs if x > y]", {"xs", "y"}),
    ("def f():\n    return [x for x in x]", {"x"}),
    ("def f():\n    return {k: v for k, v in pairs.items() for w in k if w}", {"pairs"}),
    ("def f():\n    return any((hit := x) for x in xs) and hit", {"any", "xs"}),
    ("def f():\n    if (n := g()):\n        return n", {"g"}),
    ("def f():\n    return lambda a, *b, c=D, **e: a + b + c + e + free", {"D", "free"}),
    ("def f():\n    x = 1\n    def g(y):\n        return x + y + z\n    return g", {"z"}),
    ("def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = y\n    return g", {"y"}),
    ("def f():\n    global COUNT\n    COUNT = COUNT + 1", {"COUNT"}),
    ("def f():\n    global COUNT\n    COUNT = 1", {"COUNT"}),
    ("def f():\n    import a.b, c as d\n    from e import g\n    return a, d, g, c", {"c"}),
    ("def f(*args):\n    first, *rest = args\n    return g(*rest, **first, key=value)", {"g", "value"}),
    ("def f():\n    for i, (j, k) in it:\n        pass\n    return i, j, k", {"it"}),
    ("def f():\n    with a as b, c as (d, e):\n        return b, d, e", {"a", "c"}),
    ("def f():\n    try:\n        pass\n    except Error as e:\n        return e", {"Error"}),
    ("def f(x):\n    match x:\n        case Cls(a, key=b) if a > LIMIT:\n            return a, b\n"
     "        case [h, *t]:\n            return h, t\n        case {'k': v, **rest}:\n            return v, rest\n"
     "        case mod.CONST | 1 as c:\n            return c", {"Cls", "LIMIT", "mod"}),
    ("async def f():\n    async for x in xs:\n        await g(x)", {"xs", "g"}),
    ("def f():\n    x: T = 1\n    return x", {"T"}),
    ("def f():\n    return f'{a!r:{width}} {b}'", {"a", "width", "b"}),
    ("class C(Base, metaclass=Meta):\n    a = 1\n    b = a + OUT\n    def m(self):\n        return a", {
        "Base", "Meta", "OUT", "a"}),
    ("class C:\n    a = 1\n    def m(self, x=a):\n        return x", set()),
    ("class C:\n    @property\n    def p(self): return 1\n    @p.setter\n    def p(self, value: T): pass", {
        "property", "T"}),
    ("class C:\n    torch = torch", {"torch"}),
    ("class C:\n    x: Annotation\n    y: Other = field(default=D)", {"Annotation", "Other", "field", "D"}),
    ("class C:\n    class Inner:\n        z = 1\n    w = Inner.z", set()),
)  # fmt: skip


@pytest.mark.parametrize(("text", "names"), SCOPES, ids=[text.replace("\n", "; ")[:50] for text, _ in SCOPES])
def test_free_names_are_those_that_the_module_around_must_bind(text: str, names: set[str]) -> None:
    assert free_names(ast.parse(text).body[0]) == names


def test_a_counter_of_the_module_is_taken_with_the_function_that_sets_it() -> None:
    assert run("COUNT = 4\ndef step():\n    global COUNT\n    COUNT += 1\n    return COUNT\n" + user("step()")) == 5


def test_names_that_python_binds_itself_are_no_riddle() -> None:
    text = "class FusedAttnFunc:\n    def forward(ctx):\n        return len(__name__), __file__\n    x = __qualname__\n"
    assert sliced(text).reached == ("FusedAttnFunc",)


# ------------------------------------------------------------------ what is refused


def test_a_name_that_nothing_binds_is_refused_by_name() -> None:
    with pytest.raises(SliceError, match=r"mine\.py: FusedAttnFunc reaches the name 'missing_helper', which nothing"):
        sliced(user("missing_helper()"))


@pytest.mark.parametrize(
    ("text", "line"), [("x = 1\ndef f(:\n", 2), ("class C:\npass\n", 2), ("x = 'abc\n", 1), ("\n\n\n  return\n", 4)]
)
def test_a_syntax_error_is_refused_with_its_line(text: str, line: int) -> None:
    with pytest.raises(SliceError, match=rf"^mine\.py, line {line}: not valid Python: "):
        slice_source(text, "mine.py", "FusedAttnFunc", SEAM)


def test_a_null_byte_is_refused() -> None:
    with pytest.raises(SliceError, match=r"^mine\.py.*: not valid Python: "):
        slice_source("x = 1\0", "mine.py", "FusedAttnFunc", SEAM)


def test_a_file_without_the_class_is_refused_with_the_classes_it_has() -> None:
    with pytest.raises(SliceError, match=r"no class FusedAttnFunc at top level; it defines Alpha, Beta\. Name another"):
        sliced("class Beta:\n    pass\nclass Alpha:\n    class FusedAttnFunc:\n        pass\n")
    with pytest.raises(SliceError, match="it defines no class"):
        sliced("def FusedAttnFunc():\n    pass\n")
    with pytest.raises(SliceError, match="it defines no class"):
        sliced("")


@given(st.text(st.characters(codec="utf-8"), max_size=60) | st.sampled_from(["(" * 500, "-" * 5000 + "1", "x=" * 3000]))
@settings(max_examples=200, deadline=None)
def test_any_text_is_refused_as_a_source_with_no_such_class(text: str) -> None:
    with pytest.raises(SliceError):
        slice_source(text, "mine.py", "FusedAttnFunc", SEAM)


@pytest.mark.parametrize(
    "patch",
    [
        "setattr(FusedAttnFunc, 'answer', 2)",
        "def install(c):\n    c.answer = 2\ninstall(FusedAttnFunc)",
        "for name in ('answer',):\n    setattr(FusedAttnFunc, name, 2)",
        "FusedAttnFunc.answer = 2",
    ],
)
def test_what_changes_a_reached_object_at_top_level_is_run(patch: str) -> None:
    part = sliced(user("1") + "\n" + patch + "\n")
    module = types.ModuleType("patched")
    exec(compile(part.tree, "file.py", "exec"), module.__dict__)
    assert module.FusedAttnFunc.answer == 2


def test_a_module_that_raises_when_it_is_imported_is_refused_with_the_line() -> None:
    with pytest.raises(SliceError, match=r"line \d+: the module raises when it is imported"):
        sliced(user("1") + "\nraise RuntimeError('old')\n")


@pytest.mark.parametrize(
    "end",
    [
        "raise ImportError",
        "if True:\n    raise ImportError",
        "if not 0:\n    pass\n    raise ImportError",
        "if False:\n    pass\nelse:\n    raise ImportError",
        "while 1:\n    raise ImportError",
        "with open('x'):\n    raise ImportError",
        "try:\n    raise ImportError\nfinally:\n    pass",
        "try:\n    pass\nfinally:\n    raise ImportError",
        "if UNKNOWN:\n    raise ImportError\nelse:\n    raise ValueError",
        "assert False",
        "import sys\nsys.exit()",
        "exit(0)",
        "import os\nos._exit(0)",
    ],
)
def test_a_file_whose_import_is_sure_to_fail_is_refused(end: str) -> None:
    for text in (f"{USES.format(1)}\n{end}\n", f"{end}\n{USES.format(1)}"):
        with pytest.raises(SliceError, match=r"mine\.py, line \d+: the module raises when it is imported"):
            sliced(text)


@pytest.mark.parametrize(
    "end",
    [
        "if False:\n    raise ImportError",
        "if UNKNOWN:\n    raise ImportError",
        "try:\n    raise ImportError\nexcept ImportError:\n    pass",
        "def later():\n    raise ImportError",
        "if UNKNOWN:\n    raise ImportError\nelse:\n    pass",
        "assert UNKNOWN",
    ],
)
def test_a_file_whose_import_may_succeed_is_taken(end: str) -> None:
    assert run(f"{USES.format(1)}\n{end}\n") == 1
