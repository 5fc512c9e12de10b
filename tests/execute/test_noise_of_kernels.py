"""On an engine whose kernels may be noisy, noise counts as theirs only where its bits prove it."""

from __future__ import annotations

import functools

import pytest
import torch

from harness.case import Case
from harness.engines.reference import ReferenceEngine
from harness.execute.pair import Pair
from harness.subjects.source import Source, resolve

CASE = Case(dtype="fp32", batch_size=2, num_heads=2, num_gqa_groups=2, max_seqlen_q=3, max_seqlen_kv=6)
BACKWARD = "        return (*_fused_attn_backward_impl(bwd_args), None)"


class NoisyKernels(ReferenceEngine):
    """Adds rare unseeded noise to dq, as an atomic sum on a GPU does: the control's ``quiet`` first calls get none."""

    repeatable = False
    quiet = 0

    def seam(self, *, offload_v1: bool = False) -> dict[str, object]:
        names = super().seam(offload_v1=offload_v1)
        kernel = names["fused_attn_bwd"]
        calls = 0

        @functools.wraps(kernel)  # type: ignore[arg-type]
        def noisy(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            result = kernel(*args, **kwargs)  # type: ignore[operator]
            if calls > self.quiet:
                result[0].add_(torch.randn(result[0].shape, generator=torch.Generator().manual_seed(calls)) * 1e-7)
            return result

        names["fused_attn_bwd"] = noisy
        return names


def candidate(edit: str) -> Source:
    text = resolve("refactored").text
    assert text.count(BACKWARD) == 1
    return Source("candidate", "candidate.py", text.replace(BACKWARD, edit))


def test_noise_of_a_kernel_that_never_met_the_control_is_noise() -> None:
    engine = NoisyKernels()
    pair = Pair(resolve("refactored"), resolve("refactored"), engine)
    engine.quiet = 10**9  # read by the control's kernel and the candidate's alike, so both are quiet here
    assert pair.run(CASE).outcome == "match"
    engine.quiet = 0
    assert pair.run(CASE).outcome == "noisy"


@pytest.mark.parametrize(
    "write",
    [
        "grads[0].data.add_({noise})",
        "grads[0].add_({noise})",
        "torch.empty(0).set_(grads[0].untyped_storage(), 0, (grads[0].numel(),)).add_({noise}.reshape(-1))",
        "grads = (grads[0] + {noise}, *grads[1:])",
    ],
)
def test_noise_that_the_candidate_adds_is_its_own_by_whatever_way(write: str) -> None:
    drawn = "torch.frombuffer(bytearray(os.urandom(4 * grads[0].numel())), dtype=torch.int32)"
    noise = f"{drawn}.view(grads[0].shape) * 1e-9"
    source = candidate(
        "        grads = _fused_attn_backward_impl(bwd_args)\n"
        f"        {write.format(noise='(' + noise + ')')}\n"
        "        return (*grads, None)"
    )
    engine = NoisyKernels()
    engine.quiet = 10**9
    result = Pair(resolve("refactored"), source, engine).run(CASE)
    assert result.outcome == "difference"
    assert "grad/q" in {difference.path for difference in result.differences}


def test_a_nan_that_comes_and_goes_is_never_noise() -> None:
    source = candidate(
        "        grads = _fused_attn_backward_impl(bwd_args)\n"
        "        grads[0].data[0].fill_(float('nan') if os.urandom(1)[0] % 2 else 1.0)\n"
        "        return (*grads, None)"
    )
    engine = NoisyKernels()
    engine.quiet = 10**9
    assert Pair(resolve("refactored"), source, engine).run(CASE).outcome == "difference"
