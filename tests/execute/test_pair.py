"""A pair runs every case on equal terms, and gives each ending its own name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from harness.case import DIFFERENTIABLE, Case
from harness.engines.api import Engine, get_engine
from harness.execute import pair as module
from harness.execute.pair import NOISE_RUNS, Pair
from harness.observe import results
from harness.observe.recorder import Recorder
from harness.observe.values import Array, Observation
from harness.subjects.source import Source, resolve

CASE = Case(dtype="fp32", batch_size=2, num_heads=2, num_gqa_groups=2, max_seqlen_q=3, max_seqlen_kv=6)
REFUSED = CASE.replace(
    attn_bias_type="post_scale_bias", softmax_type="learnable", requires_grad=DIFFERENTIABLE
)  # the kernel's bias gradient then has the softmax offset's shape, which autograd refuses
START = '    nvtx_range_push("transformer_engine.FusedAttnFunc.forward")\n'
END = "        return (*_fused_attn_backward_impl(bwd_args), None)"


def source(*edits: tuple[str, str]) -> Source:
    text = resolve("refactored").text
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return Source("refactored", "refactored.py", text)


def raising(error: str) -> Source:
    return source((START, START + f"    raise {error}\n"))


def make(control: Source | None = None, candidate: Source | None = None, engine: Engine | None = None) -> Pair:
    return Pair(control or source(), candidate or source(), engine or get_engine("reference"))


class Script:
    """Stands for ``observe``: gives each side's observations in turn, the last one for ever, and notes the order."""

    def __init__(self, control: list[Observation], candidate: list[Observation], pair: Pair) -> None:
        self.given = {"control": iter_last(control), "candidate": iter_last(candidate)}
        self.sides = {id(subject): side for side, subject in pair.subjects.items()}
        self.order: list[str] = []

    def __call__(self, subject: Any, *_: Any) -> Observation:
        side = self.sides[id(subject)]
        self.order.append(side)
        return next(self.given[side])


def iter_last(items: list[Observation]) -> Iterator[Observation]:
    yield from items
    while True:
        yield items[-1]


def value(number: float, meaning: str = "fresh") -> Observation:
    tensor = torch.tensor([number])
    return Observation({"grad/q": Array("float32", (1,), (1,), meaning, tensor)})


Scripted = Callable[[list[Observation], list[Observation]], tuple[Pair, Script]]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    def build(control: list[Observation], candidate: list[Observation]) -> tuple[Pair, Script]:
        pair = make()
        script = Script(control, candidate, pair)
        monkeypatch.setattr(module, "observe", script)
        return pair, script

    return build


def test_a_case_that_the_engine_refuses_is_unsupported_in_the_engines_own_words() -> None:
    engine = get_engine("reference")
    case = CASE.replace(attn_bias_type="alibi")
    result = make(engine=engine).run(case)
    assert (result.outcome, result.reason) == ("unsupported", engine.unsupported(case))
    assert result.reason is not None
    assert "causal" in result.reason


RAGGED_O = (
    "            o_format=o_format,\n            attn_bias_type=",
    '            o_format="thd",\n            attn_bias_type=',
)  # the kernels write such an output of a ragged q alone


def test_what_the_engine_refuses_only_when_called_is_unsupported_where_both_sides_ask_for_it() -> None:
    result = make(source(RAGGED_O), source(RAGGED_O)).run(CASE)
    assert result.outcome == "unsupported"
    assert result.reason is not None
    assert "o_format" in result.reason


def test_what_one_side_alone_asks_of_an_engine_that_refuses_it_is_a_difference() -> None:
    for subjects in ((None, source(RAGGED_O)), (source(RAGGED_O), None)):
        result = make(*subjects).run(CASE)
        assert result.outcome == "difference"
        assert ("exception/type", "exception") in result.signatures


def test_equal_subjects_match() -> None:
    result = make().run(CASE)
    assert (result.outcome, result.both_raised, result.differences, result.notes) == ("match", False, (), ())


