"""A case survives its JSON, has one id on every machine, and refuses clearly what no call can mean."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness import case as module
from harness.case import DTYPES, MASKS, MAX_SIZE, RULES, SCHEMA, Case, CaseError, causal, nearest, padding
from harness.layouts import LAYOUTS
from harness.strategies import cases

any_case = cases(dtypes=DTYPES)

PINNED = {
    "ec0cebfeed03": Case(),
    "6d7763d2c081": Case(
        qkv_layout="sbhd_sbh2d", dtype="fp32", num_heads=6, num_gqa_groups=3, max_seqlen_kv=24,
        attn_mask_type="padding_causal", window_size=(13, 0), attn_bias_type="post_scale_bias", bias_shape="b1ss",
        softmax_type="learnable", dropout_p=0.1, attn_scale=0.07, generator="own",
        requires_grad=("q", "attn_bias", "softmax_offset"), output_grad="sliced", layer_number=7, seed=2**31 - 1,
    ),
}  # fmt: skip


@given(any_case)
@settings(max_examples=200, deadline=None)
def test_a_case_comes_back_from_its_json_as_it_was(case: Case) -> None:
    again = Case.from_json(case.to_json())
    assert again == case
    assert again.id == case.id
    assert again.to_json() == case.to_json()
    assert Case.from_dict(case.to_dict()) == case


@given(any_case, any_case)
@settings(max_examples=200, deadline=None)
def test_ids_are_equal_just_where_cases_are(one: Case, other: Case) -> None:
    assert (one.id == other.id) == (one == other)


@pytest.mark.parametrize("expected", PINNED)
def test_the_id_of_a_case_is_the_same_on_every_machine(expected: str) -> None:
    assert PINNED[expected].id == expected


def test_the_canonical_json_is_one_line_in_the_order_of_the_class() -> None:
    text = Case().to_json()
    assert list(json.loads(text)) == ["schema", *(field.name for field in dataclasses.fields(Case))]
    assert " " not in text
    assert "\n" not in text


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Case)])
def test_every_field_takes_part_in_the_id(field: str) -> None:
    other: dict[str, dict[str, Any]] = {
        "attn_mask_type": {"attn_mask_type": "padding"},
        "attn_bias_type": {"attn_bias_type": "alibi"},
        "softmax_type": {"softmax_type": "learnable"},
        "window_size": {"window_size": (3, 1)},
        "bottom_right_diagonal": {"bottom_right_diagonal": True},
        "qkv_layout": {"qkv_layout": "sb3hd"},
        "dtype": {"dtype": "fp16"},
        "num_gqa_groups": {"num_gqa_groups": 2},
        "num_heads": {"num_heads": 8},
        "dropout_p": {"dropout_p": 0.5},
        "attn_scale": {"attn_scale": 0.5},
        "generator": {"generator": "own"},
        "fp8_recipe": {"fp8_recipe": "delayed"},
        "scenario": {"scenario": "no_grad"},
        "requires_grad": {"requires_grad": ("q",)},
        "output_grad": {"output_grad": "expanded"},
    }
    fp8 = {"fp8_format": "E4M3", "fp8_input": True, "fp8_output": True, "fp8_cs_o_in_f16": False,
           "bf16_backward": True}  # fmt: skip
    if field in fp8:
        one = Case(fp8_recipe="current")
        two = one.replace(**{field: fp8[field]})
    elif field == "packed_given":
        one = Case(qkv_layout="sb3hd")
        two = one.replace(packed_given=False)
    elif field == "bias_shape":
        one = Case(attn_bias_type="post_scale_bias")
        two = one.replace(bias_shape="bhss")
    elif field == "pad_between_seqs":
        one = Case(qkv_layout="thd_thd_thd")
        two = one.replace(pad_between_seqs=True)
    elif field == "page_size":
        one = Case(qkv_layout="paged_kv_thd_bshd_bshd", page_size=16)
        two = one.replace(page_size=4)
    else:
        one = Case()
        value = getattr(one, field)
        two = one.replace(**other.get(field, {field: not value if isinstance(value, bool) else value + 1}
                                      if isinstance(value, int) else {}))  # fmt: skip
    assert getattr(two, field) != getattr(one, field)
    assert two.id != one.id


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"dropout_p": 0}, {"dropout_p": 0.0}),
        ({"dropout_p": -0.0}, {"dropout_p": 0.0}),
        ({"attn_scale": 1}, {"attn_scale": 1.0}),
        ({"window_size": [4, 0]}, {"window_size": (4, 0)}),
        ({}, {"schema": 1}),
        ({}, {"dtype": "bf16"}),
    ],
)
def test_spellings_of_one_case_have_one_id(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = Case.from_dict(one), Case.from_dict(other)
    assert first == second
    assert first.id == second.id


def test_a_case_made_in_python_with_whole_numbers_has_the_id_of_its_json() -> None:
    assert Case(dropout_p=0, attn_scale=2).id == Case(dropout_p=-0.0, attn_scale=2.0).id


# ------------------------------------------------------------------ what is refused


def test_an_unknown_field_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(CaseError, match=r"unknown field 'num_head'; did you mean 'num_heads'"):
        Case.from_dict({"num_head": 4})
    with pytest.raises(CaseError, match=r"unknown field 'xyzzy'$"):
        Case.from_dict({"xyzzy": 4})


@pytest.mark.parametrize("schema", [0, SCHEMA + 1, "1", None, True, 1.0, [1]])
def test_another_schema_is_refused(schema: object) -> None:
    with pytest.raises(CaseError, match=rf"^schema=.*reads schema=1 to {SCHEMA}"):
        Case.from_dict({"schema": schema})


@pytest.mark.parametrize("data", [[], "x", 1, None, 1.5, True])
def test_what_is_no_object_is_refused(data: Any) -> None:
    with pytest.raises(CaseError, match=r"a case is a JSON object, not"):
        Case.from_dict(data)
    with pytest.raises(CaseError, match=r"a case is a JSON object, not"):
        Case.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "{'dtype': 1}", "\x00", "[" * 100_000, '{"seed": ' + "9" * 5000 + "}"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(CaseError, match=r"^not JSON: "):
        Case.from_json(text)


SAMPLES: tuple[Any, ...] = (True, 3, 2.5, "x", None, [1], [1, 2], ["q"], {"a": 1}, [[1], [2]], [True, False], ["q", 1])


def allowed_types(annotation: str) -> list[Any]:
    """Return the samples that a field with this annotation takes; written apart from the code under test."""
    found: list[Any] = []
    for part in annotation.split(" | "):
        found += {
            "int": [3], "str": ["x"], "bool": [True], "float": [3, 2.5], "None": [None],
            "tuple[int, int]": [[1, 2]], "tuple[str, ...]": [["q"]],
        }[part]  # fmt: skip
    return found


@pytest.mark.parametrize("field", dataclasses.fields(Case), ids=lambda field: str(field.name))
def test_a_value_of_another_type_is_refused_with_field_and_value(field: Any) -> None:
    takes = allowed_types(field.type)
    refused = 0
    for sample in SAMPLES:
        if any(type(sample) is type(good) and sample == good for good in takes):
            continue
        refused += 1
        with pytest.raises(CaseError) as caught:
            Case.from_dict({field.name: sample})
        assert str(caught.value).startswith(f"{field.name}=")
        assert "has the wrong type; it takes" in str(caught.value)
    assert refused >= len(SAMPLES) - 3


def test_a_whole_number_stands_for_a_float_and_a_truth_value_stands_for_no_number() -> None:
    assert Case.from_dict({"attn_scale": 2}).attn_scale == 2.0
    for field in ("batch_size", "seed", "attn_scale", "dropout_p"):
        with pytest.raises(CaseError, match=rf"{field}=True has the wrong type"):
            Case.from_dict({field: True})


CAUSAL = {"attn_mask_type": "causal", "window_size": (-1, 0)}
PAGED = {"qkv_layout": "paged_kv_bshd_bshd_bshd"}
BROKEN: tuple[tuple[dict[str, Any], str], ...] = (
    ({"qkv_layout": "sbh3"}, "qkv_layout='sbh3'"),
    ({"dtype": "float16"}, "dtype='float16'"),
    ({"batch_size": 0}, "batch_size=0"),
    ({"num_heads": -4}, "num_heads=-4"),
    ({"num_gqa_groups": 0}, "num_gqa_groups=0"),
    ({"max_seqlen_q": -1}, "max_seqlen_q=-1"),
    ({"max_seqlen_kv": MAX_SIZE + 1}, f"max_seqlen_kv={MAX_SIZE + 1}"),
    ({"head_dim_qk": 0}, "head_dim_qk=0"),
    ({"head_dim_v": -8}, "head_dim_v=-8"),
    ({"attn_mask_type": "casual"}, "attn_mask_type='casual'"),
    ({"attn_bias_type": "bias"}, "attn_bias_type='bias'"),
    ({"bias_shape": "bh1s"}, "bias_shape='bh1s'"),
    ({"softmax_type": "off_by_one"}, "softmax_type='off_by_one'"),
    ({"output_grad": "strided"}, "output_grad='strided'"),
    ({"generator": "mine"}, "generator='mine'"),
    ({"num_heads": 4, "num_gqa_groups": 3}, "num_gqa_groups=3"),
    ({"qkv_layout": "sbh3d", "num_gqa_groups": 2}, "num_gqa_groups=2"),
    ({"qkv_layout": "sbh3d", "max_seqlen_kv": 24}, "max_seqlen_kv=24"),
    ({"qkv_layout": "sbhd_sb2hd", "head_dim_v": 16}, "head_dim_v=16"),
    ({"window_size": (-2, 0)}, "window_size=[-2, 0]"),
    ({"attn_mask_type": "causal"}, "window_size=[-1, -1]"),
    ({"bias_shape": "bhss"}, "bias_shape=bhss"),
    ({"dropout_p": 1.0}, "dropout_p=1.0"),
    ({"attn_scale": 0.0}, "attn_scale=0.0"),
    ({"is_training": False, "dropout_p": 0.5}, "dropout_p=0.5"),
    ({"requires_grad": ("q", "page_table")}, "requires_grad=['q', 'page_table']"),
    ({"requires_grad": ("k", "q", "v")}, "requires_grad=['k', 'q', 'v']"),
    ({"requires_grad": ("q", "k", "v", "attn_bias")}, "attn_bias_type=no_bias"),
    ({"requires_grad": ("q", "k", "v", "softmax_offset"), "softmax_type": "off-by-one"}, "softmax_type=off-by-one"),
    ({"qkv_layout": "bs3hd", "requires_grad": ("q", "k")}, "requires_grad=['q', 'k']"),
    ({"qkv_layout": "bshd_bs2hd", "requires_grad": ("q", "v")}, "requires_grad=['q', 'v']"),
    ({"pad_between_seqs": True}, "qkv_layout=sbhd_sbhd_sbhd"),
    ({"pad_between_seqs": True, **PAGED, "page_size": 4}, "qkv_layout=paged_kv_bshd_bshd_bshd"),
    ({"page_size": 16}, "page_size=16"),
    ({"page_size": 16, "qkv_layout": "thd_thd_thd"}, "qkv_layout=thd_thd_thd"),
    ({"page_size": 0}, "page_size=0"),
    (PAGED, "page_size=None"),
    (PAGED | {"page_size": 0}, "page_size=0"),
    (PAGED | {"page_size": -4}, "page_size=-4"),
    (PAGED | {"page_size": 5}, "max_seqlen_kv=16"),
    (PAGED | {"page_size": 32}, "page_size=32"),
    ({"generator": "own", "fp8_recipe": "block"}, "fp8_recipe='block'"),
    ({"fp8_recipe": "delayed", "fp8_format": "E5M2"}, "fp8_format='E5M2'"),
    ({"scenario": "odd"}, "scenario='odd'"),
    ({"fp8_recipe": "delayed", "dtype": "fp32"}, "dtype=fp32"),
    ({"fp8_format": "E4M3"}, "fp8_format=E4M3"),
    ({"fp8_input": True}, "fp8_input=True"),
    ({"fp8_output": True}, "fp8_output=True"),
    ({"fp8_cs_o_in_f16": False}, "fp8_cs_o_in_f16=False"),
    ({"bf16_backward": True}, "bf16_backward=True"),
    ({"packed_given": False}, "packed_given=false"),
    ({"output_grad": "quantized"}, "output_grad=quantized"),
    ({"scenario": "second_backward", "requires_grad": ()}, "scenario=second_backward"),
    ({"scenario": "scale_changed"}, "scenario=scale_changed"),
    ({"scenario": "recipe_changed"}, "scenario=recipe_changed"),
    ({"scenario": "fav2_backward"}, "qkv_layout=sbhd_sbhd_sbhd"),
    ({"seed": -1}, "seed=-1"),
)


@pytest.mark.parametrize(("fields", "named"), BROKEN, ids=[named for _, named in BROKEN])
def test_a_broken_rule_is_told_with_field_and_value(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(CaseError) as caught:
        Case.from_dict(fields)
    assert named in str(caught.value)


def test_every_rule_is_the_first_that_some_invalid_case_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = set()
    for fields, _ in BROKEN:
        with monkeypatch.context() as patch:
            patch.setattr(module, "RULES", ())
            case = Case.from_dict(fields)
        broken.add(next(index for index, rule in enumerate(RULES) if rule(case) is not None))
    assert broken == set(range(len(RULES))), "a rule that no case of BROKEN reaches first is not tested"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gaps_are_for_ragged_layouts_and_pages_for_paged_ones_which_need_them(layout: str) -> None:
    row = LAYOUTS[layout]

    def holds(**fields: Any) -> bool:
        try:
            Case(qkv_layout=layout, **fields)
        except CaseError:
            return False
        return True

    pages = {"page_size": 4} if row.paged else {}
    assert holds(pad_between_seqs=True, **pages) == ("thd" in layout or layout in ("t3hd", "th3d"))
    assert {size for size in (None, 1, 2, 3, 4, 8, 12, 16, 17) if holds(page_size=size)} == (
        {1, 2, 4, 8, 16} if "paged" in layout else {None}
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.1, 1.5])
def test_numbers_that_are_no_probability_or_no_scale_are_refused(value: float) -> None:
    with pytest.raises(CaseError, match=r"dropout_p="):
        Case(dropout_p=value)
    if not 0 < value < float("inf"):
        with pytest.raises(CaseError, match=r"attn_scale="):
            Case(attn_scale=value)


def test_a_wrong_choice_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(CaseError, match=r"did you mean .*'causal'"):
        Case(attn_mask_type="casual")
    with pytest.raises(CaseError, match=r"did you mean .*'sbh3d'"):
        Case(qkv_layout="sbh3")


def test_a_change_is_checked_again() -> None:
    with pytest.raises(CaseError, match=r"batch_size=0"):
        Case().replace(batch_size=0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4),
    max_leaves=12,
)
field_names = st.sampled_from([field.name for field in dataclasses.fields(Case)] + ["schema", "num_head", ""])
plausible = st.sampled_from((*LAYOUTS, *MASKS, *DTYPES, "alibi", "post_scale_bias", "learnable", 1, 2, 3, 0.5, -1))
near_cases = st.dictionaries(field_names, plausible | json_values, max_size=6)


def deep(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


@given(json_values | near_cases)
@settings(max_examples=400, deadline=None)
def test_any_json_value_is_a_case_or_a_case_error(data: Any) -> None:
    check_value(data)


EXTREMES: dict[str, Any] = {
    "huge float": {"dropout_p": 10**400},
    "huge negative float": {"attn_scale": -(10**4299)},
    "huge size": {"batch_size": 10**5000},
    "huge seed": {"seed": 10**5000},
    "huge window": {"window_size": [-(10**5000), 10**5000]},
    "deep list for a string": {"dtype": deep(5000)},
    "deep list for a tuple": {"window_size": deep(5000)},
    "surrogate value": {"requires_grad": ["\ud800", "q"]},
    "surrogate name": {"\ud800": 1},
    "NaN": {"dropout_p": float("nan")},
    "infinity": {"attn_scale": float("inf")},
    "long name": {"x" * 100_000: 1},
    "long value": {"dtype": "x" * 100_000},
    "long list": {"requires_grad": ["q"] * 100_000},
}


@pytest.mark.parametrize("what", EXTREMES)
def test_an_extreme_value_is_a_case_error_with_a_short_message(what: str) -> None:
    with pytest.raises(CaseError) as caught:
        Case.from_dict(EXTREMES[what])
    assert 0 < len(str(caught.value)) < 2000


def check_value(data: Any, read: Callable[[Any], Case] = Case.from_dict) -> None:
    try:
        case = read(data)
    except CaseError as error:
        message = str(error)
    else:
        message = "no error"
        assert Case.from_json(case.to_json()) == case
    assert 0 < len(message) < 2000


@given(st.text() | st.builds(json.dumps, json_values | near_cases))
@settings(max_examples=200, deadline=None)
@example('{"dropout_p": NaN}')
@example('{"attn_scale": Infinity}')
@example('{"dropout_p": 1e999}')
@example('{"batch_size": ' + "[" * 900 + "]" * 900 + "}")
@example('{"requires_grad": ["\\ud800"]}')
def test_any_text_is_a_case_or_a_case_error(text: str) -> None:
    check_value(text, Case.from_json)


def test_the_nearest_names_are_few_and_near() -> None:
    assert nearest("sbh3", LAYOUTS).startswith("; did you mean 'sbh3d'")
    assert nearest("xyzzy", LAYOUTS) == ""
    assert nearest("sbhd", LAYOUTS).count("'") <= 6


def test_masks_are_told_apart_by_what_they_mask() -> None:
    kinds = {mask: (causal(mask), padding(mask)) for mask in MASKS}
    assert kinds == {
        "no_mask": (False, False),
        "padding": (False, True),
        "causal": (True, False),
        "padding_causal": (True, True),
        "causal_bottom_right": (True, False),
        "padding_causal_bottom_right": (True, True),
    }
