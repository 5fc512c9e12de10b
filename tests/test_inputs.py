"""Inputs are the same bits for the same case, lie in memory as their layout says, and show every write."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from harness.case import BIAS_SHAPES, DIFFERENTIABLE, FP8_RECIPES, OUTPUT_GRADIENTS, Case
from harness.engines.api import get_engine
from harness.inputs import (
    DTYPES,
    FP8_PADDING_POISON,
    PADDING_POISON,
    RED_ZONE_BYTE,
    RED_ZONE_BYTES,
    RED_ZONE_INTEGER,
    SPARE_PAGES,
    Geometry,
    Inputs,
    Live,
    bias_sizes,
    build,
    geometry,
)
from harness.layouts import LAYOUTS
from harness.quantized import fp8_dtype, parts

DENSE = [name for name, layout in LAYOUTS.items() if not layout.thd and not layout.paged]
RAGGED = [name for name, layout in LAYOUTS.items() if layout.thd]
PAGED = [name for name, layout in LAYOUTS.items() if layout.paged]
PLAIN_GRADIENTS = [kind for kind in OUTPUT_GRADIENTS if kind != "quantized"]
B, SQ, SKV, H, HG, D, DV = 3, 7, 11, 4, 2, 8, 16


def case_of(layout: str, **changes: object) -> Case:
    """Return a case of pairwise different sizes as far as the layout allows them."""
    row = LAYOUTS[layout]
    sizes = {
        "batch_size": B,
        "num_heads": H,
        "num_gqa_groups": H if row.parts == 1 else HG,
        "max_seqlen_q": SQ,
        "max_seqlen_kv": SQ if row.parts == 1 else SKV,
        "head_dim_qk": D,
        "head_dim_v": DV if row.parts == 3 else D,
    }
    return Case(**{"qkv_layout": layout, "dtype": "fp32", "seed": 5, **sizes, **changes})  # type: ignore[arg-type]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def zones(inputs: Inputs, name: str, live: Live | None = None) -> torch.Tensor:
    """Return the elements of both red zones of a buffer."""
    buffer = (live.buffers if live is not None else inputs.masters)[name]
    return torch.cat([buffer.flat[: buffer.margin], buffer.flat[-buffer.margin :]])


FULL = {
    "attn_mask_type": "padding",
    "attn_bias_type": "post_scale_bias",
    "softmax_type": "learnable",
    "requires_grad": DIFFERENTIABLE,
}


@pytest.mark.parametrize("layout", DENSE)
def test_the_same_case_gives_the_same_bits_and_another_seed_others(layout: str) -> None:
    one, again, other = (build(case_of(layout, seed=seed, **FULL)) for seed in (5, 5, 6))
    assert list(one.masters) == list(again.masters)
    for name, master in one.masters.items():
        assert torch.equal(bits(master.flat), bits(again.masters[name].flat))
        if not name.startswith("cu_seqlens"):
            assert not torch.equal(bits(master.flat), bits(other.masters[name].flat))
    assert (one.q, one.kv) == (again.q, again.kv)


def test_drawing_leaves_the_global_generator_alone_and_does_not_depend_on_it() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = build(case_of("sbh3d", **FULL))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(bits(one.masters["qkv"].flat), bits(build(case_of("sbh3d", **FULL)).masters["qkv"].flat))


@pytest.mark.parametrize(
    ("layout", "q", "kv"),
    [
        ("bs3hd", (3 * SQ * H * D, D, 3 * H * D), None),
        ("bsh3d", (3 * SQ * H * D, 3 * D, 3 * H * D), None),
        ("sb3hd", (3 * H * D, D, 3 * B * H * D), None),
        ("sbh3d", (3 * H * D, 3 * D, 3 * B * H * D), None),
        ("bshd_bs2hd", (SQ * H * D, D, H * D), (2 * SKV * HG * D, D, 2 * HG * D)),
        ("bshd_bsh2d", (SQ * H * D, D, H * D), (2 * SKV * HG * D, 2 * D, 2 * HG * D)),
        ("sbhd_sb2hd", (H * D, D, B * H * D), (2 * HG * D, D, 2 * B * HG * D)),
        ("sbhd_sbh2d", (H * D, D, B * H * D), (2 * HG * D, 2 * D, 2 * B * HG * D)),
        ("sbhd_sbhd_sbhd", (H * D, D, B * H * D), (HG * D, D, B * HG * D)),
        ("bshd_bshd_bshd", (SQ * H * D, D, H * D), (SKV * HG * D, D, HG * D)),
        ("sbhd_bshd_bshd", (H * D, D, B * H * D), (SKV * HG * D, D, HG * D)),
        ("bshd_sbhd_sbhd", (SQ * H * D, D, H * D), (HG * D, D, B * HG * D)),
    ],
)
def test_views_have_the_strides_that_the_kernels_assume(
    layout: str, q: tuple[int, ...], kv: tuple[int, ...] | None
) -> None:
    """Strides along batch, head and token, as the kernels derive them from the layout's name."""
    tensors = build(case_of(layout)).fresh().tensors

    def strides(name: str, layout_format: str) -> tuple[int, ...]:
        stride = tensors[name].stride()
        batch, token = (0, 1) if layout_format.startswith("b") else (1, 0)
        assert stride[3] == 1
        return stride[batch], stride[2], stride[token]

    row = LAYOUTS[layout]
    assert strides("q", row.q_format) == q
    assert strides("k", row.kv_format) == (kv or q)
    if row.parts < 3:
        assert strides("v", row.kv_format) == (kv or q)
    else:
        assert tensors["v"].shape[-1] == DV
        assert tensors["v"].is_contiguous()