def test_both_raising_alike_is_marked_and_raising_otherwise_is_a_difference() -> None:
    alike = make(resolve("legacy")).run(REFUSED)
    assert (alike.outcome, alike.both_raised) == ("match", True)
    assert make(raising("ValueError('a')"), raising("ValueError('a')")).run(CASE).both_raised
    for error in ("ValueError('b')", "TypeError('a')"):
        other = make(raising("ValueError('a')"), raising(error)).run(CASE)
        assert other.outcome == "difference"
    one_sided = make(source(), raising("ValueError('a')")).run(CASE)
    assert (one_sided.outcome, one_sided.both_raised) == ("difference", False)


@pytest.mark.parametrize("error", ["MemoryError('no room')", "torch.OutOfMemoryError('no room')"])
def test_out_of_memory_is_an_error_and_never_a_finding_whichever_side_ran_out(error: str) -> None:
    for subjects in ((raising(error), None), (None, raising(error)), (raising(error), raising(error))):
        result = make(*subjects).run(CASE)
        assert (result.outcome, result.differences) == ("error", ())
        assert result.reason == "out of memory: no room"


def test_a_fault_of_the_harness_is_not_laid_on_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Observation:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "observe", broken)
    result = make().run(CASE)
    assert (result.outcome, result.both_raised, result.differences) == ("error", False, ())
    assert result.reason is not None
    assert result.reason.startswith("the harness failed: ZeroDivisionError")


