"""A recorder says of every tensor what it is to the caller, by its memory and not by the object that carries it."""

from __future__ import annotations

import enum
import weakref
from typing import Any

import pytest
import torch

from harness.case import Case
from harness.engines.api import get_engine
from harness.inputs import Live, build
from harness.observe.recorder import HarnessFault, Kinds, Recorder
from harness.observe.values import Array, Plain, is_kernel_result, made_by
from harness.quantized import parts

DENSE: dict[str, Any] = {"batch_size": 3, "max_seqlen_q": 6, "max_seqlen_kv": 16, "num_heads": 4, "head_dim_qk": 8}


def start(*, padding_defined: bool = True, generator: torch.Generator | None = None, **changes: Any) -> Recorder:
    inputs = build(Case(**{**DENSE, "dtype": "fp32", **changes}))
    return Recorder(inputs, inputs.fresh(generator), padding_defined=padding_defined)


def packed() -> tuple[Recorder, Live]:
    recorder = start(qkv_layout="sbh3d", max_seqlen_kv=6)
    return recorder, recorder.live


def test_every_input_is_known_by_its_own_name() -> None:
    recorder = start(attn_mask_type="padding", attn_bias_type="post_scale_bias", softmax_type="learnable")
    for name, tensor in recorder.live.tensors.items():
        assert recorder.meaning(tensor) == f"input {name}"
    assert recorder.meaning(recorder.live.output_grad) == "gradient of the output"


def test_the_same_memory_in_another_python_object_is_the_same_input() -> None:
    recorder = start()
    q = recorder.live.tensors["q"]
    assert recorder.meaning(q.detach()) == recorder.meaning(q.view(q.shape)) == "input q"


def test_parts_of_one_packed_buffer_are_told_apart_and_from_the_buffer() -> None:
    recorder, live = packed()
    names = ("q", "k", "v", "packed_qkv")
    assert [recorder.meaning(live.tensors[name]) for name in names] == [f"input {name}" for name in names]


def test_another_view_of_an_input_is_a_view_of_its_buffer_at_an_offset_in_elements() -> None:
    recorder = start()
    q = recorder.live.tensors["q"]
    assert recorder.meaning(q[..., 2:]) == "view of buffer q at 2"
    assert recorder.meaning(q.transpose(0, 1)) == "view of buffer q at 0"
    assert recorder.meaning(q.view(torch.int32)) == "view of buffer q at 0"
    assert recorder.meaning(q[0]) == "view of buffer q at 0"
    packed_recorder, live = packed()
    assert packed_recorder.meaning(live.tensors["k"][..., 1:]) == "view of buffer qkv at 9"


def test_a_view_that_reaches_into_a_red_zone_has_a_negative_offset() -> None:
    recorder = start()
    flat = recorder.live.buffers["q"].flat
    assert recorder.meaning(flat) == f"view of buffer q at -{recorder.live.buffers['q'].margin}"


def test_a_copy_of_an_input_is_fresh_and_carries_its_elements() -> None:
    recorder = start()
    q = recorder.live.tensors["q"]
    array = recorder.array(q.clone())
    assert array.meaning == "fresh"
    assert torch.equal(array.data, q)


def test_a_kernel_result_is_known_wherever_it_turns_up_and_its_views_and_copies_are_not_it() -> None:
    recorder = start()
    result = torch.zeros(2, 3)
    recorder.name(result, "output of fused_attn_fwd")
    assert recorder.meaning(result) == recorder.meaning(result.detach()) == "output of fused_attn_fwd"
    assert recorder.meaning(result.t()) == recorder.meaning(result[1:]) == "view of output of fused_attn_fwd"
    assert recorder.meaning(result.clone()) == "fresh"


def test_an_input_that_a_kernel_hands_back_keeps_its_name() -> None:
    recorder = start()
    recorder.name(recorder.live.tensors["q"].detach(), "aux 2 of fused_attn_fwd")
    assert recorder.meaning(recorder.live.tensors["q"]) == "input q"


def test_the_memory_of_a_named_result_is_not_given_to_another_tensor() -> None:
    recorder = start()
    for number in range(20):
        recorder.name(torch.zeros(1 << 10), f"result {number}")
        assert recorder.meaning(torch.zeros(1 << 10)) == "fresh"


def test_an_input_that_nothing_wrote_to_is_recorded_by_name_alone_and_with_elements_once_written() -> None:
    recorder = start()
    q = recorder.live.tensors["q"]
    assert recorder.array(q).data is None
    with torch.no_grad():
        q[0, 0, 0, 0] = 7
    array = recorder.array(q)
    assert array.meaning == "input q"
    assert array.data[0, 0, 0, 0] == 7


