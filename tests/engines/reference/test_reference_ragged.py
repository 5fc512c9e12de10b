"""Ragged batches: only real tokens enter, results are zero elsewhere, and each sequence starts where it is said to."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_problem import (
    BIAS_SHAPES,
    RAGGED_LAYOUTS,
    Data,
    Problem,
    Rows,
    backward,
    expected_by_sequence,
    forward,
    gradient,
    lay_out,
    make_data,
    outside,
    run,
    unlay,
)

PADDING_MASKS = ("padding", "padding_causal", "padding_causal_bottom_right")
NAN = float("nan")


def with_gaps(lengths: list[int], gaps: list[int], tail: int = 0) -> Rows:
    """Place sequences with so many rows of no one's before each, and after the last."""
    starts, row = [], 0
    for length, gap in zip(lengths, gaps[:-1], strict=True):
        starts.append(row + gap)
        row += gap + length
    return Rows((*starts, row + gaps[-1]), row + gaps[-1] + tail)


def one_after_another(lengths: tuple[int, ...], tail: int = 0) -> Rows:
    return with_gaps(list(lengths), [0] * (len(lengths) + 1), tail)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    layout = draw(st.sampled_from(sorted(RAGGED_LAYOUTS)))
    _, kv_order, one_buffer, two_buffers = RAGGED_LAYOUTS[layout]
    mask = draw(st.sampled_from(PADDING_MASKS))
    b = draw(st.integers(1, 4))
    hg = draw(st.integers(1, 3))
    h = hg if one_buffer else hg * draw(st.integers(1, 2))
    sq, skv = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    lengths_q = draw(st.lists(st.integers(0, sq), min_size=b, max_size=b))
    lengths_kv = draw(st.lists(st.integers(0, skv), min_size=b, max_size=b))
    padded = draw(st.booleans())
    gaps = st.lists(st.integers(0, 3), min_size=b + 1, max_size=b + 1) if padded else st.just([0] * (b + 1))
    tail = draw(st.integers(0, 3))
    if one_buffer and not padded:
        lengths_kv = [min(length, skv) for length in lengths_q]
    room = [max(pair) for pair in zip(lengths_q, lengths_kv, strict=True)] if one_buffer else lengths_q
    d = draw(st.integers(1, 4))
    bounds = st.integers(-1, 3)
    bias_types = ["no_bias", "post_scale_bias", *(["alibi"] if "causal" in mask and h in (1, 2, 4, 6) else [])]
    return Problem(
        layout=layout,
        b=b,
        h=h,
        hg=hg,
        sq=sq,
        skv=skv,
        d=d,
        d_v=d if one_buffer or two_buffers else draw(st.integers(1, 4)),
        mask=mask,
        window=(draw(bounds), draw(bounds)),
        diagonal=draw(st.sampled_from([None, True, False])),
        bias_type=draw(st.sampled_from(bias_types)),
        bias_shape=draw(st.sampled_from([*BIAS_SHAPES, "111s"])),
        softmax=draw(st.sampled_from(["vanilla", "off-by-one", "learnable"])),
        lengths_q=tuple(lengths_q),
        lengths_kv=tuple(lengths_kv),
        rows_q=with_gaps(room, draw(gaps), tail),
        rows_kv=with_gaps(lengths_kv, draw(gaps), tail) if kv_order == "thd" and not one_buffer else None,
        padded=padded,
        fill=draw(st.sampled_from([NAN, float("inf"), 1e30, 7.0])),
        seed=draw(st.integers(0, 1000)),
        options={"return_max_logit": draw(st.booleans())},
    )


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-9, atol=1e-11)


