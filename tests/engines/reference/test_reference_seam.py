"""The engine binds every name of the seam, with the signatures and the behaviour that the sources rely on."""

from __future__ import annotations

import dataclasses
import inspect
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fp8_problem import Setup, make_call, run, spied
from reference_problem import ALL_LAYOUTS, DENSE_LAYOUTS, MASKS, SEAM

from harness import constraints
from harness.case import Case
from harness.engines.api import Engine
from harness.engines.reference import ReferenceEngine, surroundings
from harness.layouts import LAYOUTS

NAMES = [
    "fused_attn_fwd",
    "fused_attn_bwd",
    "FusedAttnBackend",
    "dpa_utils",
    "combine_and_quantize",
    "combine_and_dequantize",
    "mxfp8_quantize_fast_path",
    "print_quantizers",
    "FP8GlobalStateManager",
    "Float8Quantizer",
    "Float8CurrentScalingQuantizer",
    "MXFP8Quantizer",
    "QuantizedTensorStorage",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "TensorOrQuantized",
    "NVTE_CPU_OFFLOAD_V1",
    "is_cpu_offload_enabled",
    "start_offload",
    "mark_activation_offload",
    "is_current_layer_offloaded",
    "is_graph_capturing",
    "nvtx_range_push",
    "nvtx_range_pop",
    "get_nvtx_range_context",
    "flash_attn_cuda_bwd",
]

FORWARD = [
    "is_training",
    "max_seqlen_q",
    "max_seqlen_kv",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "q",
    "k",
    "v",
    "fake_dtype",
    "fused_attention_backend",
    "attn_bias=None",
    "cu_seqlens_q_padded=None",
    "cu_seqlens_kv_padded=None",
    "page_table_k=None",
    "page_table_v=None",
    "s_quantizer=None",
    "o_quantizer=None",
    "attn_scale=None",
    "dropout=0.0",
    "fast_zero_fill=True",
    "qkv_layout='sbh3d'",
    "o_format='sbhd'",
    "qkv_scale_inv_format=None",
    "attn_bias_type='no_bias'",
    "attn_mask_type='padding'",
    "softmax_type='vanilla'",
    "window_size=(-1,-1)",
    "bottom_right_diagonal=None",
    "rng_gen=None",
    "softmax_offset=None",
    "return_max_logit=False",
    "cuda_graph=False",
]

BACKWARD = [
    "max_seqlen_q",
    "max_seqlen_kv",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "q",
    "k",
    "v",
    "o",
    "d_o",
    "fake_dtype",
    "aux_ctx_tensors",
    "fused_attention_backend",
    "cu_seqlens_q_padded=None",
    "cu_seqlens_kv_padded=None",
    "s_quantizer=None",
    "dp_quantizer=None",
    "dqkv_quantizer=None",
    "attn_scale=None",
    "dropout=0.0",
    "fast_zero_fill=True",
    "qkv_layout='sbh3d'",
    "o_format='sbhd'",
    "do_format='sbhd'",
    "dqkv_layout='sbh3d'",
    "qkv_scale_inv_format=None",
    "do_scale_inv_format=None",
    "attn_bias_type='no_bias'",
    "attn_mask_type='padding'",
    "softmax_type='vanilla'",
    "window_size=(-1,-1)",
    "bottom_right_diagonal=None",
    "deterministic=False",
    "cuda_graph=False",
]


def signature(function: Any) -> list[str]:
    result = []
    for parameter in inspect.signature(function).parameters.values():
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}".replace(" ", "")
        result.append(parameter.name + default)
    return result


def test_every_name_of_the_seam_is_bound() -> None:
    assert sorted(SEAM) == sorted(NAMES)
    assert len(NAMES) == 26


def test_the_table_is_fresh_each_time() -> None:
    engine = ReferenceEngine()
    engine.seam().clear()
    assert len(engine.seam()) == 26


def test_the_kernels_take_the_parameters_of_the_wrappers() -> None:
    assert signature(SEAM["fused_attn_fwd"]) == FORWARD
    assert signature(SEAM["fused_attn_bwd"]) == BACKWARD
    assert (len(FORWARD), len(BACKWARD)) == (32, 33)


def test_backends_are_found_by_name_and_number() -> None:
    backend = SEAM["FusedAttnBackend"]
    assert {name: int(backend[name]) for name in ("No_Backend", "F16_arbitrary_seqlen", "FP8")} == {
        "No_Backend": -1,
        "F16_arbitrary_seqlen": 1,
        "FP8": 2,
    }
    with pytest.raises(KeyError):
        backend["F32"]