@pytest.mark.parametrize("run", [1, 2, 3])
def test_a_bug_in_the_recorder_is_an_error_that_names_the_harness_on_whichever_side_it_shows(
    run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = results.see_outputs, 0

    def broken(recorder: Recorder, output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == run:
            raise KeyError("planted")
        original(recorder, output)

    monkeypatch.setattr(results, "see_outputs", broken)
    result = make().run(CASE)
    assert calls == run
    assert (result.outcome, result.both_raised, result.differences) == ("error", False, ())
    assert result.reason is not None
    assert result.reason.startswith("the harness failed")
    assert "KeyError: 'planted'" in result.reason


def test_a_bug_in_the_recorder_that_both_sides_meet_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> str:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Recorder, "meaning", broken)
    result = make(resolve("legacy")).run(CASE)
    assert (result.outcome, result.both_raised, result.differences) == ("error", False, ())
    assert result.reason is not None
    assert "the harness failed" in result.reason
    assert "ZeroDivisionError: planted" in result.reason


SAVE = "        ctx.save_for_backward(*tensors)\n"


@pytest.mark.parametrize(
    ("stash", "meaning"),
    [
        ("ctx.kept = q", "input q"),
        ("ctx.kept = [1, (None, k)]", "input k"),
        ("ctx.kept = {'a': {'b': v}}", "input v"),
        ("ctx.kept = {q}", "input q"),
        ("bwd_args.q = q", "input q"),  # a field of the bag, which is filled from the saved tensors later
        ("ctx.kept = q.clone()", "fresh"),
        ("ctx.kept = fwd_args.cu_seqlens_kv", "input cu_seqlens_kv"),
        ("ctx.kept = out.detach()", "output of fused_attn_fwd"),
    ],
)
@pytest.mark.parametrize("layout", ["sbhd_sbhd_sbhd", "thd_thd_thd"])
def test_a_tensor_that_is_stashed_on_ctx_is_seen_wherever_it_lies(layout: str, stash: str, meaning: str) -> None:
    case = CASE.replace(qkv_layout=layout, attn_mask_type="padding")
    result = make(resolve("legacy"), source((SAVE, f"{SAVE}        {stash}\n"))).run(case)
    assert result.outcome == "difference"
    found = {difference.path: difference for difference in result.differences}
    left = set() if stash.startswith("bwd_args") else {"saved/on ctx after backward"}  # the bag is dropped in backward
    assert set(found) == {"saved/outside save_for_backward"} | left
    difference = found["saved/outside save_for_backward"]
    assert (difference.control, difference.candidate) == (["list", []], ["list", [meaning]])


def test_an_interruption_ends_the_run_and_not_just_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Observation:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "observe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make().run(CASE)


def test_the_control_runs_twice_and_the_order_follows_from_the_seed_of_the_case(scripted: Scripted) -> None:
    pair, script = scripted([value(1)], [value(1)])

    def order(seed: int) -> tuple[str, ...]:
        script.order.clear()
        assert pair.run(CASE.replace(seed=seed)).outcome == "match"
        return tuple(script.order)

    orders = [order(seed) for seed in range(300)]
    assert {tuple(sorted(names)) for names in orders} == {("candidate", "control", "control")}
    assert orders[:20] == [order(seed) for seed in range(20)]
    places = Counter(names.index("candidate") for names in orders)
    assert set(places) == {0, 1, 2}
    assert min(places.values()) > 70


def test_no_further_runs_where_nothing_differs(scripted: Scripted) -> None:
    pair, script = scripted([value(1)], [value(1)])
    pair.run(CASE)
    assert len(script.order) == 3


def test_a_difference_in_numbers_is_checked_against_further_runs_of_the_control(scripted: Scripted) -> None:
    pair, script = scripted([value(1)], [value(2)])
    assert pair.run(CASE).outcome == "difference"
    assert Counter(script.order)["control"] == 2 + NOISE_RUNS


def test_a_difference_in_more_than_numbers_is_checked_against_two_further_runs_of_the_control(
    scripted: Scripted,
) -> None:
    pair, script = scripted([value(1)], [value(1, "input q")])
    result = pair.run(CASE)
    assert (result.outcome, result.signatures) == ("difference", frozenset({("grad/q", "alias")}))
    assert Counter(script.order) == {"control": 4, "candidate": 1}


@pytest.mark.parametrize("late", [2, 3])
def test_a_control_that_shows_only_in_a_further_run_that_it_does_not_stand_still_is_an_error(
    scripted: Scripted, late: int
) -> None:
    pair, script = scripted([value(1)] * late + [value(1, "input q")], [value(1, "input q")])
    result = pair.run(CASE)
    assert (result.outcome, result.differences) == ("error", ())
    assert result.reason is not None
    assert "the control disagrees with itself on grad/q" in result.reason
    assert Counter(script.order) == {"control": 4, "candidate": 1}


def test_noise_that_shows_only_in_a_further_run_of_the_control_still_counts(scripted: Scripted) -> None:
    late = [value(1), value(1), value(1), value(1), value(2)]
    pair, _ = scripted(late, [value(1.5)])
    result = pair.run(CASE)
    assert result.outcome == "noisy"
    assert [(noise.path, noise.spread) for noise in result.noise] == [("grad/q", 1.0)]


def test_a_control_that_differs_from_itself_in_more_than_numbers_is_an_error(scripted: Scripted) -> None:
    pair, _ = scripted([value(1), value(1, "input q")], [value(1)])
    result = pair.run(CASE)
    assert (result.outcome, result.differences) == ("error", ())


def test_a_breach_that_both_sides_share_is_no_difference_and_is_noted() -> None:
    surplus = source((END, END.replace("None)", "None, None)")))
    result = make(surplus, surplus).run(CASE)
    assert result.outcome == "match"
    assert result.notes == ("both sides: backward returns 1 values beyond the inputs",)
    writing = source((END, "        bwd_args.grad_output.zero_()\n" + END))
    assert make(writing, writing).run(CASE).notes == ("both sides: write/output_grad: the caller's memory was written",)


def test_the_event_says_all_that_the_result_does() -> None:
    result = make(source(), raising("ValueError('a')")).run(CASE)
    event = result.event()
    assert (event["event"], event["case_id"], event["outcome"]) == ("case", CASE.id, "difference")
    assert Case.from_dict(event["case"]) == CASE
    assert {(item["path"], item["kind"]) for item in event["differences"]} == result.signatures
    assert event["lanes"]
    assert result.seconds > 0
