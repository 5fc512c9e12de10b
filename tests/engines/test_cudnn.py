"""The cuDNN engine asks TransformerEngine the question that its version takes, and keeps its answer.

Made-up modules stand for TransformerEngine 2.19 and 2.20, so that this runs without either.
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import sys
import types
from typing import Any

import pytest
import torch

from harness.case import Case
from harness.engines.api import Engine, EngineUnavailable
from harness.engines.cudnn import SEAM_HOMES, CudnnEngine, bottom_right
from harness.engines.reference import ReferenceEngine

UTILS = "transformer_engine.pytorch.attention.dot_product_attention.utils"
FUSED = "transformer_engine.pytorch.cpp_extensions.fused_attn"
CUSTOM_OP = "transformer_engine.pytorch.dynamo.custom_op"


class Backend(enum.IntEnum):
    No_Backend = -1
    F16_arbitrary_seqlen = 1
    FP8 = 2


class Names:
    """Stand for a mapping from names to enum members: each member is ``KIND.name``."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __getitem__(self, name: str) -> str:
        return f"{self.kind}.{name}"


class Parameters:
    """Stand for FusedAttentionParams: it takes what the real one takes, and nothing else."""

    FIELDS = (
        "is_training deterministic cuda_graph return_max_logit attn_mask_type bias_type window_size_left "
        "window_size_right bottom_right_diagonal softmax_type scaling_mode dropout attn_scale qkv_dtype o_dtype "
        "do_dtype dqkv_dtype qkv_layout o_format do_format dqkv_layout qkv_scale_inv_format do_scale_inv_format "
        "batch_size num_attn_heads num_gqa_groups head_dim_qk head_dim_v max_seqlen_q max_seqlen_kv num_tokens_q "
        "num_tokens_kv num_pages_k num_pages_v page_size_k page_size_v max_pages_per_seq_k max_pages_per_seq_v "
        "bias_batch_size bias_num_heads bias_seqlen_q bias_seqlen_kv"
    )

    def __init__(self, **fields: Any) -> None:
        unknown = set(fields) - set(self.FIELDS.split())
        if unknown:
            raise TypeError(f"unexpected fields {unknown}")
        self.fields = fields


class Fake:
    """A made-up TransformerEngine: its modules, the questions it was asked, and the answer it gives."""

    def __init__(self, generation: str, patch: pytest.MonkeyPatch) -> None:
        self.generation = generation
        self.questions: list[Any] = []
        self.backend = Backend.F16_arbitrary_seqlen
        self.message = ""
        self.modules: dict[str, types.ModuleType] = {}
        for name, home in SEAM_HOMES.items():
            setattr(self.module(home), name, f"TransformerEngine's {name}")
        fused = self.module(FUSED)
        fused.FusedAttnBackend = {member.name: member for member in Backend}  # type: ignore[attr-defined]
        for kind in ("QKVLayout", "QKVFormat", "AttnBiasType", "AttnMaskType", "SoftmaxType"):
            setattr(fused, kind, Names(kind))
        types_ = {torch.bfloat16: "kBFloat16", torch.float16: "kFloat16", torch.float32: "kFloat32"}
        self.module("transformer_engine.pytorch.constants").TE_DType = types_  # type: ignore[attr-defined]
        self.module("transformer_engine.pytorch")
        tex = self.module("transformer_engine_torch")
        tex.get_cudnn_version = lambda: 91900  # type: ignore[attr-defined]
        tex.DType = types.SimpleNamespace(kFloat8E4M3="E4M3", kFloat8E5M2="E5M2")  # type: ignore[attr-defined]
        manager = types.SimpleNamespace(quantization_state=types.SimpleNamespace(fp8_recipe="the one before"))
        self.module("transformer_engine.pytorch.quantization").FP8GlobalStateManager = (  # type: ignore[attr-defined]
            manager
        )
        self.capability = (9, 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        if generation == "2.20":
            self.module(CUSTOM_OP).TensorOrQuantized = "its own alias"  # type: ignore[attr-defined]
            self.module(UTILS).FusedAttentionParams = Parameters  # type: ignore[attr-defined]
            tex.get_fused_attn_backend = self.answer_one  # type: ignore[attr-defined]
        else:
            tex.get_fused_attn_backend = self.answer_nineteen  # type: ignore[attr-defined]
        for name in [name for name in sys.modules if name.startswith(("transformer_engine", "flash_attn_2_cuda"))]:
            patch.delitem(sys.modules, name)
        for name, module in self.modules.items():
            patch.setitem(sys.modules, name, module)
        find_spec = importlib.util.find_spec
        patch.setattr(importlib.util, "find_spec", lambda name, *rest: self if name == "transformer_engine"
                      else find_spec(name, *rest))  # fmt: skip
        patch.setattr(importlib.metadata, "version", lambda name: f"{generation}.0")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)

    def module(self, name: str) -> types.ModuleType:
        return self.modules.setdefault(name, types.ModuleType(name))

    def answer_one(self, question: Parameters) -> tuple[Backend, str]:
        self.questions.append(question.fields)
        return self.of(question.fields["qkv_dtype"]), self.message

    def of(self, dtype: str) -> Backend:
        """Return the backend: FP8's for FP8 where the F16 one is selected for F16."""
        return Backend.FP8 if dtype == "E4M3" and self.backend == Backend.F16_arbitrary_seqlen else self.backend

    def answer_nineteen(self, *question: Any) -> Backend:
        assert len(question) == 19
        self.questions.append(question)
        return self.of(question[1])