@pytest.mark.parametrize(
    ("layout", "formats"),
    [
        ("sb3hd", ("sbhd", "sbhd", "sbhd")),
        ("bshd_bsh2d", ("bshd", "bshd", "bshd")),
        ("thd_t2hd", ("thd", "thd", "thd")),
        ("sbhd_bshd_bshd", ("sbhd_2bshd", "sbhd", "bshd")),
        ("thd_sbhd_sbhd", ("thd_2sbhd", "thd", "sbhd")),
        ("paged_kv_thd_bshd_bshd", ("thd_2bshd", "thd", "bshd")),
        ("paged_kv_bshd_bshd_bshd", ("bshd", "bshd", "bshd")),
        ("bhsd_bhsd_bhsd", ("bhsd", "bhsd", "bhsd")),
    ],
)
def test_formats_are_the_letters_of_a_layout(layout: str, formats: tuple[str, str, str]) -> None:
    assert SEAM["dpa_utils"].get_qkv_format(layout) == formats


def test_formats_agree_with_the_layout_table() -> None:
    for layout in LAYOUTS.values():
        assert SEAM["dpa_utils"].get_qkv_format(layout.name)[1:] == (layout.q_format, layout.kv_format)
    assert SEAM["dpa_utils"].get_qkv_format() == ("bshd", "bshd", "bshd")


def test_maybe_contiguous_copies_only_a_strided_last_dimension() -> None:
    maybe_contiguous = SEAM["dpa_utils"].maybe_contiguous
    tensor = torch.zeros(2, 3, 4)
    assert maybe_contiguous(tensor.transpose(0, 1)).stride() == (4, 12, 1)
    assert maybe_contiguous(tensor.transpose(1, 2)).stride() == (12, 3, 1)


def delayed() -> Any:
    return ReferenceEngine().quantizer("delayed", "E4M3")


def test_there_are_no_quantizers_without_fp8() -> None:
    assert SEAM["dpa_utils"].get_attention_quantizers(False, object()) == (None,) * 6


def test_quantizers_are_found_by_their_place_and_flagged() -> None:
    quantizers = {"scaling_fwd": [delayed() for _ in range(9)], "scaling_bwd": [delayed() for _ in range(6)]}
    found = SEAM["dpa_utils"].get_attention_quantizers(True, quantizers)
    forward, backward = quantizers["scaling_fwd"], quantizers["scaling_bwd"]
    wanted = (forward[2], forward[3], forward[8], backward[0], backward[3], backward[5])
    assert all(one is other for one, other in zip(found, wanted, strict=True))
    assert [quantizer.internal for quantizer in found] == [False, False, True, False, False, True]
    assert all(quantizer.rowwise_usage and not quantizer.columnwise_usage for quantizer in found)
    assert forward[0].columnwise_usage


def test_a_quantizer_of_another_kind_is_refused() -> None:
    other = type("Other", (type(delayed()).__mro__[2],), {})(delayed().dtype)
    quantizers = {"scaling_fwd": [delayed() for _ in range(9)], "scaling_bwd": [other] * 6}
    with pytest.raises(TypeError, match="dQKV"):
        SEAM["dpa_utils"].get_attention_quantizers(True, quantizers)


