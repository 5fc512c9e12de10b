"""The refactored implementation fails loudly, and keeps apart what is apart, where a refactoring of it goes wrong."""

import copy
import dataclasses
import inspect
from typing import get_args

import pytest
import torch

from .scenarios import (
    LENGTHS,
    Config,
    apply,
    fp8_backward_env,
    make_d_out,
    make_stub,
    make_values,
    run,
    source_of,
)
from .stub_seam import QuantizedTensor, QuantizedTensorStorage, Stub, load

FWD_FIELDS = [
    "q",
    "k",
    "v",
    "attn_bias",
    "softmax_offset",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "page_table_k",
    "page_table_v",
    "packed_qkv",
    "packed_kv",
    "is_training",
    "max_seqlen_q",
    "max_seqlen_kv",
    "attn_scale",
    "dropout_p",
    "fast_zero_fill",
    "qkv_layout",
    "attn_bias_type",
    "attn_mask_type",
    "softmax_type",
    "window_size",
    "bottom_right_diagonal",
    "fused_attention_backend",
    "deterministic",
    "use_FAv2_bwd",
    "return_max_logit",
    "rng_gen",
    "fp8",
    "fp8_meta",
    "quantizers",
    "fp8_output",
    "bf16_backward",
    "layer_number",
]
BWD_FIELDS = [
    "grad_output",
    "q_fp8",
    "k_fp8",
    "v_fp8",
    "out_fp8",
    "q",
    "k",
    "v",
    "out",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "softmax_stats",
    "rng_state",
    "aux_bias",
    "aux_softmax_offset",
    "max_seqlen_q",
    "max_seqlen_kv",
    "attn_scale",
    "dropout_p",
    "fast_zero_fill",
    "qkv_layout",
    "dqkv_layout",
    "o_format",
    "attn_bias_type",
    "attn_mask_type",
    "softmax_type",
    "window_size",
    "bottom_right_diagonal",
    "fused_attention_backend",
    "deterministic",
    "use_FAv2_bwd",
    "nominal_dtype",
    "fp8",
    "is_input_fp8",
    "bf16_backward",
    "qkv_type",
    "qkv_scale_inv_format",
    "layer_number",
    "QKV_quantizer",
    "O_quantizer",
    "S_quantizer",
    "dQKV_quantizer",
    "dO_quantizer",
    "dP_quantizer",
]
TENSOR_FIELDS = BWD_FIELDS[1:17]
EVERYTHING = Config(bias="post_scale_bias", softmax="learnable")


def module_for(config, **changes):
    """Return (refactored module on a fresh stub, stub, values)."""
    values = make_values(config)
    stub = make_stub(config, values, **changes)
    return load(source_of("refactored"), stub.seam()), stub, values


@pytest.fixture
def module():
    return load(source_of("refactored"), Stub().seam())


def forward_by_hand(module, values):
    """Run the helpers up to the filled backward bag, with no ctx."""
    fwd = module.FusedAttnFwdArgs(**values)
    out, max_logit, to_save, attrs = module._fused_attn_forward_impl(fwd)
    bwd = module.FusedAttnBwdArgs()
    kept = module._fused_attn_setup_ctx(bwd, fwd, (out, max_logit), attrs, to_save)
    return fwd, out, to_save, attrs, bwd, kept


def fill(bwd, kept, d_out):
    for name, tensor in zip(TENSOR_FIELDS, kept, strict=True):
        setattr(bwd, name, tensor)
    bwd.grad_output = d_out


# The bags


def test_the_bags_have_the_fields_of_the_interface_in_its_order(module):
    assert [f.name for f in dataclasses.fields(module.FusedAttnFwdArgs)] == FWD_FIELDS
    assert [f.name for f in dataclasses.fields(module.FusedAttnBwdArgs)] == BWD_FIELDS
    assert (len(FWD_FIELDS), len(BWD_FIELDS)) == (36, 46)


def test_the_forward_bag_takes_every_legacy_parameter(module):
    legacy = load(source_of("legacy"), Stub().seam())
    parameters = list(inspect.signature(legacy.FusedAttnFunc.forward).parameters)[1:]
    assert sorted(parameters) == sorted(FWD_FIELDS)


