"""FP8 numbers of the reference engine against the formats' own bits, and its FP8 kernels against both precisions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fp8_problem import (
    ENGINE,
    F16,
    FP8,
    QUANTIZED,
    SCALES,
    SEAM,
    Setup,
    for_recipe,
    make_call,
    make_quantizers,
    quantized_values,
    rounded,
    run,
    slot,
    spied,
    spread,
    values_of,
)

FORMATS = ("E4M3", "E5M2")
RECIPES = ("delayed", "current", "hybrid", "mxfp8")
LAYOUTS = ("bshd_bshd_bshd", "sbhd_sbhd_sbhd", "bs3hd", "sbh3d", "bshd_bsh2d", "sbhd_sb2hd")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.double(), other.double())


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_byte_means_what_its_bits_say_and_every_value_comes_back(fmt: str) -> None:
    table = values_of(fmt).float()
    numbers = table[~table.isnan()]
    tensor = ENGINE.quantizer("delayed", fmt)(numbers)
    assert same(tensor.dequantize(), numbers)
    bytes_of_numbers = torch.arange(256, dtype=torch.uint8)[~table.isnan()]
    assert torch.equal(tensor._data, bytes_of_numbers)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rounding_is_to_nearest_even_and_saturates(fmt: str) -> None:
    generator = torch.Generator().manual_seed(1)
    table = values_of(fmt)[:128]
    table = table[~table.isnan()]
    ties = (table[1:] + table[:-1]) / 2
    wide = torch.randn(4096, generator=generator).exp2() * torch.randn(4096, generator=generator) * 100
    huge = torch.tensor([float(table[-1]) * 1.01, 1e30, -1e30, 0.0, -0.0, float("inf"), -float("inf")])
    values = torch.cat([ties.float(), -ties.float(), wide, huge])
    for scale in (1.0, 0.25, 48.0):
        found = ENGINE.quantizer("delayed", fmt, scale)(values / scale).dequantize()
        assert same(found, (rounded(values / scale * scale, fmt) * torch.tensor(scale).reciprocal()).float())


def test_nan_stays_nan_and_counts_for_no_amax() -> None:
    quantizer = ENGINE.quantizer("delayed", "E4M3")
    tensor = quantizer(torch.tensor([1.0, float("nan"), -3.0]))
    assert tensor.dequantize().isnan().tolist() == [False, True, False]
    assert quantizer.amax.tolist() == [3.0]
    current = ENGINE.quantizer("current", "E4M3")(torch.tensor([1.0, float("nan"), -3.5]))
    assert current.dequantize()[2] == -3.5


@pytest.mark.parametrize("fmt", FORMATS)
def test_current_scaling_brings_the_largest_magnitude_to_that_of_the_format(fmt: str) -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(2)) * 0.01
    tensor = ENGINE.quantizer("current", fmt)(values)
    largest = float(values_of(fmt).nan_to_num(nan=0.0).max())
    assert tensor._scale_inv.dtype == torch.float32
    assert tensor._scale_inv.shape == (1,)
    assert float(tensor._scale_inv) == pytest.approx(float(values.abs().max()) / largest, rel=1e-6)
    assert int(tensor._data[values.abs().argmax()]) % 128 == (126 if fmt == "E4M3" else 123)
    assert same(ENGINE.quantizer("current", fmt)(torch.zeros(3)).dequantize(), torch.zeros(3))


@pytest.mark.parametrize("way", ["rowwise", "columnwise"])
def test_a_block_of_mxfp8_shares_the_smallest_power_of_two_that_holds_it(way: str) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(2, 32, 64, generator=generator) * torch.randn(2, 32, 64, generator=generator).exp2() ** 4
    values[0, :, :32] = 0.0
    values[1, 0, 0] = 448.0 * 4  # a power of two exactly
    quantizer = ENGINE.quantizer("mxfp8", "E4M3")
    quantizer.set_usage(rowwise=way == "rowwise", columnwise=way == "columnwise")
    tensor = quantizer(values)
    lines = values.view(-1, 64) if way == "rowwise" else values.view(-1, 64).t()
    wanted = torch.empty(lines.shape, dtype=torch.float64)
    exponents = torch.empty(lines.shape[0], lines.shape[1] // 32, dtype=torch.int64)
    for line in range(lines.shape[0]):
        for block in range(lines.shape[1] // 32):
            inside = lines[line, block * 32 : block * 32 + 32]
            amax = float(inside.abs().max())
            exponent = math.ceil(math.log2(amax / 448.0)) if amax else -127
            exponents[line, block] = exponent + 127
            wanted[line, block * 32 : block * 32 + 32] = quantized_values(inside, 2.0**-exponent, "E4M3")
    scales, data = getattr(tensor, f"_{way}_scale_inv"), getattr(tensor, f"_{way}_data")
    assert scales.dtype == data.dtype == torch.uint8
    assert data.shape == values.shape
    turned = (lambda found: found) if way == "rowwise" else torch.t
    assert torch.equal(turned(scales).long(), exponents)
    assert same(tensor.dequantize().view(-1, 64), turned(wanted).float())


def test_mxfp8_of_both_ways_rounds_each_by_itself() -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(4)) * 10 ** torch.linspace(-6, 3, 64)
    both = ENGINE.quantizer("mxfp8", "E4M3")(values)
    assert not torch.equal(both._rowwise_data, both._columnwise_data)
    assert same(both.dequantize(), both.decode_by(columns=False, dtype=torch.float32))
    assert not same(both.dequantize(), both.decode_by(columns=True, dtype=torch.float32))
    with pytest.raises(RuntimeError, match=r"shape=\(4, 48\) is not made of blocks of 32"):
        ENGINE.quantizer("mxfp8", "E4M3")(torch.zeros(4, 48))
    neither = ENGINE.quantizer("mxfp8", "E4M3")
    neither.set_usage(rowwise=False, columnwise=False)
    with pytest.raises(RuntimeError, match="columnwise_usage=False"):
        neither(values)


@pytest.mark.parametrize("fmt", ["bshd", "sbhd"])
def test_the_fast_path_quantizes_along_d_and_s_where_tensors_lie(fmt: str) -> None:
    generator = torch.Generator().manual_seed(5)
    canonical = torch.randn(2, 3, 64, 32, generator=generator).bfloat16()  # b, h, s, d
    order = ["bhsd".index(letter) for letter in fmt]
    tensor = canonical.permute(order).contiguous()
    quantizer = ENGINE.quantizer("mxfp8", "E4M3")
    (found,), scales = SEAM["mxfp8_quantize_fast_path"]([(tensor, quantizer)], fmt)
    wanted = quantizer(canonical.contiguous())
    assert scales == "bhsd"
    assert (found.shape, found.dtype) == (tensor.shape, torch.bfloat16)
    assert torch.equal(found._rowwise_scale_inv, wanted._rowwise_scale_inv)
    assert torch.equal(found._columnwise_scale_inv, wanted._columnwise_scale_inv)
    for columns in (False, True):
        one, other = (one.decode_by(columns=columns, dtype=torch.float32) for one in (found, wanted))
        assert same(one, other.permute(order))
    assert SEAM["mxfp8_quantize_fast_path"]([], fmt) == ([], fmt)
    with pytest.raises(AssertionError, match="src_format='thd'"):
        SEAM["mxfp8_quantize_fast_path"]([(tensor, quantizer)], "thd")


def operands(setup: Setup) -> tuple[Any, dict[str, Any], list[Any]]:
    """Return the quantizers of a setup, the arguments that both kernels share, and quantized q, k and v."""
    quantizers = make_quantizers(setup.recipe)
    named = SEAM["dpa_utils"].get_attention_quantizers(True, quantizers)
    values = make_call(setup.with_(recipe="none")).values
    with torch.no_grad():
        *qkv, layout, scales = SEAM["combine_and_quantize"](
            setup.layout, values["q"], values["k"], values["v"], named[0], used_in_backward=True
        )
    shared = {name: values[name] for name in ("max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv")} | {
        "fake_dtype": torch.bfloat16, "qkv_layout": layout, "o_format": setup.order, "attn_mask_type": "no_mask",
        "qkv_scale_inv_format": scales,
    }  # fmt: skip
    return quantizers, shared, qkv


def reference(setup: Setup, qkv: list[Any], grad: Any) -> dict[str, torch.Tensor]:
    """Compute what per-tensor FP8 kernels are to give, in float64, rounding by the formats' own bits."""
    q, k, v, do = (x.dequantize(dtype=torch.float32).double().transpose(1, 2) for x in (*qkv, grad))
    scale = setup.d**-0.5
    p = torch.softmax(q @ k.transpose(2, 3) * scale, -1)
    rounded_p = quantized_values(p, SCALES["S"], "E4M3")
    o = rounded_p @ v
    found = {"o": o.transpose(1, 2), "p": p}
    kept_o = quantized_values(o, SCALES["O"], "E4M3") if setup.recipe != "current" else o.bfloat16().double()
    ds = p * (do @ v.transpose(2, 3) - (do * kept_o).sum(-1, keepdim=True))
    rounded_ds = quantized_values(ds, SCALES["dP"], "E5M2")
    gradients = {"dq": rounded_ds @ k * scale, "dk": rounded_ds.transpose(2, 3) @ q * scale,
                 "dv": rounded_p.transpose(2, 3) @ do}  # fmt: skip
    return found | {"ds": ds} | {name: gradient.transpose(1, 2) for name, gradient in gradients.items()}


