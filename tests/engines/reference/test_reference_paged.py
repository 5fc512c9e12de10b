"""Paged KV caches: a token of K or V is found by its own table; nothing else in cache or tables is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_problem import (
    PAGED_LAYOUTS,
    Data,
    Pages,
    Problem,
    Rows,
    expected_by_sequence,
    forward,
    lay_out,
    make_data,
    unlay,
)

NOT_READ = (-7, 1 << 30)  # entries of a table that no token needs


def shuffled(lengths: tuple[int, ...], size: int, width: int, seed: int) -> Pages:
    """Give each sequence the pages it needs, in no order, from a cache with two pages to spare."""
    needed = [-(-length // size) for length in lengths]
    count = sum(needed) + 2
    free = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    table = []
    for pages in needed:
        own, free = free[:pages], free[pages:]
        table.append(tuple(own + [NOT_READ[i % 2] for i in range(width - pages)]))
    return Pages(size, count, tuple(table))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    layout = draw(st.sampled_from(sorted(PAGED_LAYOUTS)))
    b = draw(st.integers(1, 3))
    hg = draw(st.integers(1, 2))
    size, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sq, skv = draw(st.integers(1, 4)), size * width
    lengths_q = tuple(draw(st.lists(st.integers(0, sq), min_size=b, max_size=b)))
    lengths_kv = tuple(draw(st.lists(st.integers(0, skv), min_size=b, max_size=b)))
    starts, row = [], 0
    for length in lengths_q:
        starts.append(row + draw(st.integers(0, 2)))
        row = starts[-1] + length
    seed = draw(st.integers(0, 1000))
    bounds = st.integers(-1, 3)
    return Problem(
        layout=layout,
        b=b,
        h=hg * draw(st.integers(1, 2)),
        hg=hg,
        sq=sq,
        skv=skv,
        d=draw(st.integers(1, 4)),
        d_v=draw(st.integers(1, 4)),
        mask=draw(st.sampled_from(["padding", "padding_causal", "padding_causal_bottom_right"])),
        window=(draw(bounds), draw(bounds)),
        diagonal=draw(st.sampled_from([None, True, False])),
        softmax=draw(st.sampled_from(["vanilla", "off-by-one", "learnable"])),
        lengths_q=lengths_q,
        lengths_kv=lengths_kv,
        rows_q=Rows((*starts, row), row + 2) if "thd" in layout else None,
        pages_k=shuffled(lengths_kv, size, width, seed),
        pages_v=shuffled(lengths_kv, size, width, seed + 1),
        fill=draw(st.sampled_from([float("nan"), 1e300, 3.0])),
        seed=seed,
        options={"return_max_logit": draw(st.booleans()), "is_training": draw(st.booleans())},
    )


def check(problem: Problem) -> None:
    p, data = problem, make_data(problem)
    output, aux, *rest = forward(p, data)
    wanted = expected_by_sequence(p, data)
    real = unlay(output, p.q_order, p.lengths()[0], p.sq, p.rows_q)
    torch.testing.assert_close(real, wanted.output, rtol=1e-9, atol=1e-11)
    assert aux[0].shape == ((p.b, p.h, p.sq, 1) if p.rows_q is None else (p.rows_q.total, p.h, 1))
    assert len(aux) == 2 + (p.softmax != "vanilla")
    if rest:
        torch.testing.assert_close(rest[0], wanted.scores.amax((0, 2, 3)), rtol=1e-9, atol=1e-11)


@settings(max_examples=120, deadline=None)
@given(problems())
def test_numbers_are_those_of_each_sequence(problem: Problem) -> None:
    check(problem)


LENGTHS = (5, 0, 4)


def paged(layout: str, **changes: Any) -> Problem:
    """Three sequences in pages of two: one with a last page half full, one empty, one with full pages alone."""
    problem = Problem(
        layout=layout, b=3, h=4, hg=2, sq=3, skv=6, d=3, d_v=3, mask="padding", lengths_q=(3, 2, 1), lengths_kv=LENGTHS
    )
    return problem.with_(
        rows_q=Rows((1, 4, 7, 9), 10) if "thd" in layout else None,
        pages_k=Pages(2, 9, ((6, 0, 3), (*NOT_READ, 9), (8, 1, -1))),
        pages_v=Pages(2, 9, ((2, 7, 4), (*NOT_READ, 9), (1, 0, -1))),
    ).with_(**changes)


@pytest.mark.parametrize("fill", [float("nan"), 1e300])
@pytest.mark.parametrize("layout", sorted(PAGED_LAYOUTS))
def test_every_layout_with_shuffled_pages_and_a_last_one_half_full(layout: str, fill: float) -> None:
    check(paged(layout, fill=fill))


@pytest.mark.parametrize("size", [1, 3, 6])
def test_any_page_size(size: int) -> None:
    problem = paged("paged_kv_bshd_bshd_bshd")
    check(problem.with_(pages_k=shuffled(LENGTHS, size, 6 // size, 1), pages_v=shuffled(LENGTHS, size, 6 // size, 2)))


@pytest.mark.parametrize("layout", ["paged_kv_bshd_bshd_bshd", "paged_kv_thd_sbhd_sbhd"])
def test_k_is_read_by_its_table_alone_and_v_by_its_own(layout: str) -> None:
    problem = paged(layout, fill=0.5)
    data = make_data(problem)
    k, v = (torch.tensor(pages.table, dtype=torch.int32) for pages in (problem.pages_k, problem.pages_v) if pages)
    right = forward(problem, data)
    for wrong in ({"page_table_k": v}, {"page_table_v": k}, {"page_table_k": v, "page_table_v": k}):
        assert not torch.allclose(right[0], forward(problem, data, **wrong)[0])
    # The statistics hang on K and not on V.
    assert torch.equal(right[1][0], forward(problem, data, page_table_v=k)[1][0])
    assert not torch.equal(right[1][0], forward(problem, data, page_table_k=v)[1][0])


@pytest.mark.parametrize(("right", "wrong"), [("bshd", "sbhd"), ("sbhd", "bshd")])
def test_the_wrong_format_of_the_cache_gives_wrong_numbers(right: str, wrong: str) -> None:
    # As many pages as tokens in one, so that neither reading leaves the cache.
    problem = paged(
        f"paged_kv_bshd_{right}_{right}",
        skv=3,
        lengths_kv=(3, 0, 2),
        pages_k=Pages(3, 3, ((2,), (9,), (1,))),
        pages_v=Pages(3, 3, ((0,), (9,), (2,))),
        fill=0.5,
    )
    check(problem)
    data = make_data(problem)
    misread = forward(problem, data, qkv_layout=f"paged_kv_bshd_{wrong}_{wrong}")[0]
    assert not torch.allclose(forward(problem, data)[0], misread)


def test_tables_are_read_as_if_contiguous() -> None:
    problem = paged("paged_kv_bshd_bshd_bshd", fill=0.5, lengths_kv=(6, 6, 6)).with_(
        pages_k=Pages(2, 9, ((6, 0, 3), (1, 2, 4), (8, 5, 7))), pages_v=Pages(2, 9, ((6, 0, 3), (1, 2, 4), (8, 5, 7)))
    )
    data = make_data(problem)
    assert problem.pages_k is not None
    strided = torch.tensor(problem.pages_k.table, dtype=torch.int32).T.contiguous().T
    right = forward(problem, data)[0]
    assert not torch.allclose(right, forward(problem, data, page_table_k=strided)[0])


def test_tables_of_another_layout_have_no_effect() -> None:
    problem = Problem(mask="padding", lengths_q=(3, 5), lengths_kv=(2, 4))
    data: Data = make_data(problem)
    table = torch.full((2, 1), 99, dtype=torch.int32)
    assert torch.equal(forward(problem, data)[0], forward(problem, data, page_table_k=table, page_table_v=table)[0])


def table(*rows: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"page_table_k": None}, "needs both"),
        ({"page_table_v": None}, "needs both"),
        ({"page_table_k": None, "page_table_v": None}, "needs both"),
        ({"attn_mask_type": "causal"}, "needs a padding mask"),
        ({"attn_bias_type": "post_scale_bias", "attn_bias": torch.zeros(1, 4, 3, 6).double()}, "takes no bias"),
        ({"attn_bias_type": "alibi", "attn_mask_type": "padding_causal"}, "takes no bias"),
        ({"dropout": 0.1}, "takes no dropout"),
        ({"page_table_k": table((6, 0, 9), (0, 0, 0), (8, 1, 0))}, "page_table_k: page 0 or 9 of 9"),
        ({"page_table_v": table((6, -1, 3), (0, 0, 0), (8, 1, 0))}, "page_table_v: page -1"),
        ({"page_table_k": table((6, 0), (0, 0), (8, 1))}, "5 tokens take more than 2 pages of 2"),
        ({"page_table_k": table((6, 0, 3), (8, 1, 0))}, "page_table_k has shape"),
        ({"page_table_k": table((6, 0, 3), (0, 0, 0), (8, 1, 0)).long()}, "page_table_k has shape"),
        ({"max_seqlen_kv": 4}, "lengths"),
        ({"k": torch.zeros(18, 2, 3, dtype=torch.float64)}, "k.shape"),
    ],
)
def test_forward_refuses(changes: dict[str, Any], match: str) -> None:
    problem = paged("paged_kv_bshd_bshd_bshd")
    data = make_data(problem)
    before = torch.random.get_rng_state()
    with pytest.raises(RuntimeError, match=match) as caught:
        forward(problem, data, **changes)
    assert not isinstance(caught.value, NotImplementedError)
    assert torch.equal(before, torch.random.get_rng_state())
    forward(problem, data)


def test_the_cache_is_left_as_it_was() -> None:
    problem = paged("paged_kv_sbhd_sbhd_sbhd", fill=2.0)
    data = make_data(problem)
    q, k, v = lay_out(problem, data)
    forward(problem, data, q=q, k=k, v=v)
    assert all(torch.equal(one, other) for one, other in zip((q, k, v), lay_out(problem, data), strict=True))
