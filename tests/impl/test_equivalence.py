"""Legacy and refactored do the same thing in every branch, and a refactoring mistake in any of them is seen."""

from itertools import product

import pytest

from .scenarios import OFFLOAD, Config, differences, run, source_of

F16 = [
    Config(layout=layout, bias=bias, softmax=softmax, offload=offload, max_logit=max_logit)
    for layout, bias, softmax, (offload, max_logit) in product(
        ("bshd_bshd_bshd", "bs3hd", "bshd_bs2hd", "thd_thd_thd", "t3hd", "paged_kv_bshd_bshd_bshd"),
        ("no_bias", "alibi", "post_scale_bias"),
        ("vanilla", "learnable"),
        [*((offload, False) for offload in OFFLOAD), ("off", True), ("v1_this_layer", True)],
    )
]
AUX = [
    Config(bias=bias, softmax=softmax, aux=aux, training=training, strided_stats=strided, d_out=d_out)
    for bias, softmax, aux, training, (strided, d_out) in product(
        ("no_bias", "post_scale_bias"),
        ("vanilla", "learnable"),
        ("same", "rewrapped", "copied"),
        (False, True),
        ((False, "plain"), (True, "expanded"), (True, "transposed")),
    )
]
FP8 = [
    Config(
        layout=layout,
        kind=kind,
        o_in_f16=o_in_f16,
        fp8_inputs=fp8_inputs,
        fp8_output=fp8_output,
        bf16_backward=bf16_backward,
        fp8_backward=fp8_backward,
        training=training,
        offload=offload,
    )
    for (kind, o_in_f16), (layout, offload), fp8_inputs, fp8_output, bf16_backward, fp8_backward, training in product(
        (("delayed", True), ("current", True), ("current", False), ("mxfp8", True)),
        (("bshd_bshd_bshd", "v1_this_layer"), ("bs3hd", "off")),
        *[(False, True)] * 5,
    )
]
FP8_MORE = [
    Config(kind=kind, d_out=d_out, fp8_output=fp8_output, fp8_backward=fp8_backward, softmax=softmax, offload=offload)
    for kind, d_out, fp8_output, fp8_backward, softmax, offload in product(
        ("delayed", "current", "mxfp8"),
        ("expanded", "quantized"),
        (False, True),
        (False, True),
        ("vanilla", "learnable"),
        ("new", "v1"),
    )
]
FP8_GRADS = [
    Config(kind=kind, fp8_inputs=fp8_inputs, bf16_backward=bf16_backward, quantized_grads=quantized)
    for kind, fp8_inputs, bf16_backward, quantized in product(
        ("delayed", "current", "mxfp8"), (False, True), (False, True), (False, True)
    )
]
FAV2 = [
    Config(fav2=True, layout=layout, padded=padded, mask=mask, strided_stats=strided, d_out=d_out)
    for layout, padded, mask, (strided, d_out) in product(
        ("bshd_bshd_bshd", "bs3hd", "bshd_bs2hd", "thd_thd_thd", "t3hd", "thd_bshd_bshd"),
        (False, True),
        ("padding", "padding_causal"),
        ((False, "plain"), (True, "expanded")),
    )
]
ALL = {"f16": F16, "aux": AUX, "fp8": FP8, "fp8_more": FP8_MORE, "fp8_grads": FP8_GRADS, "fav2": FAV2}


def name_of(config):
    """Spell what a configuration has beyond the default."""
    plain = Config()
    return ",".join(f"{k}={v}" for k, v in vars(config).items() if v != getattr(plain, k)) or "default"


def branches():
    """Return the configurations by group and the values that choose a branch, so that a failure says which."""
    found = {}
    for group, configs in ALL.items():
        for config in configs:
            label = "-".join(str(x) for x in (group, config.kind, config.layout, config.offload) if x is not None)
            found.setdefault(label, []).append(config)
    return found


