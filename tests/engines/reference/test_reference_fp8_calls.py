"""FP8 on the reference engine as the sources use it: what is saved, handed on and returned, and what is refused."""

from __future__ import annotations

import itertools
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
    SLOTS,
    Setup,
    Spied,
    for_recipe,
    kind_of,
    make_call,
    make_quantizers,
    run,
    slot,
    spied,
    spread,
    variables,
)

OURS = ("legacy", "refactored")
RELEASES = ("te==2.19.0", "te==2.20.2")
SPECS = [*OURS, *(pytest.param(spec, marks=pytest.mark.network) for spec in RELEASES)]
RECIPES = ("delayed", "current", "hybrid", "mxfp8")
SAVED = ("q8", "k8", "v8", "o8", "q", "k", "v", "o")
LAYOUTS = ("bshd_bshd_bshd", "sbhd_sb2hd", "bsh3d")


def quantized(tensor: Any) -> bool:
    return isinstance(tensor, QUANTIZED)


def saved_slots(recipe: str, backward_in_fp8: bool, o_in_f16: bool) -> set[str]:
    """Return which of the eight slots hold a tensor. Source: the matrix of what is saved, 2.16 to 2.20."""
    if not backward_in_fp8:
        return {"q", "k", "v", "o"}
    keeps_f16 = recipe == "mxfp8" or (recipe in ("current", "hybrid") and o_in_f16)
    return {"q8", "k8", "v8", "o" if keeps_f16 else "o8"}


def check_saved(call: Any, output: Any, saved: dict[str, Any], setup: Setup, backward_in_fp8: bool) -> None:
    """Check whose the saved tensors are: the caller's, the output, or new ones."""
    for name in "qkv":
        given = call.values[name]
        if backward_in_fp8:
            assert quantized(saved[f"{name}8"])
            assert (saved[f"{name}8"] is given) == setup.fp8_input
        else:
            assert not quantized(saved[name])
            assert (saved[name] is given) == (not setup.fp8_input)
    kept = saved["o8"] if saved["o8"] is not None else saved["o"]
    assert quantized(kept) == (saved["o8"] is not None)
    if quantized(kept) == setup.fp8_output:
        assert kept.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()


def check_backward_call(loaded: Spied, call: Any, setup: Setup, backward_in_fp8: bool, o_in_f16: bool) -> None:
    """Check what the backward kernel was given."""
    (given,) = loaded.of("fused_attn_bwd")
    assert given["dqkv_layout"] == setup.layout
    names = ("s_quantizer", "dp_quantizer", "dqkv_quantizer")
    if not backward_in_fp8:
        assert given["fused_attention_backend"] == F16
        assert given["qkv_layout"] == setup.layout
        assert not any(quantized(given[name]) for name in ("q", "k", "v", "o", "d_o"))
        assert [given[name] for name in names] == [None] * 3
        return
    mxfp8 = setup.recipe == "mxfp8"
    assert given["fused_attention_backend"] == FP8
    assert all(quantized(given[name]) for name in ("q", "k", "v", "d_o"))
    o8 = saved_slots(setup.recipe, True, o_in_f16) >= {"o8"}
    assert quantized(given["o"]) == o8
    assert len(given["aux_ctx_tensors"]) == 2 + mxfp8
    if mxfp8:
        assert given["aux_ctx_tensors"][-1].shape == given["o"].shape
        assert (given["s_quantizer"], given["dp_quantizer"]) == (None, None)
        assert (given["qkv_scale_inv_format"], given["do_scale_inv_format"]) == ("bhsd", "bhsd")
        if not setup.fp8_input:
            fast = setup.layout == "bshd_bshd_bshd"
            assert given["qkv_layout"] == (setup.layout if fast else "bhsd_bhsd_bhsd")
    else:
        own = slot(call.quantizers, "S")
        assert given["s_quantizer"] is not own
        assert given["s_quantizer"].amax is own.amax
        assert given["s_quantizer"].scale is not own.scale
        assert given["dp_quantizer"] is slot(call.quantizers, "dP")
    assert given["dqkv_quantizer"] is slot(call.quantizers, "dQKV")