@pytest.mark.parametrize("layout", DENSE)
def test_parts_of_one_buffer_share_its_memory_and_do_not_overlap(layout: str) -> None:
    inputs = build(case_of(layout))
    tensors = inputs.fresh().tensors
    storages = {tensors[name].untyped_storage().data_ptr() for name in "qkv"}
    assert len(storages) == LAYOUTS[layout].parts
    with torch.no_grad():
        for value, name in enumerate("qkv"):
            tensors[name].fill_(value)
    assert all(bool((tensors[name] == value).all()) for value, name in enumerate("qkv"))
    packed = {1: "packed_qkv", 2: "packed_kv"}.get(LAYOUTS[layout].parts)
    assert {name for name in tensors if name.startswith("packed")} == ({packed} if packed else set())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_buffer_lies_between_red_zones_of_nan_or_of_no_valid_offset(dtype: str) -> None:
    inputs = build(case_of("sbhd_sb2hd", dtype=dtype, **FULL))
    assert {"q", "kv", "attn_bias", "softmax_offset", "output_grad", "cu_seqlens_q"} <= set(inputs.masters)
    for name, master in inputs.masters.items():
        zone = zones(inputs, name)
        assert zone.numel() * zone.element_size() == 2 * RED_ZONE_BYTES
        assert bool((zone.isnan() if zone.is_floating_point() else zone == RED_ZONE_INTEGER).all())
        assert not bool(master.inner().isnan().any())


def test_offsets_in_a_red_zone_point_nowhere() -> None:
    assert RED_ZONE_INTEGER < -(2**20)


@pytest.mark.parametrize("layout", ["sbhd_sbhd_sbhd", "bshd_bshd_bshd", "sbh3d", "bs3hd", "bshd_bsh2d"])
def test_rows_past_a_sequence_are_large_and_finite_and_real_rows_are_not(layout: str) -> None:
    inputs = build(case_of(layout, attn_mask_type="padding", batch_size=5, seed=9))
    tensors, row = inputs.fresh().tensors, LAYOUTS[layout]
    padded = 0
    for name in "qkv":
        lengths = inputs.q.lengths if name == "q" else inputs.kv.lengths
        by_token = (
            tensors[name]
            if (row.q_format if name == "q" else row.kv_format).startswith("b")
            else (tensors[name].transpose(0, 1))
        )
        for index, length in enumerate(lengths):
            assert bool((by_token[index, length:].abs() == PADDING_POISON).all())
            assert float(by_token[index, :length].detach().abs().max()) < 10
            padded += by_token.shape[1] - length
    assert padded > 0


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("layout", ["sbh3d", "sbhd_sbhd_sbhd"])
def test_lengths_are_within_the_longest_and_one_of_them_is_the_longest(layout: str, seed: int) -> None:
    inputs = build(case_of(layout, attn_mask_type="padding_causal", window_size=(-1, 0), seed=seed))
    case = inputs.case
    for lengths, longest in ((inputs.q.lengths, case.max_seqlen_q), (inputs.kv.lengths, case.max_seqlen_kv)):
        assert len(lengths) == B
        assert min(lengths) >= 1
        assert max(lengths) == longest
    if case.layout.parts == 1:
        assert inputs.q.lengths == inputs.kv.lengths


def test_lengths_differ_between_sequences_and_sides_somewhere() -> None:
    drawn = [build(case_of("sbhd_sbhd_sbhd", attn_mask_type="padding", seed=seed)) for seed in range(8)]
    assert any(len(set(inputs.q.lengths)) > 1 for inputs in drawn)
    assert any(inputs.q.lengths != inputs.kv.lengths for inputs in drawn)


