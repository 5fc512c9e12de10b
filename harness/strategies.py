"""Hypothesis strategies over Case: the only place that draws cases, and the only importer of hypothesis.

Hypothesis draws dimensions and seeds; tensors come from ``harness.inputs``. Simple values stand first, so that a
failing case shrinks towards small sizes and switched-off options.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import hypothesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from harness.case import BIAS_SHAPES, MASKS, OUTPUT_GRADIENTS, SOFTMAX_TYPES, Case, causal, padding
from harness.layouts import LAYOUTS

BATCHES = (1, 2, 3, 5)
GROUPS = (1, 2, 3, 4)
HEADS_PER_GROUP = (1, 2, 3)
TOKENS = (1, 3, 6, 16, 24, 40, 65)
PAGE_SIZES = (1, 4, 16)
PAGES = (1, 2, 3)
HEAD_DIMS = (8, 16, 32, 64)
SCALES = (None, 0.5, 0.07)
DROPOUTS = (0.0, 0.1, 0.5)


CaseStrategy: TypeAlias = st.SearchStrategy[Case]


@st.composite
def cases(draw: st.DrawFn, layouts: Sequence[str] = tuple(LAYOUTS), dtypes: Sequence[str] = ("bf16", "fp16")) -> Case:
    """Draw a valid case.

    Sizes are drawn independently from sets that overlap in 1 and 3 alone, so that most are pairwise different and some
    are deliberately equal (h == s, b == 3, h == 3, s == 1).
    """
    layout = LAYOUTS[draw(st.sampled_from(layouts))]
    batch_size = draw(st.sampled_from(BATCHES))
    num_gqa_groups = draw(st.sampled_from(GROUPS))
    num_heads = num_gqa_groups * (1 if layout.parts == 1 else draw(st.sampled_from(HEADS_PER_GROUP)))
    max_seqlen_q = draw(st.sampled_from(TOKENS))
    page_size = draw(st.sampled_from(PAGE_SIZES)) if layout.paged else None
    if page_size is not None:
        max_seqlen_kv = page_size * draw(st.sampled_from(PAGES))
    else:
        max_seqlen_kv = max_seqlen_q if layout.parts == 1 else draw(st.sampled_from(TOKENS))
    head_dim_qk = draw(st.sampled_from(HEAD_DIMS))
    head_dim_v = head_dim_qk if layout.parts < 3 else draw(st.sampled_from((head_dim_qk, *HEAD_DIMS)))
    ragged = layout.thd or layout.paged  # these need the lengths that a padding mask gives
    mask = draw(st.sampled_from([name for name in MASKS if padding(name) or not ragged]))
    windowed = draw(_seldom(4))
    left = draw(st.sampled_from((0, 1, 4, 13))) if windowed else -1
    right = 0 if causal(mask) else draw(st.sampled_from((0, 2, 7))) if windowed else -1
    alibi = ("alibi",) if causal(mask) else ()
    bias_types = ("no_bias",) if layout.paged else ("no_bias", "no_bias", "post_scale_bias", *alibi)
    attn_bias_type = draw(st.sampled_from(bias_types))
    bias_shape = draw(st.sampled_from(BIAS_SHAPES)) if attn_bias_type == "post_scale_bias" else "1hss"
    softmax_type = draw(st.sampled_from(("vanilla", *SOFTMAX_TYPES)))
    is_training = not layout.paged and not draw(_seldom(8))
    groups = {1: (("q", "k", "v"),), 2: (("q",), ("k", "v")), 3: (("q",), ("k",), ("v",))}[layout.parts]
    optional = [("attn_bias",)] * (attn_bias_type == "post_scale_bias") + [("softmax_offset",)] * (
        softmax_type == "learnable"
    )
    frozen = {group for group in (*groups, *optional) if layout.paged or draw(_seldom(6))}  # paged: forward only
    return Case(
        qkv_layout=layout.name,
        dtype=draw(st.sampled_from(dtypes)),
        batch_size=batch_size,
        num_heads=num_heads,
        num_gqa_groups=num_gqa_groups,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        head_dim_qk=head_dim_qk,
        head_dim_v=head_dim_v,
        attn_mask_type=mask,
        window_size=(left, right),
        bottom_right_diagonal=draw(st.sampled_from((None, False, True))),
        attn_bias_type=attn_bias_type,
        bias_shape=bias_shape,
        softmax_type=softmax_type,
        dropout_p=draw(st.sampled_from(DROPOUTS)) if is_training else 0.0,
        attn_scale=draw(st.sampled_from(SCALES)),
        is_training=is_training,
        deterministic=draw(st.booleans()),
        fast_zero_fill=draw(st.sampled_from((True, False))),
        return_max_logit=draw(_seldom(8)),
        generator=draw(st.sampled_from(("default", "own"))),
        pad_between_seqs=layout.thd and draw(st.sampled_from((False, True, True))),
        page_size=page_size,
        requires_grad=tuple(name for group in (*groups, *optional) if group not in frozen for name in group),
        output_grad=draw(st.sampled_from(OUTPUT_GRADIENTS)),
        layer_number=draw(st.sampled_from((1, 7))),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


def _seldom(times: int) -> st.SearchStrategy[bool]:
    """Draw True about once in so many times."""
    return st.sampled_from((False,) * (times - 1) + (True,))


def _settings(count: int, *phases: Phase) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=count,
        phases=phases,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )


def draw_cases(strategy: CaseStrategy, count: int, seed: int) -> list[Case]:
    """Return up to ``count`` distinct cases; the same arguments give the same cases."""
    found: dict[str, Case] = {}

    @hypothesis.seed(seed)
    @_settings(count, Phase.generate)
    @given(strategy)
    def collect(case: Case) -> None:
        found.setdefault(case.id, case)

    collect()
    return list(found.values())


class _Failing(Exception):
    """Raised to have Hypothesis shrink."""


def smallest(
    strategy: CaseStrategy,
    count: int,
    seed: int,
    failing: Case,
    fails: Callable[[Case], bool],
    *,
    runs: int = 200,
    seconds: float = 30.0,
) -> Case:
    """Return the smallest case found that ``fails``, starting from one that ``draw_cases`` drew and that does.

    Hypothesis shrinks only what it drew itself, so the draw is repeated: nothing fails until the known case comes up.
    ``fails`` is called at most ``runs`` times and for about ``seconds``; after that nothing new fails, which ends the
    search. At worst the case given comes back.
    """
    best = failing
    known = {failing.id: True}
    stop = time.monotonic() + seconds
    found = False

    def check(case: Case) -> bool:
        if case.id not in known:
            if not found or len(known) > runs or time.monotonic() > stop:
                return False
            known[case.id] = fails(case)
        return known[case.id]

    @hypothesis.seed(seed)
    @_settings(count, Phase.generate, Phase.shrink)
    @given(strategy)
    def shrink(case: Case) -> None:
        nonlocal best, found
        if check(case):
            best, found = case, True
            raise _Failing

    with contextlib.suppress(_Failing):
        shrink()
    return best
