"""The lanes: parts of the space that are reported on their own, and that a run can be asked for by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.case import DTYPES, MASKS, Case, causal, padding
from harness.layouts import LAYOUTS
from harness.space import FACTORS, Box, meet, row, within


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane: its name on the command line, what it is in words, and the levels that belong to it."""

    name: str
    title: str
    box: Box


def _lane(name: str, title: str, **levels: str | Iterable[str]) -> Lane:
    """Return a lane by its levels; a string holds them with spaces between."""
    return Lane(
        name,
        title,
        {factor: frozenset(found.split() if isinstance(found, str) else found) for factor, found in levels.items()},
    )


def _all_but(factor: str, levels: str) -> list[str]:
    return [level for level in FACTORS[factor].levels if level not in levels.split()]


_F16 = "bf16 fp16"
_DENSE = [name for name, layout in LAYOUTS.items() if not layout.thd and not layout.paged]
_FP8 = _all_but("fp8_recipe", "none")

LANES: dict[str, Lane] = {
    lane.name: lane
    for lane in (
        _lane("plain", "one forward and one backward, nothing in FP8", scenario="plain", fp8_recipe="none"),
        _lane("dense-f16", "F16 and BF16, q, k and v in buffers of their own", dtype=_F16, fp8_recipe="none",
              qkv_layout=[name for name in _DENSE if LAYOUTS[name].packing is None]),
        _lane("packed-f16", "F16 and BF16, q, k and v or k and v in one buffer", dtype=_F16, fp8_recipe="none",
              qkv_layout=[name for name in _DENSE if LAYOUTS[name].packing is not None]),
        _lane("thd", "ragged batches", qkv_layout=[name for name, layout in LAYOUTS.items() if layout.thd]),
        _lane("thd-gaps", "ragged batches with rows that belong to no sequence", pad_between_seqs="true"),
        _lane("paged", "keys and values in a paged cache",
              qkv_layout=[name for name, layout in LAYOUTS.items() if layout.paged]),
        _lane("fp32", "FP32, which no real kernel takes", dtype="fp32"),
        _lane("padding", "padding masks", attn_mask_type=filter(padding, MASKS)),
        _lane("causal", "causal masks", attn_mask_type=filter(causal, MASKS)),
        _lane("window", "sliding windows", window_size="left both"),
        _lane("bias", "a bias tensor", bias=_all_but("bias", "no_bias alibi")),
        _lane("alibi", "ALiBi", bias="alibi"),
        _lane("softmax-offset", "off-by-one and learnable softmax", softmax_type=_all_but("softmax_type", "vanilla")),
        _lane("dropout", "dropout", dropout_p="some"),
        _lane("gqa", "fewer key heads than query heads", heads="gqa mqa"),
        _lane("mla", "values of another head dimension than keys", head_dims="v_smaller v_larger"),
        _lane("cross-attention", "queries and keys of different lengths", lengths=_all_but("lengths", "self")),
        _lane("max-logit", "the largest logit is returned too", return_max_logit="true"),
        _lane("inference", "is_training false", is_training="false"),
        _lane("partial-gradients", "some gradients asked for, others not",
              requires_grad=_all_but("requires_grad", "all none")),
        _lane("strided-output-gradient", "an output gradient that is transposed, expanded or sliced",
              output_grad="transposed expanded sliced"),
        _lane("fp8-delayed", "FP8, delayed scaling", fp8_recipe="delayed"),
        _lane("fp8-current", "FP8, current scaling", fp8_recipe="current"),
        _lane("mxfp8", "FP8, MXFP8 blocks", fp8_recipe="mxfp8"),
        _lane("fp8-hybrid", "FP8, current scaling of QKV and dO, delayed of the rest", fp8_recipe="hybrid"),
        _lane("fp8-f16-backward", "FP8 forward, backward in F16 (NVTE_FP8_DPA_BWD=0)", fp8_recipe=_FP8,
              fp8_dpa_bwd="false", requires_grad=_all_but("requires_grad", "none")),
        _lane("fp8-input", "q, k and v come quantized", fp8_input="true"),
        _lane("fp8-output", "the output is returned quantized", fp8_output="true"),
        _lane("checkpoint", "activation checkpointing, both kinds", scenario="checkpoint checkpoint_reentrant"),
        _lane("saved-tensor-hooks", "hooks that copy, move or restride what is saved",
              scenario="hooks_copy hooks_cpu hooks_strided"),
        _lane("offload", "CPU offload", scenario="offload"),
        _lane("offload-v1", "CPU offload by its first code path", scenario="offload_v1"),
        _lane("fav2-backward", "backward by FlashAttention 2", scenario="fav2_backward"),
        _lane("graph-capture", "CUDA graph capture", scenario="graph_capture"),
        _lane("two-graphs", "two graphs alive at once", scenario="two_graphs"),
        _lane("changed-between", "environment, scales, lengths or recipe changed between forward and backward",
              scenario="environment_changed scale_changed cu_seqlens_changed recipe_changed"),
        _lane("in-place-edit", "a saved input edited in place", scenario="inplace_edit"),
        _lane("second-backward", "backward a second and a third time", scenario="second_backward"),
        _lane("memory", "what stays alive once the output is gone", scenario="output_deleted"),
        _lane("no-grad", "under torch.no_grad", scenario="no_grad"),
        _lane("train-eval", "training, evaluation and training in turn", scenario="alternating"),
        _lane("nvtx", "NVTX ranges", scenario="nvtx"),
        _lane("debug-prints", "debug prints", scenario="debug_prints"),
    )
}  # fmt: skip
"""One row per lane, in the order of reports. A case can be of several, and is of at least one."""

OUTSIDE = (
    "Context parallelism does not pass through FusedAttnFunc: it has autograd functions of its own, which nothing here "
    "calls."
)


def lanes_of(case: Case) -> tuple[str, ...]:
    """Return the names of the lanes that a case belongs to, in the table's order."""
    levels = row(case)
    return tuple(name for name, lane in LANES.items() if within(levels, lane.box))


def boxes(layouts: Sequence[str] = (), lanes: Sequence[str] = (), dtypes: Sequence[str] = DTYPES) -> tuple[Box, ...]:
    """Return the part of the space that is asked for, a box per lane: any of the layouts, any of the lanes.

    None of a kind stands for all of it. A lane of other dtypes than those given keeps its own.
    """
    asked: Box = {"qkv_layout": frozenset(layouts)} if layouts else {}
    found = []
    for box in [LANES[name].box for name in lanes] or [{}]:
        own = box.get("dtype", frozenset(DTYPES))
        found.append(meet(meet(asked, box), {"dtype": own & frozenset(dtypes) or own}))
    return tuple(found)