def test_without_a_padding_mask_every_sequence_is_full_and_no_padded_offsets_are_given() -> None:
    inputs = build(case_of("sbhd_sbhd_sbhd"))
    assert (inputs.q.lengths, inputs.kv.lengths) == ((SQ,) * B, (SKV,) * B)
    tensors = inputs.fresh().tensors
    assert not any(name.endswith("_padded") for name in tensors)
    assert tensors["cu_seqlens_q"].tolist() == [0, SQ, 2 * SQ, 3 * SQ]
    assert tensors["cu_seqlens_kv"].dtype == torch.int32


def test_offsets_add_up_the_lengths_and_the_padded_ones_are_tensors_of_their_own() -> None:
    inputs = build(case_of("sbhd_sbhd_sbhd", attn_mask_type="padding"))
    tensors = inputs.fresh().tensors
    for side, lengths in (("q", inputs.q.lengths), ("kv", inputs.kv.lengths)):
        offsets = tensors[f"cu_seqlens_{side}"]
        assert offsets.diff().tolist() == list(lengths)
        assert offsets[0] == 0
        assert tensors[f"cu_seqlens_{side}_padded"].data_ptr() != offsets.data_ptr()


def test_two_fresh_sets_share_bits_and_no_memory() -> None:
    inputs = build(case_of("sbh3d", **FULL))
    one, two = inputs.fresh(), inputs.fresh()
    assert list(one.tensors) == list(two.tensors)
    for name, tensor in one.tensors.items():
        assert torch.equal(bits(tensor), bits(two.tensors[name]))
    memory = [
        {buffer.flat.untyped_storage().data_ptr() for buffer in buffers.values()}
        for buffers in (one.buffers, two.buffers, inputs.masters)
    ]
    assert not memory[0] & memory[1]
    assert not memory[0] & memory[2]
    with torch.no_grad():
        one.tensors["q"].zero_()
    assert set(inputs.changes(two).values()) == {"unchanged"}


@pytest.mark.parametrize("layout", ["sbh3d", "sbhd_sb2hd", "sbhd_sbhd_sbhd"])
@pytest.mark.parametrize("output_grad", PLAIN_GRADIENTS)
def test_changes_names_exactly_the_buffer_that_was_written(layout: str, output_grad: str) -> None:
    inputs = build(case_of(layout, output_grad=output_grad, **FULL))
    assert set(inputs.changes(inputs.fresh()).values()) == {"unchanged"}
    for name in inputs.masters:
        live = inputs.fresh()
        target = live.output_grad if name == "output_grad" else live.buffers[name].inner().detach()
        one = target.reshape(-1)[-1:] if target.is_contiguous() else target[..., -1:]
        integers = one.view({4: torch.int32, 8: torch.int64}[one.element_size()])
        with torch.no_grad():
            integers[(0,) * integers.dim()] ^= 1  # one bit of one element
        changes = inputs.changes(live)
        assert changes.pop(name) == "written"
        assert set(changes.values()) == {"unchanged"}


@pytest.mark.parametrize("where", [0, -1])
def test_changes_tells_a_red_zone_from_the_tensor_between(where: int) -> None:
    inputs = build(case_of("sbh3d", **FULL))
    for name in inputs.masters:
        live = inputs.fresh()
        buffer = live.buffers[name]
        edge = buffer.margin - 1 if where == 0 else buffer.flat.numel() - buffer.margin
        with torch.no_grad():
            buffer.flat.detach()[edge] = 0
        changes = inputs.changes(live)
        assert changes.pop(name) == "red zone written"
        assert set(changes.values()) == {"unchanged"}


def test_another_nan_in_a_red_zone_is_a_write() -> None:
    inputs = build(case_of("sbh3d"))
    live = inputs.fresh()
    live.buffers["qkv"].flat.detach().view(torch.int32)[0] ^= 1
    assert bool(live.buffers["qkv"].flat[0].isnan())
    assert inputs.changes(live)["qkv"] == "red zone written"


def test_an_output_gradient_is_never_uniform_and_has_the_same_values_however_it_lies() -> None:
    drawn = {kind: build(case_of("sbhd_sbhd_sbhd", output_grad=kind)).fresh().output_grad for kind in PLAIN_GRADIENTS}
    shape = (SQ, B, H, DV)
    assert {tuple(gradient.shape) for gradient in drawn.values()} == {shape}
    assert torch.equal(drawn["contiguous"], drawn["transposed"])
    assert torch.equal(drawn["contiguous"], drawn["sliced"])
    assert torch.equal(drawn["expanded"], drawn["contiguous"][:1, :1].expand(shape))
    assert drawn["contiguous"].is_contiguous()
    assert drawn["expanded"].stride()[:2] == (0, 0)
    assert not drawn["transposed"].is_contiguous()
    assert drawn["transposed"].transpose(0, 2).is_contiguous()
    assert not drawn["sliced"].is_contiguous()
    assert drawn["sliced"].storage_offset() == 2
    assert drawn["sliced"].stride(-1) == 1
    assert all(float(gradient.std()) > 0.1 for gradient in drawn.values())


