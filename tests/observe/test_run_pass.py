"""One pass leaves a whole observation, no trace in the process, and nothing of the calling convention."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from harness.case import DIFFERENTIABLE, Case
from harness.compare import compare
from harness.engines.api import get_engine
from harness.inputs import build
from harness.observe import results, run_pass
from harness.observe import seam as seam_module
from harness.observe.recorder import HarnessFault
from harness.observe.run_pass import normalise, observe
from harness.observe.seam import WatchedSeam
from harness.observe.values import Array, Observation, Plain
from harness.subjects.source import Source, resolve
from harness.subjects.subject import Subject, load

ENGINE = get_engine("reference")
CASE = Case(
    dtype="fp32", batch_size=2, num_heads=4, num_gqa_groups=2, max_seqlen_q=6, max_seqlen_kv=16, dropout_p=0.1, seed=4
)
REFUSED = CASE.replace(
    attn_bias_type="post_scale_bias", softmax_type="learnable", requires_grad=DIFFERENTIABLE
)  # the kernel's bias gradient then has the softmax offset's shape, which autograd refuses


def loaded(spec: str, *edits: tuple[str, str]) -> tuple[Subject, WatchedSeam]:
    source = resolve(spec)
    text = source.text
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    seam = WatchedSeam(ENGINE.seam())
    return load(Source(spec, source.resolved, text), ENGINE, seam.names), seam


def seen(case: Case, spec: str, *edits: tuple[str, str]) -> Observation:
    subject, seam = loaded(spec, *edits)
    return observe(subject, build(case), ENGINE, seam)


def plain(observation: Observation, path: str) -> Any:
    value = observation[path]
    assert isinstance(value, Plain)
    return value.value


@pytest.mark.parametrize("spec", ["legacy", "refactored"])
def test_a_whole_pass_has_every_gradient_by_input_name_and_one_result_per_input(spec: str) -> None:
    case = CASE.replace(attn_bias_type="post_scale_bias", requires_grad=("q", "k", "v", "attn_bias"))
    observation = seen(case, spec)
    assert observation.exception() is None
    for name in ("q", "k", "v", "attn_bias"):
        raw, leaf = observation[f"grad/{name}"], observation[f"leaf/{name}"]
        assert isinstance(raw, Array)
        assert isinstance(leaf, Array)
        assert torch.equal(raw.data, leaf.data)
        assert bool(raw.data.any())
    assert observation["grad/softmax_offset"] == Plain("NoneType", None)
    assert plain(observation, "backward/calls") == 1
    assert plain(observation, "backward/results beyond the inputs") == 0
    assert plain(observation, "backward/gradients for what has none") == []
    assert {plain(observation, path) for path in observation if path.startswith("write/")} == {"unchanged"}


@pytest.mark.parametrize("spec", ["legacy", "refactored"])
def test_saved_tensors_are_recorded_by_what_they_are(spec: str) -> None:
    case = CASE.replace(qkv_layout="sbhd_sb2hd", attn_bias_type="post_scale_bias", attn_mask_type="padding")
    observation = seen(case, spec)
    assert {path for path in observation if path.startswith("saved/")} == {
        "saved/count",
        "saved/outside save_for_backward",
        "saved/on ctx after backward",
        *(f"saved/{name}" for name in ("q", "k", "v", "attn_bias", "cu_seqlens_q", "cu_seqlens_kv")),
        *(f"saved/cu_seqlens_{side}_padded" for side in ("q", "kv")),
        *(f"saved/{name} of fused_attn_fwd" for name in ("output", "softmax_stats", "rng_state")),
    }
    assert plain(observation, "saved/count") == 11
    assert plain(observation, "saved/outside save_for_backward") == []


def test_the_two_calling_conventions_leave_equal_observations() -> None:
    assert compare(seen(CASE, "legacy"), seen(CASE, "refactored")) == []


def test_an_error_of_autograd_names_the_input_whatever_its_index_in_the_signature() -> None:
    subjects = [loaded(spec)[0] for spec in ("legacy", "refactored")]
    given = dict.fromkeys((*DIFFERENTIABLE, "cu_seqlens_q", "cu_seqlens_kv"), torch.zeros(1))
    indices = [subject.tensor_inputs(given).index("attn_bias") for subject in subjects]
    assert indices[0] != indices[1]

    one, other = (seen(REFUSED, spec) for spec in ("legacy", "refactored"))
    assert compare(one, other) == []
    raised = one.exception()
    assert raised is not None
    assert (raised["stage"], raised["type"]) == ("backward", "RuntimeError")
    assert "for attn_bias" in str(raised["message"])
    assert "at index" not in str(raised["message"])


def test_a_message_loses_addresses_and_indices_and_keeps_the_rest() -> None:
    names = ["cu_seqlens_q", "q"]
    assert normalise("gradient at index 1 has shape [2]", names) == "gradient for q has shape [2]"
    assert normalise("gradient at index 0", names) != normalise("gradient at index 1", names)
    assert normalise("gradient at index 7", names) == "gradient at index 7"
    assert normalise("<f at 0x7f01aB>", names) == normalise("<f at 0x12>", names)
    assert normalise("harness_subject_00ff_3.FusedAttnFunc", names) == "subject.FusedAttnFunc"
    assert normalise("dropout_p=0.5 is refused", names) == "dropout_p=0.5 is refused"
    assert len(normalise("x" * 10_000, names)) == 2000


def test_what_was_seen_before_an_exception_stays() -> None:
    observation = seen(REFUSED, "legacy")
    assert observation.exception() is not None
    assert isinstance(observation["output/0"], Array)
    assert isinstance(observation["grad/q"], Array)
    assert observation["leaf/q"] == Plain("NoneType", None)
    assert "calls/sequence" in observation


FORWARD_STARTS = '        nvtx_range_push("transformer_engine.FusedAttnFunc.forward")\n'
BACKWARD_STARTS = "        d_out_fp8 = None\n"


@pytest.mark.parametrize(("place", "stage"), [(FORWARD_STARTS, "forward"), (BACKWARD_STARTS, "backward")])
def test_an_exception_is_recorded_with_the_stage_that_raised_it(place: str, stage: str) -> None:
    raised = seen(CASE, "legacy", (place, place + "        raise KeyError('here')\n")).exception()
    assert raised is not None
    assert (raised["stage"], raised["type"], raised["message"]) == (stage, "KeyError", "'here'")


@pytest.mark.parametrize("place", [FORWARD_STARTS, BACKWARD_STARTS])
@pytest.mark.parametrize("error", ["MemoryError()", "torch.OutOfMemoryError()"])
def test_what_says_nothing_about_the_subject_is_passed_on(place: str, error: str) -> None:
    subject, seam = loaded("legacy", (place, place + f"        raise {error}\n"))
    with pytest.raises(run_pass.FATAL):
        observe(subject, build(CASE), ENGINE, seam)
    assert subject.on_backward == []
    assert seam.recorder is None


@pytest.mark.parametrize("generator", ["default", "own"])
def test_a_pass_starts_from_the_seed_of_the_case_and_puts_the_global_generator_back(generator: str) -> None:
    case = CASE.replace(generator=generator)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one = seen(case, "legacy")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    assert compare(one, seen(case, "legacy")) == []
    assert ("generator/own/after forward" in one) == (generator == "own")
    assert compare(one, seen(case.replace(seed=5), "legacy"))


def test_a_pass_without_gradients_ends_after_forward() -> None:
    observation = seen(CASE.replace(requires_grad=()), "legacy")
    assert observation["saved/count"] == Plain("NoneType", None)
    assert plain(observation, "backward/calls") == 0
    assert observation.exception() is None
    assert not any(path.startswith(("grad/", "aux/")) for path in observation)


def test_statistics_that_the_engine_does_not_define_are_marked_and_nothing_else_is() -> None:
    case = CASE.replace(attn_mask_type="padding", batch_size=5, seed=3)
    subject, seam = loaded("legacy")

    class Silent(type(ENGINE)):  # type: ignore[misc]
        defines_padding = False

    observation = observe(subject, build(case), Silent(), seam)
    marked = {path for path in observation if isinstance(value := observation[path], Array) and value.valid is not None}
    assert marked == {"saved/softmax_stats of fused_attn_fwd", "aux/0"}


RAGGED = CASE.replace(
    qkv_layout="thd_thd_thd", attn_mask_type="padding", pad_between_seqs=True, batch_size=5, num_gqa_groups=4, seed=3
)


class Careless(type(ENGINE)):  # type: ignore[misc]
    """Leaves in the statistics of rows that belong to no sequence what lay there before: here ``garbage``."""

    defines_padding = False
    garbage = 0.0
    wrong_row: int | None = None

    def seam(self, *, offload_v1: bool = False) -> dict[str, object]:
        names = super().seam(offload_v1=offload_v1)
        forward: Any = names["fused_attn_fwd"]

        @functools.wraps(forward)
        def careless(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            place = build(RAGGED).q
            rows = [start + row for start, length in zip(place.offsets, place.lengths, strict=False)
                    for row in range(length)]  # fmt: skip
            others = sorted(set(range(place.rows)) - set(rows))
            assert others
            assert rows
            result[1][0][others] = self.garbage
            if self.wrong_row is not None:
                result[1][0][rows[self.wrong_row]] += 1
            return result

        return names | {"fused_attn_fwd": careless}


def careless_pass(garbage: float, *, defines: bool = False, wrong_row: int | None = None) -> Observation:
    engine = Careless()
    engine.garbage, engine.defines_padding, engine.wrong_row = garbage, defines, wrong_row
    seam = WatchedSeam(engine.seam())
    return observe(load(resolve("legacy"), engine, seam.names), build(RAGGED), engine, seam)


STATISTICS = {"saved/softmax_stats of fused_attn_fwd", "aux/0"}


def test_statistics_of_no_sequence_in_a_ragged_batch_are_marked_and_nothing_else_is() -> None:
    observation = careless_pass(1.0)
    assert observation.exception() is None
    values = {path: value for path in observation if isinstance(value := observation[path], Array)}
    assert {path for path, value in values.items() if value.valid is not None} == STATISTICS
    for path in STATISTICS:
        assert values[path].data.shape[0] == values[path].valid.shape[0] == build(RAGGED).q.rows
        assert int(values[path].valid.sum()) == sum(build(RAGGED).q.lengths)


def test_what_an_engine_leaves_undefined_is_no_difference_and_what_it_defines_is() -> None:
    assert compare(careless_pass(1.0), careless_pass(float("nan"))) == []
    assert {item.path for item in compare(careless_pass(1.0, defines=True), careless_pass(2.0, defines=True))} == (
        STATISTICS
    )
    for row in (0, -1):
        assert {item.path for item in compare(careless_pass(1.0), careless_pass(1.0, wrong_row=row))} >= STATISTICS


@pytest.mark.parametrize("qkv_layout", ["thd_thd_thd", "t3hd", "thd_th2d", "thd_bshd_bshd", "thd_sbhd_sbhd"])
def test_the_two_calling_conventions_leave_equal_observations_of_ragged_batches(qkv_layout: str) -> None:
    case = RAGGED.replace(qkv_layout=qkv_layout, max_seqlen_kv=6)
    one, other = seen(case, "legacy"), seen(case, "refactored")
    assert one.exception() is None
    assert plain(one, "saved/outside save_for_backward") == []
    assert compare(one, other) == []


@pytest.mark.parametrize("qkv_layout", ["paged_kv_bshd_bshd_bshd", "paged_kv_sbhd_sbhd_sbhd", "paged_kv_thd_sbhd_sbhd"])
def test_a_paged_case_has_both_tables_in_its_call(qkv_layout: str) -> None:
    case = CASE.replace(
        qkv_layout=qkv_layout, attn_mask_type="padding", page_size=4, requires_grad=(), is_training=False,
        dropout_p=0.0,
    )  # fmt: skip
    one, other = seen(case, "legacy"), seen(case, "refactored")
    assert one.exception() is None
    for name in ("page_table_k", "page_table_v"):
        table = one[f"call/fused_attn_fwd/0/{name}"]
        assert isinstance(table, Array)
        assert table.meaning == f"input {name}"
        assert plain(one, f"write/{name}") == "unchanged"
    assert compare(one, other) == []


# ------------------------------------------------------------------ a harness that fails

WATCHING = (
    (seam_module, "_see_call"),
    (seam_module, "made_by"),
    (seam_module, "_see_aux"),
    (results, "see_outputs"),
    (results, "see_saved"),
    (results, "tensors_in"),
)


@pytest.mark.parametrize("spec", ["legacy", "refactored"])
@pytest.mark.parametrize(("module", "name"), WATCHING, ids=[name for _, name in WATCHING])
def test_a_fault_of_the_watching_is_raised_as_one_and_is_no_exception_of_the_subject(
    module: Any, name: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    subject, seam = loaded(spec)
    monkeypatch.setattr(module, name, broken)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    with pytest.raises(HarnessFault, match="ZeroDivisionError: planted"):
        observe(subject, build(CASE), ENGINE, seam)
    assert subject.on_backward == []
    assert seam.recorder is None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_fault_of_the_watching_that_the_subject_swallows_is_raised_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swallowing = (
        FORWARD_STARTS,
        "        try:\n    " + FORWARD_STARTS + "        except ZeroDivisionError:\n            pass\n",
    )
    original = seam_module._see_call

    def broken(recorder: Any, name: str, *rest: Any) -> None:
        if name == "nvtx_range_push":
            raise ZeroDivisionError("planted")
        original(recorder, name, *rest)

    subject, seam = loaded("legacy", swallowing)
    monkeypatch.setattr(seam_module, "_see_call", broken)
    with pytest.raises(HarnessFault, match="ZeroDivisionError: planted"):
        observe(subject, build(CASE), ENGINE, seam)
