"""Two observations agree exactly where every bit, name and relation does, and else the disagreement is named."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.compare import KINDS, Difference, compare, compare_values, measure
from harness.observe.values import Array, Observation, Plain, Value, plain

INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32,
            torch.float64: torch.int64, torch.int32: torch.int32, torch.int64: torch.int64,
            torch.uint8: torch.uint8}  # fmt: skip


def array(data: Any, dtype: torch.dtype = torch.float32, **changes: Any) -> Array:
    tensor = data if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=dtype)
    name = str(tensor.dtype).removeprefix("torch.")
    whole = Array(name, tuple(tensor.shape), tuple(tensor.stride()), "fresh", tensor)
    return dataclasses.replace(whole, **changes)


def seen(**values: Value) -> Observation:
    return Observation({path.replace("__", "/"): value for path, value in values.items()})


def only(differences: Iterable[Difference]) -> Difference:
    (difference,) = differences
    return difference


def kind(control: Value, candidate: Value, path: str = "path") -> str | None:
    difference = compare_values(path, control, candidate)
    return difference.kind if difference is not None else None


def from_bits(bits: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([bits], dtype=INTEGERS[dtype]).view(dtype)


@pytest.mark.parametrize(
    ("dtype", "one", "other"),
    [
        (torch.float32, 0x7FC00000, 0x7FC00001),
        (torch.bfloat16, 0x7FC0, 0x7FC1),
        (torch.float16, 0x7E00, 0x7E01),
        (torch.float64, 0x7FF8000000000000, 0x7FF8000000000001),
    ],
)
def test_the_payload_of_a_nan_counts(dtype: torch.dtype, one: int, other: int) -> None:
    left, right = array(from_bits(one, dtype)), array(from_bits(other, dtype))
    assert compare_values("path", left, left) is None
    difference = compare_values("path", left, right)
    assert difference is not None
    assert difference.distance is not None
    assert (difference.kind, difference.distance.different, difference.distance.largest_absolute) == ("value", 1, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_sign_of_zero_counts_and_is_no_distance(dtype: torch.dtype) -> None:
    distance = measure(array([0.0, 1.0], dtype), array([-0.0, 1.0], dtype))
    assert distance is not None
    assert (distance.different, distance.largest_absolute, distance.largest_relative) == (1, 0.0, 0.0)


VALUES = (0, 1, True, False, 0.0, -0.0, 1.0, "1", "", None, [1], [True], [1.0], [0.0], [-0.0], {"a": 1}, {"a": True})


@pytest.mark.parametrize("left", range(len(VALUES)))
@pytest.mark.parametrize("right", range(len(VALUES)))
def test_plain_values_are_equal_only_to_themselves_with_type_and_sign(left: int, right: int) -> None:
    found = compare_values("path", plain(VALUES[left]), plain(VALUES[right]))
    assert (found is None) == (left == right)


def test_plain_values_of_one_value_and_two_types_differ_in_type() -> None:
    assert kind(plain((1, 2)), plain([1, 2])) == "type"
    assert kind(plain(1), plain(True)) == "type"
    assert kind(plain(None), plain(0)) == "type"
    assert kind(plain(1), array([1.0])) == "type"
    assert kind(array([1.0]), plain(None)) == "type"


def test_nan_and_infinities_among_plain_values_equal_themselves_alone() -> None:
    assert kind(plain(math.nan), plain(math.nan)) is None
    assert kind(plain(math.inf), plain(math.inf)) is None
    assert kind(plain(math.inf), plain(-math.inf)) == "value"
    assert kind(plain(math.nan), plain("nan")) == "type"


def test_the_same_items_in_another_order_differ_in_order_and_other_items_in_value() -> None:
    assert kind(plain(["a", "b", "b"]), plain(["b", "a", "b"])) == "order"
    assert kind(plain(["a", "b", "b"]), plain(["b", "a", "a"])) == "value"
    assert kind(plain(["a"]), plain(["a", "a"])) == "value"


def test_what_one_side_alone_has_is_missing_or_extra_and_never_passed_over() -> None:
    both = plain(1)
    assert only(compare(seen(a=both, b=both), seen(a=both))).signature == ("b", "missing")
    assert only(compare(seen(a=both), seen(a=both, b=both))).signature == ("b", "extra")
    assert [found.signature for found in compare(seen(a=both), seen(b=both))] == [("a", "missing"), ("b", "extra")]
    assert only(compare(seen(a=plain(None)), seen())).signature == ("a", "missing")


def test_an_exception_on_one_side_or_another_one_is_of_the_kind_exception() -> None:
    error = seen(exception__type=plain("ValueError"))
    assert only(compare(error, seen())).kind == "exception"
    assert only(compare(seen(), error)).kind == "exception"
    assert only(compare(error, seen(exception__type=plain("TypeError")))).kind == "exception"
    assert compare(error, error) == []


def test_differences_come_in_the_order_of_the_control_and_then_what_is_extra() -> None:
    control = seen(b=plain(1), a=plain(1), c=plain(1))
    candidate = seen(z=plain(1), c=plain(2), a=plain(2), b=plain(2))
    assert [difference.path for difference in compare(control, candidate)] == ["b", "a", "c", "z"]


def test_the_order_in_which_paths_were_seen_is_no_difference() -> None:
    assert compare(seen(a=plain(1), b=plain(2)), seen(b=plain(2), a=plain(1))) == []


def test_each_attribute_of_a_tensor_is_a_kind_of_its_own_and_meaning_comes_first() -> None:
    whole = array(torch.zeros(2, 3))
    assert kind(whole, dataclasses.replace(whole, meaning="input q")) == "alias"
    assert kind(whole, array(torch.zeros(2, 3, dtype=torch.float64))) == "dtype"
    assert kind(whole, array(torch.zeros(3, 2))) == "shape"
    assert kind(whole, array(torch.zeros(3, 2).t())) == "stride"
    assert kind(whole, dataclasses.replace(whole, data=None)) == "type"
    assert kind(whole, array(torch.zeros(2, 3).index_fill_(1, torch.tensor(2), 1.0))) == "value"
    assert kind(whole, array(torch.ones(3, 3, dtype=torch.float64), meaning="input q")) == "alias"


def test_dtypes_of_one_size_with_the_same_bits_differ_in_dtype() -> None:
    half = torch.zeros(4, dtype=torch.float16)
    assert kind(array(half), array(half.view(torch.bfloat16))) == "dtype"


def test_tensors_whose_elements_do_not_matter_are_equal_by_their_attributes() -> None:
    one, other = (dataclasses.replace(array([number]), data=None) for number in (1.0, 2.0))
    assert kind(one, other) is None


def test_elements_that_are_not_valid_do_not_count_and_the_number_compared_says_so() -> None:
    control, candidate = torch.zeros(2, 3), torch.zeros(2, 3)
    candidate[0, 1], candidate[1, 2] = 5.0, 7.0
    valid = torch.tensor([[True], [False]])
    distance = measure(array(control, valid=valid), array(candidate, valid=valid))
    assert distance is not None
    assert (distance.elements, distance.different, distance.first) == (3, 1, (0, 1))
    assert distance.largest_absolute == 5.0
    nowhere = torch.zeros(2, 1, dtype=torch.bool)
    assert measure(array(control, valid=nowhere), array(candidate, valid=nowhere)) is None


def test_largest_magnitude_is_that_of_the_valid_elements() -> None:
    valid = torch.tensor([True, True, False])
    distance = measure(array([1.0, 2.0, 1024.0], valid=valid), array([1.0, 3.0, 1024.0], valid=valid))
    assert distance is not None
    assert distance.largest_relative == 0.5


@pytest.mark.parametrize("other", [None, torch.tensor([True, True])])
def test_a_disagreement_about_what_is_valid_is_a_fault_of_the_harness(other: torch.Tensor | None) -> None:
    valid = torch.tensor([True, False])
    with pytest.raises(ValueError, match="valid"):
        measure(array([0.0, 0.0], valid=valid), array([0.0, 1.0], valid=other))
    with pytest.raises(ValueError, match="valid"):
        measure(array([0.0, 0.0], valid=other), array([0.0, 1.0], valid=valid))


def test_distances_are_absolute_and_relative_to_the_largest_magnitude_of_the_control() -> None:
    distance = measure(array([[1.0, -8.0], [0.5, 0.0]]), array([[1.0, -8.0], [0.25, 2.0]]))
    assert distance is not None
    assert (distance.elements, distance.different, distance.first) == (4, 2, (1, 0))
    assert (distance.largest_absolute, distance.largest_relative) == (2.0, 0.25)


def test_a_distance_from_a_tensor_of_zeros_has_no_finite_relation() -> None:
    distance = measure(array([0.0]), array([1e-30]))
    assert distance is not None
    assert distance.largest_relative == math.inf


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (math.inf, -math.inf, math.inf),
        (math.inf, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.nan, 1.0, math.inf),
        (math.nan, math.inf, math.inf),
        (3.0, 1.0, 2.0),
    ],
)
def test_distance_is_infinite_where_one_side_has_no_number_near_the_other(
    left: float, right: float, expected: float
) -> None:
    distance = measure(array([left, 4.0]), array([right, 4.0]))
    assert distance is not None
    assert distance.largest_absolute == expected


def test_equal_infinities_are_equal() -> None:
    assert measure(array([math.inf, -math.inf]), array([math.inf, -math.inf])) is None


def test_tensors_of_bool_and_of_integers_are_compared_too() -> None:
    assert measure(array([True, False], torch.bool), array([True, True], torch.bool)) is not None
    assert measure(array([1, 2], torch.int32), array([1, 2], torch.int32)) is None
    distance = measure(array([1, 2], torch.int64), array([1, 5], torch.int64))
    assert distance is not None
    assert distance.largest_absolute == 3.0


def test_every_kind_but_a_crash_is_one_that_compare_gives() -> None:
    whole = array(torch.zeros(2, 3))
    pairs = [
        (seen(a=plain(1)), seen()),
        (seen(), seen(a=plain(1))),
        (seen(a=plain([1, 2])), seen(a=plain([2, 1]))),
        (seen(a=plain(1)), seen(a=plain("1"))),
        (seen(a=whole), seen(a=array(torch.zeros(3, 3)))),
        (seen(a=whole), seen(a=array(torch.zeros(2, 3).half()))),
        (seen(a=whole), seen(a=array(torch.zeros(3, 2).t()))),
        (seen(a=whole), seen(a=dataclasses.replace(whole, meaning="input q"))),
        (seen(a=whole), seen(a=array(torch.ones(2, 3)))),
        (seen(exception__type=plain("ValueError")), seen()),
    ]
    assert {only(compare(*pair)).kind for pair in pairs} == set(KINDS) - {"crash"}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any bits, NaNs and zeros of both signs included, sometimes strided."""
    dtype = draw(st.sampled_from(list(INTEGERS)))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
    return tensor.transpose(0, -1) if draw(st.booleans()) else tensor


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
observations = st.dictionaries(st.text("ab/", min_size=1, max_size=6), tensors().map(array) | json_values.map(plain),
                               max_size=5).map(Observation)  # fmt: skip


