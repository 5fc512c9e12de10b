"""A watched seam records each call as the callee gets it, in order, and passes everything through untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.case import Case
from harness.compare import compare
from harness.engines.api import get_engine
from harness.inputs import build
from harness.observe.recorder import Recorder
from harness.observe.seam import WATCHED, WatchedSeam
from harness.observe.values import Array, Observation, Plain

CASE = Case(dtype="fp32", attn_bias_type="post_scale_bias", attn_mask_type="padding")


def recorder() -> Recorder:
    inputs = build(CASE)
    return Recorder(inputs, inputs.fresh(), padding_defined=True)


def label(msg: str, depth: int = 2, *, loud: bool = False) -> str:
    if depth < 0:
        raise ValueError("too deep")
    return f"{msg} {depth} {loud}"


def backward(q: Any, aux_ctx_tensors: Any, scale: float = 1.0) -> list[Any]:
    return [q, aux_ctx_tensors, scale]


def forward(result: Any) -> Any:
    return result


def seam(**more: Any) -> WatchedSeam:
    names = {"nvtx_range_push": label, "fused_attn_bwd": backward, "fused_attn_fwd": forward, "other": label}
    return WatchedSeam(names | more)


def seen(*calls: tuple[str, tuple[Any, ...], dict[str, Any]]) -> Observation:
    watched, now = seam(), recorder()
    with watched.attached(now):
        for name, args, kwargs in calls:
            watched.names[name](*args, **kwargs)  # type: ignore[operator]
    return now.observation


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("a", 2), {}),
        (("a",), {"depth": 2}),
        ((), {"msg": "a", "depth": 2}),
        ((), {"loud": False, "depth": 2, "msg": "a"}),
    ],
)
def test_a_value_is_recorded_by_parameter_name_however_it_was_passed(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert compare(seen(("nvtx_range_push", ("a",), {})), seen(("nvtx_range_push", args, kwargs))) == []


def test_an_argument_that_differs_is_seen_under_its_name() -> None:
    differences = compare(seen(("nvtx_range_push", ("a",), {})), seen(("nvtx_range_push", ("a",), {"depth": 3})))
    assert [difference.signature for difference in differences] == [("call/nvtx_range_push/0/depth", "value")]


def test_calls_are_numbered_and_their_order_is_kept_across_names() -> None:
    first, second = ("nvtx_range_push", ("a",), {}), ("fused_attn_bwd", (1, []), {})
    observation = seen(first, second, first)
    assert observation["calls/sequence"] == Plain("list", ["nvtx_range_push", "fused_attn_bwd", "nvtx_range_push"])
    assert observation["call/nvtx_range_push/1/msg"] == Plain("str", "a")
    assert [found.signature for found in compare(observation, seen(first, first, second))] == [
        ("calls/sequence", "order")
    ]


def test_results_pass_through_untouched() -> None:
    watched = seam()
    with watched.attached(recorder()):
        tensor, aux = torch.zeros(1), [torch.zeros(2)]
        result = watched.names["fused_attn_bwd"](tensor, aux)  # type: ignore[operator]
        assert result[0] is tensor
        assert result[1] is aux
        assert watched.names["nvtx_range_push"]("a") == "a 2 False"  # type: ignore[operator]


def test_nothing_is_recorded_while_no_recorder_is_attached_and_counting_starts_anew() -> None:
    watched, one, two = seam(), recorder(), recorder()
    call: Any = watched.names["nvtx_range_push"]
    call("before")
    with watched.attached(one):
        call("first")
    call("between")
    with watched.attached(two):
        call("first")
    assert compare(one.observation, two.observation) == []
    assert one.observation["calls/sequence"] == Plain("list", ["nvtx_range_push"])


def test_the_recorder_is_let_go_and_the_order_of_calls_kept_when_a_subject_raises() -> None:
    watched, now = seam(), recorder()
    call: Any = watched.names["nvtx_range_push"]
    with pytest.raises(ValueError, match="too deep"), watched.attached(now):
        call("a", -1)
    assert now.observation["call/nvtx_range_push/0/depth"] == Plain("int", -1)
    assert now.observation["calls/sequence"] == Plain("list", ["nvtx_range_push"])
    assert watched.recorder is None


def test_a_call_that_does_not_fit_raises_what_it_raises_unwatched_and_is_recorded() -> None:
    watched, now = seam(), recorder()
    call: Any = watched.names["nvtx_range_push"]
    with pytest.raises(TypeError, match="nonsense"), watched.attached(now):
        call("a", nonsense=1)
    assert now.observation["call/nvtx_range_push/0/arguments"] == Plain("list", ["str", "int"])


def test_names_that_only_answer_a_question_are_not_watched() -> None:
    watched = seam(flash_attn_cuda_bwd=None)
    assert watched.names["other"] is label
    assert watched.names["flash_attn_cuda_bwd"] is None
    assert watched.names["nvtx_range_push"] is not label


def test_every_watched_name_is_one_of_the_seam() -> None:
    names = get_engine("reference").seam()
    assert set(WATCHED) <= set(names)
    watched = WatchedSeam(names)
    assert {name for name in names if watched.names[name] is not names[name]} == {
        *(name for name in WATCHED if callable(names[name])),
        "dpa_utils",  # a namespace of each subject's own
    }


def test_the_aux_list_is_recorded_slot_by_slot_as_the_kernel_gets_it() -> None:
    watched, now = seam(), recorder()
    stats, bias = torch.tensor([1.0]), now.live.tensors["attn_bias"]
    aux = [stats, bias]
    with watched.attached(now):
        watched.names["fused_attn_bwd"](1, aux)  # type: ignore[operator]
        aux.reverse()
        aux.append(stats)
        stats.fill_(9)
    observation = now.observation
    assert observation["aux/length"] == Plain("int", 2)
    assert [path for path in observation if path.startswith("aux/")] == ["aux/length", "aux/0", "aux/1"]
    first, second = observation["aux/0"], observation["aux/1"]
    assert isinstance(first, Array)
    assert isinstance(second, Array)
    assert (first.meaning, first.data.tolist()) == ("fresh", [1.0])
    assert second.meaning == "input attn_bias"
    assert not any("aux_ctx_tensors" in path for path in observation)


def test_an_aux_that_is_no_list_and_a_second_backward_are_recorded_too() -> None:
    observation = seen(("fused_attn_bwd", (1, None), {}), ("fused_attn_bwd", (1, [torch.zeros(1)]), {}))
    assert observation["aux"] == Plain("NoneType", None)
    assert observation["aux/call 1/length"] == Plain("int", 1)


def test_results_of_the_forward_kernel_are_named_and_an_input_among_them_is_still_that_input() -> None:
    watched, now = seam(), recorder()
    output, stats, rng_state, max_logit = torch.zeros(4), torch.zeros(3), torch.zeros(2), torch.zeros(1)
    bias = now.live.tensors["attn_bias"]
    with watched.attached(now):
        watched.names["fused_attn_fwd"]((output, [stats, rng_state, bias], max_logit))  # type: ignore[operator]
        watched.names["fused_attn_fwd"]((torch.zeros(4), [again := torch.zeros(3)]))  # type: ignore[operator]
    assert [now.meaning(tensor) for tensor in (output, stats, rng_state, bias, max_logit, again)] == [
        "output of fused_attn_fwd",
        "softmax_stats of fused_attn_fwd",
        "rng_state of fused_attn_fwd",
        "input attn_bias",
        "max_logit of fused_attn_fwd",
        "softmax_stats of fused_attn_fwd call 1",
    ]


@pytest.mark.parametrize("result", [None, (), (torch.zeros(1),), (1, None), [torch.zeros(1), "aux"]])
def test_an_odd_result_of_the_forward_kernel_reaches_the_subject_as_it_is(result: Any) -> None:
    watched = seam()
    with watched.attached(recorder()):
        assert watched.names["fused_attn_fwd"](result) is result  # type: ignore[operator]


# ------------------------------------------------------------------ FP8, silence, passes

ENGINE = get_engine("reference")
FP8_CASE = Case(fp8_recipe="delayed", max_seqlen_q=128, max_seqlen_kv=128, head_dim_qk=32, head_dim_v=32)


def fp8() -> tuple[WatchedSeam, Recorder, dict[str, Any]]:
    watched, inputs = WatchedSeam(ENGINE.seam()), build(FP8_CASE)
    live = inputs.fresh(engine=ENGINE)
    assert live.quantizers is not None
    return watched, Recorder(inputs, live, padding_defined=True, kinds=watched.kinds), live.quantizers.named()


@pytest.mark.parametrize("method", ["__call__", "quantize"])
def test_the_call_of_a_quantizer_is_recorded_once_however_it_is_called_and_its_result_named(method: str) -> None:
    watched, now, quantizers = fp8()
    with watched.attached(now):
        made = getattr(quantizers["dO"], method)(now.live.output_grad)
        again = getattr(quantizers["O"], method)(now.live.output_grad)
    seen_ = now.observation
    assert seen_["calls/sequence"] == Plain("list", ["quantize", "quantize"])
    whose = seen_["call/quantize/0/quantizer"]
    assert isinstance(whose, Plain)
    assert isinstance(whose.value, dict)
    assert whose.value["is"] == "the caller's dO"
    tensor = seen_["call/quantize/0/tensor"]
    assert isinstance(tensor, Array)
    assert tensor.meaning == "gradient of the output"
    assert now.meaning(made) == "result of quantize"
    assert now.meaning(again) == "result of quantize call 1"


def test_the_classes_of_the_quantizers_are_what_they_were_once_the_recorder_is_let_go() -> None:
    watched, now, quantizers = fp8()
    before = [{name: id(item) for name, item in vars(cls).items()} for cls in watched.kinds.quantizers]
    with pytest.raises(AttributeError), watched.attached(now):
        quantizers["O"](None)
    assert [{name: id(item) for name, item in vars(cls).items()} for cls in watched.kinds.quantizers] == before


def test_what_a_function_of_the_seam_calls_itself_is_not_recorded_and_its_results_are_named() -> None:
    watched, now, quantizers = fp8()
    tensors = [now.live.tensors[name].detach() for name in "qkv"]
    with watched.attached(now):
        call: Any = watched.names["combine_and_quantize"]
        q, k, v, *_ = call(FP8_CASE.qkv_layout, *tensors, quantizers["QKV"])
        back: Any = watched.names["combine_and_dequantize"]
        plain_ = back(FP8_CASE.qkv_layout, q, k, v)
    assert now.observation["calls/sequence"] == Plain("list", ["combine_and_quantize", "combine_and_dequantize"])
    assert [now.meaning(item) for item in (q, k, v)] == [f"{name} of combine_and_quantize" for name in "qkv"]
    assert [now.meaning(item) for item in plain_] == [f"{name} of combine_and_dequantize" for name in "qkv"]
    assert "call/combine_and_dequantize/0/q_fp8/data" in now.observation


def test_printing_quantizers_is_recorded_by_whose_they_are_and_without_their_values() -> None:
    watched, now, quantizers = fp8()
    with watched.attached(now):
        watched.names["print_quantizers"]("label", 1, *quantizers.values())  # type: ignore[operator]
    paths = [path for path in now.observation if path.startswith("call/print_quantizers/0/")]
    assert len(paths) == 2 + len(quantizers)
    assert all(isinstance(now.observation[path], Plain) for path in paths)


def test_a_silent_block_is_not_recorded_and_recording_goes_on_after_it() -> None:
    watched, now = seam(), recorder()
    call: Any = watched.names["nvtx_range_push"]
    with watched.attached(now):
        call("before")
        with pytest.raises(ValueError, match="too deep"), watched.silent():
            call("hidden", -1)
        call("after")
    assert now.observation["calls/sequence"] == Plain("list", ["nvtx_range_push", "nvtx_range_push"])
    assert now.observation["call/nvtx_range_push/1/msg"] == Plain("str", "after")


def test_calls_are_counted_and_ordered_pass_by_pass() -> None:
    watched, now = seam(), recorder()
    call: Any = watched.names["nvtx_range_push"]
    with watched.attached(now):
        call("first")
        now.turn_to(now.inputs, now.live, 2)
        call("second")
        now.turn_to(now.inputs, now.live, 1)
        call("third")
    assert now.observation["call/nvtx_range_push/1/msg"] == Plain("str", "third")
    assert now.observation["call/pass 2/nvtx_range_push/0/msg"] == Plain("str", "second")
    assert now.observation["calls/sequence"] == Plain("list", ["nvtx_range_push"] * 2)
    assert now.observation["calls/pass 2/sequence"] == Plain("list", ["nvtx_range_push"])


def test_memory_that_flash_attention_is_to_write_to_is_recorded_without_what_lay_there() -> None:
    written: list[Any] = []

    def compiled(*args: Any) -> list[Any]:
        written.extend(args[6:9])
        return [*args[6:9], None]

    watched, now = seam(flash_attn_cuda_bwd=compiled), recorder()
    tensors = [torch.full((2,), float(number)) for number in range(9)]
    with watched.attached(now):
        watched.names["flash_attn_cuda_bwd"](*tensors, *range(10))  # type: ignore[operator]
    for name, tensor in zip(("dq", "dk", "dv"), written, strict=True):
        value = now.observation[f"call/flash_attn_cuda_bwd/0/{name}"]
        assert isinstance(value, Array)
        assert value.data is None
        assert now.meaning(tensor) == f"{name} of flash_attn_cuda_bwd"
    other = now.observation["call/flash_attn_cuda_bwd/0/softmax_lse"]
    assert isinstance(other, Array)
    assert other.data.tolist() == [5, 5]
