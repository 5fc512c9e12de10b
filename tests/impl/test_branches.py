"""Each branch does what the interface says, in both implementations and in the order that it says."""

import ast
import inspect
from pathlib import Path

import pytest
import torch

from .scenarios import AUX, LENGTHS, SLOTS, Config, apply, make_d_out, make_stub, make_values, run, source_of
from .stub_seam import ROOT, SEAM_NAMES, SOURCES, Float8Quantizer, QuantizedTensorStorage, Stub, load

PARAMETERS = [
    "is_training",
    "max_seqlen_q",
    "max_seqlen_kv",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "page_table_k",
    "page_table_v",
    "q",
    "k",
    "v",
    "attn_bias",
    "attn_scale",
    "dropout_p",
    "fast_zero_fill",
    "qkv_layout",
    "attn_bias_type",
    "attn_mask_type",
    "softmax_type",
    "window_size",
    "bottom_right_diagonal",
    "rng_gen",
    "fused_attention_backend",
    "use_FAv2_bwd",
    "fp8",
    "fp8_meta",
    "quantizers",
    "deterministic",
    "softmax_offset",
    "fp8_output",
    "bf16_backward",
    "layer_number",
    "return_max_logit",
    "packed_qkv",
    "packed_kv",
]

pytestmark = pytest.mark.parametrize("implementation", ["legacy", "refactored"])


def prepared(implementation, config, **changes):
    """Return (module, stub, values) of an implementation on a fresh stub."""
    values = make_values(config)
    stub = make_stub(config, values, **changes)
    return load(source_of(implementation), stub.seam()), stub, values


# The source


