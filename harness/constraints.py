"""What no fused attention kernel takes, on any hardware: constraints on a case's options, as data.

A case that breaks one can be stated, and a call with it raises; nothing is learnt from drawing it often. The reference
engine refuses by this table, generated cases stay inside it, and a message names the constraint that excludes a choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.layouts import LAYOUTS

if TYPE_CHECKING:
    from harness.case import Case


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint: ``excludes`` takes the values of ``fields``, in their order, and says whether they clash.

    ``message`` is formatted with the values by name.
    """

    id: str
    fields: tuple[str, ...]
    excludes: Callable[..., bool]
    message: str

    def refusal(self, values: dict[str, Any]) -> str | None:
        """Return the message where the values clash, else None; ``values`` must hold every field."""
        chosen = {name: values[name] for name in self.fields}
        return self.message.format(**chosen) if self.excludes(*chosen.values()) else None


def _ragged_or_paged(qkv_layout: str) -> bool:
    return LAYOUTS[qkv_layout].thd or LAYOUTS[qkv_layout].paged


def _not_dense_alike(qkv_layout: str) -> bool:
    layout = LAYOUTS[qkv_layout]
    return layout.thd or layout.paged or layout.q_format != layout.kv_format


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "no-pre-scale-bias",
        ("attn_bias_type",),
        lambda bias: bias == "pre_scale_bias",
        "attn_bias_type={attn_bias_type} is not supported by any kernel",
    ),
    Constraint(
        "alibi-is-causal",
        ("attn_bias_type", "attn_mask_type"),
        lambda bias, mask: bias == "alibi" and "causal" not in mask,
        "attn_bias_type={attn_bias_type} needs a causal mask, not attn_mask_type={attn_mask_type}",
    ),
    Constraint(
        "lengths-need-padding",
        ("qkv_layout", "attn_mask_type"),
        lambda layout, mask: _ragged_or_paged(layout) and "padding" not in mask,
        "qkv_layout={qkv_layout} needs a padding mask, not attn_mask_type={attn_mask_type}",
    ),
    Constraint(
        "paged-without-bias",
        ("qkv_layout", "attn_bias_type"),
        lambda layout, bias: LAYOUTS[layout].paged and bias != "no_bias",
        "qkv_layout={qkv_layout} takes no bias, not attn_bias_type={attn_bias_type}",
    ),
    Constraint(
        "paged-without-dropout",
        ("qkv_layout", "dropout_p"),
        lambda layout, dropout: LAYOUTS[layout].paged and dropout != 0.0,
        "qkv_layout={qkv_layout} takes no dropout, not dropout_p={dropout_p}",
    ),
    Constraint(
        "paged-without-backward",
        ("qkv_layout", "requires_grad"),
        lambda layout, requires_grad: LAYOUTS[layout].paged and bool(requires_grad),
        "qkv_layout={qkv_layout}: paged KV has no backward, and requires_grad={requires_grad} asks for one",
    ),
    Constraint(
        "fp8-is-dense",
        ("fp8_recipe", "qkv_layout"),
        lambda recipe, layout: recipe != "none" and _not_dense_alike(layout),
        "fp8_recipe={fp8_recipe} takes dense layouts with q, k and v alike (sbhd or bshd), not qkv_layout={qkv_layout}",
    ),
    Constraint(
        "fp8-without-bias",
        ("fp8_recipe", "attn_bias_type"),
        lambda recipe, bias: recipe != "none" and bias != "no_bias",
        "fp8_recipe={fp8_recipe} takes no bias and no ALiBi, not attn_bias_type={attn_bias_type}",
    ),
    Constraint(
        "fp8-without-max-logit",
        ("fp8_recipe", "return_max_logit"),
        lambda recipe, wanted: recipe != "none" and wanted,
        "fp8_recipe={fp8_recipe} gives no max logit, and return_max_logit={return_max_logit}",
    ),
    Constraint(
        "mxfp8-input-is-separate",
        ("fp8_recipe", "fp8_input", "qkv_layout"),
        lambda recipe, given, layout: (
            recipe == "mxfp8" and given and layout not in ("bshd_bshd_bshd", "sbhd_sbhd_sbhd")
        ),
        "fp8_recipe={fp8_recipe} with fp8_input={fp8_input} takes bshd_bshd_bshd or sbhd_sbhd_sbhd, not "
        "qkv_layout={qkv_layout}",
    ),
    Constraint(
        "mxfp8-in-blocks",
        ("fp8_recipe", "max_seqlen_q", "max_seqlen_kv", "head_dim_qk", "head_dim_v"),
        lambda recipe, q, kv, d, d_v: recipe == "mxfp8" and bool(q % 128 or kv % 128 or d % 32 or d_v % 32),
        "fp8_recipe={fp8_recipe} needs sequences of a multiple of 128 and head dimensions of a multiple of 32, not "
        "max_seqlen_q={max_seqlen_q}, max_seqlen_kv={max_seqlen_kv}, head_dim_qk={head_dim_qk}, "
        "head_dim_v={head_dim_v}",
    ),
)


def refusal(case: Case) -> str | None:
    """Return the message of the first constraint that a case breaks, or None."""
    for constraint in CONSTRAINTS:
        message = constraint.refusal({name: getattr(case, name) for name in constraint.fields})
        if message is not None:
            return message
    return None