def check_gradients(call: Any, setup: Setup, backward_in_fp8: bool) -> None:
    wanted = setup.fp8_input and backward_in_fp8 and not setup.bf16_backward
    for leaf in call.leaves.values():
        assert quantized(leaf.grad) == wanted
        assert leaf.grad.shape == leaf.shape
        assert leaf.grad.dtype == torch.bfloat16
        assert bool(leaf.grad.dequantize().isfinite().all() if wanted else leaf.grad.isfinite().all())


@pytest.mark.parametrize("o_in_f16", [True, False])
@pytest.mark.parametrize("bwd", ["1", "0"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("spec", SPECS)
def test_what_is_saved_handed_on_and_returned_is_what_the_matrix_says(
    spec: str, recipe: str, bwd: str, o_in_f16: bool
) -> None:
    loaded = spied(spec, o_in_f16=o_in_f16)
    flags = itertools.product(LAYOUTS, *[(False, True)] * 3)
    ran = 0
    for layout, fp8_input, fp8_output, bf16_backward in flags:
        if recipe == "mxfp8" and fp8_input and layout != "bshd_bshd_bshd":
            continue  # MXFP8 has no packed form
        setup = for_recipe(Setup(layout=layout), recipe).with_(
            fp8_input=fp8_input, fp8_output=fp8_output, bf16_backward=bf16_backward, packed_given=bool(ran % 2)
        )
        call = make_call(setup)
        if recipe == "hybrid" and bwd == "1" and o_in_f16:
            with pytest.raises(RuntimeError, match="o is in high precision and dqkv_quantizer a Float8Quantizer"):
                run(loaded, call, bwd=bwd)
            ran += 1
            continue
        output = run(loaded, call, bwd=bwd)
        assert quantized(output) == fp8_output
        node_saved = saved_of(loaded, call, bwd)
        assert {name for name, tensor in node_saved.items() if tensor is not None} == saved_slots(
            recipe, bwd == "1", o_in_f16
        )
        check_backward_call(loaded, call, setup, bwd == "1", o_in_f16)
        check_gradients(call, setup, bwd == "1")
        ran += 1
    assert ran >= 16


def saved_of(loaded: Spied, call: Any, bwd: str) -> dict[str, Any]:
    """Run another forward of the call; check and return what autograd keeps of it, by slot."""
    with variables(NVTE_FP8_DPA_BWD=bwd):
        output = loaded.subject.call(call.values)
    node: Any = output.grad_fn
    saved = dict(zip(SAVED, node.saved_tensors, strict=False))
    check_saved(call, output, saved, call.setup, bwd == "1")
    return saved


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("spec", [*RELEASES])
@pytest.mark.network
def test_this_repositorys_sources_and_the_releases_give_the_same_bits(spec: str, recipe: str) -> None:
    for layout, fp8_input, bwd in itertools.product(LAYOUTS, (False, True), "10"):
        if recipe == "mxfp8" and fp8_input and layout != "bshd_bshd_bshd":
            continue
        setup = for_recipe(Setup(layout=layout), recipe).with_(fp8_input=fp8_input)
        results = []
        for each in (spec, *OURS):
            call = make_call(setup)
            output = run(spied(each, o_in_f16=recipe != "hybrid"), call, bwd=bwd)
            states = [state(call.quantizers, name) for name in SLOTS]
            grads = [leaf.grad for leaf in call.leaves.values()]
            results.append([output, *grads, *itertools.chain(*states)])
        for other in results[1:]:
            assert all(same(one, another) for one, another in zip(results[0], other, strict=True))


def same(one: Any, other: Any) -> bool:
    if quantized(one):
        return all(torch.equal(part, other.parts()[name]) for name, part in one.parts().items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def state(quantizers: Any, name: str) -> list[Any]:
    quantizer = slot(quantizers, name)
    kept = [getattr(quantizer, field).clone() for field in ("scale", "amax") if hasattr(quantizer, field)]
    flags = ("internal", "rowwise_usage", "columnwise_usage", "optimize_for_gemm")
    return [*kept, *(getattr(quantizer, flag) for flag in flags)]


@pytest.mark.parametrize("bwd", ["1", "0"])
@pytest.mark.parametrize("fp8_input", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "current", "hybrid"])
def test_a_run_writes_the_amax_of_what_it_quantizes_and_no_scale(recipe: str, fp8_input: bool, bwd: str) -> None:
    call = make_call(Setup(recipe, fp8_input=fp8_input))
    run(spied("legacy", o_in_f16=recipe != "hybrid"), call, bwd=bwd)
    used = {"O", "S"} | (set() if fp8_input else {"QKV"}) | ({"dO", "dP", "dQKV"} if bwd == "1" else set())
    for group, items in call.quantizers.items():
        for index, quantizer in enumerate(items):
            name = next((name for name, place in SLOTS.items() if place == (group, index)), None)
            if not hasattr(quantizer, "amax"):
                continue
            assert (float(quantizer.amax) > 0) == (name in used), (group, index)
            assert float(quantizer.scale) == SCALES.get(name or "", 1.0)


def test_quantizers_of_current_scaling_and_blocks_have_no_state() -> None:
    assert {kind_of(name, "current") for name in SLOTS} == {"current", "delayed"}
    for kind in ("current", "mxfp8"):
        quantizer = ENGINE.quantizer(kind, "E4M3")
        assert not [value for value in vars(quantizer).values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("layout", ["bs3hd", "sbh3d", "bshd_bs2hd", "sbhd_sbh2d", "sbhd_sbhd_sbhd", "bshd_bshd_bshd"])
@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_q_k_and_v_are_views_of_one_buffer_and_share_one_scale(kind: str, layout: str, given: bool) -> None:
    values = make_call(Setup("none", layout)).values
    packed = {"combined_qkv": values["packed_qkv"], "combined_kv": values["packed_kv"]} if given else {}
    quantizer = ENGINE.quantizer(kind, "E4M3", 32.0)
    with torch.no_grad():
        q8, k8, v8, found, scales = SEAM["combine_and_quantize"](
            layout, values["q"], values["k"], values["v"], quantizer, **packed
        )
    assert (found, scales) == (layout, None)
    assert len({tensor._data.untyped_storage().data_ptr() for tensor in (q8, k8, v8)}) == 1
    assert q8._scale_inv is k8._scale_inv is v8._scale_inv
    bounds = [float(values[name].detach().abs().max()) for name in "qkv"]
    if kind == "delayed":
        assert float(quantizer.amax) == max(bounds)
    for name, tensor in zip("qkv", (q8, k8, v8), strict=True):
        assert tensor.dtype == torch.bfloat16
        assert tensor.shape == values[name].shape
        if layout.count("_") < 2:  # strides of the packed buffer, in q too where it is in there
            assert tensor.stride() == values[name].stride()
        assert spread(tensor.dequantize(), values[name]) < 0.01
    back = SEAM["combine_and_dequantize"](layout, q8, k8, v8)
    assert len({tensor.untyped_storage().data_ptr() for tensor in back}) == 1
    for tensor, plain in zip((q8, k8, v8), back, strict=True):
        assert torch.equal(tensor.dequantize(), plain)
        assert plain.dtype == torch.bfloat16
    wide = SEAM["combine_and_dequantize"](layout, q8, k8, v8, des_nominal_dtype=torch.float32)
    assert {tensor.dtype for tensor in wide} == {torch.float32}


@pytest.mark.parametrize(
    ("layout", "name", "shape"),
    [("bs3hd", "combined_qkv", (2, 16, 2, 3, 8)), ("bshd_bsh2d", "combined_kv", (2, 16, 3, 3, 8))],
)
def test_a_packed_buffer_of_another_size_is_refused(layout: str, name: str, shape: tuple[int, ...]) -> None:
    values = make_call(Setup("none", layout)).values
    with pytest.raises(AssertionError, match=rf"{name}.shape=\(2, 16.*does not fit"):
        SEAM["combine_and_quantize"](
            layout,
            values["q"],
            values["k"],
            values["v"],
            ENGINE.quantizer("delayed", "E4M3"),
            **{name: torch.zeros(shape)},
        )


def test_dequantizing_plain_tensors_needs_their_nominal_dtype() -> None:
    with pytest.raises(AssertionError, match="src_nominal_dtype=None"):
        SEAM["combine_and_dequantize"]("bshd_bshd_bshd", *[torch.zeros(1)] * 3)


@pytest.mark.parametrize(
    ("forward", "backward", "ways"),
    [
        (True, False, ((True, False), (True, False), (False, True))),
        (False, True, ((True, True), (True, True), (True, False))),
        (True, True, ((True, True), (True, True), (True, True))),
    ],
)
@pytest.mark.parametrize("layout", ["sbhd_sbhd_sbhd", "bs3hd"])
def test_mxfp8_tensors_are_quantized_in_the_ways_that_are_used(
    layout: str, forward: bool, backward: bool, ways: tuple[tuple[bool, bool], ...]
) -> None:
    values = make_call(for_recipe(Setup("none", layout), "mxfp8").with_(recipe="none")).values
    quantizer = ENGINE.quantizer("mxfp8", "E4M3")
    *tensors, found, scales = SEAM["combine_and_quantize"](
        layout, values["q"], values["k"], values["v"], quantizer, used_in_forward=forward, used_in_backward=backward
    )
    assert scales == "bhsd"
    assert found == (layout if layout == "sbhd_sbhd_sbhd" else "bhsd_bhsd_bhsd")
    for name, tensor, (rows, columns) in zip("qkv", tensors, ways, strict=True):
        assert (tensor._rowwise_data is not None, tensor._columnwise_data is not None) == (rows, columns)
        order = "sbhd" if layout == found else "bhsd"
        given = values[name].permute(["bshd".index(letter) for letter in order]) if layout != found else values[name]
        assert tensor.shape == given.shape
        assert spread(tensor.dequantize(), given) < 0.02
    assert (quantizer.rowwise_usage, quantizer.columnwise_usage) == (True, True)
    kept = SEAM["combine_and_quantize"](
        layout, values["q"], values["k"], values["v"], quantizer, keep_same_data_and_scale_inv_format=True
    )
    assert kept[3] == "bhsd_bhsd_bhsd"


@pytest.mark.parametrize(("layout", "sizes"), [
    ("bshd_bshd_bshd", {"s": 96, "d": 32}), ("bshd_bshd_bshd", {"s": 128, "d": 24}),
    ("sbhd_bshd_bshd", {"s": 128, "d": 32}),
])  # fmt: skip
def test_mxfp8_of_other_sizes_and_formats_is_refused(layout: str, sizes: dict[str, int]) -> None:
    values = make_call(Setup("none", layout, b=1, h=1, **sizes)).values
    with pytest.raises(AssertionError, match="MXFP8 takes"):
        SEAM["combine_and_quantize"](layout, values["q"], values["k"], values["v"], ENGINE.quantizer("mxfp8", "E4M3"))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("spec", OURS)
def test_a_quantized_gradient_of_the_output_is_taken_as_it_is(spec: str, recipe: str) -> None:
    for bwd in "10":
        call = make_call(Setup(recipe))
        grad = ENGINE.quantizer("delayed", "E5M2", 512.0)(call.grad).detach()
        loaded = spied(spec)
        run(loaded, call, bwd=bwd, grad=grad)
        (given,) = loaded.of("fused_attn_bwd")
        if bwd == "1":
            assert given["d_o"]._data is grad._data
        else:
            assert torch.equal(given["d_o"], grad.dequantize())
        if recipe == "delayed":
            assert float(slot(call.quantizers, "dO").amax) == 0.0


@pytest.mark.parametrize("spec", OURS)
def test_a_scale_that_changes_after_forward_changes_no_gradient(spec: str) -> None:
    gradients = []
    for factor in (1.0, 0.01):
        call = make_call(Setup("current"))
        output = spied(spec).subject.call(call.values)
        slot(call.quantizers, "S").scale.mul_(factor)
        output.backward(call.grad)
        gradients.append([leaf.grad for leaf in call.leaves.values()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def kernel_arguments(recipe: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments with which both kernels run."""
    setup = for_recipe(Setup(), recipe)
    loaded = spied("legacy")
    call = make_call(setup)
    run(loaded, call)
    (forward,), (backward,) = loaded.of("fused_attn_fwd"), loaded.of("fused_attn_bwd")
    return tuple({name: value for name, value in given.items() if name != "result"} for given in (forward, backward))  # type: ignore[return-value]


def plain(tensor: Any) -> torch.Tensor:
    return tensor.dequantize()


FORWARD_REFUSALS: list[tuple[str, str, Any, str]] = [
    ("a mixture of tensors", "delayed", lambda a: a | {"k": plain(a["k"])}, "tensors of different kinds"),
    ("no S quantizer", "delayed", lambda a: a | {"s_quantizer": None}, "s_quantizer is of type NoneType"),
    ("S of current scaling", "delayed", lambda a: a | {"s_quantizer": ENGINE.quantizer("current", "E4M3")},
     "s_quantizer is of type Float8CurrentScalingQuantizer"),
    ("blocks for O", "current", lambda a: a | {"o_quantizer": ENGINE.quantizer("mxfp8", "E4M3")}, "o_quantizer is of"),
    ("S with blocks", "mxfp8", lambda a: a | {"s_quantizer": ENGINE.quantizer("delayed", "E4M3")}, "s_quantizer is of"),
    ("quantizers without FP8 tensors", "delayed", lambda a: a | {name: plain(a[name]) for name in "qkv"},
     "s_quantizer is of type Float8Quantizer"),
    ("max logit", "delayed", lambda a: a | {"return_max_logit": True}, "gives no max logit"),
    ("bias", "delayed", lambda a: a | {"attn_bias_type": "post_scale_bias",
                                       "attn_bias": torch.zeros(1, 3, 16, 16).bfloat16()}, "takes no bias"),
    ("formats that differ", "delayed", lambda a: a | {"qkv_layout": "bshd_sbhd_sbhd"}, "takes dense layouts"),
    ("blocks in a packed layout", "mxfp8", lambda a: a | {"qkv_layout": "bs3hd"}, "takes bshd_bshd_bshd"),
    ("another nominal dtype", "delayed", lambda a: a | {"fake_dtype": torch.float32}, "fake_dtype=torch.float32"),
]  # fmt: skip
BACKWARD_REFUSALS: list[tuple[str, str, Any, str]] = [
    ("a plain O with quantized gradients", "delayed", lambda a: a | {"o": plain(a["o"])}, "takes the mixture"),
    ("a quantized O with blocks", "mxfp8", lambda a: a | {"o": a["d_o"]}, "o is of kind mxfp8"),
    ("a plain gradient", "delayed", lambda a: a | {"d_o": plain(a["d_o"])}, "d_o is of kind none"),
    ("no dP quantizer", "current", lambda a: a | {"dp_quantizer": None}, "dp_quantizer is of type NoneType"),
    ("no exact gradient with blocks", "mxfp8", lambda a: a | {"aux_ctx_tensors": a["aux_ctx_tensors"][:-1]},
     r"aux_ctx_tensors\[-1\] has shape"),
    ("an exact gradient alone", "mxfp8", lambda a: a | {"d_o": a["aux_ctx_tensors"][-1]}, "d_o is of kind none"),
    ("plain q, k and v with quantizers", "current", lambda a: a | {name: plain(a[name]) for name in "qkv"},
     "s_quantizer is of type Float8Quantizer"),
]  # fmt: skip


def refusals(rows: list[tuple[str, str, Any, str]]) -> Any:
    return pytest.mark.parametrize(
        ("recipe", "change", "match"), [row[1:] for row in rows], ids=[row[0] for row in rows]
    )


@refusals(FORWARD_REFUSALS)
def test_forward_refuses_what_no_fp8_kernel_takes(recipe: str, change: Any, match: str) -> None:
    arguments, _ = kernel_arguments(recipe)
    SEAM["fused_attn_fwd"](**arguments)
    amax = {name: getattr(arguments[name], "amax", torch.zeros(1)).clone() for name in ("s_quantizer", "o_quantizer")}
    state = torch.default_generator.get_state()
    with pytest.raises(RuntimeError, match=match):
        SEAM["fused_attn_fwd"](**change(dict(arguments)))
    assert torch.equal(torch.default_generator.get_state(), state)
    for name, before in amax.items():
        assert torch.equal(getattr(arguments[name], "amax", torch.zeros(1)), before)


@refusals(BACKWARD_REFUSALS)
def test_backward_refuses_what_no_fp8_kernel_takes(recipe: str, change: Any, match: str) -> None:
    _, arguments = kernel_arguments(recipe)
    SEAM["fused_attn_bwd"](**arguments)
    with pytest.raises(RuntimeError, match=match):
        SEAM["fused_attn_bwd"](**change(dict(arguments)))


def test_an_emptied_tensor_is_refused() -> None:
    arguments, _ = kernel_arguments("delayed")
    empty = arguments["q"].detach()
    empty.prepare_for_saving()
    with pytest.raises(RuntimeError, match="holds no data"):
        SEAM["fused_attn_fwd"](**arguments | {"q": empty})


@pytest.mark.parametrize("layout", ["bs3hd", "sbh3d", "bshd_bsh2d", "sbhd_sbhd_sbhd"])
def test_quantized_gradients_of_one_buffer_stay_in_one_buffer(layout: str) -> None:
    loaded = spied("legacy")
    run(loaded, make_call(Setup(layout=layout, fp8_input=True)))
    (given,) = loaded.of("fused_attn_bwd")
    dq, dk, dv = given["result"][:3]
    assert dq._scale_inv is dk._scale_inv is dv._scale_inv
    pointers = [tensor._data.untyped_storage().data_ptr() for tensor in (dq, dk, dv)]
    assert len(set(pointers)) == {"bs3hd": 1, "sbh3d": 1, "bshd_bsh2d": 2, "sbhd_sbhd_sbhd": 3}[layout]
    assert all(tensor.dtype == torch.bfloat16 and tensor._data.dtype == torch.uint8 for tensor in (dq, dk, dv))


def test_o_takes_its_dtype_from_the_nominal_one_and_its_bytes_from_its_quantizer() -> None:
    arguments, _ = kernel_arguments("delayed")
    output = SEAM["fused_attn_fwd"](**arguments | {"fake_dtype": torch.float16})[0]
    assert (output.dtype, output._data.dtype, output._fp8_dtype.name) == (torch.float16, torch.uint8, "kFloat8E4M3")
    assert float(output._scale_inv) == 1 / SCALES["O"]
    exact = SEAM["fused_attn_fwd"](**arguments | {"o_quantizer": None, "fake_dtype": torch.float16})[0]
    assert type(exact) is torch.Tensor
    assert exact.dtype == torch.float16


def test_mxfp8_sets_the_flags_of_all_quantizers_and_drops_two() -> None:
    quantizers = make_quantizers("mxfp8")
    qkv, o, s, dqkv, do, dp = SEAM["dpa_utils"].get_attention_quantizers(True, quantizers)
    assert (s, dp) == (None, None)
    assert [each.columnwise_usage for each in (qkv, o, dqkv, do)] == [True] * 4
    assert [each.optimize_for_gemm for each in (qkv, o, dqkv, do)] == [True, False, False, True]
    assert [slot(quantizers, name).internal for name in SLOTS] == [False, False, True, False, False, True]
