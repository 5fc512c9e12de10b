"""The lanes: slices of the space that are reported on their own."""

from __future__ import annotations

from collections.abc import Callable

from harness.case import Case, padding


def _f16(case: Case) -> bool:
    return case.dtype in ("bf16", "fp16")


LANES: dict[str, Callable[[Case], bool]] = {
    "dense F16": lambda case: (
        _f16(case) and case.layout.packing is None and not case.layout.thd and not case.layout.paged
    ),
    "packed F16": lambda case: _f16(case) and case.layout.packing is not None and not case.layout.thd,
    "THD": lambda case: case.layout.thd,
    "THD with gaps": lambda case: case.pad_between_seqs,
    "paged": lambda case: case.layout.paged,
    "FP32": lambda case: case.dtype == "fp32",
    "padding": lambda case: padding(case.attn_mask_type),
    "causal": lambda case: "causal" in case.attn_mask_type,
    "window": lambda case: case.window_size[0] >= 0 or case.window_size[1] > 0,
    "bias": lambda case: case.has_bias,
    "ALiBi": lambda case: case.attn_bias_type == "alibi",
    "softmax offset": lambda case: case.has_softmax_offset,
    "dropout": lambda case: case.dropout_p > 0,
    "GQA": lambda case: case.num_gqa_groups != case.num_heads,
    "MLA": lambda case: case.head_dim_qk != case.head_dim_v,
    "cross attention": lambda case: case.max_seqlen_q != case.max_seqlen_kv,
    "max logit": lambda case: case.return_max_logit,
    "inference": lambda case: not case.is_training,
    "partial gradients": lambda case: not {"q", "k", "v"} <= set(case.requires_grad),
    "strided output gradient": lambda case: case.output_grad != "contiguous",
}


def lanes_of(case: Case) -> tuple[str, ...]:
    """Return the names of the lanes that a case belongs to, in the table's order."""
    return tuple(name for name, belongs in LANES.items() if belongs(case))


NEVER_DRAWN = ("FP8", "CPU offload", "FAv2 backward", "graph capture")
"""Branches of the function that no case reaches: a report names them, so that green does not read as complete."""