@pytest.mark.parametrize("requires_grad", [(), ("q",), ("v",), ("k", "v"), ("q", "k", "v"), DIFFERENTIABLE])
def test_exactly_the_named_tensors_ask_for_a_gradient(requires_grad: tuple[str, ...]) -> None:
    live = build(case_of("sbhd_sbhd_sbhd", **(FULL | {"requires_grad": requires_grad}))).fresh()
    assert {name for name, tensor in live.tensors.items() if tensor.requires_grad} == set(requires_grad)
    assert {name for name, leaf in live.leaves.items() if leaf.requires_grad} == set(requires_grad)
    assert all(leaf.is_leaf for leaf in live.leaves.values())


def test_gradients_of_a_packed_layout_gather_in_the_buffer_itself() -> None:
    live = build(case_of("sbh3d")).fresh()
    assert list(live.leaves) == ["qkv"]
    assert live.leaves["qkv"].is_leaf
    assert live.leaves["qkv"].requires_grad
    assert all(live.tensors[name].requires_grad for name in "qkv")
    frozen = build(case_of("sbh3d", requires_grad=())).fresh()
    assert not any(tensor.requires_grad for tensor in frozen.tensors.values())


@pytest.mark.parametrize("shape", BIAS_SHAPES)
def test_a_bias_has_the_sizes_of_its_shape_and_the_dtype_of_q(shape: str) -> None:
    case = case_of("sbhd_sbhd_sbhd", attn_bias_type="post_scale_bias", bias_shape=shape, dtype="bf16")
    sizes = {"1": 1, "b": B, "h": H, "s": SQ}
    bias = build(case).fresh().tensors["attn_bias"]
    assert tuple(bias.shape) == (*(sizes[letter] for letter in shape[:3]), SKV) == bias_sizes(case)
    assert bias.dtype == torch.bfloat16


def test_a_learnt_softmax_offset_is_far_from_zero_with_both_signs_and_off_by_one_is_zero() -> None:
    learnt = build(case_of("sbhd_sbhd_sbhd", softmax_type="learnable")).fresh().tensors["softmax_offset"]
    assert (learnt.dtype, tuple(learnt.shape)) == (torch.float32, (1, H, 1, 1))
    assert float(learnt.abs().min()) >= 1.0
    assert {float(value) for value in learnt.sign().flatten()} == {1.0, -1.0}
    zero = build(case_of("sbhd_sbhd_sbhd", softmax_type="off-by-one")).fresh().tensors["softmax_offset"]
    assert not bool(zero.any())


