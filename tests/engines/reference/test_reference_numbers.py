"""The reference kernels compute attention and its gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_problem import (
    BIAS_SHAPES,
    DENSE_LAYOUTS,
    MASKS,
    Data,
    Problem,
    backward,
    expected,
    forward,
    make_data,
    plain_mask,
    run,
)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    layout = draw(st.sampled_from(sorted(DENSE_LAYOUTS)))
    _, _, one_buffer, two_buffers = DENSE_LAYOUTS[layout]
    mask = draw(st.sampled_from(MASKS))
    b = draw(st.integers(1, 3))
    hg = draw(st.sampled_from([1, 2, 4, 6])) if one_buffer else draw(st.integers(1, 3))
    h = hg if one_buffer else hg * draw(st.integers(1, 3))
    sq = draw(st.integers(1, 7))
    skv = sq if one_buffer else draw(st.integers(1, 7))
    d = draw(st.integers(1, 5))
    bias_types = ["no_bias", "post_scale_bias"]
    if "causal" in mask and h in (1, 2, 4, 6):
        bias_types.append("alibi")
    padded = "padding" in mask
    bounds = st.integers(-1, 4)
    return Problem(
        layout=layout,
        b=b,
        h=h,
        hg=hg,
        sq=sq,
        skv=skv,
        d=d,
        d_v=d if one_buffer or two_buffers else draw(st.integers(1, 5)),
        mask=mask,
        window=(draw(bounds), draw(bounds)),
        diagonal=draw(st.sampled_from([None, True, False])),
        bias_type=draw(st.sampled_from(bias_types)),
        bias_shape=draw(st.sampled_from(BIAS_SHAPES)),
        softmax=draw(st.sampled_from(["vanilla", "off-by-one", "learnable"])),
        scale=draw(st.sampled_from([None, 0.3])),
        lengths_q=tuple(draw(st.lists(st.integers(0, sq), min_size=b, max_size=b))) if padded else None,
        lengths_kv=tuple(draw(st.lists(st.integers(0, skv), min_size=b, max_size=b))) if padded else None,
        seed=draw(st.integers(0, 1000)),
    )


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-9, atol=1e-11)


def check_gradients(problem: Problem, data: Data, keep: torch.Tensor | None = None) -> None:
    """Hold one run against autograd."""
    got, wanted = run(problem, data), expected(problem, data, keep)
    close(got.output, wanted.output)
    for actual, gradient in zip(got.grads, wanted.grads, strict=True):
        close(actual, gradient)
    d_bias, d_offset = got.raw_grads[3:]
    if problem.bias_type != "post_scale_bias":
        assert d_bias is None
    elif problem.softmax == "vanilla" and data.bias is not None and data.bias.shape[:3].numel() > 1:
        close(d_bias, wanted.d_bias)
    if problem.softmax == "vanilla":
        assert d_offset is None
    else:
        close(d_offset, wanted.d_offset)


@settings(max_examples=250, deadline=None)
@given(problems())
def test_output_and_gradients_are_those_of_autograd(problem: Problem) -> None:
    check_gradients(problem, make_data(problem))


@pytest.mark.parametrize("layout", sorted(DENSE_LAYOUTS))
def test_every_layout_gives_the_same_numbers(layout: str) -> None:
    problem = Problem(layout=layout, mask="causal", h=3, hg=3)
    check_gradients(problem, make_data(problem))


@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
@pytest.mark.parametrize("shape", BIAS_SHAPES)
def test_the_bias_gradient_is_summed_over_what_the_bias_is_broadcast_along(shape: str, softmax: str) -> None:
    problem = Problem(bias_type="post_scale_bias", bias_shape=shape, mask="padding", lengths_q=(5, 2), softmax=softmax)
    check_gradients(problem, make_data(problem))


def test_dropout_acts_on_probabilities_and_their_gradients_with_one_mask() -> None:
    for problem in (
        Problem(dropout=0.4, hg=2, mask="causal"),
        Problem(dropout=0.4, softmax="learnable", bias_type="post_scale_bias"),
    ):
        data = make_data(problem)
        torch.manual_seed(5)
        _, aux = forward(problem, data)
        # Identity as V shows the probabilities themselves, so what is zero was dropped.
        eye = torch.eye(problem.skv, dtype=problem.dtype).expand(problem.b, problem.hg, -1, -1)
        torch.manual_seed(5)
        probe = problem.with_(d_v=problem.skv, bias_type="no_bias")
        shown, probe_aux = forward(probe, Data(data.q, data.k, eye, data.grad, None, data.offset))
        assert torch.equal(aux[1], probe_aux[1])
        keep = shown.transpose(1, 2) != 0
        fraction = keep[plain_mask(problem).expand_as(keep)].double().mean()
        assert 0.4 < fraction < 0.8
        torch.manual_seed(5)
        check_gradients(problem, data, keep)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes_are_close_and_keep_their_type(dtype: torch.dtype) -> None:
    problem = Problem(dtype=dtype, mask="causal", bias_type="post_scale_bias", d=8, d_v=8)
    data = make_data(problem)
    got, wanted = run(problem, data), expected(problem, data)
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}[dtype]
    pairs = [(got.output, wanted.output), *zip(got.grads, wanted.grads, strict=True), (got.raw_grads[3], wanted.d_bias)]
    for actual, reference in pairs:
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), reference, rtol=tolerance, atol=tolerance)
    assert got.aux[0].dtype == torch.float32


def test_float32_is_rounded_once_from_float64() -> None:
    problem = Problem(dtype=torch.float32)
    data = make_data(problem)
    assert torch.equal(run(problem, data).output, expected(problem, data).output.float())


@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one", "learnable"])
def test_stats_are_the_log_sum_exp_with_the_offset_in_it(softmax: str) -> None:
    problem = Problem(softmax=softmax, mask="padding_causal", lengths_q=(5, 3), lengths_kv=(5, 0))
    data = make_data(problem)
    _, aux = forward(problem, data)
    wanted = expected(problem, data)
    assert aux[0].shape == (2, 4, 5, 1)
    close(aux[0], wanted.stats)
    assert not aux[0].isnan().any()


def test_stats_are_float32_unless_the_inputs_are_float64() -> None:
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        problem = Problem(dtype=dtype)
        assert forward(problem, make_data(problem))[1][0].dtype == wanted


def test_backward_takes_the_saved_statistics_not_its_own() -> None:
    problem = Problem()
    data = make_data(problem)
    output, aux = forward(problem, data)
    before = backward(problem, data, output, aux)
    after = backward(problem, data, output, [aux[0] + 1.0, aux[1]])
    close(after[2], before[2].double() / torch.e)


def test_max_logit_is_the_largest_visible_score_of_each_head() -> None:
    problem = Problem(
        mask="padding_causal",
        lengths_q=(5, 3),
        lengths_kv=(4, 3),
        bias_type="post_scale_bias",
        softmax="learnable",
        options={"return_max_logit": True},
    )
    data = make_data(problem)
    wanted = expected(problem, data)
    scores = wanted.scores.masked_fill(~wanted.seen, -torch.inf)
    output, aux, max_logit = forward(problem, data)
    close(max_logit, scores.amax((0, 2, 3)))
    assert not torch.equal(scores.amax((0, 2, 3)), wanted.scores.amax((0, 2, 3)))
    assert (max_logit.shape, max_logit.dtype, len(aux)) == ((4,), output.dtype, 4)


def test_max_logit_has_the_type_of_the_output() -> None:
    problem = Problem(dtype=torch.bfloat16)
    data = make_data(problem)
    max_logit = forward(problem, data, return_max_logit=True)[2]
    assert max_logit.dtype == torch.bfloat16
    torch.testing.assert_close(max_logit.double(), expected(problem, data).scores.amax((0, 2, 3)), rtol=1e-2, atol=0)


SHOWN = {
    ("no_mask", (-1, -1), None): ("111111", "111111", "111111"),
    ("causal", (-1, 0), None): ("100000", "110000", "111000"),
    ("causal", (-1, -1), None): ("100000", "110000", "111000"),
    ("causal", (1, 0), None): ("100000", "110000", "011000"),
    ("causal", (-1, 0), True): ("100000", "110000", "111000"),
    ("padding_causal", (1, 0), True): ("100000", "110000", "000000"),
    ("causal_bottom_right", (2, 0), False): ("011100", "001110", "000111"),
    ("causal_bottom_right", (-1, 0), None): ("111100", "111110", "111111"),
    ("causal_bottom_right", (2, 0), True): ("011100", "001110", "000111"),
    ("no_mask", (0, 1), False): ("110000", "011000", "001100"),
    ("no_mask", (0, 1), True): ("000110", "000011", "000001"),
    ("padding", (-1, -1), None): ("111100", "111100", "000000"),
    ("padding_causal", (-1, 0), None): ("100000", "110000", "000000"),
    ("padding_causal_bottom_right", (-1, 0), None): ("111000", "111100", "000000"),
    ("padding_causal_bottom_right", (1, 0), True): ("011000", "001100", "000000"),
    ("padding", (1, 0), True): ("011000", "001100", "000000"),
}


@pytest.mark.parametrize(("mask", "window", "diagonal"), SHOWN)
def test_a_query_sees_exactly_these_keys(mask: str, window: tuple[int, int], diagonal: bool | None) -> None:
    # Three queries, six keys, of which a padding mask leaves two and four; identity as V shows who is seen.
    problem = Problem(
        b=1, sq=3, skv=6, d_v=6, mask=mask, window=window, diagonal=diagonal, lengths_q=(2,), lengths_kv=(4,)
    )
    data = make_data(problem)
    data.v = torch.eye(6, dtype=torch.float64).expand(1, 4, 6, 6)
    seen = run(problem, data).output != 0
    for head in range(4):
        assert tuple("".join("01"[int(bit)] for bit in row) for row in seen[0, head]) == SHOWN[mask, window, diagonal]


def test_bottom_right_is_top_left_for_a_square() -> None:
    problem = Problem(mask="causal_bottom_right")
    data = make_data(problem)
    assert torch.equal(forward(problem, data)[0], forward(problem.with_(mask="causal"), data)[0])


def test_cu_seqlens_mean_nothing_without_a_padding_mask() -> None:
    problem = Problem(mask="causal")
    data = make_data(problem)
    shorter = problem.with_(lengths_q=(2, 3), lengths_kv=(1, 3))
    assert torch.equal(forward(problem, data)[0], forward(shorter, data)[0])


PADDED = Problem(
    mask="padding_causal",
    sq=5,
    skv=6,
    lengths_q=(3, 5),
    lengths_kv=(4, 2),
    bias_type="post_scale_bias",
    bias_shape="bhss",
    dropout=0.3,
)


def poison(problem: Problem, data: Data, value: float) -> Data:
    """Overwrite all that lies beyond each sequence's length."""
    poisoned = Data(*(None if t is None else t.clone() for t in vars(data).values()))
    assert problem.lengths_q is not None
    assert problem.lengths_kv is not None
    for sequence, (length_q, length_kv) in enumerate(zip(problem.lengths_q, problem.lengths_kv, strict=True)):
        poisoned.q[sequence, :, length_q:] = value
        poisoned.grad[sequence, :, length_q:] = value
        poisoned.k[sequence, :, length_kv:] = value
        poisoned.v[sequence, :, length_kv:] = value
        if poisoned.bias is not None:
            poisoned.bias[sequence, :, length_q:] = value
            poisoned.bias[sequence, :, :, length_kv:] = value
    return poisoned


