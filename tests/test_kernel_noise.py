"""Noise that the seam shows to be a kernel's is no difference; noise that a subject adds is one."""

from __future__ import annotations

import pytest

from harness.compare import Difference, Distance
from harness.judge import NOISE_FACTOR, judge
from harness.observe.values import is_kernel_result


def differ(path: str, meaning: str, largest: float, candidate_meaning: str | None = None) -> Difference:
    sides = [{"dtype": "float32", "shape": [1], "stride": [1], "is": what} for what in (meaning, candidate_meaning)]
    if candidate_meaning is None:
        sides[1] = sides[0]
    return Difference(path, "value", sides[0], sides[1], "", Distance(3, 1, (0,), largest, largest))


KERNEL = "d_softmax_offset of fused_attn_bwd"
SEEN = differ("grad/softmax_offset", KERNEL, 4e-7)
AGAIN = [[differ("grad/softmax_offset", KERNEL, 2e-7)]]


def test_noise_that_missed_every_run_of_the_control_is_the_kernels_if_calls_agree() -> None:
    judgement = judge([SEEN], [[]] * 7, AGAIN)
    assert judgement.outcome == "noisy"
    assert [(noise.path, noise.spread) for noise in judgement.noise] == [("grad/softmax_offset", 2e-7)]


def test_a_difference_that_the_candidate_repeats_stands() -> None:
    assert judge([SEEN], [[]] * 7, [[]] * 6).outcome == "difference"


def test_a_difference_far_beyond_the_candidates_spread_stands() -> None:
    far = differ("grad/softmax_offset", KERNEL, 2e-7 * NOISE_FACTOR * 1.01)
    assert judge([far], [[]] * 7, AGAIN).outcome == "difference"


@pytest.mark.parametrize("meaning", ["fresh", "input q", "gradient", f"fresh and {KERNEL}"])
def test_noise_in_what_no_kernel_made_is_the_candidates(meaning: str) -> None:
    again = [[differ("grad/softmax_offset", meaning, 2e-7)]]
    assert judge([differ("grad/softmax_offset", meaning, 2e-7)], [[]] * 7, again).outcome == "difference"


def test_one_differing_argument_withdraws_the_excuse_from_all() -> None:
    argument = Difference("call/fused_attn_bwd/0/attn_scale", "value", None, 0.125, "")
    judgement = judge([argument, SEEN], [[]] * 7, AGAIN)
    assert {difference.path for difference in judgement.differences} == {argument.path, SEEN.path}


def test_what_a_kernel_made_is_told_by_its_meaning() -> None:
    def described(meaning: str) -> dict[str, str]:
        return {"is": meaning}

    for meaning in (
        "output of fused_attn_fwd",
        "dq of fused_attn_bwd, in one buffer: q, k, v",
        "dq of fused_attn_bwd and dk of fused_attn_bwd",
        "d_bias of fused_attn_bwd call 1",
    ):
        assert is_kernel_result(described(meaning)), meaning
    for meaning in (
        "fresh",
        "input q",
        "dq of fused_attn_bwd and fresh",
        "of fused_attn_bwdx",
        "view of buffer qkv",
        "view of dv of fused_attn_bwd",
    ):
        assert not is_kernel_result(described(meaning)), meaning
    assert not is_kernel_result(None)
    assert not is_kernel_result([1])
