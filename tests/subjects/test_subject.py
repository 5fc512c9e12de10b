"""A subject is called by parameter name whatever its signature, and one that cannot be called is refused clearly."""

from __future__ import annotations

import random
import traceback
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines.reference import ReferenceEngine
from harness.subjects.source import Source
from harness.subjects.subject import PARAMETERS, TENSOR_PARAMETERS, LoadError, SliceError, Subject, load

ENGINE = ReferenceEngine()
VALUES: dict[str, Any] = {name: f"the value of {name}" for name in PARAMETERS}
FIELDS = tuple(name for name in PARAMETERS if name not in TENSOR_PARAMETERS)
BODY = """
    @staticmethod
    def forward(ctx, {parameters}):
        return dict(locals())

    @staticmethod
    def backward(ctx, d_out):
        return None
"""


def loaded(text: str, name: str = "FusedAttnFunc") -> Subject:
    return load(Source("mine", "/somewhere/mine.py", text, name), ENGINE)


def positional(parameters: str) -> str:
    return "import torch\n\n\nclass FusedAttnFunc(torch.autograd.Function):" + BODY.format(parameters=parameters)


def bag(fields: str, parameters: str, bag_name: str = "FusedAttnFwdArgs") -> str:
    lines = "".join(f"    {field}\n" for field in fields.split("; "))
    return (
        "import torch\nfrom dataclasses import dataclass\nfrom typing import Any\n\n\n"
        f"@dataclass\nclass {bag_name}:\n{lines}\n\n"
        "class FusedAttnFunc(torch.autograd.Function):" + BODY.format(parameters=parameters)
    )