@pytest.mark.parametrize("branch", branches())
def test_both_make_the_same_calls_and_give_the_same_results(branch):
    wrong = {}
    for config in branches()[branch]:
        legacy, refactored = run("legacy", config), run("refactored", config)
        found = differences(config, legacy, refactored)
        if not legacy.saved:
            found.append("nothing was saved")
        if bool(legacy.gradients) != ("paged" not in config.layout):
            found.append("no gradients")
        found += [f"no gradient of {name}" for name, gradient in legacy.gradients.items() if gradient[0] == "NoneType"]
        if found:
            wrong[name_of(config)] = found
    assert wrong == {}


# What a refactoring can get wrong, as a change of the refactored source, and a configuration that shows it.
MISTAKES = {
    "bias and offset swapped": (
        "optional = (self.aux_bias, self.aux_softmax_offset)",
        "optional = (self.aux_softmax_offset, self.aux_bias)",
        Config(bias="post_scale_bias", softmax="learnable"),
    ),
    "statistics and rng state swapped": (
        "return [self.softmax_stats, self.rng_state,",
        "return [self.rng_state, self.softmax_stats,",
        Config(),
    ),
    "v re-attached from k": ('"v": fwd_args.v', '"v": fwd_args.k', Config(layout="bs3hd")),
    "page tables merged": (
        "page_table_v=args.page_table_v",
        "page_table_v=args.page_table_k",
        Config(layout="paged_kv_bshd_bshd_bshd"),
    ),
    "unpadded lengths passed as padded": (
        "cu_seqlens_q_padded=bwd_args.cu_seqlens_q_padded",
        "cu_seqlens_q_padded=bwd_args.cu_seqlens_q",
        Config(layout="thd_thd_thd"),
    ),
    "dropout lost in backward": ("dropout=bwd_args.dropout_p,", "", Config()),
    "backward layout lost": ("qkv_layout=bwd_args.qkv_layout,", "", Config()),
    "dqkv layout is the changed one": (
        'bwd_args.dqkv_layout = ctx_attrs["original_qkv_layout"]',
        'bwd_args.dqkv_layout = ctx_attrs["qkv_layout"]',
        Config(kind="mxfp8", layout="bs3hd"),
    ),
    "F16 backward in the changed layout": (
        'elif fwd_args.fp8 and not ctx_attrs["fp8"]:',
        "elif False:",
        Config(kind="mxfp8", layout="bs3hd", fp8_backward=False),
    ),
    "F16 backward on the FP8 backend": (
        '"FP8" if is_bwd_fp8 else "F16_arbitrary_seqlen"',
        '"FP8"',
        Config(kind="delayed", fp8_backward=False),
    ),
    "S quantizer shared": ("S_quantizer.copy()", "S_quantizer", Config(kind="delayed")),
    "S scale not cloned": ("S_quantizer.scale.clone()", "S_quantizer.scale", Config(kind="delayed")),
    "wrong O for current scaling": (
        'qkv_type == "current" and _dpa_fp8_cs_o_in_f16',
        'qkv_type == "current" and not _dpa_fp8_cs_o_in_f16',
        Config(kind="current"),
    ),
    "d_out not appended for mxfp8": ("aux_ctx_tensors.append(d_out)", "pass", Config(kind="mxfp8")),
    "d_out not made contiguous": ("d_out = d_out.contiguous()", "pass", Config(d_out="expanded")),
    "statistics not made contiguous": (
        "aux_ctx_tensors[0] = aux_ctx_tensors[0].contiguous()",
        "pass",
        Config(strided_stats=True),
    ),
    "bf16_backward ignored": (
        "bwd_args.is_input_fp8 and not bwd_args.bf16_backward",
        "bwd_args.is_input_fp8",
        Config(kind="delayed", fp8_inputs=True, bf16_backward=True),
    ),
    "packed buffer not passed": (
        "combined_qkv=args.packed_qkv",
        "combined_qkv=None",
        Config(kind="delayed", layout="bs3hd"),
    ),
    "environment read again in backward": (
        "    if bwd_args.fp8:\n        if is_d_out",
        '    if bwd_args.fp8 and int(os.environ["NVTE_FP8_DPA_BWD"]):\n        if is_d_out',
        Config(kind="delayed"),
    ),
    "marks use the forward flag": (
        "        if is_bwd_fp8:\n            mark",
        "        if args.fp8:\n            mark",
        Config(kind="delayed", fp8_backward=False, offload="v1"),
    ),
    "aux not marked": ("        mark_activation_offload(*aux)\n", "", Config(offload="v1")),
    "layout kept when this layer is offloaded": (
        'bwd_args.qkv_layout = _reload_qkv_layout(ctx_attrs["qkv_layout"])',
        'bwd_args.qkv_layout = ctx_attrs["qkv_layout"]',
        Config(layout="bs3hd", offload="v1_this_layer"),
    ),
    "generator ignored": ("rng_gen=args.rng_gen,", "", Config()),
    "softmax offset gradient dropped": (
        "return dq, dk, dv, d_bias, d_softmax_offset",
        "return dq, dk, dv, d_bias, None",
        Config(softmax="learnable"),
    ),
    "gradients of k and v swapped": (
        "return dq, dk, dv, d_bias",
        "return dq, dv, dk, d_bias",
        Config(layout="bs3hd"),
    ),
    "NVTX range closed early": (
        "    q, k, v = args.q, args.k, args.v\n",
        '    q, k, v = args.q, args.k, args.v\n    nvtx_range_pop("transformer_engine.FusedAttnFunc.forward")\n',
        Config(),
    ),
    "FAv2 flag lost": ('"use_FAv2_bwd",\n', "", Config(fav2=True)),
    "FAv2 tail not zeroed": ("grad.masked_fill_", "grad.masked_fill", Config(fav2=True, layout="thd_thd_thd")),
    "output copied on the way": ("        out_f16 = out\n", "        out_f16 = out.clone()\n", Config()),
}