def test_a_tensor_that_the_case_has_not_is_absent() -> None:
    tensors = build(case_of("sbhd_sbhd_sbhd")).fresh().tensors
    assert set(tensors) == {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv"}


@pytest.mark.parametrize("layout", DENSE)
def test_a_dense_layout_is_drawn_whole(layout: str) -> None:
    tensors = build(case_of(layout)).fresh().tensors
    assert math.prod(tensors["q"].shape) == B * SQ * H * D


# ------------------------------------------------------------------ THD

SEEDS = range(40)


def ragged(layout: str, *, gaps: bool = True, **changes: object) -> Case:
    """Return a case of a ragged layout."""
    pages = {"page_size": 4, "max_seqlen_kv": 12} if LAYOUTS[layout].paged else {}
    return case_of(layout, attn_mask_type="padding", pad_between_seqs=gaps, **(pages | changes))


def sides(layout: str) -> list[str]:
    """Return the sides of a layout that are ragged."""
    row = LAYOUTS[layout]
    return [side for side, fmt in (("q", row.q_format), ("kv", row.kv_format)) if fmt == "thd"]


def owned(place: Geometry) -> list[int]:
    """Return the rows that belong to a sequence, sequence by sequence."""
    return [start + row for length, start in zip(place.lengths, place.offsets, strict=False) for row in range(length)]


@pytest.mark.parametrize("layout", RAGGED)
def test_a_ragged_tensor_has_all_its_rows_before_the_heads_and_an_output_as_many_as_q(layout: str) -> None:
    inputs = build(ragged(layout))
    live = inputs.fresh()
    for name in "qkv":
        side, place = ("q", inputs.q) if name == "q" else ("kv", inputs.kv)
        if side in sides(layout):
            assert live.tensors[name].dim() == 3
            assert live.tensors[name].shape[0] == place.rows
    if "q" in sides(layout):
        assert live.output_grad.shape == (inputs.q.rows, H, inputs.case.head_dim_v)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("layout", RAGGED)
def test_sequences_do_not_overlap_and_lie_within_their_rows(layout: str, gaps: bool) -> None:
    for case in (ragged(layout, gaps=gaps, seed=seed) for seed in SEEDS):
        for side, place in zip(("q", "kv"), geometry(case), strict=True):
            longest = case.max_seqlen_q if side == "q" else case.max_seqlen_kv
            assert len(place.lengths) == B
            assert len(place.offsets) == B + 1
            assert place.offsets[0] == 0
            assert min(place.lengths) >= (0 if gaps else 1)
            assert max(place.lengths) == longest
            for (start, following), length in zip(itertools.pairwise(place.offsets), place.lengths, strict=True):
                assert start + length <= following
            assert place.offsets[-1] <= place.rows
            rows = owned(place)
            assert rows == sorted(set(rows))
            if side not in sides(layout) or not gaps:
                assert place.offsets == (0, *itertools.accumulate(place.lengths))
                assert place.rows == sum(place.lengths)
            else:
                assert place.rows > place.offsets[-1], "a tail that belongs to no sequence"


@pytest.mark.parametrize("layout", RAGGED)
def test_gaps_and_empty_sequences_come_up_over_seeds_and_only_where_they_are_asked_for(layout: str) -> None:
    gaps, empty, first_empty, last_empty = 0, 0, 0, 0
    for seed in SEEDS:
        drawn = dict(zip(("q", "kv"), geometry(ragged(layout, seed=seed)), strict=True))
        tight = dict(zip(("q", "kv"), geometry(ragged(layout, gaps=False, seed=seed)), strict=True))
        for side in sides(layout):
            place = drawn[side]
            gaps += place.offsets != (0, *itertools.accumulate(place.lengths))
            empty += 0 in place.lengths
            first_empty += place.lengths[0] == 0
            last_empty += place.lengths[-1] == 0
            assert min(tight[side].lengths) >= 1
    assert gaps > len(SEEDS) // 2
    assert empty > 2
    assert first_empty
    assert last_empty


def test_a_batch_of_one_is_never_without_a_token() -> None:
    lengths = [build(ragged("thd_thd_thd", batch_size=1, seed=seed)).q.lengths[0] for seed in SEEDS]
    assert min(lengths) >= 1
    assert len(set(lengths)) > 3


@pytest.mark.parametrize("layout", RAGGED)
def test_parts_of_one_buffer_share_their_rows_and_others_have_rows_of_their_own(layout: str) -> None:
    pairs = [geometry(ragged(layout, seed=seed)) for seed in SEEDS]
    if LAYOUTS[layout].parts == 1:
        assert all(q == kv for q, kv in pairs)
    else:
        assert all(q != kv for q, kv in pairs if q.lengths != kv.lengths)
        assert any(q.lengths != kv.lengths for q, kv in pairs)
    inputs = build(ragged(layout))
    assert (inputs.q, inputs.kv) == geometry(inputs.case)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", [name for name in RAGGED if not LAYOUTS[name].paged])
def test_rows_of_no_sequence_are_large_and_finite_and_rows_of_one_are_not(layout: str, seed: int) -> None:
    inputs = build(ragged(layout, seed=seed))
    tensors = inputs.fresh().tensors
    for name in "qkv":
        side, place = ("q", inputs.q) if name == "q" else ("kv", inputs.kv)
        if side not in sides(layout):
            continue
        rows = owned(place)
        others = sorted(set(range(place.rows)) - set(rows))
        assert others
        assert bool((tensors[name][others].abs() == PADDING_POISON).all())
        assert float(tensors[name][rows].detach().abs().max()) < 10


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("layout", RAGGED)
def test_both_kinds_of_offsets_say_where_the_sequences_lie(layout: str, gaps: bool) -> None:
    for seed in range(6):
        inputs = build(ragged(layout, gaps=gaps, seed=seed))
        tensors = inputs.fresh().tensors
        for side, place in (("q", inputs.q), ("kv", inputs.kv)):
            lengths, starts = tensors[f"cu_seqlens_{side}"], tensors[f"cu_seqlens_{side}_padded"]
            assert (lengths.dtype, starts.dtype) == (torch.int32, torch.int32)
            assert lengths.data_ptr() != starts.data_ptr()
            assert lengths.tolist() == [0, *itertools.accumulate(place.lengths)]
            assert starts.tolist() == list(place.offsets)
            assert torch.equal(lengths, starts) == (place.offsets == (0, *itertools.accumulate(place.lengths)))
            assert bool((starts.diff() >= lengths.diff()).all())


@pytest.mark.parametrize(
    ("layout", "q", "kv"),
    [
        ("t3hd", (3 * H * D, D), (3 * H * D, D)),
        ("th3d", (3 * H * D, 3 * D), (3 * H * D, 3 * D)),
        ("thd_t2hd", (H * D, D), (2 * HG * D, D)),
        ("thd_th2d", (H * D, D), (2 * HG * D, 2 * D)),
        ("thd_thd_thd", (H * D, D), (HG * D, D)),
    ],
)
def test_ragged_views_have_the_strides_that_the_kernels_assume(
    layout: str, q: tuple[int, int], kv: tuple[int, int]
) -> None:
    """Strides along row and head."""
    tensors = build(ragged(layout)).fresh().tensors
    assert tensors["q"].stride() == (*q, 1)
    assert tensors["k"].stride() == (*kv, 1)
    assert len({tensors[name].untyped_storage().data_ptr() for name in "qkv"}) == LAYOUTS[layout].parts


@pytest.mark.parametrize("layout", RAGGED)
def test_the_same_ragged_case_gives_the_same_bits(layout: str) -> None:
    one, again, other = (build(ragged(layout, seed=seed)) for seed in (5, 5, 6))
    for name, master in one.masters.items():
        assert torch.equal(bits(master.flat), bits(again.masters[name].flat))
    assert not torch.equal(bits(one.masters["output_grad"].flat), bits(other.masters["output_grad"].flat))


# ------------------------------------------------------------------ paged


def paged(layout: str, page_size: int = 4, **changes: object) -> Case:
    """Return a case of a paged layout of three pages a sequence."""
    sizes: dict[str, object] = {"max_seqlen_kv": 3 * page_size, "page_size": page_size, "requires_grad": ()}
    return case_of(layout, attn_mask_type="padding", **(sizes | changes))


def by_page(case: Case, cache: torch.Tensor) -> torch.Tensor:
    """Return a cache as [pages, page_size, hg, d]."""
    return cache if case.layout.kv_format == "bshd" else cache.transpose(0, 1)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("layout", PAGED)
def test_a_cache_has_pages_to_spare_and_a_table_names_each_page_once(layout: str, page_size: int) -> None:
    case = paged(layout, page_size)
    live = build(case).fresh()
    pages = 3 * B + SPARE_PAGES
    first = (pages, page_size) if case.layout.kv_format == "bshd" else (page_size, pages)
    assert SPARE_PAGES > 0
    for name, size in (("k", D), ("v", DV)):
        assert tuple(live.tensors[name].shape) == (*first, HG, size)
        assert live.tensors[name].is_contiguous()
        table = live.tensors[f"page_table_{name}"]
        assert (table.dtype, tuple(table.shape)) == (torch.int32, (B, 3))
        entries = table.flatten().tolist()
        assert len(set(entries)) == len(entries)
        assert 0 <= min(entries) <= max(entries) < pages


@pytest.mark.parametrize("layout", PAGED)
def test_every_token_is_found_through_its_own_table_and_nothing_but_poison_elsewhere(layout: str) -> None:
    for seed in range(8):
        case = paged(layout, batch_size=5, seed=seed)
        inputs = build(case)
        tensors = inputs.fresh().tensors
        for name in ("k", "v"):
            cache = by_page(case, tensors[name])
            table = tensors[f"page_table_{name}"].tolist()
            real = torch.zeros(cache.shape[:2], dtype=torch.bool)
            for row, length in zip(table, inputs.kv.lengths, strict=True):
                for token in range(length):
                    real[row[token // 4], token % 4] = True
            assert int(real.sum()) == sum(inputs.kv.lengths)
            assert float(cache[real].abs().max()) < 10
            assert bool((cache[~real].abs() == PADDING_POISON).all())
            spare = sorted(set(range(len(cache))) - {page for row in table for page in row})
            assert len(spare) == SPARE_PAGES
            assert bool((cache[spare].abs() == PADDING_POISON).all())


@pytest.mark.parametrize("layout", PAGED)
def test_paging_moves_the_tokens_of_the_dense_layout_and_changes_none(layout: str) -> None:
    """A dense case of the same seed draws the same k and v, which the pages must hold in the same order."""
    case = paged(layout)
    row = case.layout
    dense = "bshd" if row.kv_format == "bshd" else "sbhd"
    q_format = "thd" if row.q_format == "thd" else row.q_format
    name_of_dense = f"{q_format}_{dense}_{dense}"
    straight = build(case.replace(qkv_layout=name_of_dense, page_size=None)).fresh().tensors
    tensors = build(case).fresh().tensors
    assert torch.equal(tensors["q"], straight["q"])
    for name in ("k", "v"):
        cache = by_page(case, tensors[name])
        found = cache[tensors[f"page_table_{name}"].long()].flatten(1, 2)  # [b, pages * page_size, hg, d]
        wanted = straight[name] if dense == "bshd" else straight[name].transpose(0, 1)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("layout", PAGED)
def test_k_and_v_have_tables_of_their_own_that_are_no_plain_count(layout: str) -> None:
    for seed in range(8):
        tensors = build(paged(layout, seed=seed)).fresh().tensors
        tables = [tensors[f"page_table_{name}"] for name in ("k", "v")]
        assert not torch.equal(*tables)
        assert all(not torch.equal(table.flatten(), torch.arange(3 * B, dtype=torch.int32)) for table in tables)


@pytest.mark.parametrize("layout", PAGED)
def test_a_write_to_a_page_table_or_a_spare_page_shows(layout: str) -> None:
    inputs = build(paged(layout))
    for name in ("page_table_k", "page_table_v", "k", "v"):
        live = inputs.fresh()
        tensor = live.tensors[name]
        used = set(live.tensors[f"page_table_{name[-1]}"].flatten().tolist())
        if name in ("k", "v"):
            tensor = by_page(inputs.case, tensor)[min(set(range(3 * B + SPARE_PAGES)) - used)]
        tensor += 1
        changes = inputs.changes(live)
        assert changes.pop(name) == "written"
        assert set(changes.values()) == {"unchanged"}


def test_only_a_paged_case_has_page_tables() -> None:
    for layout in (*DENSE, *(name for name in RAGGED if not LAYOUTS[name].paged)):
        case = case_of(layout, attn_mask_type="padding")
        assert not any(name.startswith("page_table") for name in build(case).fresh().tensors)


# ------------------------------------------------------------------ FP8

ENGINE = get_engine("reference")
RECIPES = [name for name in FP8_RECIPES if name != "none"]


def fp8_case(layout: str = "bshd_bshd_bshd", recipe: str = "delayed", **changes: object) -> Case:
    """Return an FP8 case; of whole blocks, so that every recipe takes it."""
    sizes: dict[str, object] = {
        "max_seqlen_q": 128, "max_seqlen_kv": 128, "head_dim_qk": 32, "head_dim_v": 32, "dtype": "bf16", "seed": 3,
    }  # fmt: skip
    return case_of(layout, **(sizes | {"fp8_recipe": recipe} | changes))


def test_an_fp8_case_needs_an_engine_to_make_its_quantizers() -> None:
    with pytest.raises(ValueError, match="fp8_recipe=delayed: the inputs need an engine"):
        build(fp8_case()).fresh()


def test_a_case_without_fp8_has_neither_quantizers_nor_a_recipe() -> None:
    live = build(case_of("sbh3d")).fresh(engine=ENGINE)
    assert live.quantizers is None
    assert live.fp8_meta is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_fp8_case_has_fresh_quantizers_every_time_unless_they_are_given(recipe: str) -> None:
    inputs = build(fp8_case(recipe=recipe))
    one, other = inputs.fresh(engine=ENGINE), inputs.fresh(engine=ENGINE)
    assert one.quantizers is not None
    assert other.quantizers is not None
    assert not {*map(id, one.quantizers.named().values())} & {*map(id, other.quantizers.named().values())}
    assert inputs.fresh(engine=ENGINE, quantizers=one.quantizers).quantizers is one.quantizers


def test_the_recipe_comes_with_the_call_but_where_only_the_one_in_force_is_to_tell() -> None:
    for scenario, keys in (("plain", {"recipe", "local_recipes"}), ("recipe_changed", {"recipe"})):
        live = build(fp8_case(recipe="mxfp8", scenario=scenario)).fresh(engine=ENGINE)
        assert live.fp8_meta is not None
        assert set(live.fp8_meta) == keys
        assert live.fp8_meta["recipe"].mxfp8()
        assert live.changes_of_meta() == "unchanged"
        live.fp8_meta["more"] = 1
        assert live.changes_of_meta() == "changed"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mask", ["no_mask", "padding"])
def test_no_given_value_saturates_and_real_ones_keep_their_precision(recipe: str, mask: str) -> None:
    case = fp8_case(recipe=recipe, attn_mask_type=mask, fp8_input=True)
    inputs = build(case)
    live = inputs.fresh(engine=ENGINE)
    longest = max(float(inputs.masters[name].inner().abs().max()) for name in "qkv")
    assert (longest == FP8_PADDING_POISON) == (mask == "padding")
    for name in "qkv":
        given = inputs.masters[name].inner().float()
        kept = live.tensors[name].detach().dequantize().float()
        assert torch.equal(kept[given.abs() == FP8_PADDING_POISON], given[given.abs() == FP8_PADDING_POISON])
        error = (kept - given).abs()
        assert bool((error <= given.abs() / 16 + 2.0**-9).all())


@pytest.mark.parametrize("recipe", ["delayed", "current", "hybrid"])
@pytest.mark.parametrize("layout", ["sbhd_sbhd_sbhd", "bshd_bshd_bshd", "sb3hd", "bshd_bs2hd"])
def test_quantized_inputs_share_bytes_and_scale_and_are_leaves_part_by_part(layout: str, recipe: str) -> None:
    asked = ("q", "k", "v") if LAYOUTS[layout].parts == 1 else ("q",)
    live = build(fp8_case(layout, recipe, fp8_input=True, requires_grad=asked)).fresh(engine=ENGINE)
    held = [parts(live.tensors[name]) for name in "qkv"]
    for what in ("data", "scale_inv"):
        assert len({part[what].untyped_storage().data_ptr() for part in held}) == 1
    assert list(live.leaves) == ["q", "k", "v"]
    assert all(leaf.is_leaf and leaf.requires_grad == (name in asked) for name, leaf in live.leaves.items())
    assert {name for name in live.tensors if name.startswith("packed")} == set()
    assert {"qkv.data", "qkv.scale_inv"} <= set(live.buffers)
    assert not {"q", "k", "v", "kv", "qkv"} & set(live.buffers)


def test_quantized_inputs_of_blocks_have_parts_of_their_own() -> None:
    live = build(fp8_case(recipe="mxfp8", fp8_input=True)).fresh(engine=ENGINE)
    names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    assert {f"{tensor}.{name}" for tensor in "qkv" for name in names} <= set(live.buffers)


QUANTIZED = [(recipe, "bshd_bshd_bshd") for recipe in RECIPES] + [("delayed", "sb3hd"), ("current", "bshd_bs2hd")]


@pytest.mark.parametrize(("recipe", "layout"), QUANTIZED)
def test_a_write_to_any_part_of_a_quantized_tensor_or_its_red_zones_shows(recipe: str, layout: str) -> None:
    gradient = "contiguous" if recipe == "mxfp8" else "quantized"
    inputs = build(fp8_case(layout, recipe, fp8_input=True, output_grad=gradient))
    names = [name for name in inputs.fresh(engine=ENGINE).buffers if "." in name]
    assert any(name.startswith("q") for name in names)
    assert any(name.startswith("output_grad") for name in names) == (gradient == "quantized")
    for name in names:
        for place, word in ((0, "written"), (-1, "red zone written")):
            live = inputs.fresh(engine=ENGINE)
            assert set(inputs.changes(live).values()) == {"unchanged"}
            buffer = live.buffers[name]
            buffer.flat.view(torch.uint8)[buffer.margin * buffer.flat.element_size() + place] ^= 1
            changes = inputs.changes(live)
            assert changes.pop(name) == word
            assert set(changes.values()) == {"unchanged"}


def test_bytes_in_a_red_zone_are_nan_in_either_format() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert bool(torch.tensor([RED_ZONE_BYTE], dtype=torch.uint8).view(dtype).float().isnan())


@pytest.mark.parametrize("recipe", ["delayed", "current", "hybrid"])
def test_a_quantized_output_gradient_is_in_the_backward_format_with_a_scale_of_its_own(recipe: str) -> None:
    live = build(fp8_case(recipe=recipe, output_grad="quantized")).fresh(engine=ENGINE)
    plain_ = build(fp8_case(recipe=recipe)).fresh(engine=ENGINE).output_grad
    assert fp8_dtype(live.output_grad) == "E5M2"
    assert live.output_grad.shape == plain_.shape
    assert live.output_grad.dtype == plain_.dtype
    assert live.quantizers is not None
    if recipe == "delayed":
        own = 1 / float(parts(live.output_grad)["scale_inv"])
        assert own not in [float(item.scale) for item in live.quantizers.named().values()]
    assert bool(((live.output_grad.dequantize() - plain_).abs() <= plain_.abs() / 8 + 2.0**-12).all())


@pytest.mark.parametrize("layout", ["sbh3d", "sbhd_sb2hd", "t3hd", "thd_th2d"])
def test_a_packed_buffer_is_left_out_where_the_case_says_so_and_its_views_stay_views(layout: str) -> None:
    row = LAYOUTS[layout]
    mask = "padding" if row.thd else "no_mask"
    given, left_out = (
        build(case_of(layout, attn_mask_type=mask, packed_given=flag)).fresh().tensors for flag in (True, False)
    )
    assert set(given) - set(left_out) == {"packed_qkv" if row.parts == 1 else "packed_kv"}
    assert left_out["k"].untyped_storage().data_ptr() == left_out["v"].untyped_storage().data_ptr()


def test_what_the_caller_itself_edits_is_no_write_and_leaves_the_next_set_alone() -> None:
    inputs = build(case_of("sbh3d", **FULL))
    live = inputs.fresh()
    before = live.tensors["q"]._version
    live.edit("qkv", lambda tensor: tensor.mul_(0.5))
    assert live.tensors["q"]._version > before
    assert set(inputs.changes(live).values()) == {"unchanged"}
    fresh = inputs.fresh()
    assert torch.equal(fresh.tensors["q"] * 0.5, live.tensors["q"])
    live.tensors["q"].data[0, 0, 0, 0] += 1
    assert inputs.changes(live)["qkv"] == "written"