@pytest.mark.parametrize("recipe", ["delayed", "current", "hybrid"])
def test_the_kernels_round_the_probabilities_and_the_gradients_of_the_scores_and_nothing_else(recipe: str) -> None:
    setup = Setup(recipe, s=24, d=16)
    quantizers, shared, qkv = operands(setup)
    named = {name: slot(quantizers, name) for name in SCALES}
    output, aux = SEAM["fused_attn_fwd"](
        True, **shared, q=qkv[0], k=qkv[1], v=qkv[2], fused_attention_backend=FP8,
        s_quantizer=named["S"], o_quantizer=named["O"],
    )  # fmt: skip
    grad = named["dO"](make_call(setup).grad)
    wanted = reference(setup, qkv, grad)
    assert isinstance(output, QUANTIZED) == (recipe != "current")
    plain = output.dequantize() if recipe != "current" else output
    assert spread(plain, wanted["o"]) < (1e-3 if recipe == "current" else 6e-3)
    if recipe != "current":
        in_format = quantized_values(wanted["o"], SCALES["O"], "E4M3")
        assert float((plain.double() == in_format).double().mean()) > 0.98  # float32 may round a tie the other way
        assert float(named["O"].amax) == pytest.approx(float(wanted["o"].abs().max()), rel=1e-4)
    assert float(named["S"].amax) == pytest.approx(float(wanted["p"].max()), rel=1e-5)
    named["S"].amax.zero_()
    dq, dk, dv, d_bias, d_offset = SEAM["fused_attn_bwd"](
        **shared, q=qkv[0], k=qkv[1], v=qkv[2], o=output, d_o=grad, aux_ctx_tensors=aux, fused_attention_backend=FP8,
        s_quantizer=named["S"], dp_quantizer=named["dP"], dqkv_quantizer=named["dQKV"], do_format="bshd",
        dqkv_layout="bshd_bshd_bshd",
    )  # fmt: skip
    assert d_bias is None
    assert d_offset is None
    assert float(named["S"].amax) == 0.0  # backward rounds as forward did, and measures nothing
    assert float(named["dP"].amax) == pytest.approx(float(wanted["ds"].abs().max()), rel=2e-2)
    for name, found in (("dq", dq), ("dk", dk), ("dv", dv)):
        assert isinstance(found, QUANTIZED) == (recipe != "current")
        exact = wanted[name]
        if recipe == "current":
            assert spread(found, exact) < 2e-3
        else:
            in_format = quantized_values(exact, SCALES["dQKV"], "E5M2")
            assert spread(found.dequantize(), in_format) < 4e-3
    if recipe != "current":
        largest = max(float(wanted[name].abs().max()) for name in ("dq", "dk", "dv"))
        assert float(named["dQKV"].amax) == pytest.approx(largest, rel=1e-2)