class Pair(SEAM["QuantizedTensorStorage"]):
    """A storage of two tensors that is no tensor itself."""

    def __init__(self, first: torch.Tensor | None, second: torch.Tensor | None) -> None:
        self.held: list[torch.Tensor | None] = [first, second]

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], Pair]:
        handed, self.held = self.held, [None, None]
        return handed, self

    def restore_from_saved(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        self.held = tensors[:2]
        return tensors[2:]


def test_saving_expands_storages_and_restoring_puts_them_together() -> None:
    a, b, c, d = (torch.full((1,), float(value)) for value in range(4))
    pair = Pair(b, None)
    saved, objects = SEAM["prepare_for_saving"](a, None, pair, c, d)
    assert [id(tensor) for tensor in saved] == [id(t) for t in (a, None, b, None, c, d)]
    assert objects == [None, None, pair, None, None]
    assert pair.held == [None, None]
    ctx = SimpleNamespace(saved_tensors=tuple(saved), tensor_objects=objects)
    restored = SEAM["restore_from_func_ctx"](ctx)
    assert [id(value) for value in restored] == [id(value) for value in (a, None, pair, c, d)]
    assert pair.held == [b, None]
    assert ctx.tensor_objects is None
    with pytest.raises(AttributeError):
        SEAM["restore_from_func_ctx"](ctx)


def test_saving_works_within_autograd() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            saved, ctx.tensor_objects = SEAM["prepare_for_saving"](tensor, None)
            ctx.save_for_backward(*saved)
            return tensor * tensor

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            tensor, nothing = SEAM["restore_from_func_ctx"](ctx)
            assert nothing is None
            return 2 * tensor * grad

    tensor = torch.tensor([3.0], requires_grad=True)
    Twice.apply(tensor).backward()
    assert tensor.grad == 6.0


def test_quantizers_are_printed_only_where_debugging_is_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(label: str, layer: int = 1) -> list[str]:
        SEAM["print_quantizers"](label, layer, delayed(), engine.quantizer("current", "E4M3"), None, *[delayed()] * 3)
        return capsys.readouterr().out.splitlines()

    engine = ReferenceEngine()
    assert printed("forward >>") == []
    for value in ("1", "3"):
        monkeypatch.setenv("NVTE_DEBUG", "1")
        monkeypatch.setenv("NVTE_DEBUG_LEVEL", value)
        assert printed("forward >>") == []
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", "2")
    assert printed("forward >>") == [
        "forward >> QKV_quantizer: DS, scale=1.0000e+00, amax=0.0000e+00",
        "forward >> S_quantizer: None",
        "forward >> O_quantizer: CS",
    ]
    assert [line.split(":")[0] for line in printed("backward >>")] == [
        "backward >> dO_quantizer", "backward >> dP_quantizer", "backward >> dQKV_quantizer",
    ]  # fmt: skip
    assert len(printed("")) == 6
    assert printed("forward >>", 2) == []
    monkeypatch.setenv("NVTE_PRINT_LAYER_NUMBER", "2")
    assert len(printed("forward >>", 2)) == 3


def test_the_scenario_of_debug_prints_prints_the_cases_layer(capsys: pytest.CaptureFixture[str]) -> None:
    engine, before = ReferenceEngine(), dict(os.environ)
    with engine.during(Case(scenario="debug_prints", layer_number=3)):
        SEAM["print_quantizers"]("forward", 3, *[delayed()] * 6)
        SEAM["print_quantizers"]("forward", 1, *[delayed()] * 6)
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert dict(os.environ) == before


def test_what_is_off_says_so() -> None:
    assert SEAM["NVTE_CPU_OFFLOAD_V1"] is False
    assert SEAM["is_cpu_offload_enabled"]() is False
    assert SEAM["is_current_layer_offloaded"]() is False
    assert SEAM["is_graph_capturing"]() is False
    assert SEAM["start_offload"](torch.zeros(1), offload_base_tensor=True) is None
    assert SEAM["mark_activation_offload"](torch.zeros(1), None) is None
    assert SEAM["nvtx_range_push"]("x") is None
    assert SEAM["nvtx_range_pop"]() is None
    assert SEAM["nvtx_range_pop"]("x") is None
    assert surroundings.open_ranges() == ()
    with SEAM["get_nvtx_range_context"]("x"):
        pass


def test_nvtx_ranges_nest_and_must_be_popped_by_their_label() -> None:
    engine, push, pop = ReferenceEngine(), SEAM["nvtx_range_push"], SEAM["nvtx_range_pop"]
    with engine.during(Case(scenario="nvtx")):
        with pytest.raises(RuntimeError, match="no NVTX range is open"):
            pop("a")
        push("a")
        push("b")
        with SEAM["get_nvtx_range_context"]("c"):
            assert surroundings.open_ranges() == ("a", "b")
        pop()
        with pytest.raises(ValueError, match="msg='b' was to be popped, and the innermost NVTX range is 'a'"):
            pop("b")
        push("left open")
        with engine.during(Case(scenario="nvtx")):
            assert surroundings.open_ranges() == ()
            push("inner")
        assert surroundings.open_ranges() == ("left open",)
    assert surroundings.open_ranges() == ()
    assert "NVTE_NVTX_ENABLED" not in os.environ


@pytest.mark.parametrize("spec", ["legacy", "refactored"])
def test_the_sources_leave_no_range_open_and_print_what_they_quantize_with(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ReferenceEngine().during(Case(scenario="nvtx")):
        run(spied(spec), make_call(Setup()))
        assert surroundings.open_ranges() == ()
    assert capsys.readouterr().out == ""
    with ReferenceEngine().during(Case(scenario="debug_prints")):
        run(spied(spec), make_call(Setup()))
    assert len(capsys.readouterr().out.splitlines()) == 12


def test_the_recipe_is_delayed_scaling() -> None:
    recipe = SEAM["FP8GlobalStateManager"].get_fp8_recipe()
    assert (recipe.delayed(), recipe.float8_current_scaling(), recipe.mxfp8()) == (True, False, False)


def fail_under(recipe: Any) -> None:
    with ReferenceEngine().recipe_in_force(recipe):
        assert SEAM["FP8GlobalStateManager"].get_fp8_recipe() is recipe
        raise ZeroDivisionError


def test_a_recipe_is_in_force_inside_the_block_alone_even_if_it_fails() -> None:
    engine = ReferenceEngine()
    before = SEAM["FP8GlobalStateManager"].get_fp8_recipe()
    answers = {
        kind: tuple(getattr(engine.recipe(kind, "HYBRID"), what)() for what in
                    ("delayed", "float8_current_scaling", "mxfp8"))
        for kind in ("delayed", "current", "hybrid", "mxfp8")
    }  # fmt: skip
    assert answers == {"delayed": (True, False, False), "current": (False, True, False),
                       "hybrid": (False, True, False), "mxfp8": (False, False, True)}  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        fail_under(engine.recipe("mxfp8", "E4M3"))
    assert SEAM["FP8GlobalStateManager"].get_fp8_recipe() is before


def test_the_engine_is_an_engine() -> None:
    engine = ReferenceEngine()
    assert isinstance(engine, Engine)
    assert engine.defines_padding
    assert (engine.name, engine.device) == ("reference", torch.device("cpu"))
    environment = engine.environment()
    assert environment["torch"] == torch.__version__
    assert environment["cpu_capability"]
    assert all(isinstance(value, str) for value in environment.values())
    assert engine.generator(7).initial_seed() == 7


# The engine looks at nothing but these, so that a case may be one that Case itself would refuse.
DEFAULTS = {field.name: getattr(Case(), field.name) for field in dataclasses.fields(Case)}


@pytest.mark.parametrize("mask", MASKS)
def test_dense_layouts_are_supported_with_any_mask_and_the_others_with_padding(mask: str) -> None:
    def case(name: str) -> Any:
        paged = {"requires_grad": ()} if LAYOUTS[name].paged else {}
        return SimpleNamespace(**(DEFAULTS | {"qkv_layout": name, "attn_mask_type": mask} | paged))

    supported = {name for name in LAYOUTS if ReferenceEngine().unsupported(case(name)) is None}
    assert supported == set(ALL_LAYOUTS if "padding" in mask else DENSE_LAYOUTS)


PAGED = {"qkv_layout": "paged_kv_sbhd_sbhd_sbhd", "attn_mask_type": "padding", "requires_grad": ()}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"qkv_layout": "t3hd", "attn_mask_type": "causal"},
         "qkv_layout=t3hd needs a padding mask, not attn_mask_type=causal"),
        (PAGED | {"attn_mask_type": "no_mask"},
         "qkv_layout=paged_kv_sbhd_sbhd_sbhd needs a padding mask, not attn_mask_type=no_mask"),
        (PAGED | {"requires_grad": ("q", "v")},
         "qkv_layout=paged_kv_sbhd_sbhd_sbhd: paged KV has no backward, and requires_grad=('q', 'v') asks for one"),
        (PAGED | {"dropout_p": 0.5}, "qkv_layout=paged_kv_sbhd_sbhd_sbhd takes no dropout, not dropout_p=0.5"),
        (PAGED | {"attn_bias_type": "post_scale_bias"},
         "qkv_layout=paged_kv_sbhd_sbhd_sbhd takes no bias, not attn_bias_type=post_scale_bias"),
        ({"attn_bias_type": "pre_scale_bias"}, "attn_bias_type=pre_scale_bias is not supported by any kernel"),
        ({"attn_bias_type": "alibi"}, "attn_bias_type=alibi needs a causal mask, not attn_mask_type=no_mask"),
    ],
)  # fmt: skip
def test_an_unsupported_case_has_a_reason_of_one_sentence(changes: dict[str, Any], reason: str) -> None:
    case: Any = SimpleNamespace(**(DEFAULTS | changes))
    assert ReferenceEngine().unsupported(case) == reason


def test_the_engine_refuses_by_the_table_of_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ReferenceEngine()
    assert engine.unsupported(Case()) is None
    assert engine.unsupported(Case(fp8_recipe="delayed")) is None
    never = dataclasses.replace(constraints.CONSTRAINTS[0], excludes=lambda *values: True, message="planted")
    monkeypatch.setattr(constraints, "CONSTRAINTS", (never,))
    assert engine.unsupported(Case()) == "planted"


def test_graph_capture_needs_cuda() -> None:
    assert "needs CUDA" in (ReferenceEngine().unsupported(Case(scenario="graph_capture")) or "")