@pytest.mark.parametrize("field", FWD_FIELDS)
def test_a_forgotten_forward_field_fails_by_name(module, field):
    values = make_values(Config())
    del values[field]
    with pytest.raises(TypeError, match=rf"'{field}'"):
        module.FusedAttnFwdArgs(**values)


@pytest.mark.parametrize("field", BWD_FIELDS)
def test_a_forgotten_backward_field_fails_by_name(field):
    module, _, values = module_for(EVERYTHING)
    _, out, _, _, bwd, kept = forward_by_hand(module, values)
    fill(bwd, kept, make_d_out(EVERYTHING, out))
    setattr(bwd, field, module.Unset)
    with pytest.raises(TypeError, match=rf"1 field\(s\) not set: {field}$"):
        module._fused_attn_backward_impl(bwd)


def test_no_backward_field_has_a_plausible_default(module):
    bag = module.FusedAttnBwdArgs()
    assert all(getattr(bag, name) is module.Unset for name in BWD_FIELDS)
    with pytest.raises(TypeError, match=f"46 field.*: {', '.join(BWD_FIELDS)}"):
        module._fused_attn_backward_impl(bag)


def test_none_is_a_value_and_not_a_forgotten_field():
    module, _, values = module_for(Config())
    _, out, _, _, bwd, kept = forward_by_hand(module, values)
    fill(bwd, kept, make_d_out(Config(), out))
    assert {bwd.aux_bias, bwd.aux_softmax_offset, bwd.q_fp8, bwd.qkv_type, bwd.S_quantizer} == {None}
    bwd.require_set()
    assert len(module._fused_attn_backward_impl(bwd)) == 5


def test_an_unset_field_stays_unset_in_a_copied_bag(module):
    for twin in (copy.copy(module.FusedAttnBwdArgs()), copy.deepcopy(module.FusedAttnBwdArgs())):
        assert twin.q is module.Unset
        with pytest.raises(TypeError, match="softmax_stats"):
            twin.aux_ctx_tensors()


def test_a_misspelt_field_cannot_be_added(module):
    with pytest.raises(AttributeError):
        module.FusedAttnBwdArgs().qkv_layuot = "bs3hd"


def test_bags_compare_and_hash_without_looking_at_tensors(module):
    values = make_values(Config())
    one, other = module.FusedAttnFwdArgs(**values), module.FusedAttnFwdArgs(**values)
    assert one == one
    assert one != other
    assert len({one, other}) == 2


def _schema_takes(annotation):
    def operator(x): ...

    operator.__annotations__ = {"x": annotation, "return": None}
    try:
        torch.library.infer_schema(operator, mutates_args=())
    except ValueError:
        return False
    return True


def test_every_annotation_can_be_an_operator_argument_or_has_a_documented_stand_in(module):
    annotations = [
        field.type for bag in (module.FusedAttnFwdArgs, module.FusedAttnBwdArgs) for field in dataclasses.fields(bag)
    ]
    stand_ins = {annotation for annotation in annotations if not _schema_takes(annotation)}
    assert stand_ins == set(module.SCHEMA_TYPES)
    assert all(_schema_takes(stand_in) for stand_in in module.SCHEMA_TYPES.values())


def test_a_whole_bag_can_be_an_operator_signature(module):
    def operator(): ...

    for bag in (module.FusedAttnFwdArgs, module.FusedAttnBwdArgs):
        types = {field.name: module.SCHEMA_TYPES.get(field.type, field.type) for field in dataclasses.fields(bag)}
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        operator.__signature__ = inspect.Signature(
            [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in types.items()],
            return_annotation=None,
        )
        operator.__annotations__ = {**types, "return": None}
        schema = torch.library.infer_schema(operator, mutates_args=())
        assert [part.split()[-1] for part in schema[1 : -len(") -> ()")].split(", ")] == list(types)