def test_a_write_to_one_part_of_a_packed_buffer_shows_in_all_of_its_parts() -> None:
    recorder, live = packed()
    assert recorder.array(live.tensors["v"]).data is None
    with torch.no_grad():
        live.tensors["q"].zero_()
    assert recorder.array(live.tensors["v"]).data is not None


def test_what_was_recorded_does_not_change_with_the_tensor() -> None:
    recorder = start()
    tensor = torch.zeros(3)
    recorder.see("path", tensor)
    tensor.fill_(1)
    value = recorder.observation["path"]
    assert isinstance(value, Array)
    assert value.data.tolist() == [0, 0, 0]


def test_dtype_shape_and_strides_are_recorded_as_they_are() -> None:
    array = start().array(torch.zeros(2, 3, dtype=torch.bfloat16).t())
    assert (array.dtype, array.shape, array.stride) == ("bfloat16", (3, 2), (1, 3))


class Colour(enum.IntEnum):
    RED = 1


def test_values_that_are_no_tensors_keep_their_type() -> None:
    recorder = start(generator=torch.Generator())
    assert recorder.value(recorder.live.generator) == Plain("Generator", "the caller's own")
    assert recorder.value(torch.Generator()) == Plain("Generator", "another")
    assert recorder.value(torch.bfloat16) == Plain("dtype", "bfloat16")
    assert recorder.value(Colour.RED) == Plain("enum", "RED")
    assert recorder.value(1) == Plain("int", 1)
    assert recorder.value(True) == Plain("bool", True)
    assert recorder.value(None) == Plain("NoneType", None)
    assert recorder.value((1, 2)) == Plain("tuple", [1, 2])
    assert recorder.value([1, 2]) == Plain("list", [1, 2])
    assert start().value(torch.Generator()) == Plain("Generator", "another")


def test_a_list_with_tensors_is_recorded_item_by_item_and_with_its_length() -> None:
    recorder = start()
    recorder.see("list", [recorder.live.tensors["q"], None, torch.zeros(1)])
    assert list(recorder.observation) == ["list/length", "list/0", "list/1", "list/2"]
    assert recorder.observation["list/length"] == Plain("int", 3)
    assert recorder.observation["list/1"] == Plain("NoneType", None)


def test_a_path_is_seen_once() -> None:
    recorder = start()
    recorder.see("path", 1)
    with pytest.raises(KeyError, match="twice"):
        recorder.see("path", 1)


def test_statistics_past_a_sequence_are_marked_where_the_engine_leaves_them_undefined() -> None:
    recorder = start(attn_mask_type="padding", padding_defined=False, batch_size=5, seed=3)
    defined = recorder.defined_statistics()
    assert defined is not None
    assert defined.shape == (5, 1, 6, 1)
    assert tuple(defined.sum(2).flatten().tolist()) == recorder.inputs.q.lengths
    assert min(recorder.inputs.q.lengths) < 6


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("layout", ["thd_thd_thd", "t3hd", "thd_bshd_bshd"])
def test_statistics_of_rows_of_no_sequence_are_marked_in_a_ragged_batch(layout: str, gaps: bool) -> None:
    left_out = 0
    for seed in range(6):
        recorder = start(
            qkv_layout=layout, attn_mask_type="padding", pad_between_seqs=gaps, padding_defined=False, batch_size=5,
            max_seqlen_kv=6, seed=seed,
        )  # fmt: skip
        place = recorder.inputs.q
        defined = recorder.defined_statistics()
        assert defined is not None
        assert defined.shape == (place.rows, 1, 1)
        rows = [
            start_ + row
            for start_, length in zip(place.offsets, place.lengths, strict=False)
            for row in range(length)
        ]  # fmt: skip
        assert defined.flatten().nonzero().flatten().tolist() == rows
        left_out += place.rows - len(rows)
    assert (left_out > 0) == gaps


def test_no_statistics_are_marked_in_a_ragged_batch_where_the_engine_defines_them() -> None:
    recorder = start(qkv_layout="thd_thd_thd", attn_mask_type="padding", pad_between_seqs=True)
    assert recorder.defined_statistics() is None


def test_all_statistics_count_where_there_is_no_padding_or_the_engine_defines_it() -> None:
    assert start(padding_defined=False).defined_statistics() is None
    assert start(attn_mask_type="padding").defined_statistics() is None


def test_a_kernel_result_that_was_written_to_is_one_no_more() -> None:
    recorder = start()
    result = torch.zeros(2, 3)
    recorder.name(result, made_by("fused_attn_bwd", "dq"))
    before = recorder.array(result)
    result[0].add_(1)
    after = recorder.array(result)
    assert is_kernel_result(before.describe())
    assert not is_kernel_result(after.describe())
    assert not is_kernel_result(recorder.array(result[1:]).describe())


