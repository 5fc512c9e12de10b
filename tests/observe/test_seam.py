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
