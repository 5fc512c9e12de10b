"""TransformerEngine's own releases, legacy and refactored, load on the reference engine and run."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch

from harness.case import Case
from harness.engines.reference import ReferenceEngine
from harness.inputs import build
from harness.observe.run_pass import observe
from harness.observe.seam import WatchedSeam
from harness.observe.values import Array, Plain
from harness.subjects.source import resolve
from harness.subjects.subject import PARAMETERS, TENSOR_PARAMETERS, Subject, load

RELEASES = ("2.16.0", "2.17.0", "2.18.0", "2.19.0", "2.20.2")
CASES = {
    "packed, causal, dropout": Case(
        qkv_layout="sbh3d", batch_size=3, attn_mask_type="causal", window_size=(-1, 0), dropout_p=0.1, seed=1
    ),
    "grouped, learnable offset, own generator": Case(
        qkv_layout="bshd_sbhd_sbhd", dtype="fp16", num_heads=6, num_gqa_groups=3, max_seqlen_kv=24, head_dim_v=16,
        softmax_type="learnable", requires_grad=("q", "k", "v", "softmax_offset"), generator="own", dropout_p=0.5,
        output_grad="transposed", seed=2,
    ),
    "bias with gradient, padding": Case(
        qkv_layout="sbhd_sb2hd", dtype="fp32", attn_mask_type="padding", attn_bias_type="post_scale_bias",
        bias_shape="bhss", requires_grad=("q", "k", "v", "attn_bias"), output_grad="expanded", seed=3,
    ),
    "max logit, some gradients": Case(return_max_logit=True, requires_grad=("q", "v"), seed=4),
}  # fmt: skip


@functools.cache
def loaded(spec: str) -> tuple[Subject, WatchedSeam, ReferenceEngine]:
    engine = ReferenceEngine()
    seam = WatchedSeam(engine.seam())
    return load(resolve(spec), engine, seam.names), seam, engine


@pytest.mark.network
@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_runs_forward_and_backward_with_no_exception(release: str, what: str) -> None:
    subject, seam, engine = loaded(f"te=={release}")
    case = CASES[what]
    seen = observe(subject, build(case), engine, seam)
    raised = {path: seen[path] for path in seen if path.startswith("exception/")}
    assert raised == {}
    assert seen["calls/sequence"] != []
    assert any(path.startswith("call/fused_attn_fwd/0/") for path in seen)
    assert any(path.startswith("call/fused_attn_bwd/0/") for path in seen)
    assert seen["backward/calls"] == Plain("int", 1)
    for name in case.requires_grad:
        gradient = seen[f"grad/{name}"]
        assert isinstance(gradient, Array)
        assert gradient.data is not None
        assert bool(gradient.data.isfinite().all())
        assert float(gradient.data.abs().max()) > 0
    output = seen["output/0"]
    assert isinstance(output, Array)
    assert output.data is not None
    assert output.data.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.dtype]


@pytest.mark.network
def test_the_36_values_of_2_19_0_stand_in_the_order_of_this_repositorys_legacy_one() -> None:
    theirs, ours = loaded("te==2.19.0")[0].convention, loaded("legacy")[0].convention
    assert theirs.bag is None
    assert ours.bag is None
    assert theirs.parameters == ours.parameters
    assert len(theirs.parameters) == 36


@pytest.mark.network
def test_the_bag_of_2_20_2_has_the_fields_of_this_repositorys_refactored_one() -> None:
    def fields(convention: Any) -> set[str]:
        return set(inspect.signature(convention.bag).parameters)

    theirs, ours = loaded("te==2.20.2")[0].convention, loaded("refactored")[0].convention
    assert fields(theirs) == fields(ours)
    assert set(theirs.parameters) - {theirs.bag_parameter} == set(TENSOR_PARAMETERS)
    assert len(theirs.parameters) == len(ours.parameters) == 6


@pytest.mark.network
def test_every_name_that_a_release_takes_has_a_meaning_and_every_meaning_is_taken_by_some_release() -> None:
    taken: set[str] = set()
    for release in RELEASES:
        convention = loaded(f"te=={release}")[0].convention
        names = {*convention.parameters} - {convention.bag_parameter}
        if convention.bag is not None:
            names |= set(inspect.signature(convention.bag).parameters)
        assert names <= set(PARAMETERS)
        taken |= names
    assert taken == set(PARAMETERS)