def test_an_output_that_a_kernel_made_and_the_subject_wrote_to_before_it_was_named_again_is_none_either() -> None:
    recorder = start()
    result = torch.zeros(2, 3)
    recorder.name(result, made_by("fused_attn_fwd", "output"))
    result.add_(1)
    recorder.name(result, "output 0")
    assert not is_kernel_result(recorder.array(result).describe())


def test_an_address_in_the_text_of_a_value_is_left_out_and_the_rest_of_the_text_stays() -> None:
    class Thing:
        def __init__(self, text: str) -> None:
            self.text = text

        def __str__(self) -> str:
            return self.text

    recorder = start()
    assert recorder.value(Thing("<f at 0x7F01aB>")) == recorder.value(Thing("<f at 0x12>"))
    assert recorder.value(Thing("<f at 0x12>")) != recorder.value(Thing("<g at 0x12>"))


# ------------------------------------------------------------------ faults of the watching itself


def test_a_fault_while_watching_is_passed_on_and_kept_even_where_the_subject_swallows_it() -> None:
    recorder = start()
    with pytest.raises(ZeroDivisionError, match="first"), recorder.watching():
        raise ZeroDivisionError("first")
    with pytest.raises(KeyError), recorder.watching():
        raise KeyError("second")
    with pytest.raises(HarnessFault, match=r"^ZeroDivisionError: first$") as caught:
        recorder.check()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_watching_that_went_well_leaves_nothing_to_raise() -> None:
    recorder = start()
    with recorder.watching():
        recorder.see("path", 1)
    recorder.check()


# ------------------------------------------------------------------ quantized tensors and quantizers

ENGINE = get_engine("reference")
SEAM: dict[str, Any] = ENGINE.seam()
FP8: dict[str, Any] = {
    "qkv_layout": "bshd_bshd_bshd", "dtype": "bf16", "batch_size": 2, "max_seqlen_q": 128, "max_seqlen_kv": 128,
    "head_dim_qk": 32, "head_dim_v": 32,
}  # fmt: skip


def start_fp8(recipe: str = "delayed", **changes: Any) -> Recorder:
    inputs = build(Case(**{**FP8, "fp8_recipe": recipe, **changes}))
    return Recorder(inputs, inputs.fresh(engine=ENGINE), padding_defined=True, kinds=Kinds.of(SEAM))


def named(recorder: Recorder) -> dict[str, Any]:
    assert recorder.live.quantizers is not None
    return recorder.live.quantizers.named()


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_a_quantized_input_is_known_by_its_parts_whatever_object_carries_them(recipe: str) -> None:
    recorder = start_fp8(recipe, fp8_input=True)
    q = recorder.live.tensors["q"]
    assert recorder.meaning(q) == recorder.meaning(q.detach()) == "input q"
    assert recorder.meaning(recorder.live.tensors["k"]) == "input k"
    first = next(iter(parts(q)))
    assert recorder.meaning(parts(q)[first]) == f"{first} of input q"
    assert recorder.meaning(q.detach().clone()) == "fresh"


def test_a_quantized_tensor_is_recorded_by_class_dtypes_parts_and_whose_quantizer_it_has() -> None:
    recorder = start_fp8(fp8_input=True)
    recorder.see("given", recorder.live.tensors["q"])
    made = named(recorder)["O"](torch.ones(2, 4, dtype=torch.bfloat16))
    recorder.see("made", made)
    seen = recorder.observation
    header = seen["made"]
    assert isinstance(header, Array)
    assert (header.dtype, header.shape, header.meaning, header.data) == (
        "bfloat16 as Float8Tensor E4M3", (2, 4), "fresh", None
    )  # fmt: skip
    quantizer = seen["made/quantizer"]
    assert isinstance(quantizer, Plain)
    assert isinstance(quantizer.value, dict)
    assert (quantizer.type, quantizer.value["is"]) == ("Float8Quantizer", "a copy of the caller's O")
    data = seen["made/data"]
    assert isinstance(data, Array)
    assert torch.equal(data.data, parts(made)["data"])
    given = seen["given/data"]
    assert isinstance(given, Array)
    assert (given.meaning, given.data) == ("data of input q", None)
    assert list(seen) == [
        *("given", "given/quantizer", "given/data", "given/scale_inv"),
        *("made", "made/quantizer", "made/data", "made/transpose", "made/scale_inv"),
    ]


def test_parts_that_were_written_to_are_recorded_with_their_bytes() -> None:
    recorder = start_fp8(fp8_input=True)
    parts(recorder.live.tensors["q"])["data"].view(-1)[0] ^= 1
    recorder.see("q", recorder.live.tensors["q"])
    data = recorder.observation["q/data"]
    assert isinstance(data, Array)
    assert data.data is not None


