"""Every lane holds some of the cases that are drawn and leaves out others."""

from __future__ import annotations

import functools

import pytest

from harness.case import Case
from harness.lanes import LANES, lanes_of
from harness.strategies import cases, draw_cases


@functools.cache
def drawn() -> list[Case]:
    return draw_cases(cases(dtypes=("bf16", "fp16", "fp32")), 700, seed=0)


FP8 = {"fp8_recipe": "delayed"}
THD = {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding"}


# one case per lane that is in it, and one that differs in that alone and is not
EXAMPLES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "dense-f16": ({"qkv_layout": "sbhd_bshd_bshd"}, {"qkv_layout": "sbhd_bshd_bshd", "dtype": "fp32"}),
    "packed-f16": ({"qkv_layout": "sbhd_sb2hd", "dtype": "fp16"}, {"qkv_layout": "sbhd_sb2hd", "dtype": "fp32"}),
    "thd": ({"qkv_layout": "thd_bshd_bshd"}, {"qkv_layout": "bshd_bshd_bshd"}),
    "thd-gaps": (
        {"qkv_layout": "thd_bshd_bshd", "pad_between_seqs": True},
        {"qkv_layout": "thd_bshd_bshd", "pad_between_seqs": False},
    ),
    "paged": ({"qkv_layout": "paged_kv_bshd_bshd_bshd", "page_size": 16}, {"qkv_layout": "bshd_bshd_bshd"}),
    "fp32": ({"dtype": "fp32"}, {"dtype": "fp16"}),
    "padding": (
        {"attn_mask_type": "padding_causal_bottom_right", "window_size": (-1, 0)},
        {"attn_mask_type": "causal_bottom_right", "window_size": (-1, 0)},
    ),
    "causal": ({"attn_mask_type": "padding_causal", "window_size": (-1, 0)}, {"attn_mask_type": "padding"}),
    "window": (
        {"attn_mask_type": "causal", "window_size": (4, 0)},
        {"attn_mask_type": "causal", "window_size": (-1, 0)},
    ),
    "bias": ({"attn_bias_type": "post_scale_bias"}, {"attn_bias_type": "alibi"}),
    "alibi": ({"attn_bias_type": "alibi"}, {"attn_bias_type": "post_scale_bias"}),
    "softmax-offset": ({"softmax_type": "off-by-one"}, {"softmax_type": "vanilla"}),
    "dropout": ({"dropout_p": 0.1}, {"dropout_p": 0.0}),
    "gqa": ({"num_gqa_groups": 2}, {"num_gqa_groups": 4}),
    "mla": ({"head_dim_v": 16}, {"head_dim_v": 8}),
    "cross-attention": ({"max_seqlen_kv": 24}, {"max_seqlen_kv": 16}),
    "max-logit": ({"return_max_logit": True}, {"return_max_logit": False}),
    "inference": ({"is_training": False}, {"is_training": True}),
    "partial-gradients": ({"requires_grad": ("q", "v")}, {"requires_grad": ("q", "k", "v")}),
    "strided-output-gradient": ({"output_grad": "sliced"}, {"output_grad": "contiguous"}),
    "plain": ({"dtype": "fp32"}, FP8),
    "fp8-delayed": (FP8, {"fp8_recipe": "hybrid"}),
    "fp8-current": ({"fp8_recipe": "current"}, {"fp8_recipe": "hybrid"}),
    "mxfp8": ({"fp8_recipe": "mxfp8"}, {"fp8_recipe": "current"}),
    "fp8-hybrid": ({"fp8_recipe": "hybrid"}, {"fp8_recipe": "current"}),
    "fp8-f16-backward": ({**FP8, "fp8_dpa_bwd": False}, FP8),
    "fp8-input": ({**FP8, "fp8_input": True}, FP8),
    "fp8-output": ({**FP8, "fp8_output": True}, FP8),
    "checkpoint": ({"scenario": "checkpoint_reentrant"}, {"scenario": "hooks_copy"}),
    "saved-tensor-hooks": ({"scenario": "hooks_strided"}, {"scenario": "checkpoint"}),
    "offload": ({"scenario": "offload"}, {"scenario": "offload_v1"}),
    "offload-v1": ({"scenario": "offload_v1"}, {"scenario": "offload"}),
    "fav2-backward": ({**THD, "scenario": "fav2_backward"}, THD),
    "graph-capture": ({"scenario": "graph_capture"}, {}),
    "two-graphs": ({"scenario": "two_graphs"}, {"scenario": "second_backward"}),
    "changed-between": ({"scenario": "cu_seqlens_changed"}, {"scenario": "inplace_edit"}),
    "in-place-edit": ({"scenario": "inplace_edit"}, {"scenario": "scale_changed", **FP8}),
    "second-backward": ({"scenario": "second_backward"}, {"scenario": "two_graphs"}),
    "memory": ({"scenario": "output_deleted"}, {"scenario": "no_grad"}),
    "no-grad": ({"scenario": "no_grad"}, {"scenario": "output_deleted"}),
    "train-eval": ({"scenario": "alternating"}, {}),
    "nvtx": ({"scenario": "nvtx"}, {"scenario": "debug_prints"}),
    "debug-prints": ({"scenario": "debug_prints"}, {"scenario": "nvtx"}),
}


@pytest.mark.parametrize("lane", LANES)
def test_some_drawn_case_is_in_the_lane_and_another_is_not(lane: str) -> None:
    inside = [case for case in drawn() if lane in lanes_of(case)]
    assert inside, f"no drawn case reaches the lane {lane}"
    assert len(inside) < len(drawn()), f"every drawn case is in the lane {lane}"


@pytest.mark.parametrize("lane", LANES)
def test_a_lane_holds_just_what_its_name_says(lane: str) -> None:
    inside, outside = EXAMPLES[lane]
    assert lane in lanes_of(Case.from_dict(inside))
    assert lane not in lanes_of(Case.from_dict(outside))


def test_every_case_belongs_to_a_lane_that_says_what_its_numbers_are() -> None:
    kinds = {"dense-f16", "packed-f16", "thd", "paged", "fp32", "fp8-delayed", "fp8-current", "mxfp8", "fp8-hybrid"}
    assert all(kinds & set(lanes_of(case)) for case in drawn())
