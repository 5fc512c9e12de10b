"""A case of schema 1 means now what it meant then, and no other schema is read."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.case import MIGRATIONS, SCHEMA, Case, CaseError

SCHEMA_1 = ("qkv_layout", "dtype", "batch_size", "num_heads", "num_gqa_groups", "max_seqlen_q", "max_seqlen_kv",
            "head_dim_qk", "head_dim_v", "attn_mask_type", "window_size", "bottom_right_diagonal", "attn_bias_type",
            "bias_shape", "softmax_type", "dropout_p", "attn_scale", "is_training", "deterministic", "fast_zero_fill",
            "return_max_logit", "generator", "pad_between_seqs", "page_size", "requires_grad", "output_grad",
            "layer_number", "seed")  # fmt: skip
"""The fields that a case of schema 1 has, in their order."""
SINCE_2: dict[str, Any] = {
    "fp8_recipe": "none",
    "fp8_format": "HYBRID",
    "fp8_input": False,
    "fp8_output": False,
    "fp8_dpa_bwd": True,
    "fp8_cs_o_in_f16": True,
    "bf16_backward": False,
    "packed_given": True,
    "scenario": "plain",
}
"""The fields that came with schema 2, and what every case of schema 1 meant by them."""

THD = {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding"}
BIAS = {"attn_bias_type": "post_scale_bias"}
CHANGED: dict[str, dict[str, Any]] = {
    "qkv_layout": {"qkv_layout": "sb3hd"},
    "dtype": {"dtype": "fp32"},
    "batch_size": {"batch_size": 3},
    "num_heads": {"num_heads": 8},
    "num_gqa_groups": {"num_gqa_groups": 2},
    "max_seqlen_q": {"max_seqlen_q": 5},
    "max_seqlen_kv": {"max_seqlen_kv": 24},
    "head_dim_qk": {"head_dim_qk": 16},
    "head_dim_v": {"head_dim_v": 32},
    "attn_mask_type": {"attn_mask_type": "padding"},
    "window_size": {"window_size": [3, 1]},
    "bottom_right_diagonal": {"bottom_right_diagonal": False},
    "attn_bias_type": {"attn_bias_type": "pre_scale_bias"},
    "bias_shape": {**BIAS, "bias_shape": "b1ss"},
    "softmax_type": {"softmax_type": "off-by-one"},
    "dropout_p": {"dropout_p": 0.25},
    "attn_scale": {"attn_scale": 2},
    "is_training": {"is_training": False},
    "deterministic": {"deterministic": True},
    "fast_zero_fill": {"fast_zero_fill": False},
    "return_max_logit": {"return_max_logit": True},
    "generator": {"generator": "own"},
    "pad_between_seqs": {**THD, "pad_between_seqs": True},
    "page_size": {"qkv_layout": "paged_kv_bshd_bshd_bshd", "page_size": 4},
    "requires_grad": {**BIAS, "requires_grad": ["q", "attn_bias"]},
    "output_grad": {"output_grad": "sliced"},
    "layer_number": {"layer_number": 7},
    "seed": {"seed": 12},
}
"""For each field of schema 1 a valid case in which it differs from its default."""

some_values = st.fixed_dictionaries({}, optional={
    name: st.sampled_from([fields[name], Case().to_dict()[name]]) for name, fields in CHANGED.items()
})  # fmt: skip
any_values = st.dictionaries(
    st.sampled_from(SCHEMA_1),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers() | st.text()),
)


def read(fields: dict[str, Any], schema: int) -> Case | str:
    """Return the case, or the message of the error."""
    try:
        return Case.from_dict({"schema": schema, **fields})
    except CaseError as error:
        return str(error)


def test_a_case_has_the_fields_of_schema_1_and_those_that_came_later_and_no_others() -> None:
    assert {field.name for field in dataclasses.fields(Case)} == {*SCHEMA_1, *SINCE_2}
    assert not set(SCHEMA_1) & set(SINCE_2)
    assert set(CHANGED) == set(SCHEMA_1)


@pytest.mark.parametrize("field", SCHEMA_1)
def test_each_field_of_schema_1_is_read_as_in_schema_2_with_the_defaults(field: str) -> None:
    old = Case.from_dict({"schema": 1, **CHANGED[field]})
    assert old == Case.from_dict({"schema": 2, **SINCE_2, **CHANGED[field]})
    assert getattr(old, field) != getattr(Case(), field)


@given(some_values | any_values)
@settings(max_examples=300, deadline=None)
@example({})
def test_any_values_are_the_same_case_in_both_schemas_or_the_same_error(fields: dict[str, Any]) -> None:
    assert read(fields, 1) == read(fields, 2) == read({**SINCE_2, **fields}, 2)


@pytest.mark.parametrize("field", SCHEMA_1)
def test_a_case_read_from_schema_1_is_written_in_the_present_one_and_keeps_its_id(field: str) -> None:
    case = Case.from_json(json.dumps({"schema": 1, **CHANGED[field]}))
    assert case.to_dict()["schema"] == SCHEMA
    again = Case.from_json(case.to_json())
    assert (again, again.id) == (case, case.id)


@pytest.mark.parametrize("field", SINCE_2)
def test_a_field_of_schema_2_is_refused_in_a_case_of_schema_1_whatever_its_value(field: str) -> None:
    for value in (SINCE_2[field], None, "x"):
        with pytest.raises(CaseError, match=rf"^unknown field '{field}' in a case of schema=1; it came with schema=2$"):
            Case.from_dict({"schema": 1, field: value})
    assert Case.from_dict({"schema": 2, field: SINCE_2[field]}) == Case()


@pytest.mark.parametrize("schema", [0, -1, 3, True, False, "2", "1", 1.0, 2.0, None, [2], {"schema": 2}, 10**400])
def test_a_schema_that_is_not_known_is_refused_with_those_that_are(schema: object) -> None:
    with pytest.raises(CaseError, match=r"^schema=.* is not one that this version reads; it reads schema=1 to 2$"):
        Case.from_dict({"schema": schema})


def test_a_case_that_names_no_schema_is_of_the_present_one() -> None:
    assert Case.from_dict({"scenario": "no_grad"}) == Case(scenario="no_grad")


def test_there_is_a_way_from_each_older_schema_to_the_next() -> None:
    assert set(MIGRATIONS) == set(range(1, SCHEMA))


@given(some_values)
@settings(max_examples=50, deadline=None)
def test_bringing_a_case_up_leaves_the_dictionary_that_was_given_as_it_was(fields: dict[str, Any]) -> None:
    given_ = {"schema": 1, **fields}
    before = json.dumps(given_)
    read(given_, 1)
    assert json.dumps(given_) == before