def test_the_source_knows_no_harness_and_only_the_seam(implementation):
    allowed = {"torch", "os", "dataclasses", "typing"}
    for node in ast.walk(ast.parse(source_of(implementation))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name
                assert name in allowed or (name in SEAM_NAMES and alias.name.startswith("transformer_engine."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            if node.module.startswith("transformer_engine."):
                assert {alias.asname or alias.name for alias in node.names} <= SEAM_NAMES
            else:
                assert node.module in allowed | {"flash_attn_2_cuda"}


def test_reading_the_package_imports_nothing(implementation):
    text = (SOURCES[implementation].parent / "__init__.py").read_text(encoding="utf-8")
    assert not [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert (SOURCES[implementation].parent).parent == Path(ROOT)


def test_the_source_has_only_plain_definitions_at_top_level(implementation):
    plain = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign)
    body = ast.parse(source_of(implementation)).body[1:]
    guarded = [node for node in body if not isinstance(node, plain)]
    assert [type(node) for node in guarded] == [ast.Try]
    assert guarded[0].body[0].module == "flash_attn_2_cuda"


def test_every_backward_argument_reaches_the_kernel(implementation):
    observed = run(implementation, Config(bias="post_scale_bias", softmax="learnable"))
    forward, backward = observed.stub.last("fused_attn_fwd"), observed.stub.last("fused_attn_bwd")
    values = observed.values
    for name, value in (
        ("max_seqlen_q", 4),
        ("max_seqlen_kv", 6),
        ("attn_scale", 0.375),
        ("dropout", 0.125),
        ("qkv_layout", "bshd_bshd_bshd"),
        ("o_format", "bshd"),
        ("attn_mask_type", "padding_causal"),
        ("window_size", (3, 0)),
        ("bottom_right_diagonal", False),
        ("fake_dtype", torch.bfloat16),
        ("fused_attention_backend", 1),
    ):
        assert forward[name] == value, name
        assert backward[name] == value, name
    assert backward["do_format"] == "bshd"
    assert backward["dqkv_layout"] == "bshd_bshd_bshd"
    assert backward["deterministic"] is True
    assert forward["rng_gen"] is values["rng_gen"]
    for name in LENGTHS:
        assert forward[name] is values[name]
        assert torch.equal(backward[name], values[name])


# Order of what is done


def test_forward_and_backward_act_in_order(implementation):
    observed = run(implementation, Config(kind="delayed", offload="v1_this_layer"))
    order = [
        "nvtx_range_push",
        "start_offload",
        "get_fp8_recipe",
        "get_qkv_format",
        "combine_and_quantize",
        "print_quantizers",
        "is_graph_capturing",
        "fused_attn_fwd",
        "print_quantizers",
        "nvtx_range_pop",
        "mark_activation_offload",
        "mark_activation_offload",
        "prepare_for_saving",
        "restore_from_func_ctx",
        "nvtx_enter",
        "print_quantizers",
        "is_graph_capturing",
        "fused_attn_bwd",
        "combine_and_dequantize",
        "print_quantizers",
        "nvtx_exit",
    ]
    questions = {"is_cpu_offload_enabled", "is_current_layer_offloaded"}
    assert [name for name in observed.stub.names() if name not in questions] == order


def test_nvtx_ranges_carry_their_labels(implementation):
    stub = run(implementation, Config()).stub
    labels = [(name, next(iter(a.values()))) for name, a in stub.raw if name.startswith("nvtx")]
    assert labels == [
        ("nvtx_range_push", "transformer_engine.FusedAttnFunc.forward"),
        ("nvtx_range_pop", "transformer_engine.FusedAttnFunc.forward"),
        ("nvtx_enter", "FusedAttnFunc.backward"),
        ("nvtx_exit", "FusedAttnFunc.backward"),
    ]


def test_the_forward_range_stays_open_when_the_kernel_fails(implementation):
    module, stub, values = prepared(implementation, Config(), fail_in="fused_attn_fwd")
    with pytest.raises(RuntimeError, match="told to fail"):
        apply(module, values)
    assert "nvtx_range_push" in stub.names()
    assert "nvtx_range_pop" not in stub.names()


def test_quantizers_are_printed_around_both_kernels_in_fp8_only(implementation):
    stub = run(implementation, Config(kind="delayed")).stub
    prints = [arguments for name, arguments in stub.raw if name == "print_quantizers"]
    assert [p["label"] for p in prints] == [
        "FusedAttnFunc.forward >> before: ",
        "FusedAttnFunc.forward >> after:  ",
        "FusedAttnFunc.backward >> before: ",
        "FusedAttnFunc.backward >> after:  ",
    ]
    for printed in prints:
        assert printed["layer_number"] == 11
        assert [printed[x].name for x in ("QKV", "O", "S", "dQKV", "dO", "dP")] == ["QKV", "O", "S", "dQKV", "dO", "dP"]
    assert "print_quantizers" not in run(implementation, Config()).stub.names()


def test_capturing_a_graph_is_told_to_both_kernels(implementation):
    for kind in (None, "delayed"):
        config = Config(kind=kind)
        module, stub, values = prepared(implementation, config, capturing=True)
        out = apply(module, values)
        out.backward(make_d_out(config, out))
        assert stub.last("fused_attn_fwd")["cuda_graph"] is True
        assert stub.last("fused_attn_bwd")["cuda_graph"] is True


# What is saved


def test_tensors_are_saved_in_the_documented_order(implementation):
    config = Config(bias="post_scale_bias", softmax="learnable")
    observed = run(implementation, config)
    saved = observed.stub.last("prepare_for_saving")["tensors"]
    assert len(saved) == len((*SLOTS, *LENGTHS, *AUX)) == 16
    assert saved[:4] == (None,) * 4
    wanted = [observed.values[name] for name in ("q", "k", "v")]
    assert all(a is b for a, b in zip(saved[4:7], wanted, strict=True))
    assert all(saved[8 + i] is observed.values[name] for i, name in enumerate(LENGTHS))
    assert saved[12].dtype is torch.float32
    assert saved[13].tolist() == [1234, 16]
    assert saved[14] is observed.values["attn_bias"]
    assert saved[15] is observed.values["softmax_offset"]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (Config(), {"q", "k", "v", "out"}),
        (Config(kind="delayed"), {"q_fp8", "k_fp8", "v_fp8", "out_fp8"}),
        (Config(kind="current"), {"q_fp8", "k_fp8", "v_fp8", "out"}),
        (Config(kind="current", o_in_f16=False), {"q_fp8", "k_fp8", "v_fp8", "out_fp8"}),
        (Config(kind="mxfp8"), {"q_fp8", "k_fp8", "v_fp8", "out"}),
        (Config(kind="delayed", fp8_backward=False), {"q", "k", "v", "out"}),
        (Config(kind="delayed", fp8_backward=False, fp8_inputs=True), {"q", "k", "v", "out"}),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_saved_tensors_and_the_operands_of_backward_follow_the_matrix(implementation, config, names):
    observed = run(implementation, config)
    assert set(observed.saved) & set(SLOTS) == names
    call = observed.stub.last("fused_attn_bwd")
    quantized = {name for name in "qkvo" if isinstance(call[name], QuantizedTensorStorage)}
    assert quantized == {name[0] for name in names if name.endswith("fp8")}
    assert (call["fused_attention_backend"] == 2) == ("q_fp8" in names)
    assert observed.stub.last("fused_attn_fwd")["fused_attention_backend"] == (2 if config.kind else 1)


def test_a_saved_tensor_is_seen_by_hooks_once_and_in_order(implementation):
    module, _, values = prepared(implementation, Config())
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        apply(module, values)
    wanted = [values["q"], values["k"], values["v"]]
    assert [x.data_ptr() for x in packed[:3]] == [x.data_ptr() for x in wanted]
    assert len(packed) == 10


def test_legacy_keeps_its_attributes_on_ctx_and_refactored_two(implementation):
    module, _, values = prepared(implementation, Config(kind="delayed"))
    attributes = set(vars(apply(module, values).grad_fn))
    legacy = {
        "fp8_recipe",
        "fp8",
        "nominal_dtype",
        "is_input_fp8",
        "is_output_fp8",
        "bf16_backward",
        "tensor_objects",
        "fp8_meta",
        "layer_number",
        "QKV_quantizer",
        "O_quantizer",
        "dQKV_quantizer",
        "dO_quantizer",
        "dP_quantizer",
        "S_quantizer",
        "qkv_type",
        "max_seqlen_q",
        "max_seqlen_kv",
        "attn_scale",
        "dropout_p",
        "fast_zero_fill",
        "qkv_layout",
        "o_format",
        "qkv_scale_inv_format",
        "dqkv_layout",
        "attn_bias_type",
        "attn_mask_type",
        "softmax_type",
        "window_size",
        "bottom_right_diagonal",
        "fused_attention_backend",
        "use_FAv2_bwd",
        "deterministic",
    }
    assert len(legacy) == 33
    assert attributes == (legacy if implementation == "legacy" else {"tensor_objects", "backward_objects"})


def test_bare_quantized_inputs_are_marked_before_saving_empties_them(implementation):
    config = Config(kind="delayed", fp8_inputs=True, offload="v1")
    module, stub, values = prepared(implementation, config)
    for name in "qkv":
        values[name] = QuantizedTensorStorage(values[name].data_, 2.0)
    apply(module, values)
    marks = [arguments["tensors"] for name, arguments in stub.calls if name == "mark_activation_offload"]
    assert [item[0] for item in marks[0][1]] == ["quantized"] * 4
    assert all(item[3] != "emptied" for item in marks[0][1][:3])
    assert len(marks[1][1]) == 2
    assert all(values[name].data_ is None for name in "qkv")


def test_the_new_offload_path_starts_and_never_marks(implementation):
    stub = run(implementation, Config(offload="new")).stub
    assert stub.last("start_offload")["offload_base_tensor"] is True
    assert len(stub.last("start_offload")["tensors"]) == 3
    assert "mark_activation_offload" not in stub.names()
    assert "is_current_layer_offloaded" not in stub.names()


# Layouts


@pytest.mark.parametrize(
    ("config", "current", "gradients"),
    [
        (Config(layout="bs3hd"), "bs3hd", "bs3hd"),
        (Config(layout="bs3hd", offload="v1"), "bs3hd", "bs3hd"),
        (Config(layout="bs3hd", offload="v1_this_layer"), "bshd_bshd_bshd", "bs3hd"),
        (Config(layout="bs3hd", kind="mxfp8"), "bhsd_bhsd_bhsd", "bs3hd"),
        (Config(layout="bs3hd", kind="mxfp8", fp8_backward=False), "bs3hd", "bs3hd"),
        (Config(layout="bs3hd", kind="delayed", fp8_backward=False), "bs3hd", "bs3hd"),
    ],
    ids=str,
)
def test_backward_gets_its_layouts(implementation, config, current, gradients):
    call = run(implementation, config).stub.last("fused_attn_bwd")
    assert (call["qkv_layout"], call["dqkv_layout"]) == (current, gradients)


def test_packed_buffers_go_to_quantization_only(implementation):
    config = Config(layout="bs3hd", kind="delayed")
    observed = run(implementation, config)
    call = observed.stub.last("combine_and_quantize")
    assert call["combined_qkv"] is observed.values["packed_qkv"]
    assert call["used_in_backward"] is True
    config = Config(layout="bshd_bs2hd", kind="delayed")
    observed = run(implementation, config)
    assert observed.stub.last("combine_and_quantize")["combined_kv"] is observed.values["packed_kv"]


# FP8


@pytest.mark.parametrize("fp8_inputs", [False, True])
@pytest.mark.parametrize("bf16_backward", [False, True])
@pytest.mark.parametrize("quantized_grads", [False, True])
def test_gradients_come_in_the_kind_that_was_asked_for(implementation, fp8_inputs, bf16_backward, quantized_grads):
    config = Config(kind="delayed", fp8_inputs=fp8_inputs, bf16_backward=bf16_backward, quantized_grads=quantized_grads)
    gradients = run(implementation, config).gradients
    expected = "quantized" if fp8_inputs and not bf16_backward else "tensor"
    assert {gradient[0] for gradient in gradients.values()} == {expected}


@pytest.mark.parametrize("kind", ["delayed", "current", "mxfp8"])
def test_the_output_is_quantized_if_asked_for(implementation, kind):
    for fp8_output in (False, True):
        observed = run(implementation, Config(kind=kind, fp8_output=fp8_output))
        assert (observed.out[0] == "quantized") is fp8_output


def test_scale_inv_format_follows_the_recipe_for_fp8_inputs(implementation):
    for kind, expected in (("delayed", None), ("current", None), ("mxfp8", "bhsd")):
        observed = run(implementation, Config(kind=kind, fp8_inputs=True))
        assert observed.stub.last("fused_attn_fwd")["qkv_scale_inv_format"] == expected
        assert observed.stub.last("fused_attn_bwd")["qkv_scale_inv_format"] == expected
        assert "combine_and_quantize" not in observed.stub.names()[: observed.stub.names().index("fused_attn_fwd")]


def test_mxfp8_hands_backward_the_output_gradient_last(implementation):
    config = Config(kind="mxfp8", softmax="learnable")
    observed = run(implementation, config)
    call = observed.stub.last("fused_attn_bwd")
    assert len(call["aux_ctx_tensors"]) == 4
    assert torch.equal(call["aux_ctx_tensors"][2], observed.values["softmax_offset"])
    assert call["aux_ctx_tensors"][3].dtype is torch.bfloat16
    assert isinstance(call["d_o"], QuantizedTensorStorage)
    assert call["do_scale_inv_format"] == "bhsd"
    assert (call["s_quantizer"], call["dp_quantizer"]) == (None, None)


def test_backward_quantizers_have_their_places(implementation):
    call = run(implementation, Config(kind="delayed")).stub.last("fused_attn_bwd")
    assert [call[x].name for x in ("s_quantizer", "dp_quantizer", "dqkv_quantizer")] == ["S", "dP", "dQKV"]
    assert call["s_quantizer"].scale.item() == 8.0
    assert isinstance(call["s_quantizer"], Float8Quantizer)
    plain = run(implementation, Config()).stub.last("fused_attn_bwd")
    assert [plain[x] for x in ("s_quantizer", "dp_quantizer", "dqkv_quantizer")] == [None] * 3


def test_a_quantized_output_gradient_is_taken_as_it_is_or_dequantized(implementation):
    config = Config(kind="delayed", fp8_output=True, d_out="quantized")
    fp8 = run(implementation, config).stub.last("fused_attn_bwd")["d_o"]
    assert isinstance(fp8, QuantizedTensorStorage)
    assert fp8.quantizer_ is None
    f16 = run(implementation, Config(kind="delayed", fp8_output=True, d_out="quantized", fp8_backward=False))
    assert type(f16.stub.last("fused_attn_bwd")["d_o"]) is torch.Tensor


def test_an_unknown_qkv_quantizer_is_a_type_error(implementation):
    module, _, values = prepared(implementation, Config(kind="delayed"))
    values["quantizers"]["scaling_fwd"][2] = object()
    with pytest.raises(TypeError, match="QKV quantizer=object is not supported"):
        apply(module, values)


def test_tensors_of_different_classes_are_refused(implementation):
    for name in "kv":
        module, stub, values = prepared(implementation, Config(kind="delayed", fp8_inputs=True))
        values[name] = torch.zeros(values[name].shape, dtype=torch.bfloat16)
        with pytest.raises(AssertionError, match=f"one class: .*{name}=Tensor"):
            apply(module, values)
        assert "fused_attn_fwd" not in stub.names()


def test_the_global_recipe_counts_without_local_ones(implementation):
    for meta in (None, {}):
        module, stub, values = prepared(implementation, Config(kind="mxfp8", fp8_inputs=True))
        values["fp8_meta"] = meta
        apply(module, values)
        assert stub.last("fused_attn_fwd")["qkv_scale_inv_format"] is None


# Output gradients and FlashAttention-2


@pytest.mark.parametrize("d_out", ["expanded", "transposed"])
def test_kernels_get_a_contiguous_output_gradient(implementation, d_out):
    for kind in (None, "mxfp8"):
        call = run(implementation, Config(d_out=d_out, kind=kind)).stub.last("fused_attn_bwd")
        given = call["d_o"].data_ if kind else call["d_o"]
        assert given.is_contiguous()


def test_kernels_get_contiguous_statistics(implementation):
    observed = run(implementation, Config(strided_stats=True))
    assert not observed.stub.last("prepare_for_saving")["tensors"][12].is_contiguous()
    assert observed.stub.last("fused_attn_bwd")["aux_ctx_tensors"][0].is_contiguous()


def test_flash_attention_gets_nineteen_values_in_order(implementation):
    for mask, causal in (("padding", False), ("padding_causal", True)):
        observed = run(implementation, Config(fav2=True, mask=mask))
        args = observed.stub.last("flash_attn_cuda_bwd")["args"]
        values = observed.values
        assert len(args) == 19
        assert all(torch.equal(args[1 + i], values[name]) for i, name in enumerate("qkv"))
        assert args[0].shape == args[4].shape
        assert args[5].dtype is torch.float32
        assert [args[6 + i][0] for i in range(3)] == [tuple(values[name].shape) for name in "qkv"]
        assert torch.equal(args[9], values["cu_seqlens_q"])
        assert torch.equal(args[10], values["cu_seqlens_kv"])
        assert args[11:18] == (4, 6, 0.125, 0.375, False, causal, None)
        assert args[18].tolist() == [1234, 16]
        assert not {"nvtx_enter", "fused_attn_bwd"} & set(observed.stub.names())


@pytest.mark.parametrize(("layout", "zeroed"), [("thd_thd_thd", "qkv"), ("thd_bshd_bshd", "q"), ("bshd_bshd_bshd", "")])
def test_flash_attention_gradients_past_the_last_sequence_are_zero(implementation, layout, zeroed):
    for padded in (True, False):
        config = Config(fav2=True, layout=layout, padded=padded)
        module, _, values = prepared(implementation, config)
        out = apply(module, values)
        grads = torch.autograd.grad(out, [values[name] for name in "qkv"], make_d_out(config, out))
        for name, grad, offset in zip("qkv", grads, (8, 11, 11), strict=True):
            tail = grad[offset:] if name in zeroed else grad[:0]
            assert grad[:2].any(dim=-1).any()
            assert (name in zeroed) == (tail.numel() > 0)
            assert bool((tail != 0).any()) == (name in zeroed and not padded)


def test_flash_attention_gradients_have_the_head_size_of_the_output_gradient(implementation):
    config = Config(fav2=True)
    module, _, values = prepared(implementation, config)
    out = apply(module, values)
    narrow = make_d_out(config, out)[..., :5].contiguous()
    result = module.FusedAttnFunc.backward(out.grad_fn, narrow)
    assert {x.shape[-1] for x in result if x is not None} == {5}


@pytest.mark.parametrize("config", [Config(fav2=True, bias="post_scale_bias"), Config(fav2=True, softmax="learnable")])
def test_flash_attention_takes_no_bias_and_no_offset(implementation, config):
    with pytest.raises(ValueError, match="too many values"):
        run(implementation, config)


def test_a_missing_flash_attention_is_a_type_error(implementation):
    config = Config(fav2=True)
    module, _, values = prepared(implementation, config)
    module.flash_attn_cuda_bwd = None
    out = apply(module, values)
    with pytest.raises(TypeError, match="NoneType"):
        out.backward(make_d_out(config, out))


def test_two_graphs_can_be_run_backward_in_reverse_order(implementation):
    config = Config(kind="delayed")
    alone = run(implementation, config).gradients
    module, _, values = prepared(implementation, config)
    first = apply(module, values)
    second_values = make_values(config)
    second = apply(module, second_values)
    for out, mine in ((second, second_values), (first, values)):
        grads = torch.autograd.grad(out, [mine[name] for name in "qkv"], make_d_out(config, out))
        for name, grad in zip("qkv", grads, strict=True):
            assert Stub().describe(grad)[-1] == alone[name][-1]


def test_no_caller_tensor_is_written_to(implementation):
    for config in (Config(bias="post_scale_bias", softmax="learnable"), Config(kind="delayed"), Config(fav2=True)):
        before = make_values(config)
        after = run(implementation, config).values
        for name, value in before.items():
            if torch.is_tensor(value):
                assert torch.equal(value, after[name]), name
                assert after[name]._version == value._version, name


def test_the_36_parameters_stand_in_order(implementation):
    module = load(source_of(implementation), Stub().seam())
    if implementation == "legacy":
        signature = inspect.signature(module.FusedAttnFunc.forward)
        assert list(signature.parameters) == ["ctx", *PARAMETERS]
        defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not p.empty}
        assert defaults == {"packed_qkv": None, "packed_kv": None}
    else:
        assert sorted(PARAMETERS) == sorted(module.FusedAttnFwdArgs.__slots__)
