"""Each scenario runs on every kind of case, and shows what a plain pass does not."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import pytest

from harness import case as case_module
from harness.case import Case, CaseError
from harness.compare import Difference, compare
from harness.engines.api import get_engine
from harness.execute.pair import Loaded, Pair, Variant
from harness.inputs import build
from harness.observe.run_pass import observe
from harness.observe.scenarios import SCENARIOS
from harness.observe.session import call_values
from harness.observe.values import Array, Observation, Plain
from harness.subjects.source import Source, resolve

ENGINE = get_engine("reference")
SMALL: dict[str, Any] = {"batch_size": 2, "num_heads": 4, "num_gqa_groups": 2, "dropout_p": 0.1, "seed": 4}
BLOCKS: dict[str, Any] = {
    "qkv_layout": "bshd_bshd_bshd", "batch_size": 1, "num_heads": 2, "num_gqa_groups": 1, "max_seqlen_q": 128,
    "max_seqlen_kv": 128, "head_dim_qk": 32, "head_dim_v": 32, "seed": 4,
}  # fmt: skip
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "bshd_bshd_bshd": SMALL | {"qkv_layout": "bshd_bshd_bshd", "max_seqlen_q": 6, "num_gqa_groups": 4},
    "sb3hd": SMALL | {"qkv_layout": "sb3hd", "max_seqlen_q": 6, "max_seqlen_kv": 6, "num_gqa_groups": 4},
    "thd_thd_thd": SMALL | {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding", "pad_between_seqs": True,
                            "max_seqlen_q": 6},
    "delayed": BLOCKS | {"fp8_recipe": "delayed"},
    "delayed, packed": BLOCKS | {"fp8_recipe": "delayed", "qkv_layout": "sb3hd", "num_gqa_groups": 2},
    "delayed, quantized in and out": BLOCKS | {"fp8_recipe": "delayed", "fp8_input": True, "fp8_output": True,
                                               "output_grad": "quantized"},
    "current": BLOCKS | {"fp8_recipe": "current"},
    "current, O quantized": BLOCKS | {"fp8_recipe": "current", "fp8_cs_o_in_f16": False},
    "mxfp8": BLOCKS | {"fp8_recipe": "mxfp8"},
    "mxfp8, quantized in": BLOCKS | {"fp8_recipe": "mxfp8", "fp8_input": True},
    "hybrid": BLOCKS | {"fp8_recipe": "hybrid", "fp8_cs_o_in_f16": False},
    "hybrid, F16 backward": BLOCKS | {"fp8_recipe": "hybrid", "fp8_dpa_bwd": False, "fp8_input": True,
                                      "bf16_backward": True},
}  # fmt: skip


_FP8 = {name for name, values in CONFIGURATIONS.items() if "fp8_recipe" in values}
IMPOSSIBLE = {
    *(("fav2_backward", name) for name in (*_FP8, "sb3hd")),
    *(("recipe_changed", name) for name in CONFIGURATIONS if name not in _FP8),
    *(("scale_changed", name) for name in CONFIGURATIONS if name not in _FP8 or name.startswith("mxfp8")),
}


def case_of(configuration: str, scenario: str, **changes: Any) -> Case:
    return Case(**CONFIGURATIONS[configuration] | {"scenario": scenario} | changes)


def edited(*edits: tuple[str, str]) -> Source:
    text = resolve("refactored").text
    for old, new in edits:
        assert text.count(old) == 1, f"this text stands {text.count(old)} times in the source, not once:\n{old}"
        text = text.replace(old, new)
    return Source("edited", "edited.py", text)


@functools.cache
def pair_of(*edits: tuple[str, str]) -> Pair:
    return Pair(resolve("legacy"), edited(*edits), ENGINE)


def seen(case: Case, side: str = "control", *edits: tuple[str, str]) -> Observation:
    loaded: Loaded = pair_of(*edits)._load(Variant.of(case))
    return observe(loaded.subjects[side], build(case), ENGINE, loaded.seams[side])


def plain(observation: Observation, path: str) -> Any:
    value = observation[path]
    assert isinstance(value, Plain)
    return value.value


def array(observation: Observation, path: str) -> Array:
    value = observation[path]
    assert isinstance(value, Array)
    return value


def test_there_is_a_function_for_every_scenario_of_a_case_and_no_other() -> None:
    assert tuple(SCENARIOS) == case_module.SCENARIOS


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_two_implementations_match_in_every_scenario(scenario: str, configuration: str) -> None:
    if (scenario, configuration) in IMPOSSIBLE:
        with pytest.raises(CaseError, match=f"scenario={scenario}"):
            case_of(configuration, scenario)
        return
    case = case_of(configuration, scenario)
    result = pair_of().run(case)
    if scenario == "graph_capture":
        assert result.outcome == "unsupported"
        return
    assert (result.outcome, result.reason if result.outcome == "error" else None) == ("match", None), [
        (item.path, item.kind, item.message) for item in result.differences
    ]
    assert result.notes == ()
    noticed = scenario == "cu_seqlens_changed" or (scenario == "inplace_edit" and not case.fp8)
    f16_backward_of_q = scenario == "inplace_edit" and case.fp8 and not case.fp8_dpa_bwd and not case.fp8_input
    assert result.both_raised == (noticed or f16_backward_of_q)


# ------------------------------------------------------------------ what each is for

SAVE = "        ctx.save_for_backward(*tensors)\n"
RESTORE = "        bwd_args.setup_saved_tensors(ctx)\n"
BAG_KEPT = "        ctx.backward_objects = bwd_args\n"
BAG_TAKEN = "        bwd_args = ctx.backward_objects\n"
FORWARD = '    nvtx_range_push("transformer_engine.FusedAttnFunc.forward")\n'
BACKWARD = "    bwd_args.require_set()\n"
END = "        return (*_fused_attn_backward_impl(bwd_args), None)"
DQKV_LAYOUT = "    bwd_args.dqkv_layout = ctx_attrs"
BAG_ON_CLASS = (
    (BAG_KEPT, BAG_KEPT + "        FusedAttnFunc.bag = bwd_args\n"),
    (BAG_TAKEN, "        bwd_args = ctx.backward_objects and FusedAttnFunc.bag\n"),
)
Q_ON_CTX = (
    (SAVE, "        ctx.kept = (tensors[4],)\n        ctx.save_for_backward(*tensors[:4], None, *tensors[5:])\n"),
    (RESTORE, RESTORE + "        (bwd_args.q,) = ctx.kept\n"),
)
LENGTHS_ON_CTX = (
    (SAVE, "        ctx.kept = (tensors[8],)\n        ctx.save_for_backward(*tensors[:8], None, *tensors[9:])\n"),
    (RESTORE, RESTORE + "        (bwd_args.cu_seqlens_q,) = ctx.kept\n"),
)
ONE_FORWARD_FOR_EACH_BACKWARD = (
    (FORWARD, '    args.fast_zero_fill = not globals().get("_open", False)\n    globals()["_open"] = True\n' + FORWARD),
    (BACKWARD, '    globals()["_open"] = False\n' + BACKWARD),
)
O_CLOSED_OVER = ((BAG_KEPT, BAG_KEPT + "        ctx.again = lambda: out\n"),)


@dataclass(frozen=True)
class Planted:
    """A mistake that a scenario shows: on ``path`` with ``kind``; ``hidden`` is whether a plain pass shows nothing."""

    scenario: str
    mistake: str
    edits: tuple[tuple[str, str], ...]
    path: str
    kind: str
    configuration: str = "bshd_bshd_bshd"
    hidden: bool = True


PLANTED = (
    Planted("two_graphs", "the bag is kept on the class, so the last forward's serves every backward", BAG_ON_CLASS,
            "call/fused_attn_bwd/0/attn_scale", "type"),
    Planted("two_graphs", "one forward at a time is taken for granted", ONE_FORWARD_FOR_EACH_BACKWARD,
            "call/pass 2/fused_attn_fwd/0/fast_zero_fill", "value"),
    Planted("second_backward", "a second backward fails in another way",
            (("            restore_from_func_ctx(ctx)\n", ""),), "exception/pass 2/type", "exception"),
    Planted("inplace_edit", "q is kept on ctx, where autograd does not see that it was edited", Q_ON_CTX,
            "exception/type", "exception", hidden=False),
    Planted("cu_seqlens_changed", "the lengths are kept on ctx, where autograd does not see that they changed",
            LENGTHS_ON_CTX, "exception/type", "exception", "thd_thd_thd", hidden=False),
    Planted("environment_changed", "backward asks the environment for its precision, which forward has decided",
            ((BACKWARD, BACKWARD + '    if bwd_args.fp8 and not int(os.getenv("NVTE_FP8_DPA_BWD", "1")):\n'
              "        bwd_args.fused_attention_backend = FusedAttnBackend[\"F16_arbitrary_seqlen\"]\n"),),
            "call/fused_attn_bwd/0/fused_attention_backend", "value", "delayed"),
    Planted("environment_changed", "backward asks the environment what O it reads, which the import has decided",
            (("and _dpa_fp8_cs_o_in_f16)", 'and os.getenv("NVTE_DPA_FP8CS_O_in_F16", "1") == "1")'),),
            "call/fused_attn_bwd/0/o", "type", "current"),
    Planted("scale_changed", "S's scale is not kept for backward, which takes the next step's",
            (("        S_for_backward.scale = S_quantizer.scale.clone()\n", ""),), "grad/v/data", "value",
            "delayed, quantized in and out", hidden=False),
    Planted("recipe_changed", "backward asks for the recipe in force, which is another step's by then",
            ((BACKWARD, BACKWARD + "    if bwd_args.fp8 and FP8GlobalStateManager.get_fp8_recipe().mxfp8():\n"
              '        bwd_args.qkv_scale_inv_format = "bhsd"\n'),),
            "call/fused_attn_bwd/0/qkv_scale_inv_format", "type", "delayed"),
    Planted("checkpoint", "one forward at a time is taken for granted", ONE_FORWARD_FOR_EACH_BACKWARD,
            "call/pass 2/fused_attn_fwd/0/fast_zero_fill", "value"),
    Planted("checkpoint_reentrant", "one forward at a time is taken for granted", ONE_FORWARD_FOR_EACH_BACKWARD,
            "call/pass 2/fused_attn_fwd/0/fast_zero_fill", "value"),
    Planted("hooks_copy", "q is kept on ctx, where no hook sees it", Q_ON_CTX, "saved/packed", "value", hidden=False),
    Planted("hooks_cpu", "q is kept on ctx, where no hook moves it", Q_ON_CTX,
            "call/fused_attn_bwd/0/q", "alias", hidden=False),
    Planted("hooks_strided", "the statistics go to the kernel as they come back",
            (("    if not aux_ctx_tensors[0].is_contiguous():\n"
              "        aux_ctx_tensors[0] = aux_ctx_tensors[0].contiguous()\n", ""),), "aux/0", "stride"),
    Planted("output_deleted", "what is on ctx reaches the output, which reaches ctx", O_CLOSED_OVER,
            "saved/in memory once the output is dropped", "value"),
    Planted("output_deleted", "what is on ctx reaches the output, which reaches ctx", O_CLOSED_OVER,
            "saved/in memory once the output is dropped", "value", "delayed, quantized in and out"),
    Planted("no_grad", "autograd is left out where it is off, and forward asks for a context all the same",
            ((END, END + "\n\n    @classmethod\n    def apply(cls, *args):\n"
              "        return super().apply(*args) if torch.is_grad_enabled() else cls.forward(None, *args)"),),
            "exception/type", "exception"),
    Planted("alternating", "one forward for each backward is taken for granted", ONE_FORWARD_FOR_EACH_BACKWARD,
            "call/pass 3/fused_attn_fwd/0/fast_zero_fill", "value"),
    Planted("offload", "the present path is not told to start",
            (("        start_offload(q, k, v, offload_base_tensor=True)\n", "        pass\n"),),
            "call/start_offload/0/offload_base_tensor", "missing"),
    Planted("offload_v1", "tensors that come back apart are read as if they lay in one buffer",
            (('        bwd_args.qkv_layout = _reload_qkv_layout(ctx_attrs["qkv_layout"])\n',
              '        bwd_args.qkv_layout = ctx_attrs["qkv_layout"]\n'),),
            "call/fused_attn_bwd/0/qkv_layout", "value", "sb3hd"),
    Planted("fav2_backward", "the choice of FlashAttention's backward is lost",
            (('        "use_FAv2_bwd",\n', ""),
             (DQKV_LAYOUT, "    bwd_args.use_FAv2_bwd = False\n" + DQKV_LAYOUT)),
            "call/flash_attn_cuda_bwd/0/dout", "missing"),
    Planted("nvtx", "a range of the caller's is closed with this one's",
            ((FORWARD, FORWARD + '    os.getenv("NVTE_NVTX_ENABLED") == "1" and nvtx_range_pop()\n'),),
            "exception/type", "exception"),
    Planted("debug_prints", "what is printed has lost its layer",
            (('print_quantizers("FusedAttnFunc.forward >> before: ", args.layer_number, ',
              'print_quantizers("FusedAttnFunc.forward >> before: ", -1, '),),
            "print/forward/stdout", "value", "delayed", hidden=False),
)  # fmt: skip


def differences(planted: Planted, scenario: str) -> list[Difference]:
    case = case_of(planted.configuration, scenario)
    return compare(seen(case), seen(case, "candidate", *planted.edits))


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: f"{planted.scenario}: {planted.mistake}")
def test_a_planted_mistake_is_seen_in_its_scenario_and_where_it_hides_from_a_plain_pass(planted: Planted) -> None:
    found = {item.signature for item in differences(planted, planted.scenario)}
    assert (planted.path, planted.kind) in found
    in_a_plain_pass = {item.signature for item in differences(planted, "plain")}
    assert (planted.path, planted.kind) not in in_a_plain_pass
    if planted.hidden:
        assert not in_a_plain_pass


def test_every_scenario_has_a_planted_mistake() -> None:
    assert {planted.scenario for planted in PLANTED} == set(SCENARIOS) - {"plain", "graph_capture"}


# ------------------------------------------------------------------ what each does


def test_a_second_graph_is_on_other_tensors_and_its_results_have_the_pass_in_their_paths() -> None:
    observation = seen(case_of("bshd_bshd_bshd", "two_graphs"))
    for family in ("output/{}0", "grad/{}q", "leaf/{}q"):
        one, other = (array(observation, family.format(words)) for words in ("", "pass 2/"))
        assert not (one.data == other.data).all()
    assert array(observation, "call/fused_attn_bwd/0/q").meaning == "input q"
    assert array(observation, "call/pass 2/fused_attn_bwd/0/q").meaning == "input q of pass 2"
    assert {plain(observation, path) for path in observation if path.startswith("write/")} == {"unchanged"}
    order = list(observation)
    assert order.index("grad/pass 2/q") < order.index("grad/q")


def test_a_third_backward_fails_and_a_first_leaves_the_gradients_of_a_plain_pass() -> None:
    observation = seen(case_of("bshd_bshd_bshd", "second_backward"))
    assert plain(observation, "exception/pass 3/stage") == "backward"
    assert "exception/pass 3/message" not in observation
    ordinary = seen(case_of("bshd_bshd_bshd", "plain"))
    assert (array(observation, "leaf/q").data == array(ordinary, "leaf/q").data).all()
    assert (array(observation, "leaf/pass 3/q").data == array(ordinary, "leaf/q").data).all()


@pytest.mark.parametrize("scenario", ["checkpoint", "checkpoint_reentrant"])
def test_a_checkpoint_runs_forward_twice_and_gives_the_gradients_of_a_plain_pass(scenario: str) -> None:
    observation, ordinary = (seen(case_of("bshd_bshd_bshd", name)) for name in (scenario, "plain"))
    assert plain(observation, "calls/pass 2/sequence").count("fused_attn_fwd") == 1
    for path in ("output/0", "leaf/q", "leaf/k", "leaf/v"):
        assert (array(observation, path).data == array(ordinary, path).data).all()


@pytest.mark.parametrize("configuration", ["sb3hd", "delayed", "mxfp8"])
def test_by_way_of_the_host_gradients_are_those_of_a_plain_pass(configuration: str) -> None:
    observation, ordinary = (seen(case_of(configuration, name)) for name in ("hooks_cpu", "plain"))
    leaf = "leaf/qkv" if configuration == "sb3hd" else "leaf/q"
    assert (array(observation, leaf).data == array(ordinary, leaf).data).all()


@pytest.mark.parametrize("scenario", ["hooks_copy", "hooks_cpu", "hooks_strided"])
def test_hooks_give_back_everything_in_the_order_in_which_they_took_it(scenario: str) -> None:
    observation = seen(case_of("bshd_bshd_bshd", scenario))
    packed = plain(observation, "saved/packed")
    assert packed[:3] == ["input q", "input k", "input v"]
    assert plain(observation, "saved/unpacked") == packed


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_nothing_stays_in_memory_once_the_output_is_dropped(configuration: str) -> None:
    observation = seen(case_of(configuration, "output_deleted"))
    assert plain(observation, "saved/in memory once the output is dropped") == []
    assert "backward/calls" not in observation


def test_without_grad_there_is_no_graph_and_no_backward() -> None:
    observation = seen(case_of("bshd_bshd_bshd", "no_grad"))
    assert plain(observation, "output/0/requires_grad") is False
    assert plain(observation, "saved/count") is None
    assert not any(path.startswith(("grad/", "backward/")) for path in observation)


def test_an_evaluation_between_two_steps_neither_trains_nor_drops() -> None:
    observation = seen(case_of("bshd_bshd_bshd", "alternating"))
    for number, trains in ((1, True), (2, False), (3, True)):
        words = "" if number == 1 else f"pass {number}/"
        assert plain(observation, f"call/{words}fused_attn_fwd/0/is_training") is trains
        assert (plain(observation, f"call/{words}fused_attn_fwd/0/dropout") > 0) is trains
        assert (f"grad/{words}q" in observation) is trains


def test_quantizers_are_seen_before_after_forward_and_after_backward_of_every_pass() -> None:
    observation = seen(case_of("delayed", "alternating"))
    for name in ("QKV", "O", "S", "dQKV", "dO", "dP"):
        amax = [
            float(array(observation, f"quantizer/{place}amax").data)
            for place in (f"{name}/before/", f"{name}/after forward/", f"{name}/after backward/")
        ]
        assert amax[0] == 0
        assert amax[2] > 0
        assert (amax[1] > 0) == (not name.startswith("d"))
        assert f"quantizer/pass 3/{name}/after backward/scale" in observation
        assert array(observation, f"quantizer/{name}/after forward/scale").meaning == f"scale of {name}"


def test_an_update_of_the_scales_changes_them_all_and_is_no_write_of_the_subjects() -> None:
    observation = seen(case_of("delayed", "scale_changed"))
    for name in ("QKV", "S", "dP"):
        before, after = (
            float(array(observation, f"quantizer/{name}/{when}/scale").data) for when in ("before", "after backward")
        )
        assert after == 1.5 * before
    assert plain(observation, "write/quantizers") == plain(observation, "write/fp8_meta") == "unchanged"


def test_what_a_pass_prints_is_recorded_and_a_silent_one_has_no_such_path() -> None:
    case = case_of("delayed", "debug_prints", layer_number=7)
    printed = plain(seen(case), "print/forward/stdout")
    assert "FusedAttnFunc.forward >> before" in printed
    assert "S_quantizer" in printed
    assert not any(path.startswith("print/") for path in seen(case_of("delayed", "plain", layer_number=7)))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_environment_of_a_case_is_set_around_it_and_is_no_change_of_the_subjects(
    scenario: str,
) -> None:
    if (scenario, "delayed") in IMPOSSIBLE or scenario == "graph_capture":
        return
    before = dict(os.environ)
    observation = seen(case_of("delayed", scenario, fp8_dpa_bwd=False))
    assert dict(os.environ) == before
    assert plain(observation, "state/environment") == "unchanged"


def test_a_case_says_whether_backward_is_in_fp8_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "1"):
        monkeypatch.setenv("NVTE_FP8_DPA_BWD", value)
        for fp8_dpa_bwd in (True, False):
            observation = seen(case_of("delayed", "plain", fp8_dpa_bwd=fp8_dpa_bwd))
            backend = observation["call/fused_attn_bwd/0/fused_attention_backend"]
            assert backend == Plain("enum", "FP8" if fp8_dpa_bwd else "F16_arbitrary_seqlen")


def test_every_second_fp8_case_names_the_backend_that_it_does_not_run_on() -> None:
    for seed, name in ((4, "FP8"), (5, "F16_arbitrary_seqlen")):
        loaded = pair_of()._load(Variant())
        inputs = build(case_of("delayed", "plain", seed=seed))
        values = call_values(inputs.case, inputs.fresh(engine=ENGINE), loaded.seams["control"])
        assert values["fused_attention_backend"].name == name
