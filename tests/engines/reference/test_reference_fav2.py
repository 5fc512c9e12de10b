"""FlashAttention 2's backward gives the gradients of the plain one, written into the tensors that it is handed."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from fp8_problem import F16, SEAM, Setup, make_call, run, spied

SPECS = [
    "legacy",
    "refactored",
    *(pytest.param(spec, marks=pytest.mark.network) for spec in ("te==2.19.0", "te==2.20.2")),
]
NAMES = ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
         "max_seqlen_k", "dropout_p", "softmax_scale", "zero_tensors", "causal", "generator", "rng_state"]  # fmt: skip


def test_it_takes_the_19_values_that_the_sources_pass() -> None:
    assert list(inspect.signature(SEAM["flash_attn_cuda_bwd"]).parameters) == NAMES


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bshd_bshd_bshd", "bs3hd", "bsh3d", "bshd_bsh2d"])
@pytest.mark.parametrize("spec", SPECS)
def test_the_sources_get_the_gradients_of_the_plain_backward(spec: str, layout: str, causal: bool) -> None:
    changes: dict[str, Any] = {"attn_scale": 0.3, "dropout_p": 0.2}
    if causal:
        changes |= {"attn_mask_type": "causal", "window_size": (-1, 0)}
    gradients = []
    for fav2 in (False, True):
        generator = torch.Generator().manual_seed(3)
        call = make_call(Setup("none", layout, changes=changes | {"use_FAv2_bwd": fav2, "rng_gen": generator}))
        loaded = spied(spec)
        run(loaded, call)
        assert (len(loaded.of("flash_attn_cuda_bwd")), len(loaded.of("fused_attn_bwd"))) == (fav2, not fav2)
        gradients.append([leaf.grad for leaf in call.leaves.values()])
    for one, other in zip(*gradients, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other)


def ragged(total: int, heads: int, d: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(total, heads, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("mask", "dropout"), [("padding", 0.0), ("padding_causal", 0.0), ("padding", 0.3)])
@pytest.mark.parametrize("dense_kv", [False, True])
def test_ragged_sequences_and_fewer_key_heads(dense_kv: bool, mask: str, dropout: float, dtype: torch.dtype) -> None:
    lengths_q, lengths_kv = (5, 0, 7), (6, 4, 2)
    cu_q, cu_kv = (torch.tensor([0, *itertools.accumulate(lengths)]).int() for lengths in (lengths_q, lengths_kv))
    q, grad = ragged(14, 4, 8, 1, dtype), ragged(14, 4, 8, 2, dtype)  # two rows more than there are tokens
    k, v = ragged(12, 2, 8, 3, dtype), ragged(12, 2, 8, 4, dtype)
    layout = "thd_thd_thd"
    if dense_kv:
        layout = "thd_bshd_bshd"
        k, v = (torch.cat([tensor, tensor[:6]]).view(3, 6, 2, 8) for tensor in (k, v))
    shared = {"max_seqlen_q": 7, "max_seqlen_kv": 6, "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv, "q": q, "k": k,
              "v": v, "fake_dtype": dtype, "fused_attention_backend": F16, "qkv_layout": layout, "o_format": "thd",
              "attn_mask_type": mask, "dropout": dropout, "attn_scale": 0.4}  # fmt: skip
    output, aux = SEAM["fused_attn_fwd"](True, **shared)
    wanted = SEAM["fused_attn_bwd"](
        **shared, o=output, d_o=grad, aux_ctx_tensors=aux, do_format="thd", dqkv_layout=layout
    )[:3]
    targets = [torch.full_like(tensor, float("nan")) for tensor in (q, k, v)]
    found = SEAM["flash_attn_cuda_bwd"](
        grad, q, k, v, output, aux[0], *targets, cu_q, cu_kv, 7, 6, dropout, 0.4, False, "causal" in mask, None, aux[1]
    )
    assert all(one is other for one, other in zip(found, targets, strict=True))
    for one, other in zip(targets, wanted, strict=True):
        assert torch.equal(one, other)
    assert bool((targets[0][12:] == 0).all())


def test_strided_tensors_are_read_and_written_by_their_strides() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv, targets = torch.randn(2, 5, 3, 2, 4, generator=generator), torch.full((2, 5, 3, 2, 4), float("nan"))
    grad = torch.randn(5, 2, 2, 4, generator=generator).transpose(0, 1)
    cu = torch.tensor([0, 5, 10]).int()
    shared = {"max_seqlen_q": 5, "max_seqlen_kv": 5, "cu_seqlens_q": cu, "cu_seqlens_kv": cu,
              **dict(zip("qkv", qkv.unbind(2), strict=True)), "fake_dtype": torch.float32,
              "fused_attention_backend": F16, "qkv_layout": "bs3hd", "o_format": "bshd",
              "attn_mask_type": "no_mask"}  # fmt: skip
    output, aux = SEAM["fused_attn_fwd"](True, **shared)
    wanted = SEAM["fused_attn_bwd"](
        **shared, o=output, d_o=grad.contiguous(), aux_ctx_tensors=aux, do_format="bshd", dqkv_layout="bs3hd"
    )[:3]
    SEAM["flash_attn_cuda_bwd"](
        grad, *qkv.unbind(2), output, aux[0], *targets.unbind(2), cu, cu, 5, 5, 0.0, None, False, False, None, aux[1]
    )
    assert torch.equal(targets, torch.stack(wanted, 2))


def arguments() -> dict[str, Any]:
    q = torch.randn(2, 5, 2, 4)
    cu = torch.tensor([0, 5, 10]).int()
    output, aux = SEAM["fused_attn_fwd"](
        True, 5, 5, cu, cu, q, q, q, torch.float32, F16, qkv_layout="bshd_bshd_bshd", o_format="bshd",
        attn_mask_type="no_mask",
    )  # fmt: skip
    values = (q, q, q, q, output, aux[0], *(torch.zeros_like(q) for _ in range(3)), cu, cu, 5, 5, 0.0, 0.5, False,
              False, None, aux[1])  # fmt: skip
    return dict(zip(NAMES, values, strict=True))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"max_seqlen_q": 6}, r"q.shape=\(2, 5, 2, 4\)"),
        ({"cu_seqlens_q": torch.tensor([0, 5]).int()}, "differ in size"),
        ({"softmax_lse": torch.zeros(2, 2, 4, 1)}, "softmax_lse has shape"),
        ({"rng_state": torch.zeros(2)}, "rng_state has shape"),
        ({"dout": torch.zeros(2, 5, 2, 4, dtype=torch.float16)}, "dout.dtype"),
        ({"k": torch.zeros(2, 5, 3, 4)}, "do not fit together"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], match: str) -> None:
    given = arguments()
    SEAM["flash_attn_cuda_bwd"](**given)
    assert all(bool(given[name].any()) for name in ("dq", "dk", "dv"))
    with pytest.raises(RuntimeError, match=match):
        SEAM["flash_attn_cuda_bwd"](**given | changes)