def check(problem: Problem) -> None:
    """Hold one run against autograd over each sequence, and what is no token against what it must be."""
    p, data = problem, make_data(problem)
    got, wanted = run(p, data), expected_by_sequence(p, data)
    lengths_q, lengths_kv = p.lengths()
    assert p.rows_q is not None
    close(got.output, wanted.output)
    for actual, reference in zip(got.grads, wanted.grads, strict=True):
        close(actual, reference)
    stats = got.aux[0]
    assert stats.shape == (p.rows_q.total, p.h, 1)
    close(unlay(stats, "thd", lengths_q, p.sq, p.rows_q), wanted.stats)
    nothing = torch.tensor(-torch.inf) if data.offset is None else data.offset.view(1, -1, 1)
    beyond = outside(stats, lengths_q, p.rows_q)
    assert torch.equal(beyond, nothing.double().expand_as(beyond))
    for tensor in (got.raw_output, got.raw_grads[0]):
        assert (outside(tensor, lengths_q, p.rows_q) == 0).all()
    if p.kv_rows is not None:
        for tensor in got.raw_grads[1:3]:
            assert (outside(tensor, lengths_kv, p.kv_rows) == 0).all()
    if got.max_logit is not None:
        close(got.max_logit, wanted.scores.amax((0, 2, 3)))
    d_bias, d_offset = got.raw_grads[3:]
    if p.softmax != "vanilla":
        close(d_offset, torch.zeros_like(d_offset) if wanted.d_offset is None else wanted.d_offset)
    elif p.bias_type == "post_scale_bias":
        # No kernel writes that of a bias over keys alone; the buffer is zeroed here.
        written = data.bias is not None and data.bias.shape[:3].numel() > 1
        close(d_bias, wanted.d_bias if written and wanted.d_bias is not None else torch.zeros_like(d_bias))


@settings(max_examples=200, deadline=None)
@given(problems())
def test_numbers_are_those_of_autograd_over_each_sequence(problem: Problem) -> None:
    check(problem)


def gapped(layout: str, **changes: Any) -> Problem:
    """Three sequences, the second without queries, the last without keys; gaps, and rows beyond the last offset."""
    _, kv_order, one_buffer, _ = RAGGED_LAYOUTS[layout]
    problem = Problem(
        layout=layout, b=3, h=2, hg=2, sq=4, skv=4, mask="padding", lengths_q=(4, 0, 3), lengths_kv=(3, 2, 0)
    )
    room = [4, 2, 3] if one_buffer else [4, 0, 3]
    rows_kv = with_gaps([3, 2, 0], [0, 3, 1, 2], 5) if kv_order == "thd" and not one_buffer else None
    return problem.with_(rows_q=with_gaps(room, [1, 2, 0, 2], 5), rows_kv=rows_kv).with_(**changes)


@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
@pytest.mark.parametrize("fill", [NAN, 1e300])
@pytest.mark.parametrize("layout", sorted(RAGGED_LAYOUTS))
def test_gaps_and_rows_beyond_the_last_offset_never_matter(layout: str, fill: float, softmax: str) -> None:
    problem = gapped(layout, fill=fill, softmax=softmax)
    check(problem)
    one, other = run(problem), run(problem.with_(fill=0.0))
    for first, second in zip([one.raw_output, *one.raw_grads], [other.raw_output, *other.raw_grads], strict=True):
        assert (first is None and second is None) or torch.equal(first, second)


@pytest.mark.parametrize("layout", sorted(RAGGED_LAYOUTS))
def test_keys_that_no_query_meets_have_a_gradient_of_exactly_zero(layout: str) -> None:
    got = run(gapped(layout))
    for gradient_of in got.grads[1:]:
        assert (gradient_of[1] == 0).all()
        assert (gradient_of[0, :, :3] != 0).any()
    assert (got.output[2] == 0).all()
    assert (got.grads[0][2] == 0).all()
    assert (got.output[0] != 0).any()


def test_a_batch_without_any_token_is_all_zeros() -> None:
    nothing = one_after_another((0, 0), 3)
    problem = Problem(layout="thd_thd_thd", mask="padding", lengths_q=(0, 0), lengths_kv=(0, 0)).with_(
        rows_q=nothing, rows_kv=nothing
    )
    got = run(problem)
    assert all((tensor == 0).all() for tensor in (got.raw_output, *got.raw_grads[:3]))