def test_the_scale_of_the_probabilities_matters_in_both_directions() -> None:
    setup = Setup("current", s=24, d=16)
    results = []
    for scale in (256.0, 4.0):
        quantizers, shared, qkv = operands(setup)
        slot(quantizers, "S").scale.fill_(scale)
        output, aux = SEAM["fused_attn_fwd"](
            True, **shared, q=qkv[0], k=qkv[1], v=qkv[2], fused_attention_backend=FP8,
            s_quantizer=slot(quantizers, "S"), o_quantizer=slot(quantizers, "O"),
        )  # fmt: skip
        results.append((output, aux, quantizers, shared, qkv))
    assert not torch.equal(results[0][0], results[1][0])
    gradients = []
    for s_scale in (256.0, 4.0):  # of the same forward
        output, aux, quantizers, shared, qkv = results[0]
        slot(quantizers, "S").scale.fill_(s_scale)
        gradients.append(
            SEAM["fused_attn_bwd"](
                **shared, q=qkv[0], k=qkv[1], v=qkv[2], o=output, d_o=slot(quantizers, "dO")(make_call(setup).grad),
                aux_ctx_tensors=aux, fused_attention_backend=FP8, s_quantizer=slot(quantizers, "S"),
                dp_quantizer=slot(quantizers, "dP"), dqkv_quantizer=slot(quantizers, "dQKV"), do_format="bshd",
                dqkv_layout="bshd_bshd_bshd",
            )
        )  # fmt: skip
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert not torch.equal(gradients[0][2], gradients[1][2])