def test_optional_means_that_none_is_passed_somewhere(module):
    types = {field.name: field.type for field in dataclasses.fields(module.FusedAttnFwdArgs)}
    for name, value in make_values(Config()).items():
        if value is None and name != "quantizers":
            assert type(None) in get_args(types[name]), name


# Lengths that drift


@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: (*t, None)])
def test_a_drifting_number_of_kept_tensors_fails(change):
    module, _, values = module_for(Config())
    fwd, out, to_save, attrs, _, _ = forward_by_hand(module, values)
    assert len(to_save) == len(attrs["saved_from"]) == 12
    bwd = module.FusedAttnBwdArgs()
    with pytest.raises(ValueError, match="zip"):
        module._fused_attn_setup_ctx(bwd, fwd, (out, None), attrs, change(to_save))
    changed = {**attrs, "saved_from": change(attrs["saved_from"])}
    with pytest.raises(ValueError, match="zip"):
        module._fused_attn_setup_ctx(bwd, fwd, (out, None), changed, to_save)


@pytest.mark.parametrize("count", [15, 17])
def test_a_drifting_number_of_restored_tensors_fails(module, count):
    module.restore_from_func_ctx = lambda ctx: [None] * count
    with pytest.raises(ValueError, match="zip"):
        module.FusedAttnBwdArgs().setup_saved_tensors(None)


@pytest.mark.parametrize("config", [Config(), Config(bias="post_scale_bias"), Config(softmax="learnable"), EVERYTHING])
@pytest.mark.parametrize("change", [lambda aux: aux[:-1], lambda aux: [*aux, torch.ones(1)]])
def test_an_unexpected_number_of_aux_tensors_fails_and_says_so(config, change):
    module, _, values = module_for(config)
    kernel = module.fused_attn_fwd
    module.fused_attn_fwd = lambda **arguments: (lambda out, aux: (out, change(aux)))(*kernel(**arguments))
    expected = 2 + (config.bias != "no_bias") + (config.softmax != "vanilla")
    with pytest.raises(AssertionError, match=rf"returned \d auxiliary tensors, expected {expected} \(softmax_stats"):
        module._fused_attn_forward_impl(module.FusedAttnFwdArgs(**values))


# Aux slots


@pytest.mark.parametrize("config", [Config(bias="post_scale_bias"), Config(softmax="learnable"), EVERYTHING, Config()])
def test_bias_and_offset_keep_to_their_own_slots(config):
    module, stub, values = module_for(config)
    _, out, _, _, bwd, kept = forward_by_hand(module, values)
    fill(bwd, kept, make_d_out(config, out))
    assert bwd.aux_bias is values["attn_bias"]
    assert bwd.aux_softmax_offset is values["softmax_offset"]
    module._fused_attn_backward_impl(bwd)
    given = stub.last("fused_attn_bwd")["aux_ctx_tensors"]
    wanted = [x for x in (values["attn_bias"], values["softmax_offset"]) if x is not None]
    assert len(given) == 2 + len(wanted)
    assert all(a is b for a, b in zip(given[2:], wanted, strict=True))
    assert given[1].tolist() == [1234, 16]


def test_the_aux_list_is_new_at_every_call():
    module, _, values = module_for(Config())
    _, out, _, _, bwd, kept = forward_by_hand(module, values)
    fill(bwd, kept, make_d_out(Config(), out))
    bwd.aux_ctx_tensors().append("something")
    assert len(bwd.aux_ctx_tensors()) == 2


@pytest.mark.parametrize("aux", ["same", "rewrapped"])
def test_an_input_that_comes_back_is_named_and_attached_again_from_the_input(aux):
    module, _, values = module_for(EVERYTHING, aux=aux)
    _, out, to_save, attrs, _, kept = forward_by_hand(module, values)
    assert attrs["saved_from"] == (*[None] * 4, "q", "k", "v", "out", None, None, "attn_bias", "softmax_offset")
    assert to_save[10:] == (None, None)
    assert kept[14] is values["attn_bias"]
    assert kept[15] is values["softmax_offset"]
    assert kept[7] is out