def seen(config, legacy, changed):
    """Tell whether a changed source fails or differs; a change that is no valid Python is no mistake to be seen."""
    try:
        broken = run("refactored", config, source=changed)
    except (SyntaxError, NameError):
        raise
    except Exception:
        return True
    return differences(config, legacy, broken) != []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_refactoring_is_seen(mistake):
    old, new, config = MISTAKES[mistake]
    changed = source_of("refactored").replace(old, new)
    assert changed != source_of("refactored"), f"{old!r} is no longer in the source"
    legacy = run("legacy", config)
    assert differences(config, legacy, run("refactored", config)) == []
    assert seen(config, legacy, changed)


def test_the_environment_is_read_at_every_forward():
    on, off = Config(kind="delayed"), Config(kind="delayed", fp8_backward=False)
    for implementation in ("legacy", "refactored"):
        fp8, f16 = run(implementation, on), run(implementation, off)
        assert "q_fp8" in fp8.saved
        assert "q_fp8" not in f16.saved
        assert f16.stub.last("fused_attn_bwd")["fused_attention_backend"] == 1
        assert fp8.stub.last("fused_attn_bwd")["fused_attention_backend"] == 2


def test_the_environment_is_not_read_without_fp8():
    for implementation in ("legacy", "refactored"):
        run(implementation, Config(fp8_backward="nonsense"))
        with pytest.raises(ValueError, match="nonsense"):
            run(implementation, Config(kind="delayed", fp8_backward="nonsense"))


# What each group is for: calls that some configuration of it must reach.
REACHED = {
    "f16": {"mark_activation_offload", "start_offload", "is_current_layer_offloaded", "fused_attn_bwd"},
    "aux": {"fused_attn_bwd"},
    "fp8": {"combine_and_quantize", "combine_and_dequantize", "print_quantizers", "mxfp8_quantize_fast_path"},
    "fp8_more": {"start_offload", "mark_activation_offload", "mxfp8_quantize_fast_path"},
    "fp8_grads": {"combine_and_quantize", "combine_and_dequantize"},
    "fav2": {"flash_attn_cuda_bwd", "maybe_contiguous"},
}


@pytest.mark.parametrize("group", ALL)
def test_every_group_reaches_the_branches_that_it_is_for(group):
    configs = ALL[group]
    sample = configs[:: max(1, len(configs) // 19)]
    reached = {name for config in sample for name in run("refactored", config).stub.names()}
    assert REACHED[group] <= reached
    assert ("fused_attn_bwd" in reached) == (group != "fav2")