def received(subject: Subject, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what each parameter of ``forward`` receives, ``ctx`` left out."""
    arguments = subject.convention.arguments(VALUES if values is None else values)
    found: dict[str, Any] = subject.function.forward(None, *arguments)
    del found["ctx"]
    return found


# ------------------------------------------------------------------ every value by position


@given(st.permutations(PARAMETERS))
@settings(max_examples=25, deadline=None)
def test_every_parameter_receives_its_own_value_in_any_order(order: list[str]) -> None:
    assert received(loaded(positional(", ".join(order)))) == VALUES


@given(st.sets(st.sampled_from(FIELDS)))
@settings(max_examples=25, deadline=None)
def test_a_signature_with_fewer_parameters_receives_those(left_out: set[str]) -> None:
    left_out = left_out - {"qkv_layout"}  # it tells the two conventions apart
    names = [name for name in PARAMETERS if name not in left_out]
    assert received(loaded(positional(", ".join(names)))) == {name: VALUES[name] for name in names}


def test_an_extra_parameter_with_a_default_keeps_its_default() -> None:
    subject = loaded(positional(", ".join(PARAMETERS) + ", extra=17"))
    assert received(subject) == {**VALUES, "extra": 17}
    assert len(subject.convention.arguments(VALUES)) == len(PARAMETERS), "a caller that does not know it sends none"


def test_parameters_after_an_extra_one_receive_their_values() -> None:
    *first, one, last = PARAMETERS
    subject = loaded(positional(f"{', '.join(first)}, extra=17, {one}=None, {last}=None"))
    assert received(subject) == {**VALUES, "extra": 17}


def test_an_extra_parameter_without_a_default_is_refused_by_name() -> None:
    with pytest.raises(LoadError, match=r"^mine: forward takes 'num_splits', which has no default and no meaning"):
        loaded(positional(f"{', '.join(PARAMETERS[:5])}, num_splits, {', '.join(PARAMETERS[5:])}"))


@pytest.mark.parametrize("name", TENSOR_PARAMETERS)
def test_a_signature_without_a_tensor_is_refused_by_name(name: str) -> None:
    with pytest.raises(LoadError, match=rf"forward has no parameter {name}; it takes "):
        loaded(positional(", ".join(other for other in PARAMETERS if other != name)))


@pytest.mark.parametrize("parameters", ["*args", f"{', '.join(PARAMETERS)}, **kwargs", f"q, *, {', '.join(FIELDS)}"])
def test_a_signature_that_autograd_cannot_call_by_position_is_refused(parameters: str) -> None:
    with pytest.raises(LoadError, match=r"forward takes \*args or keyword-only values"):
        loaded(positional(parameters))


def test_tensor_inputs_are_named_in_the_order_of_the_signature() -> None:
    order = list(PARAMETERS)
    random.Random(1).shuffle(order)
    tensors = {"q", "v", "cu_seqlens_q", "attn_bias"}
    values = {**VALUES, **{name: torch.zeros(1) for name in tensors}}
    subject = loaded(positional(", ".join(order)))
    assert subject.tensor_inputs(values) == [name for name in order if name in tensors]


# ------------------------------------------------------------------ five tensors and a bag

UNTYPED = "; ".join(f"{name}: Any" for name in FIELDS)
TENSORS = ", ".join(TENSOR_PARAMETERS)


@given(st.permutations([*TENSOR_PARAMETERS, "args: FusedAttnFwdArgs"]), st.permutations(FIELDS))
@settings(max_examples=25, deadline=None)
def test_every_tensor_and_every_field_of_the_bag_receives_its_own_value(order: list[str], fields: list[str]) -> None:
    found = received(loaded(bag("; ".join(f"{name}: Any" for name in fields), ", ".join(order))))
    contents = vars(found.pop("args"))
    assert found == {name: VALUES[name] for name in TENSOR_PARAMETERS}
    assert contents == {name: VALUES[name] for name in FIELDS}


@pytest.mark.parametrize(
    ("parameter", "bag_name"),
    [
        ("args: Mine", "Mine"),
        ("args: 'FusedAttnFwdArgs'", "FusedAttnFwdArgs"),
        ("args", "FusedAttnFwdArgs"),
        ("whatever: object", "FusedAttnFwdArgs"),
    ],
)
def test_a_bag_is_found_by_its_annotation_or_its_name(parameter: str, bag_name: str) -> None:
    subject = loaded(bag(UNTYPED, f"{TENSORS}, {parameter}", bag_name))
    assert subject.convention.bag is not None
    assert subject.convention.bag.__name__ == bag_name
    assert subject.convention.bag_parameter == parameter.partition(":")[0]


def test_postponed_annotations_name_the_bag_too() -> None:
    text = "from __future__ import annotations\n" + bag(UNTYPED, f"{TENSORS}, args: Mine", "Mine")
    assert vars(received(loaded(text))["args"]) == {name: VALUES[name] for name in FIELDS}


def test_annotations_are_what_the_source_makes_of_them() -> None:
    text = positional(", ".join(PARAMETERS)).replace("is_training,", "is_training: 1 + 1,")
    assert loaded(text).function.forward.__annotations__ == {"is_training": 2}
    postponed = loaded("from __future__ import annotations\n" + text)
    assert postponed.function.forward.__annotations__ == {"is_training": "1 + 1"}


def test_a_bag_that_repeats_tensors_receives_them_as_fields_too() -> None:
    found = received(loaded(bag(UNTYPED + "; q: Any; k: Any", f"{TENSORS}, args: FusedAttnFwdArgs")))
    assert (found["args"].q, found["args"].k) == (VALUES["q"], VALUES["k"])


def test_an_extra_field_with_a_default_keeps_its_default() -> None:
    found = received(loaded(bag(UNTYPED + "; extra: int = 17", f"{TENSORS}, args: FusedAttnFwdArgs")))
    assert found["args"].extra == 17


def test_an_extra_field_without_a_default_is_refused_by_name() -> None:
    with pytest.raises(LoadError, match=r"^mine: FusedAttnFwdArgs takes 'num_splits', which has no default"):
        loaded(bag("num_splits: int; " + UNTYPED, f"{TENSORS}, args: FusedAttnFwdArgs"))


def test_a_parameter_beside_the_bag_with_no_meaning_is_refused_by_name() -> None:
    with pytest.raises(LoadError, match=r"forward takes 'other', which has no default"):
        loaded(bag(UNTYPED, f"{TENSORS}, args: FusedAttnFwdArgs, other"))


def test_five_tensors_and_no_bag_are_refused() -> None:
    with pytest.raises(LoadError, match=r"takes neither every value by position nor five tensors and a bag"):
        loaded(positional(f"{TENSORS}, something"))


# ------------------------------------------------------------------ loading


def test_the_line_of_a_traceback_is_the_line_of_the_source(tmp_path: Any) -> None:
    text = (
        "import not_installed_anywhere\n\nUNUSED = not_installed_anywhere.f()\n\n\n"
        "def helper():\n    # a comment\n    raise KeyError('planted')  # this line\n\n\n"
        + positional(", ".join(PARAMETERS)).replace("return dict(locals())", "return helper()")
    )
    source = Source("mine", str(tmp_path / "not_on_disk.py"), text)
    subject = load(source, ENGINE)
    with pytest.raises(KeyError, match=r"planted") as caught:
        received(subject)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno) == (source.resolved, text.splitlines().index(
        "    raise KeyError('planted')  # this line") + 1)  # fmt: skip
    assert last.line == "raise KeyError('planted')  # this line"


def test_definitions_that_raise_are_refused_with_what_they_raised() -> None:
    text = "TABLE = {}\nFIRST = TABLE['first']\n" + positional(", ".join(PARAMETERS)).replace("locals()", "a=FIRST")
    with pytest.raises(LoadError, match=r"^mine: its definitions cannot be run: KeyError: 'first'"):
        loaded(text)


def test_a_class_that_is_no_autograd_function_is_refused() -> None:
    with pytest.raises(LoadError, match=r"FusedAttnFunc is not a torch\.autograd\.Function"):
        loaded("class FusedAttnFunc:\n    pass\n")


def test_a_name_that_the_engine_does_not_have_is_refused_by_name() -> None:
    text = "from transformer_engine.pytorch.new import helper\nfrom . import near\n" + positional(
        ", ".join(PARAMETERS)
    ).replace("dict(locals())", "helper(near)")
    with pytest.raises(LoadError, match=r"needs \.near, transformer_engine\.pytorch\.new\.helper, which the reference"):
        loaded(text)


def test_a_module_that_is_not_installed_is_refused() -> None:
    text = "from torch.no_such_part import helper\n" + positional(", ".join(PARAMETERS)).replace("dict(", "helper(")
    with pytest.raises(LoadError, match=r"imports torch\.no_such_part, which is not installed here"):
        loaded(text)
    text = "from torch import no_such_name\n" + positional(", ".join(PARAMETERS)).replace("dict(", "no_such_name(")
    with pytest.raises(LoadError, match=r"torch has no no_such_name"):
        loaded(text)


def test_a_submodule_imported_under_its_packages_name_is_there() -> None:
    text = "import xml.dom.minidom\nimport xml.sax\n" + positional(", ".join(PARAMETERS)).replace(
        "dict(locals())", "dict(ctx=0, found=(xml.dom.minidom.parseString, xml.sax.parse))"
    )
    assert len(received(loaded(text))["found"]) == 2


def test_a_source_that_cannot_be_taken_apart_is_refused() -> None:
    with pytest.raises(SliceError, match=r"mine\.py, line 1: not valid Python"):
        loaded("def f(:")


def test_another_class_can_be_named() -> None:
    text = positional(", ".join(PARAMETERS)).replace("FusedAttnFunc", "Renamed")
    assert received(loaded(text, "Renamed")) == VALUES


def test_two_subjects_of_one_source_share_nothing() -> None:
    text = "SEEN = []\n" + positional(", ".join(PARAMETERS)).replace("dict(locals())", "SEEN")
    one, other = loaded(text), loaded(text)
    assert one.function is not other.function
    assert one.function.forward.__globals__["SEEN"] is not other.function.forward.__globals__["SEEN"]


def test_the_backward_of_one_subject_is_watched_by_its_own_watchers() -> None:
    one, other = loaded(positional(", ".join(PARAMETERS))), loaded(positional(", ".join(PARAMETERS)))
    seen: list[Any] = []
    one.on_backward.append(seen.append)
    one.function.backward(None, None)
    other.function.backward(None, None)
    assert seen == [None]
