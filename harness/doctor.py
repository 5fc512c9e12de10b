"""Say what this machine can check, engine by engine and feature by feature, and why not the rest."""

from __future__ import annotations

from dataclasses import dataclass

from harness.case import Case, CaseError
from harness.engines.api import EngineUnavailable, get_engine
from harness.layouts import LAYOUTS

FEATURES: dict[str, dict[str, object]] = {
    "F16": {},
    "BF16": {"dtype": "bf16"},
    "FP32": {"dtype": "fp32"},
    "padding mask": {"attn_mask_type": "padding"},
    "causal mask": {"attn_mask_type": "causal", "window_size": (-1, 0)},
    "bottom-right causal mask": {"attn_mask_type": "causal_bottom_right", "window_size": (-1, 0)},
    "window": {"attn_mask_type": "causal", "window_size": (4, 0)},
    "bias": {"attn_bias_type": "post_scale_bias", "requires_grad": ("q", "k", "v", "attn_bias")},
    "ALiBi": {"attn_bias_type": "alibi", "attn_mask_type": "causal", "window_size": (-1, 0)},
    "softmax offset": {"softmax_type": "learnable", "requires_grad": ("q", "k", "v", "softmax_offset")},
    "dropout": {"dropout_p": 0.1},
    "grouped queries": {"num_gqa_groups": 2},
    "different head sizes": {"head_dim_v": 32},
    "max logit": {"return_max_logit": True},
    "deterministic": {"deterministic": True},
}
"""One case per feature, as changes to a plain one."""

_PLAIN = {"qkv_layout": "bshd_bshd_bshd", "dtype": "fp16", "max_seqlen_q": 64, "max_seqlen_kv": 64, "head_dim_qk": 64,
          "head_dim_v": 64}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether one thing can be checked here; ``reason`` says what stands in the way."""

    what: str
    works: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What one engine can check on this machine."""

    engine: str
    available: Finding
    environment: dict[str, str]
    layouts: tuple[Finding, ...] = ()
    features: tuple[Finding, ...] = ()


def diagnose(name: str) -> Diagnosis:
    """Return what an engine can check here: each layout with a plain case, each feature with a plain layout."""
    try:
        engine = get_engine(name)
    except EngineUnavailable as error:
        return Diagnosis(name, Finding(name, False, str(error)), {})

    def check(what: str, **changes: object) -> Finding:
        try:
            case = Case.from_dict({**_PLAIN, **changes})
        except CaseError as error:
            return Finding(what, False, str(error))
        reason = engine.unsupported(case)
        return Finding(what, reason is None, reason or "")

    def layout(row: str) -> Finding:
        changes: dict[str, object] = {"attn_mask_type": "padding"} if LAYOUTS[row].thd or LAYOUTS[row].paged else {}
        if LAYOUTS[row].paged:
            changes |= {"page_size": 16, "requires_grad": (), "is_training": False}
        return check(row, qkv_layout=row, **changes)

    return Diagnosis(
        name,
        Finding(name, True),
        engine.environment(),
        tuple(layout(row) for row in LAYOUTS),
        tuple(check(feature, **changes) for feature, changes in FEATURES.items()),
    )