def test_what_the_kernel_copied_is_saved_as_the_kernel_gave_it():
    module, _, values = module_for(EVERYTHING, aux="copied")
    _, _, to_save, attrs, _, kept = forward_by_hand(module, values)
    assert attrs["saved_from"][10:] == (None, None)
    for slot, name in ((10, "attn_bias"), (11, "softmax_offset")):
        assert to_save[slot] is kept[slot + 4] is not values[name]
        assert torch.equal(to_save[slot], values[name])


# The same memory seen the same way


def test_another_object_over_the_same_memory_is_the_same(module):
    tensor = torch.randn(3, 4)
    for other in (tensor, tensor.detach(), tensor.view(3, 4), tensor[:]):
        assert module._same_view(other, tensor)


@pytest.mark.parametrize(
    ("kept", "source"),
    [
        pytest.param(lambda x: x.unbind(1)[0], lambda x: x.unbind(1)[1], id="parts of one packed buffer"),
        pytest.param(lambda x: x[0], lambda x: x[0].T, id="transpose with square sizes"),
        pytest.param(lambda x: x, lambda x: x.view(torch.int32), id="another dtype"),
        pytest.param(lambda x: x[:2], lambda x: x, id="a prefix"),
        pytest.param(lambda x: x.view(6, 6, 6), lambda x: x.view(6, 1, 36), id="another shape"),
        pytest.param(lambda x: x[0, :1], lambda x: x[0, :1].expand(1, 6).as_strided((1, 6), (7, 1)), id="stride"),
        pytest.param(lambda x: x, lambda x: x.clone(), id="equal values elsewhere"),
        pytest.param(lambda x: x, lambda x: None, id="nothing to compare with"),
        pytest.param(lambda x: None, lambda x: None, id="nothing at all"),
    ],
)
def test_another_view_is_not_the_same(module, kept, source):
    buffer = torch.arange(216.0).view(6, 6, 6)
    assert not module._same_view(kept(buffer), source(buffer))
    assert not module._same_view(source(buffer), kept(buffer))


def test_empty_tensors_are_the_same_only_as_one_object(module):
    one, other = torch.empty(0, 3), torch.empty(0, 3)
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() == 0
    assert module._same_view(one, one)
    assert not module._same_view(one, other)


@pytest.mark.parametrize("kind", [QuantizedTensorStorage, QuantizedTensor])
def test_quantized_tensors_are_the_same_only_as_one_object(module, kind):
    data = torch.randn(2, 2)
    one, other = kind(data, 2.0), kind(data, 2.0)
    assert module._same_view(one, one)
    assert not module._same_view(one, other)
    assert not module._same_view(one, data)
    assert not module._same_view(data, one)


@pytest.mark.parametrize("layout", ["bs3hd", "t3hd", "bshd_bs2hd"])
def test_views_of_one_packed_buffer_are_each_attached_from_their_own_input(layout):
    module, _, values = module_for(Config(layout=layout))
    _, _, _, attrs, _, kept = forward_by_hand(module, values)
    assert attrs["saved_from"][4:7] == ("q", "k", "v")
    assert all(kept[4 + i] is values[name] for i, name in enumerate("qkv"))


def test_one_tensor_as_q_k_and_v_is_named_by_slot():
    module, _, values = module_for(Config())
    values["k"] = values["v"] = values["q"]
    _, _, _, attrs, _, kept = forward_by_hand(module, values)
    assert attrs["saved_from"][4:7] == ("q", "k", "v")
    assert kept[4] is kept[5] is kept[6] is values["q"]


def test_an_output_that_is_an_input_of_another_slot_is_not_mixed_up():
    module, _, values = module_for(Config())
    kernel = module.fused_attn_fwd
    module.fused_attn_fwd = lambda **arguments: (values["q"], kernel(**arguments)[1])
    _, out, _, attrs, _, kept = forward_by_hand(module, values)
    assert attrs["saved_from"][4:8] == ("q", "k", "v", "out")
    assert kept[7] is out is values["q"]


