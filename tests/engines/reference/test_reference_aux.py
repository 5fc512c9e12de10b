"""The auxiliary list, the oddities kept from the real kernels, and every refusal by its type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_problem import SEAM, Problem, backward, forward, make_data, run

from harness.engines.reference import EngineUnsupported

Backend = SEAM["FusedAttnBackend"]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("bias_type", ["no_bias", "alibi", "post_scale_bias"])
def test_aux_holds_the_very_inputs_in_a_fixed_order(bias_type: str, softmax: str, is_training: bool) -> None:
    problem = Problem(bias_type=bias_type, softmax=softmax, mask="causal")
    data = make_data(problem)
    _, aux = forward(problem, data, is_training=is_training)
    assert isinstance(aux, list)
    assert (aux[0].dtype, aux[0].shape) == (torch.float64, (2, 4, 5, 1))
    assert (aux[1].dtype, aux[1].shape) == (torch.int64, (2,))
    rest = [tensor for tensor in (data.bias, data.offset) if tensor is not None]
    assert len(aux) == 2 + len(rest)
    assert all(one is other for one, other in zip(aux[2:], rest, strict=True))


def test_a_bias_or_offset_that_its_type_does_not_use_is_ignored() -> None:
    problem = Problem(mask="causal")
    data = make_data(problem)
    plain = forward(problem, data)
    extra = forward(problem, data, attn_bias=torch.ones(1), softmax_offset=torch.ones(1))
    assert len(extra[1]) == 2
    assert torch.equal(plain[0], extra[0])


def test_forward_returns_a_pair_or_a_triple() -> None:
    problem = Problem()
    data = make_data(problem)
    assert len(forward(problem, data)) == 2
    assert len(forward(problem, data, return_max_logit=True)) == 3


def test_backward_returns_a_list_of_five() -> None:
    grads = run(Problem()).raw_grads
    assert isinstance(grads, list)
    assert [grad is None for grad in grads] == [False, False, False, True, True]


def test_the_bias_gradient_takes_the_shape_of_the_last_aux_entry() -> None:
    problem = Problem(bias_type="post_scale_bias", softmax="learnable")
    d_bias, d_offset = run(problem).raw_grads[3:]
    assert d_bias.shape == (1, 4, 1, 1)
    assert (d_bias == 0).all()
    assert d_offset.shape == (1, 4, 1, 1)
    assert (d_offset != 0).all()


def test_the_gradient_of_a_bias_over_keys_alone_is_poison() -> None:
    d_bias = run(Problem(bias_type="post_scale_bias", bias_shape="111s")).raw_grads[3]
    assert d_bias.shape == (1, 1, 1, 5)
    assert d_bias.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_offset_gradient_is_float32(dtype: torch.dtype) -> None:
    d_offset = run(Problem(dtype=dtype, softmax="off-by-one")).raw_grads[4]
    assert (d_offset.shape, d_offset.dtype) == ((1, 4, 1, 1), torch.float32)


def test_off_by_one_without_an_offset_is_one_of_zeros() -> None:
    problem = Problem(softmax="off-by-one")
    data = make_data(problem)
    wanted = run(problem, data)
    data.offset = None
    got = run(problem, data)
    assert torch.equal(wanted.output, got.output)
    assert len(got.aux) == 2
    assert all(torch.equal(a, b) for a, b in zip(wanted.grads, got.grads, strict=True))


LENGTHS = torch.tensor([0, 5, 10], dtype=torch.int32)
OTHER = torch.zeros(2, 5, 4, 3, dtype=torch.float32)

FORWARD_ERRORS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("no bias tensor", {"attn_bias_type": "post_scale_bias"}, ValueError, "attn_bias"),
    ("bias of another dtype", {"attn_bias_type": "post_scale_bias", "attn_bias": torch.zeros(1, 4, 5, 5)},
     ValueError, "dtype"),
    ("no backend", {"fused_attention_backend": Backend.No_Backend}, ValueError, "No_Backend|no kernel"),
    ("no backend as int", {"fused_attention_backend": -1}, ValueError, "no kernel"),
    ("unknown backend", {"fused_attention_backend": 7}, ValueError, "7"),
    ("no value as backend", {"fused_attention_backend": None}, ValueError, "None"),
    ("layout", {"qkv_layout": "bshd"}, KeyError, "qkv_layout"),
    ("output format", {"o_format": "hsbd"}, KeyError, "o_format"),
    ("scale format", {"qkv_scale_inv_format": "x"}, KeyError, "qkv_scale_inv_format"),
    ("mask", {"attn_mask_type": "arbitrary"}, KeyError, "attn_mask_type"),
    ("bias type", {"attn_bias_type": "x", "attn_bias": OTHER.double()}, KeyError, "attn_bias_type"),
    ("softmax", {"softmax_type": "x"}, KeyError, "softmax_type"),
    ("no window", {"window_size": None}, TypeError, "window_size"),
    ("window of floats", {"window_size": (1.5, 0)}, TypeError, "window_size"),
    ("no length", {"max_seqlen_q": None}, TypeError, "max_seqlen_q"),
    ("no cu_seqlens", {"cu_seqlens_kv": None}, TypeError, "cu_seqlens_kv"),
    ("window below -1", {"window_size": (-2, 0)}, RuntimeError, "window_size"),
    ("pre-scale bias", {"attn_bias_type": "pre_scale_bias", "attn_bias": torch.zeros(1, 4, 5, 5).double()},
     RuntimeError, "pre_scale_bias"),
    ("alibi without causal", {"attn_bias_type": "alibi"}, RuntimeError, "alibi"),
    ("bias that does not fit", {"attn_bias_type": "post_scale_bias", "attn_bias": torch.zeros(1, 3, 5, 5).double()},
     RuntimeError, "broadcast"),
    ("learnable without offset", {"softmax_type": "learnable"}, RuntimeError, "softmax_offset"),
    ("offset of another shape", {"softmax_type": "learnable", "softmax_offset": torch.zeros(4)},
     RuntimeError, "softmax_offset"),
    ("mixed dtypes", {"k": OTHER}, RuntimeError, "k.dtype"),
    ("integer inputs", {"q": OTHER.int(), "k": OTHER.int(), "v": OTHER.int()}, RuntimeError, "q.dtype"),
    ("dropout of 1", {"dropout": 1.0}, RuntimeError, "dropout"),
    ("heads that do not divide", {"k": OTHER[:, :, :3].double(), "v": OTHER[:, :, :3].double()},
     RuntimeError, "divide"),
    ("head dimensions that differ", {"k": OTHER[..., :2].double()}, RuntimeError, "head dimensions"),
    ("FP8 quantizer", {"o_quantizer": object()}, RuntimeError, "o_quantizer"),
    ("ragged without padding mask", {"qkv_layout": "thd_thd_thd", "o_format": "thd"}, RuntimeError, "padding mask"),
    ("paged without padding mask", {"qkv_layout": "paged_kv_bshd_bshd_bshd"}, RuntimeError, "padding mask"),
    ("starts that are no tensor", {"cu_seqlens_q_padded": [0, 5, 10]}, TypeError, "cu_seqlens_q_padded"),
    ("table that is no tensor", {"page_table_v": [[0]]}, TypeError, "page_table_v"),
    ("dense output", {"qkv_layout": "thd_thd_thd"}, EngineUnsupported, "o_format"),
    ("ragged output", {"o_format": "thd"}, EngineUnsupported, "o_format"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "match"), [row[1:] for row in FORWARD_ERRORS],
                         ids=[row[0] for row in FORWARD_ERRORS])  # fmt: skip
def test_forward_refuses(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    problem = Problem()
    data = make_data(problem)
    before = torch.random.get_rng_state()
    with pytest.raises(error, match=match) as caught:
        forward(problem, data, **changes)
    assert isinstance(caught.value, EngineUnsupported) == (error is EngineUnsupported)
    assert torch.equal(before, torch.random.get_rng_state())


BACKWARD_ERRORS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("no backend", {"fused_attention_backend": Backend.No_Backend}, ValueError, "no kernel"),
    ("unknown backend", {"fused_attention_backend": 7}, ValueError, "7"),
    ("empty aux", {"aux_ctx_tensors": []}, ValueError, "empty"),
    ("layout", {"qkv_layout": "bshd"}, KeyError, "qkv_layout"),
    ("gradient layout", {"dqkv_layout": "bshd"}, KeyError, "dqkv_layout"),
    ("output format", {"o_format": "x"}, KeyError, "o_format"),
    ("gradient format", {"do_format": None}, KeyError, "do_format"),
    ("scale format", {"do_scale_inv_format": "x"}, KeyError, "do_scale_inv_format"),
    ("mask", {"attn_mask_type": "arbitrary"}, KeyError, "attn_mask_type"),
    ("bias type", {"attn_bias_type": "x"}, KeyError, "attn_bias_type"),
    ("softmax", {"softmax_type": "x"}, KeyError, "softmax_type"),
    ("no window", {"window_size": None}, TypeError, "window_size"),
    ("no output", {"o": None}, TypeError, "o is no tensor"),
    ("None in aux", {"aux_ctx_tensors": [torch.zeros(2, 4, 5, 1), None]}, TypeError, "aux_ctx_tensors"),
    ("paged", {"qkv_layout": "paged_kv_bshd_bshd_bshd"}, RuntimeError, "QKV layout not supported"),
    ("starts that are no tensor", {"cu_seqlens_kv_padded": [0, 5, 10]}, TypeError, "cu_seqlens_kv_padded"),
    ("short aux", {"aux_ctx_tensors": [torch.zeros(2, 4, 5, 1)]}, RuntimeError, "1 entries"),
    ("aux without bias", {"attn_bias_type": "post_scale_bias"}, RuntimeError, "2 entries"),
    ("aux without offset", {"softmax_type": "learnable"}, RuntimeError, "2 entries"),
    ("swapped aux", {"aux_ctx_tensors": [torch.zeros(2).long(), torch.zeros(2, 4, 5, 1)]},
     RuntimeError, r"aux_ctx_tensors\[0\]"),
    ("rng_state of floats", {"aux_ctx_tensors": [torch.zeros(2, 4, 5, 1), torch.zeros(2)]},
     RuntimeError, r"aux_ctx_tensors\[1\]"),
    ("mixed dtypes", {"v": OTHER}, RuntimeError, "v.dtype"),
    ("gradient of another dtype", {"d_o": OTHER}, RuntimeError, "d_o.dtype"),
    ("pre-scale bias", {"attn_bias_type": "pre_scale_bias"}, RuntimeError, "pre_scale_bias"),
    ("gradients that share no buffer", {"dqkv_layout": "bs3hd", "v": OTHER[..., :2].double(),
      "o": OTHER[..., :2].double(), "d_o": OTHER[..., :2].double()}, RuntimeError, "cannot share"),
    ("FP8 quantizer", {"dp_quantizer": object()}, RuntimeError, "dp_quantizer"),
    ("ragged without padding mask", {name: "thd_thd_thd" if "layout" in name else "thd" for name in
      ("qkv_layout", "dqkv_layout", "o_format", "do_format")}, RuntimeError, "padding mask"),
    ("ragged gradient layout", {"dqkv_layout": "thd_thd_thd"}, EngineUnsupported, "dqkv_layout"),
    ("ragged gradient", {"do_format": "thd"}, EngineUnsupported, "do_format"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "match"), [row[1:] for row in BACKWARD_ERRORS],
                         ids=[row[0] for row in BACKWARD_ERRORS])  # fmt: skip
def test_backward_refuses(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    problem = Problem()
    data = make_data(problem)
    output, aux = forward(problem, data)
    backward(problem, data, output, aux)
    with pytest.raises(error, match=match) as caught:
        backward(problem, data, output, aux, **changes)
    assert isinstance(caught.value, EngineUnsupported) == (error is EngineUnsupported)


def test_a_paged_gradient_layout_has_no_backward_even_where_the_rest_is_dense() -> None:
    problem = Problem()
    data = make_data(problem)
    output, aux = forward(problem, data)
    with pytest.raises(RuntimeError, match="dqkv_layout") as caught:
        backward(problem, data, output, aux, dqkv_layout="paged_kv_sbhd_sbhd_sbhd")
    assert not isinstance(caught.value, EngineUnsupported)


def test_bias_and_offset_in_each_other_s_place_are_refused() -> None:
    problem = Problem(bias_type="post_scale_bias", softmax="learnable")
    data = make_data(problem)
    output, (stats, rng_state, bias, offset) = forward(problem, data)
    with pytest.raises(RuntimeError, match=r"aux_ctx_tensors\[2\]"):
        backward(problem, data, output, [stats, rng_state, offset, bias])


@pytest.mark.parametrize("window", [[-1, -1], (-1, -1)])
def test_a_window_may_be_a_list(window: Any) -> None:
    problem = Problem(window=window)
    assert torch.equal(run(problem).output, run(Problem()).output)


def test_the_trap_defaults_are_those_of_the_original() -> None:
    # A caller that forgets layout, formats and mask gets sbh3d, sbhd and padding.
    problem = Problem(layout="sbh3d", mask="padding", lengths_q=(3, 5), lengths_kv=(2, 4))
    data = make_data(problem)
    wanted = run(problem, data)
    q, k, v = wanted.inputs
    cu_q, cu_kv = problem.cu_seqlens()
    output, aux = SEAM["fused_attn_fwd"](True, 5, 5, cu_q, cu_kv, q, k, v, q.dtype, 1)
    assert torch.equal(output, wanted.raw_output)
    d_o = data.grad.permute(2, 0, 1, 3).contiguous()
    grads = SEAM["fused_attn_bwd"](5, 5, cu_q, cu_kv, q, k, v, output, d_o, q.dtype, aux, 1)
    assert all(torch.equal(one, other) for one, other in zip(grads[:3], wanted.raw_grads[:3], strict=True))