@pytest.mark.parametrize("layout", sorted(RAGGED_LAYOUTS))
def test_a_ragged_batch_gives_the_bits_of_a_padded_one(layout: str) -> None:
    # With all that hangs on positions within a sequence: bias, dropout, window, diagonal.
    ragged = gapped(
        layout,
        mask="padding_causal_bottom_right",
        window=(2, 0),
        bias_type="post_scale_bias",
        bias_shape="bhss",
        dropout=0.3,
        options={"return_max_logit": True},
    )
    dense = ragged.with_(layout="bshd_bshd_bshd", rows_q=None, rows_kv=None)
    data = make_data(ragged)
    results = []
    for problem in (ragged, dense):
        torch.manual_seed(3)
        results.append(run(problem, data))
    one, other = results
    assert torch.equal(one.output, other.output)
    assert all(torch.equal(a, b) for a, b in zip(one.grads, other.grads, strict=True))
    assert torch.equal(one.raw_grads[3], other.raw_grads[3])
    assert one.max_logit is not None
    assert other.max_logit is not None
    assert torch.equal(one.max_logit, other.max_logit)


@pytest.mark.parametrize("name", ["cu_seqlens_q_padded", "cu_seqlens_kv_padded"])
def test_the_starts_count_only_if_both_are_given(name: str) -> None:
    rows = one_after_another((3, 4), 2)
    moved = with_gaps([3, 4], [0, 2, 0])
    problem = Problem(layout="thd_thd_thd", sq=4, skv=4, mask="padding", lengths_q=(3, 4), lengths_kv=(3, 4)).with_(
        rows_q=rows, rows_kv=rows, padded=False, fill=5.0
    )
    data = make_data(problem)
    plain = forward(problem, data)
    starts = torch.tensor(moved.starts, dtype=torch.int32)
    alone = forward(problem, data, **{name: starts})
    both = forward(problem, data, cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=starts)
    assert torch.equal(plain[0], alone[0])
    assert not torch.allclose(plain[0], both[0])
    backward_plain, backward_alone, backward_both = (
        backward(problem, data, plain[0], plain[1], **changes)
        for changes in ({}, {name: starts}, {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts})
    )
    for index in range(3):
        assert torch.equal(backward_plain[index], backward_alone[index])
        assert not torch.allclose(backward_plain[index], backward_both[index])