NAMED = {
    "F16": (Config(), (None,) * 4 + ("q", "k", "v", "out")),
    "FP8 in, FP8 backward": (Config(kind="delayed", fp8_inputs=True), ("q", "k", "v") + (None,) * 5),
    "delayed, FP8 out": (Config(kind="delayed", fp8_output=True), (None,) * 3 + ("out",) + (None,) * 4),
    "delayed, F16 out": (Config(kind="delayed"), (None,) * 8),
    "current, O in F16": (Config(kind="current"), (None,) * 7 + ("out",)),
    "current, O in FP8": (Config(kind="current", o_in_f16=False), (None,) * 8),
    "current, O in FP8, FP8 out": (
        Config(kind="current", o_in_f16=False, fp8_output=True),
        (None,) * 3 + ("out",) + (None,) * 4,
    ),
    "mxfp8": (Config(kind="mxfp8"), (None,) * 7 + ("out",)),
    "F16 backward": (Config(kind="delayed", fp8_backward=False), (None,) * 4 + ("q", "k", "v", "out")),
    "F16 backward, FP8 out": (
        Config(kind="delayed", fp8_backward=False, fp8_output=True),
        (None,) * 4 + ("q", "k", "v", None),
    ),
    "FP8 in, F16 backward": (
        Config(kind="delayed", fp8_backward=False, fp8_inputs=True),
        (None,) * 7 + ("out",),
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_exactly_the_callers_own_tensors_are_named(case):
    config, expected = NAMED[case]
    module, _, values = module_for(config)
    module._dpa_fp8_cs_o_in_f16 = config.o_in_f16
    with fp8_backward_env(config.fp8_backward):
        _, out, to_save, attrs, _, _ = forward_by_hand(module, values)
    assert attrs["saved_from"] == (*expected, None, None, None, None)
    callers = {id(x) for x in (values["q"], values["k"], values["v"], out)}
    assert not callers & {id(tensor) for tensor in to_save}


# Helpers without autograd


@pytest.mark.parametrize(
    "config",
    [
        EVERYTHING,
        Config(layout="bs3hd"),
        Config(layout="thd_thd_thd", fav2=True),
        Config(kind="delayed"),
        Config(kind="delayed", fp8_inputs=True),
        Config(kind="mxfp8", layout="bs3hd"),
        Config(kind="current", fp8_backward=False),
    ],
    ids=str,
)
def test_the_helpers_give_autograds_gradients_without_a_ctx(config):
    module, _, values = module_for(config)
    with fp8_backward_env(config.fp8_backward):
        _, out, _, _, bwd, kept = forward_by_hand(module, values)
    assert out.grad_fn is None or out.grad_fn.name() != "FusedAttnFuncBackward"
    if values["quantizers"]:
        values["quantizers"]["scaling_fwd"][8].scale.mul_(3)
    fill(bwd, kept, make_d_out(config, out))
    by_hand = module._fused_attn_backward_impl(bwd)
    by_autograd = run("refactored", config).gradients
    assert len(by_hand) == 5
    for name, gradient in zip(("q", "k", "v", "attn_bias", "softmax_offset"), by_hand, strict=True):
        assert (gradient is None) == (name not in by_autograd)
        if gradient is not None:
            assert Stub().describe(gradient) == by_autograd[name]


def test_setup_returns_the_sixteen_tensors_in_the_order_of_the_bag():
    module, _, values = module_for(EVERYTHING)
    *_, kept = forward_by_hand(module, values)
    assert len(kept) == 16
    assert tuple(TENSOR_FIELDS) == module._SAVED_FIELDS
    assert all(kept[8 + i] is values[name] for i, name in enumerate(LENGTHS))
    assert kept[12].dtype == torch.float32
    assert kept[13].dtype == torch.int64


def test_bare_quantized_storages_survive_forward_and_backward_helpers():
    config = Config(kind="delayed", fp8_inputs=True)
    module, stub, values = module_for(config)
    for name in "qkv":
        values[name] = QuantizedTensorStorage(values[name].data_, 2.0)
    _, out, _, attrs, bwd, kept = forward_by_hand(module, values)
    assert attrs["saved_from"][:3] == ("q", "k", "v")
    fill(bwd, kept, make_d_out(config, out))
    module._fused_attn_backward_impl(bwd)
    assert all(stub.last("fused_attn_bwd")[name] is values[name] for name in "qkv")


# The wrapper


def test_page_tables_stay_apart():
    config = Config(layout="paged_kv_bshd_bshd_bshd")
    values = run("refactored", config).values
    assert not torch.equal(values["page_table_k"], values["page_table_v"])
    for implementation in ("legacy", "refactored"):
        observed = run(implementation, config)
        call = observed.stub.last("fused_attn_fwd")
        assert call["page_table_k"] is observed.values["page_table_k"]
        assert call["page_table_v"] is observed.values["page_table_v"]


def test_the_fp8_branch_passes_no_page_tables_and_no_max_logit():
    for implementation in ("legacy", "refactored"):
        module, stub, values = module_for(Config(kind="delayed"))
        module = load(source_of(implementation), stub.seam())
        values["page_table_k"] = values["page_table_v"] = torch.zeros(2, 3, dtype=torch.int32)
        values["return_max_logit"] = True
        out, max_logit = apply(module, values)
        call = stub.last("fused_attn_fwd")
        assert (call["page_table_k"], call["page_table_v"], call["return_max_logit"]) == (None, None, False)
        assert torch.is_tensor(out)
        assert max_logit is None


def test_the_max_logit_is_a_tensor_beside_the_output():
    for implementation in ("legacy", "refactored"):
        _, stub, values = module_for(Config(max_logit=True))
        result = apply(load(source_of(implementation), stub.seam()), values)
        assert isinstance(result, tuple)
        assert [type(x) for x in result] == [torch.Tensor, torch.Tensor]
        assert result[1].shape == (values["q"].shape[-2],)
        torch.autograd.backward(result, [torch.ones_like(x) for x in result])
        assert values["q"].grad is not None


def test_only_two_attributes_are_left_on_ctx_and_the_bag_goes_after_use():
    module, _, values = module_for(EVERYTHING)
    out = apply(module, values)
    ctx = out.grad_fn
    assert set(vars(ctx)) == {"tensor_objects", "backward_objects"}
    bag = ctx.backward_objects
    assert all(getattr(bag, name) is module.Unset for name in BWD_FIELDS[:17])
    assert all(getattr(bag, name) is not module.Unset for name in BWD_FIELDS[17:])
    out.backward(make_d_out(EVERYTHING, out), retain_graph=True)
    assert ctx.backward_objects is None


def test_the_bag_goes_even_if_the_backward_kernel_fails():
    module, _, values = module_for(Config(), fail_in="fused_attn_bwd")
    out = apply(module, values)
    with pytest.raises(RuntimeError, match="told to fail"):
        out.backward(make_d_out(Config(), out))
    assert out.grad_fn.backward_objects is None


@pytest.mark.parametrize("implementation", ["legacy", "refactored"])
def test_the_callers_high_precision_tensors_are_not_kept_for_an_fp8_backward(implementation):
    _, stub, values = module_for(Config(kind="delayed"))
    module = load(source_of(implementation), stub.seam())
    out = apply(module, values)
    pointers = {values[name].data_ptr() for name in "qkv"}
    saved = [x.data_ if isinstance(x, QuantizedTensor) else x for x in out.grad_fn.saved_tensors if x is not None]
    assert len(saved) == 10
    assert not pointers & {x.data_ptr() for x in saved}


@pytest.mark.parametrize("retain", [False, True])
def test_a_second_backward_fails_as_the_legacy_one_does(retain):
    errors = []
    for implementation in ("legacy", "refactored"):
        _, stub, values = module_for(Config())
        out = apply(load(source_of(implementation), stub.seam()), values)
        out.backward(make_d_out(Config(), out), retain_graph=retain)
        with pytest.raises((RuntimeError, AttributeError)) as caught:
            out.backward(make_d_out(Config(), out))
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("implementation", ["legacy", "refactored"])
@pytest.mark.parametrize("name", ["q", "attn_bias", "softmax_offset"])
def test_a_saved_input_changed_in_place_is_noticed(implementation, name):
    _, stub, values = module_for(EVERYTHING)
    out = apply(load(source_of(implementation), stub.seam()), values)
    with torch.no_grad():
        values[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(make_d_out(EVERYTHING, out))


def test_a_rewrapped_bias_changed_in_place_is_noticed_all_the_same():
    module, _, values = module_for(EVERYTHING, aux="rewrapped")
    out = apply(module, values)
    with torch.no_grad():
        values["attn_bias"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(make_d_out(EVERYTHING, out))


def test_autograd_sees_five_inputs_and_nothing_else():
    module, _, values = module_for(EVERYTHING)
    out = apply(module, values)
    edges = [edge.variable for edge, _ in out.grad_fn.next_functions]
    assert len(edges) == 5
    five = (values[name] for name in ("q", "k", "v", "attn_bias", "softmax_offset"))
    assert all(edge is value for edge, value in zip(edges, five, strict=True))


@pytest.mark.parametrize(("implementation", "arity"), [("legacy", 36), ("refactored", 6)])
def test_backward_returns_one_value_per_forward_argument(implementation, arity):
    places = {"legacy": (9, 10, 11, 12, 29), "refactored": (0, 1, 2, 3, 4)}[implementation]
    _, stub, values = module_for(EVERYTHING)
    module = load(source_of(implementation), stub.seam())
    out = apply(module, values)
    parameters = list(inspect.signature(module.FusedAttnFunc.forward).parameters)[1:]
    assert len(parameters) == arity
    result = module.FusedAttnFunc.backward(out.grad_fn, make_d_out(EVERYTHING, out), torch.zeros(3))
    assert len(result) == arity
    assert tuple(i for i, value in enumerate(result) if value is not None) == places
    assert [parameters[i] for i in places] == ["q", "k", "v", "attn_bias", "softmax_offset"]
    for place in places:
        assert result[place].shape == values[parameters[place]].shape


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_the_s_scale_of_backward_is_a_clone_and_its_amax_is_shared(kind):
    module, _, values = module_for(Config(kind=kind))
    s_quantizer = values["quantizers"]["scaling_fwd"][8]
    *_, attrs, bwd, _ = forward_by_hand(module, values)
    assert bwd.S_quantizer is attrs["S_quantizer"] is not s_quantizer
    assert bwd.S_quantizer.scale is not s_quantizer.scale
    assert bwd.S_quantizer.amax is s_quantizer.amax
    s_quantizer.scale.mul_(3)
    assert bwd.S_quantizer.scale.item() == 8.0


def test_the_s_quantizer_is_not_copied_for_an_f16_backward():
    module, _, values = module_for(Config(kind="delayed"))
    with fp8_backward_env(False):
        *_, bwd, _ = forward_by_hand(module, values)
    assert bwd.S_quantizer is values["quantizers"]["scaling_fwd"][8]


def test_the_packed_buffers_and_page_tables_are_no_differentiable_inputs(module):
    parameters = list(inspect.signature(module.FusedAttnFunc.forward).parameters)
    assert parameters == ["ctx", "q", "k", "v", "attn_bias", "softmax_offset", "fwd_args"]


@pytest.mark.parametrize(
    ("layout", "separate"),
    [
        ("sb3hd", "sbhd_sbhd_sbhd"),
        ("bsh3d", "bshd_bshd_bshd"),
        ("th3d", "thd_thd_thd"),
        ("bshd_bs2hd", "bshd_bshd_bshd"),
        ("thd_th2d", "thd_thd_thd"),
        ("sbhd_bshd_bshd", "sbhd_bshd_bshd"),
        ("paged_kv_thd_sbhd_sbhd", "paged_kv_thd_sbhd_sbhd"),
    ],
)
def test_a_reloaded_layout_has_one_part_per_tensor(module, layout, separate):
    legacy = load(source_of("legacy"), Stub().seam())
    assert module._reload_qkv_layout(layout) == legacy._separate_parts(layout) == separate