@pytest.fixture(params=["2.19", "2.20"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(request.param, monkeypatch)


@pytest.fixture
def fake19(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake("2.19", monkeypatch)


@pytest.fixture
def fake20(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake("2.20", monkeypatch)


# every value differs from every other, so that no two can change places unseen
CASE = Case(
    qkv_layout="sbhd_bshd_bshd", dtype="fp16", batch_size=3, num_heads=12, num_gqa_groups=6, max_seqlen_q=40,
    max_seqlen_kv=65, head_dim_qk=32, head_dim_v=16, attn_mask_type="padding", window_size=(13, 7),
    bottom_right_diagonal=True, attn_bias_type="post_scale_bias", bias_shape="1hss", dropout_p=0.1, attn_scale=0.07,
    return_max_logit=True,
)  # fmt: skip


# ------------------------------------------------------------------ the seam


def test_the_two_engines_bind_the_same_names(fake: Fake) -> None:
    engine = CudnnEngine()
    assert set(engine.seam()) == set(ReferenceEngine().seam())
    assert isinstance(engine, Engine)


def test_every_name_is_bound_to_transformer_engines_own(fake: Fake) -> None:
    seam = CudnnEngine().seam()
    for name, home in SEAM_HOMES.items():
        assert seam[name] is getattr(fake.modules[home], name)
    assert seam["dpa_utils"] is fake.modules[UTILS]
    assert seam["flash_attn_cuda_bwd"] is None


def test_an_annotation_that_2_19_lacks_is_stood_in_for(fake: Fake) -> None:
    alias = CudnnEngine().seam()["TensorOrQuantized"]
    assert (alias == "its own alias") == (fake.generation == "2.20")
    assert alias is not None


def test_flash_attention_is_bound_where_it_is_installed(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    flash = types.ModuleType("flash_attn_2_cuda")
    flash.varlen_bwd = "its backward"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", flash)
    assert CudnnEngine().seam()["flash_attn_cuda_bwd"] == "its backward"


def test_the_seam_is_a_table_of_ones_own(fake: Fake) -> None:
    engine = CudnnEngine()
    engine.seam().clear()
    assert engine.seam()


# ------------------------------------------------------------------ the question


def test_2_19_is_asked_with_nineteen_values_in_its_order(fake19: Fake) -> None:
    assert CudnnEngine().unsupported(CASE) is None
    assert fake19.questions == [(
        True, "kFloat16", "kFloat16", "QKVLayout.sbhd_bshd_bshd", "AttnBiasType.post_scale_bias",
        "AttnMaskType.padding", "SoftmaxType.vanilla", 0.1, 12, 6, 40, 65, 32, 16, 13, 7, True, False, False,
    )]  # fmt: skip


def test_2_20_is_asked_by_field(fake20: Fake) -> None:
    assert CudnnEngine().unsupported(CASE) is None
    (asked,) = fake20.questions
    assert asked == {
        "is_training": True, "deterministic": False, "return_max_logit": True, "window_size_left": 13,
        "window_size_right": 7, "bottom_right_diagonal": True, "dropout": 0.1, "attn_scale": 0.07,
        "qkv_dtype": "kFloat16", "o_dtype": "kFloat16", "do_dtype": "kFloat16", "dqkv_dtype": "kFloat16",
        "qkv_layout": "QKVLayout.sbhd_bshd_bshd", "dqkv_layout": "QKVLayout.sbhd_bshd_bshd",
        "bias_type": "AttnBiasType.post_scale_bias", "attn_mask_type": "AttnMaskType.padding",
        "softmax_type": "SoftmaxType.vanilla", "o_format": "QKVFormat.sbhd", "do_format": "QKVFormat.sbhd",
        "batch_size": 3, "num_attn_heads": 12, "num_gqa_groups": 6, "head_dim_qk": 32, "head_dim_v": 16,
        "max_seqlen_q": 40, "max_seqlen_kv": 65, "bias_batch_size": 1, "bias_num_heads": 12, "bias_seqlen_q": 40,
        "bias_seqlen_kv": 65,
    }  # fmt: skip


def test_without_a_bias_its_sizes_are_zero_and_the_scale_is_that_of_the_head(fake20: Fake) -> None:
    CudnnEngine().unsupported(Case(head_dim_qk=64, head_dim_v=64))
    (asked,) = fake20.questions
    assert {asked[name] for name in asked if name.startswith("bias_") and name != "bias_type"} == {0}
    assert asked["attn_scale"] == 0.125


def test_deterministic_and_the_dtype_are_passed_on(fake: Fake) -> None:
    CudnnEngine().unsupported(Case(dtype="bf16", deterministic=True))
    (asked,) = fake.questions
    if fake.generation == "2.19":
        assert asked[18] is True
        assert asked[1:3] == ("kBFloat16", "kBFloat16")
    else:
        assert asked["deterministic"] is True
        assert asked["qkv_dtype"] == "kBFloat16"


@pytest.mark.parametrize(
    ("fields", "training"),
    [
        ({}, True),
        ({"is_training": False}, True),  # gradients are asked for, so a backward kernel is needed
        ({"is_training": False, "requires_grad": ()}, False),
        ({"requires_grad": ()}, True),
    ],
)
def test_a_backward_kernel_is_asked_for_where_there_is_a_backward(
    fake: Fake, fields: dict[str, Any], training: bool
) -> None:
    CudnnEngine().unsupported(Case.from_dict(fields))
    (asked,) = fake.questions
    assert (asked[0] if fake.generation == "2.19" else asked["is_training"]) is training


@pytest.mark.parametrize(
    ("mask", "given", "expected"),
    [
        ("causal", None, False),
        ("causal_bottom_right", None, True),
        ("padding_causal_bottom_right", None, True),
        ("padding_causal", None, False),
        ("causal", True, True),
        ("causal_bottom_right", False, False),
    ],
)
def test_the_diagonal_is_the_callers_else_that_of_the_mask(mask: str, given: bool | None, expected: bool) -> None:
    case = Case(attn_mask_type=mask, window_size=(-1, 0), bottom_right_diagonal=given)
    assert bottom_right(case) is expected


# ------------------------------------------------------------------ the answer


def test_the_refusal_of_2_20_is_kept_as_the_reason_on_one_line(fake20: Fake) -> None:
    fake20.backend, fake20.message = Backend.No_Backend, "no such\n  head size:  cuDNN 9.1 "
    assert CudnnEngine().unsupported(CASE) == "no such head size: cuDNN 9.1"


def test_a_refusal_without_words_still_has_a_reason(fake: Fake) -> None:
    fake.backend = Backend.No_Backend
    assert "selects no fused attention backend" in str(CudnnEngine().unsupported(CASE))


def test_another_backend_than_the_one_that_is_called_is_a_refusal(fake: Fake) -> None:
    fake.backend = Backend.FP8
    assert CudnnEngine().unsupported(CASE) is not None


def test_fp32_is_refused_before_anyone_is_asked(fake: Fake) -> None:
    assert CudnnEngine().unsupported(Case(dtype="fp32")) == "dtype=fp32: cuDNN fused attention takes fp16 and bf16"
    assert fake.questions == []


def test_a_bias_with_a_softmax_offset_is_refused_in_training_alone(fake: Fake) -> None:
    case = Case(attn_bias_type="post_scale_bias", softmax_type="learnable")
    assert "allocates the gradient of the bias in the shape" in str(CudnnEngine().unsupported(case))
    assert CudnnEngine().unsupported(case.replace(requires_grad=(), is_training=False)) is None


# ------------------------------------------------------------------ FP8 and scenarios

FP8 = Case(fp8_recipe="delayed", head_dim_qk=128, head_dim_v=128, max_seqlen_q=128, max_seqlen_kv=128)


def asked(fake: Fake) -> list[tuple[bool, str, str]]:
    """Return of each question: training, the dtype of q, k and v, and that of the gradients where it is asked."""
    if fake.generation == "2.19":
        return [(question[0], question[1], "") for question in fake.questions]
    return [(question["is_training"], question["qkv_dtype"], question["dqkv_dtype"]) for question in fake.questions]


@pytest.mark.parametrize(("fp8_format", "backward"), [("HYBRID", "E5M2"), ("E4M3", "E4M3")])
def test_delayed_scaling_is_asked_for_in_fp8(fake: Fake, fp8_format: str, backward: str) -> None:
    assert CudnnEngine().unsupported(FP8.replace(fp8_format=fp8_format)) is None
    assert asked(fake) == [(True, "E4M3", backward if fake.generation == "2.20" else "")]


def test_an_f16_backward_after_an_fp8_forward_is_asked_for_too(fake: Fake) -> None:
    assert CudnnEngine().unsupported(FP8.replace(fp8_dpa_bwd=False)) is None
    assert [dtype for _, dtype, _ in asked(fake)] == ["E4M3", "kBFloat16"]


def test_an_fp8_forward_that_is_refused_is_said_to_be_fp8(fake20: Fake) -> None:
    fake20.backend, fake20.message = Backend.No_Backend, "head size 64"
    assert CudnnEngine().unsupported(FP8) == "fp8_recipe=delayed: head size 64"


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "hybrid"])
def test_recipes_without_kernels_on_hopper_are_refused_there_with_the_reason(fake: Fake, recipe: str) -> None:
    case = FP8.replace(fp8_recipe=recipe)
    assert str(CudnnEngine().unsupported(case)).startswith(f"fp8_recipe={recipe} on sm90: ")
    assert fake.questions == []


def test_fp8_on_a_layout_that_it_does_not_take_names_the_constraint(fake: Fake) -> None:
    case = FP8.replace(qkv_layout="thd_thd_thd", attn_mask_type="padding")
    assert "takes dense layouts" in str(CudnnEngine().unsupported(case))


@pytest.mark.parametrize("scenario", ["offload", "offload_v1", "graph_capture", "fav2_backward"])
def test_scenarios_that_are_not_bound_are_refused_with_the_reason(fake: Fake, scenario: str) -> None:
    case = Case(qkv_layout="bshd_bshd_bshd", scenario=scenario)
    assert str(CudnnEngine().unsupported(case)).startswith(f"scenario={scenario}")


def test_quantizers_are_transformer_engines_own_with_state_of_their_own(fake: Fake) -> None:
    home = fake.modules["transformer_engine.pytorch.tensor.float8_tensor"]
    home.Float8Quantizer = lambda **given: given  # type: ignore[attr-defined]
    home.Float8CurrentScalingQuantizer = lambda **given: given  # type: ignore[attr-defined]
    mxfp8 = fake.modules["transformer_engine.pytorch.tensor.mxfp8_tensor"]
    mxfp8.MXFP8Quantizer = lambda **given: given  # type: ignore[attr-defined]
    engine = CudnnEngine()
    engine.device = torch.device("cpu")
    delayed, other = (engine.quantizer("delayed", "E5M2", 4.0) for _ in range(2))
    assert (float(delayed["scale"]), delayed["amax"].tolist(), delayed["fp8_dtype"]) == (4.0, [0.0], "E5M2")
    assert delayed["scale"].shape == ()
    assert delayed["scale"] is not other["scale"]
    assert engine.quantizer("current", "E4M3") == {"fp8_dtype": "E4M3", "device": engine.device}
    assert engine.quantizer("mxfp8", "E4M3") == {"fp8_dtype": "E4M3"}


def test_a_recipe_is_in_force_inside_the_block_only(fake: Fake) -> None:
    engine = CudnnEngine()
    state = engine.seam()["FP8GlobalStateManager"].quantization_state  # type: ignore[attr-defined]
    inside = []

    def fail() -> None:
        with engine.recipe_in_force("another"):
            inside.append(state.fp8_recipe)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == ["another"]
    assert state.fp8_recipe == "the one before"


@pytest.mark.parametrize("kind", ["delayed", "current", "mxfp8", "hybrid"])
def test_every_recipe_is_one_of_transformer_engines(fake: Fake, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = types.ModuleType("transformer_engine.common.recipe")
    recipes.Format = types.SimpleNamespace(HYBRID="H", E4M3="E")  # type: ignore[attr-defined]
    for name in ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"):
        setattr(recipes, name, lambda fp8_format, name=name: (name, fp8_format))
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipes)
    name, fp8_format = CudnnEngine().recipe(kind, "E4M3")
    assert fp8_format == "E"
    assert (name == "DelayedScaling") == (kind == "delayed")


def test_debug_prints_are_on_for_the_cases_layer_inside_the_block_only(fake: Fake) -> None:
    utils: Any = fake.modules[UTILS]
    utils._NVTE_DEBUG, utils._NVTE_DEBUG_LEVEL, utils._print_layer = 0, 0, 1
    fake.module("transformer_engine.pytorch.utils")
    with CudnnEngine().during(Case(scenario="debug_prints", layer_number=7)):
        assert (utils._NVTE_DEBUG, utils._NVTE_DEBUG_LEVEL, utils._print_layer) == (1, 2, 7)
    assert (utils._NVTE_DEBUG, utils._NVTE_DEBUG_LEVEL, utils._print_layer) == (0, 0, 1)


def test_nvtx_is_asked_for_anew_inside_the_block_and_after_it(fake: Fake) -> None:
    cleared: list[str] = []
    utils: Any = fake.module("transformer_engine.pytorch.utils")
    utils._nvtx_enabled = types.SimpleNamespace(cache_clear=lambda: cleared.append("cleared"))
    utils._nvtx_range_messages = []
    with CudnnEngine().during(Case(scenario="nvtx")):
        assert cleared == ["cleared"]
        utils._nvtx_range_messages.append("left open")
    assert cleared == ["cleared", "cleared"]
    assert utils._nvtx_range_messages == []


def test_old_offload_is_a_constant_of_the_seam(fake: Fake) -> None:
    assert CudnnEngine().seam(offload_v1=True)["NVTE_CPU_OFFLOAD_V1"] is True
    assert CudnnEngine().seam()["NVTE_CPU_OFFLOAD_V1"] is not True


# ------------------------------------------------------------------ what stands in the way


def test_no_gpu_is_said(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineUnavailable, match=r"needs a CUDA GPU, and torch sees none.*--engine reference"):
        CudnnEngine()


def test_no_transformer_engine_is_said(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineUnavailable, match=r"needs TransformerEngine, which is not installed here.*gpu extra"):
        CudnnEngine()


@pytest.mark.parametrize("name", [FUSED, UTILS, "transformer_engine_torch", "transformer_engine.pytorch.quantization"])
def test_a_part_that_cannot_be_imported_is_said(fake: Fake, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # Python's own mark for a module that must not be imported
    with pytest.raises(EngineUnavailable, match=rf"installed and cannot be imported: .*{name}.*built for this torch"):
        CudnnEngine()


def test_a_name_that_is_missing_is_said_with_the_version(fake: Fake) -> None:
    del fake.modules[UTILS].print_quantizers
    with pytest.raises(EngineUnavailable, match=rf"TransformerEngine {fake.generation}\.0 has no .*print_quantizers"):
        CudnnEngine()


# ------------------------------------------------------------------ the environment


def test_the_environment_names_versions_the_gpu_and_the_switches(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = types.SimpleNamespace(name="Made Up 9000", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    found = CudnnEngine().environment()
    assert found["transformer_engine"] == f"{fake.generation}.0"
    assert found["gpu"] == "Made Up 9000 (sm90)"
    assert found["cudnn"] == "9.19.0"
    assert found["gpus visible"] == "2"
    assert found["NVTE_FUSED_ATTN"] == "1"
    assert all(isinstance(value, str) for value in found.values())