@pytest.mark.parametrize("layout", ["thd_thd_thd", "thd_t2hd", "t3hd", "thd_bshd_bshd"])
def test_starts_that_are_lost_show(layout: str) -> None:
    problem = gapped(layout, fill=0.5)
    data = make_data(problem)
    output, aux = forward(problem, data)
    lost = {"cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None}
    assert not torch.allclose(output, forward(problem, data, **lost)[0])
    right, wrong = backward(problem, data, output, aux), backward(problem, data, output, aux, **lost)
    assert not torch.allclose(right[0], wrong[0])
    assert not torch.allclose(right[1], wrong[1])


def test_starts_of_q_and_kv_in_each_other_s_place_show() -> None:
    problem = gapped("thd_thd_thd", fill=0.5)
    data = make_data(problem)
    assert problem.rows_q is not None
    assert problem.rows_kv is not None
    swapped = problem.with_(rows_q=problem.rows_kv, rows_kv=problem.rows_q)
    starts = {
        "cu_seqlens_q_padded": torch.tensor(problem.rows_kv.starts, dtype=torch.int32),
        "cu_seqlens_kv_padded": torch.tensor(problem.rows_q.starts, dtype=torch.int32),
    }
    right = forward(problem, data)[0]
    assert not torch.allclose(right, forward(problem, data, **starts)[0])
    assert not torch.allclose(right[:4], forward(swapped, data)[0][:4])


@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
def test_nothing_outside_in_saved_tensors_reaches_a_gradient(softmax: str) -> None:
    problem = gapped("thd_th2d", softmax=softmax)
    data = make_data(problem)
    output, aux = forward(problem, data)
    clean = backward(problem, data, output, aux)
    assert problem.rows_q is not None
    rows = torch.arange(problem.rows_q.total)[:, None, None]
    inside = outside(rows, problem.lengths()[0], problem.rows_q).flatten()
    stats, saved = aux[0].clone(), output.clone()
    stats[inside] = NAN
    saved[inside] = NAN
    assert stats.isnan().any()
    for one, other in zip(clean, backward(problem, data, saved, [stats, *aux[1:]]), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_backward_takes_the_saved_statistics_at_their_rows() -> None:
    problem = gapped("thd_thd_thd")
    data = make_data(problem)
    output, aux = forward(problem, data)
    before = backward(problem, data, output, aux)
    raised = aux[0].clone()
    assert problem.rows_q is not None
    first = problem.rows_q.starts[0]
    raised[first : first + 4] += 1.0
    after = backward(problem, data, output, [raised, aux[1]])
    close(after[2], before[2].double() / torch.e)


@pytest.mark.parametrize(
    ("layout", "wrong"),
    [("t3hd", "th3d"), ("th3d", "t3hd"), ("thd_t2hd", "thd_th2d"), ("thd_th2d", "thd_t2hd"), ("thd_t2hd", "t3hd"),
     ("t3hd", "thd_thd_thd"), ("thd_th2d", "thd_thd_thd"), ("thd_bshd_bshd", "thd_sbhd_sbhd")],
)  # fmt: skip
def test_a_wrong_layout_string_gives_wrong_numbers_not_an_error(layout: str, wrong: str) -> None:
    problem = gapped(layout, fill=0.5, padded=True)
    data = make_data(problem)
    q, k, v = (spacious(tensor) for tensor in lay_out(problem, data))
    # The same starts for both sides, as callers have them.
    assert problem.rows_q is not None
    kv = problem.rows_kv or problem.rows_q
    starts = {"cu_seqlens_kv_padded": torch.tensor(kv.starts, dtype=torch.int32)}
    right = forward(problem, data, q=q, k=k, v=v, **starts)[0]
    misread = forward(problem, data, q=q, k=k, v=v, qkv_layout=wrong, **starts)[0]
    torch.testing.assert_close(right, forward(problem, data)[0])
    assert right.shape == misread.shape
    assert not torch.allclose(right, misread)


def spacious(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the whole storage into one with much room behind it, and view it as ``tensor`` does."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    old = torch.as_strided(tensor, (size,), (1,), 0)
    room = torch.linspace(-1, 1, 4 * size, dtype=tensor.dtype)
    return torch.cat([old, room]).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("layout", sorted(RAGGED_LAYOUTS))
def test_gradients_share_buffers_as_the_layout_does(layout: str) -> None:
    got = run(gapped(layout))
    _, _, one_buffer, two_buffers = RAGGED_LAYOUTS[layout]
    storages = [grad.untyped_storage().data_ptr() for grad in got.raw_grads[:3]]
    assert len(set(storages)) == (1 if one_buffer else 2 if two_buffers else 3)
    assert (storages[1] == storages[2]) == (one_buffer is not None or two_buffers is not None)
    for grad, tensor in zip(got.raw_grads[:3], got.inputs, strict=True):
        assert grad.shape == tensor.shape
        assert grad.stride() == tensor.stride()
        assert grad.storage_offset() == tensor.storage_offset()
        assert grad.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


def test_output_is_fresh_contiguous_and_as_wide_as_v() -> None:
    problem = gapped("thd_thd_thd", d=4, d_v=2, dtype=torch.bfloat16)
    data = make_data(problem)
    output, aux = forward(problem, data)
    assert problem.rows_q is not None
    assert output.shape == (problem.rows_q.total, 2, 2)
    assert output.is_contiguous()
    assert (output.dtype, aux[0].dtype) == (torch.bfloat16, torch.float32)


def test_output_and_its_gradient_are_read_as_if_contiguous() -> None:
    problem = gapped("thd_thd_thd", fill=0.5)
    data = make_data(problem)
    output, aux = forward(problem, data)
    good = backward(problem, data, output, aux)
    for name, tensor in (("o", output), ("d_o", gradient(problem, data))):
        transposed = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        bad = backward(problem, data, output, aux, **{name: transposed})
        assert not torch.allclose(good[0], bad[0])


def test_inputs_are_left_as_they_were() -> None:
    problem = gapped("thd_t2hd", fill=2.0)
    data = make_data(problem)
    q, k, v = lay_out(problem, data)
    run_on = {"q": q, "k": k, "v": v}
    output, aux = forward(problem, data, **run_on)
    backward(problem, data, output, aux, **run_on)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), lay_out(problem, data), strict=True))