def test_a_quantized_result_is_known_again_part_by_part_and_no_longer_itself_once_written_to() -> None:
    recorder = start_fp8()
    made = named(recorder)["O"](torch.ones(2, 4, dtype=torch.bfloat16))
    recorder.name(made, made_by("fused_attn_fwd", "output"))
    assert recorder.meaning(made.detach()) == "output of fused_attn_fwd"
    assert recorder.meaning(parts(made)["scale_inv"]) == "scale_inv of output of fused_attn_fwd"
    assert is_kernel_result(recorder.array(made).describe())
    parts(made)["data"].view(-1)[0] ^= 1
    assert not is_kernel_result(recorder.array(made).describe())


def test_a_quantizer_is_the_callers_a_copy_of_it_or_another() -> None:
    recorder = start_fp8("hybrid")
    s = named(recorder)["S"]
    assert recorder.whose(s) == "the caller's S"
    copy = s.copy()
    assert recorder.whose(copy) == "a copy of the caller's S"
    copy.scale = s.scale.clone()
    assert recorder.whose(copy) == "a copy of the caller's S"
    copy.amax = named(recorder)["dP"].amax
    copy.scale = s.scale
    assert recorder.whose(copy) == "a copy of the caller's S and dP"
    assert recorder.whose(ENGINE.quantizer("delayed", "E4M3")) == "another"
    assert recorder.whose(named(recorder)["QKV"]) == "the caller's QKV"
    assert recorder.whose(named(recorder)["QKV"].copy()) == "another"
    assert recorder.live.quantizers is not None
    assert recorder.whose(recorder.live.quantizers.lists["scaling_fwd"][0]) == "the caller's scaling_fwd[0]"


def test_what_a_copy_of_a_quantizer_shares_with_the_callers_is_told_with_its_values_and_settings() -> None:
    recorder = start_fp8()
    s = named(recorder)["S"]
    copy = s.copy()
    copy.scale = s.scale.clone()
    copy.internal = True
    recorder.see("own", s)
    recorder.see("copy", copy)
    s.scale.mul_(2)
    seen = recorder.observation
    arrays = {path: value for path in seen if isinstance(value := seen[path], Array)}
    assert {path: array.meaning for path, array in arrays.items()} == {
        "own/scale": "scale of S", "own/amax": "amax of S", "copy/scale": "fresh", "copy/amax": "amax of S",
    }  # fmt: skip
    assert torch.equal(arrays["own/scale"].data * 2, s.scale)
    settings = [value.value["internal"] for path in ("own", "copy")
                if isinstance(value := seen[path], Plain) and isinstance(value.value, dict)]  # fmt: skip
    assert settings == [False, True]


def test_a_list_of_pairs_is_recorded_down_to_the_tensors() -> None:
    recorder = start_fp8("mxfp8")
    recorder.see("pairs", [(torch.ones(1), named(recorder)["dO"])])
    assert {"pairs/0/0", "pairs/0/1", "pairs/length", "pairs/0/length"} == set(recorder.observation)


def test_without_the_classes_of_a_seam_nothing_is_quantized() -> None:
    assert Kinds.of({}) == Kinds()
    assert not start().is_quantized(torch.ones(1))


# ------------------------------------------------------------------ passes


def test_what_a_later_pass_records_and_makes_has_its_number_in_path_and_name() -> None:
    recorder = start()
    first = recorder.live.tensors["q"]
    recorder.see("output/0", first)
    recorder.turn_to(recorder.inputs, recorder.inputs.fresh(), 2)
    recorder.admit()
    recorder.see("output/0", recorder.live.tensors["q"])
    recorder.see("output", 1)
    result = torch.ones(1)
    recorder.name(result, made_by("fused_attn_fwd", "output"))
    assert list(recorder.observation) == ["output/0", "output/pass 2/0", "output/pass 2"]
    assert recorder.meaning(first) == "input q"
    assert recorder.meaning(recorder.live.tensors["q"]) == "input q of pass 2"
    assert recorder.meaning(recorder.live.tensors["q"][0]) == "view of buffer q of pass 2 at 0"
    assert recorder.meaning(result) == "output of fused_attn_fwd of pass 2"
    assert is_kernel_result(recorder.array(result).describe())


def test_nothing_is_named_or_held_where_holding_is_off() -> None:
    recorder = start()
    recorder.holding = False
    result = torch.ones(3)
    gone = weakref.ref(result)
    recorder.name(result, "result")
    assert recorder.meaning(result) == "fresh"
    del result
    assert gone() is None