@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 7.0])
def test_nothing_beyond_a_sequence_reaches_any_result(value: float, softmax: str) -> None:
    problem = PADDED.with_(softmax=softmax)
    data = make_data(problem)
    results = []
    for given_data in (data, poison(problem, data, value)):
        torch.manual_seed(1)
        results.append(run(problem, given_data))
    clean, poisoned = results
    assert torch.equal(clean.output, poisoned.output)
    assert torch.equal(clean.aux[0], poisoned.aux[0])
    for one, other in zip(clean.raw_grads, poisoned.raw_grads, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_nothing_beyond_a_sequence_in_saved_tensors_reaches_a_gradient() -> None:
    problem = PADDED.with_(softmax="learnable")
    data = make_data(problem)
    output, aux = forward(problem, data)
    clean = backward(problem, data, output, aux)
    stats, saved = aux[0].clone(), output.clone()
    stats[0, :, 3:] = torch.nan
    saved[0, 3:] = torch.nan
    for one, other in zip(clean, backward(problem, data, saved, [stats, *aux[1:]]), strict=True):
        assert torch.equal(one, other)


def test_padded_rows_of_results_are_zero_and_the_others_are_not() -> None:
    got = run(PADDED)
    for tensor, lengths in zip([got.output, *got.grads], [(3, 5), (3, 5), (4, 2), (4, 2)], strict=True):
        for sequence, length in enumerate(lengths):
            assert (tensor[sequence, :, length:] == 0).all()
            assert (tensor[sequence, :, :1] != 0).any()


@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
def test_a_row_without_a_key_is_zero_and_gives_no_nan(softmax: str) -> None:
    # Two keys, bottom right, five queries: the first three see nothing.
    problem = Problem(mask="causal_bottom_right", skv=2, softmax=softmax)
    data = make_data(problem)
    got = run(problem, data)
    assert (got.output[:, :, :3] == 0).all()
    assert (got.output[:, :, 3:] != 0).any()
    wanted = torch.full((2, 4, 3, 1), -torch.inf) if data.offset is None else data.offset.expand(2, 4, 3, 1)
    assert torch.equal(got.aux[0][:, :, :3], wanted.double())
    assert not any(grad.isnan().any() for grad in got.grads)


def test_attn_scale_defaults_to_the_root_of_the_query_dimension() -> None:
    problem = Problem(d=4, d_v=2)
    data = make_data(problem)
    assert torch.equal(forward(problem, data)[0], forward(problem.with_(scale=0.5), data)[0])
    assert not torch.equal(forward(problem, data)[0], forward(problem.with_(scale=0.6), data)[0])