def test_the_longest_allowed_length_bounds_the_real_ones_and_else_changes_nothing() -> None:
    problem = gapped("thd_thd_thd")
    data = make_data(problem)
    right = forward(problem, data)[0]
    wide = forward(problem, data, max_seqlen_q=9, max_seqlen_kv=11)[0]
    torch.testing.assert_close(right, wide)
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        with pytest.raises(RuntimeError, match="lengths"):
            forward(problem, data, **{name: 2})


def cumulative(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"attn_mask_type": "causal"}, "needs a padding mask"),
        ({"attn_mask_type": "no_mask"}, "needs a padding mask"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 2, 4], dtype=torch.int32)}, "lengths"),
        ({"cu_seqlens_kv": cumulative(3, 2)}, "differ in size"),
        ({"cu_seqlens_q_padded": cumulative(3, 2)}, "differ in size"),
        ({"cu_seqlens_q_padded": cumulative(4, 2, 90) + 14}, "q: a token lies in row"),
        ({"cu_seqlens_kv_padded": cumulative(4, 2, 90) - 1}, "k: a token lies in row"),
        ({"q": torch.zeros(2, 9, 2, 3, dtype=torch.float64)}, "q.shape"),
    ],
)
def test_forward_and_backward_refuse(changes: dict[str, Any], match: str) -> None:
    problem = gapped("thd_thd_thd")
    data = make_data(problem)
    output, aux = forward(problem, data)
    backward(problem, data, output, aux)
    for call in (lambda: forward(problem, data, **changes), lambda: backward(problem, data, output, aux, **changes)):
        with pytest.raises(RuntimeError, match=match) as caught:
            call()
        assert not isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("layout", ["thd_bshd_bshd", "thd_thd_thd"])
def test_lengths_of_one_sequence_do_not_stand_for_all(layout: str) -> None:
    problem = gapped(layout)
    data = make_data(problem)
    with pytest.raises(RuntimeError, match="differ in size"):
        forward(problem, data, cu_seqlens_kv=cumulative(3), cu_seqlens_kv_padded=cumulative(3))


def test_only_rows_that_are_read_need_to_lie_in_the_storage() -> None:
    # Three of twelve rows are real, so that strides three times as long still reach no further than the storage.
    rows = Rows((0, 3), 12)
    problem = Problem(layout="thd_thd_thd", b=1, mask="padding", lengths_q=(3,), lengths_kv=(3,), fill=0.5).with_(
        rows_q=rows, rows_kv=rows
    )
    data = make_data(problem)
    misread = forward(problem, data, qkv_layout="t3hd")[0]
    assert not torch.allclose(forward(problem, data)[0], misread)


@pytest.mark.parametrize("value", [NAN, 1e300])
def test_a_bias_beyond_the_real_lengths_never_matters(value: float) -> None:
    problem = gapped("thd_thd_thd", bias_type="post_scale_bias", bias_shape="bhss")
    data, poisoned = make_data(problem), make_data(problem)
    assert poisoned.bias is not None
    for sequence, (length_q, length_kv) in enumerate(zip(*problem.lengths(), strict=True)):
        poisoned.bias[sequence, :, length_q:] = value
        poisoned.bias[sequence, :, :, length_kv:] = value
    one, other = run(problem, data), run(problem, poisoned)
    for first, second in zip(
        [one.raw_output, *one.raw_grads[:4]], [other.raw_output, *other.raw_grads[:4]], strict=True
    ):
        assert torch.equal(first, second)


def test_dense_statistics_are_refused() -> None:
    problem = gapped("thd_thd_thd")
    data = make_data(problem)
    output, aux = forward(problem, data)
    dense = torch.zeros(3, 2, 4, 1, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"aux_ctx_tensors\[0\]"):
        backward(problem, data, output, [dense, aux[1]])


def test_a_part_that_leaves_its_storage_is_an_error() -> None:
    problem = gapped("thd_thd_thd", padded=True)
    data: Data = make_data(problem)
    with pytest.raises(RuntimeError, match=r"v: .*leaves its storage"):
        forward(problem, data, v=torch.ones((), dtype=torch.float64).expand(15, 2, 3))