def copied(observation: Observation) -> Observation:
    return Observation({
        path: dataclasses.replace(value, data=value.data.clone(memory_format=torch.preserve_format))
        if isinstance(value, Array) else Plain(value.type, value.value)
        for path, value in observation.values.items()
    })  # fmt: skip


@settings(deadline=None, database=None, max_examples=60)
@given(observations)
def test_an_observation_compared_with_its_copy_gives_nothing(observation: Observation) -> None:
    assert compare(observation, copied(observation)) == []


@settings(deadline=None, database=None, max_examples=100)
@given(tensors(), st.data())
def test_one_flipped_bit_anywhere_is_found_at_its_index(tensor: torch.Tensor, data: st.DataObject) -> None:
    index = tuple(data.draw(st.integers(0, size - 1)) for size in tensor.shape)
    bit = data.draw(st.integers(0, tensor.element_size() * 8 - 1))
    memory = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).clone()
    place = sum(step * stride for step, stride in zip(index, tensor.stride(), strict=True)) * tensor.element_size()
    memory[place + bit // 8] ^= 1 << bit % 8
    other = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    difference = only(compare(Observation({"t": array(tensor)}), Observation({"t": array(other)})))
    assert difference.signature == ("t", "value")
    assert difference.distance is not None
    assert (difference.distance.elements, difference.distance.different) == (tensor.numel(), 1)
    assert difference.distance.first == index