def doubled(tensor: Any, way: str) -> Any:
    """Return an MXFP8 tensor whose values by rows, or by columns, are twice as large."""
    return tensor.like(tensor.parts() | {f"_{way}_scale_inv": getattr(tensor, f"_{way}_scale_inv") + 1})


READ: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("q", "rowwise"): (("out",), ("dq", "dk", "dv")),
    ("q", "columnwise"): ((), ("dk",)),
    ("k", "rowwise"): (("out",), ("dq", "dk", "dv")),
    ("k", "columnwise"): ((), ("dq",)),
    ("v", "rowwise"): ((), ("dq", "dk")),
    ("v", "columnwise"): (("out",), ()),
    ("d_o", "rowwise"): ((), ("dq", "dk")),
    ("d_o", "columnwise"): ((), ("dv",)),
}
"""Which results of forward and of backward read the values of a tensor by rows, and which by columns."""


@pytest.mark.parametrize("layout", ["bshd_bshd_bshd", "bs3hd"])
def test_each_product_reads_mxfp8_along_what_it_sums_over(layout: str) -> None:
    loaded = spied("legacy")
    run(loaded, make_call(for_recipe(Setup(layout=layout), "mxfp8")))
    forward, backward = (loaded.of(name)[0] for name in ("fused_attn_fwd", "fused_attn_bwd"))
    before = dict(zip(("out", "dq", "dk", "dv"), (forward.pop("result")[0], *backward.pop("result")[:3]), strict=True))

    def changed(name: str, tensor: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        out = SEAM["fused_attn_fwd"](**forward | ({name: tensor} if name in forward else {}))[0]
        gradients = SEAM["fused_attn_bwd"](**backward | {name: tensor})[:3]
        found = dict(zip(before, (out, *gradients), strict=True))
        names = [each for each in found if not torch.equal(found[each], before[each])]
        if len(names) == 1:  # what was doubled is a factor of one product
            assert torch.equal(found[names[0]], 2 * before[names[0]])
        return tuple(each for each in names if each == "out"), tuple(each for each in names if each != "out")

    for (name, way), wanted in READ.items():
        assert changed(name, doubled(backward[name], way)) == wanted, (name, way)
    *aux, exact = backward["aux_ctx_tensors"]
    assert changed("aux_ctx_tensors", [*aux, exact * 2]) == ((), ("dq", "dk"))
    by_columns = forward["v"].like({k: v for k, v in forward["v"].parts().items() if k.startswith("_column")})
    SEAM["fused_attn_fwd"](**forward | {"v": by_columns})
    with pytest.raises(RuntimeError, match="holds no data by rows"):
        SEAM["fused_attn_bwd"](**backward | {"v": by_columns})


def gradients_of(call: Any) -> list[torch.Tensor]:
    found = []
    for leaf in call.leaves.values():
        assert leaf.grad is not None
        found.append(leaf.grad)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_stays_near_f16(recipe: str, layout: str) -> None:
    setup = for_recipe(Setup(layout=layout, s=64, d=32), recipe)
    changes = {"attn_mask_type": "causal", "window_size": (-1, 0), "attn_scale": 0.2}
    plain = make_call(setup.with_(recipe="none", changes=changes))
    loaded = spied("legacy", o_in_f16=recipe != "hybrid")
    wanted = run(loaded, plain)
    call = make_call(setup.with_(changes=changes))
    found = run(loaded, call)
    assert 0 < spread(found, wanted) < 0.02
    for gradient, exact in zip(gradients_of(call), gradients_of(plain), strict=True):
        assert gradient.dtype == torch.bfloat16
        assert 0 < spread(gradient, exact) < 0.02


@pytest.mark.parametrize("recipe", RECIPES)
def test_padding_dropout_and_a_softmax_offset_act_in_fp8_as_in_f16(recipe: str) -> None:
    setup = for_recipe(Setup(s=64, d=32), recipe)
    lengths = torch.tensor([setup.s, setup.s // 2])
    cu = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    offset = torch.linspace(-1.0, 2.0, setup.h).view(1, -1, 1, 1)
    gradients, outputs = [], []
    loaded = spied("legacy", o_in_f16=recipe != "hybrid")
    for each in ("none", recipe):
        leaf = offset.clone().requires_grad_()
        generator = torch.Generator().manual_seed(9)
        call = make_call(setup.with_(recipe=each, changes={
            "cu_seqlens_q": cu, "cu_seqlens_kv": cu, "attn_mask_type": "padding", "softmax_type": "learnable",
            "softmax_offset": leaf, "dropout_p": 0.25, "rng_gen": generator,
        }))  # fmt: skip
        outputs.append(run(loaded, call))
        gradients.append((*gradients_of(call), leaf.grad))
    assert bool((outputs[1][1, setup.s // 2 :] == 0).all())
    assert 0 < spread(outputs[1], outputs[0]) < 0.05
    for found, exact in zip(gradients[1], gradients[0], strict=True):
        assert found.dtype == exact.dtype
        assert (
            0 < spread(found, exact) < (0.05 if found.dim() == 4 and found.shape[0] > 1 else 0.2)
        )  # a sum, the offset's


@pytest.mark.parametrize("length", [1, 16, 30, 100, 128])
def test_the_backend_that_is_asked_for_settles_how_far_the_generator_goes(length: int) -> None:
    values = make_call(Setup("none", s=length)).values
    names = ("is_training", "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv", "q", "k", "v",
             "qkv_layout", "attn_mask_type")  # fmt: skip
    states = {}
    for backend, steps in ((F16, 16), (FP8, math.ceil(length * length / 128 / 4) * 4)):
        generator, counted = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
        SEAM["fused_attn_fwd"](
            **{name: values[name] for name in names}, fake_dtype=torch.bfloat16, fused_attention_backend=backend,
            o_format="bshd", rng_gen=generator,
        )  # fmt: skip
        torch.empty(steps, dtype=torch.int32).random_(generator=counted)
        assert torch.equal(generator.get_state(), counted.get_state())
        states[backend] = generator.get_state()
    assert not torch.equal(states[F16], states[FP8])
