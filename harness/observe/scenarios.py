"""What happens around the passes of a case: one function for each scenario, in the steps that a session offers."""

from __future__ import annotations

import gc
import importlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from harness.case import Case
from harness.inputs import build
from harness.observe import hooks, results
from harness.observe.recorder import Recorder
from harness.observe.session import Pass, Session, Values
from harness.observe.state import environment
from harness.quantized import parts
from harness.subjects.subject import TENSOR_PARAMETERS

Scenario = Callable[[Session], None]
Between = Callable[[Session, Pass], None]

FP8_BACKWARD = "NVTE_FP8_DPA_BWD"
O_IN_F16 = "NVTE_DPA_FP8CS_O_in_F16"


def prepare(case: Case) -> None:
    """Do what would show as the subject's doing: the first checkpoint of a process imports what sets a variable."""
    if case.scenario.startswith("checkpoint"):
        importlib.import_module("torch._dynamo")


def variables(case: Case) -> dict[str, str]:
    """Return the environment variables that a case is run under."""
    found = {FP8_BACKWARD: str(int(case.fp8_dpa_bwd))}
    if case.scenario == "nvtx":
        found["NVTE_NVTX_ENABLED"] = "1"
    if case.scenario == "debug_prints":
        found |= {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2", "NVTE_PRINT_LAYER_NUMBER": str(case.layer_number)}
    return found


def _forward_and_backward(session: Session) -> None:
    run = session.begin()
    session.forward(run)
    session.backward(run)


def _with_hooks_of_the_engine(session: Session) -> None:
    """Leave the saved tensors where they were offloaded to."""
    run = session.begin()
    session.forward(run, look_at_saved=False)
    session.backward(run)


def _without_grad(session: Session) -> None:
    session.forward(session.begin(), grad=False)


def _between(change: Between, *, broken: bool = False) -> Scenario:
    """Return the scenario in which the caller changes something between forward and backward, perhaps breaking it."""

    def scenario(session: Session) -> None:
        run = session.begin()
        session.forward(run)
        change(session, run)
        session.backward(run, broken=broken)

    return scenario


def _edit_q(session: Session, run: Pass) -> None:
    def half(tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():
            tensor.mul_(0.5)
        else:
            tensor.bitwise_xor_(0x80)  # the sign of a number in FP8

    run.live.edit(next(name for name in run.live.buffers if name.startswith("q")), half)


def _update_scales(session: Session, run: Pass) -> None:
    if run.live.quantizers is not None:
        run.live.quantizers.update_scales()


def _halve_lengths(session: Session, run: Pass) -> None:
    run.live.edit("cu_seqlens_q", lambda offsets: offsets.div_(2, rounding_mode="floor"))


def _environment_changed(session: Session) -> None:
    run = session.begin()
    session.forward(run)
    case = session.case
    with environment({FP8_BACKWARD: str(int(not case.fp8_dpa_bwd)), O_IN_F16: str(int(not case.fp8_cs_o_in_f16))}):
        session.backward(run)


def _recipe_changed(session: Session) -> None:
    """Run each pass with another recipe in force, which ``fp8_meta`` says nothing about."""
    engine, case = session.engine, session.case
    other = "delayed" if case.fp8_recipe == "mxfp8" else "mxfp8"
    run = session.begin()
    with engine.recipe_in_force(engine.recipe(case.fp8_recipe, case.fp8_format)):
        session.forward(run)
    with engine.recipe_in_force(engine.recipe(other, case.fp8_format)):
        session.backward(run)


def _two_graphs(session: Session) -> None:
    """Run forward twice, on other tensors and with another scale, and backward of the first graph last."""
    case = session.case
    first = session.begin()
    session.forward(first)
    other = build(case.replace(seed=case.seed ^ 2), session.engine.device)
    second = session.begin(2, inputs=other, attn_scale=2 * (case.attn_scale or case.head_dim_qk**-0.5))
    session.forward(second)
    session.backward(second)
    session.backward(first)


def _second_backward(session: Session) -> None:
    """Run backward over one graph three times; by the third the graph is freed, so that it must fail."""
    run = session.begin()
    session.forward(run)
    session.backward(run, retain_graph=True)
    session.again(run, 2, retain_graph=False)
    session.again(run, 3, retain_graph=False)


def _alternating(session: Session) -> None:
    """Run a training step, an evaluation and a training step, on one set of quantizers."""
    for number in (1, 2, 3):
        if number == 2:
            session.forward(session.begin(number, is_training=False, dropout_p=0.0), grad=False)
        else:
            run = session.begin(number)
            session.forward(run)
            session.backward(run)


def _checkpointed(use_reentrant: bool) -> Scenario:
    """Return the scenario in which backward runs forward again on what the checkpoint kept, as a second pass.

    When it does so, before or after it does something of its own, is spelling.
    """

    def scenario(session: Session) -> None:
        number = itertools.count(1)

        def call(values: Values) -> Any:
            names = [name for name in TENSOR_PARAMETERS if values[name] is not None]

            def again(*tensors: torch.Tensor) -> Any:
                with session.recorded_as(run, next(number)):
                    return session.subject.call(values | dict(zip(names, tensors, strict=True)))

            return checkpoint(again, *(values[name] for name in names), use_reentrant=use_reentrant)

        run = session.begin()
        session.forward(run, call, look_at_saved=False)
        session.backward(run)

    return scenario


def _hooked(kind: hooks.Kind) -> Scenario:
    """Return the scenario in which saved tensors go through hooks; what was packed and unpacked, in order, is recorded.

    The order counts: what is moved to the host first comes back first.
    """

    def scenario(session: Session) -> None:
        recorder = session.recorder
        order: list[str] = []
        unpacked: list[str] = []

        def pack(tensor: torch.Tensor) -> tuple[str, Callable[[], torch.Tensor]]:
            with recorder.watching():
                order.append(recorder.meaning(tensor))
                return order[-1], hooks.by_parts(kind, tensor, recorder)

        def unpack(packed: tuple[str, Callable[[], torch.Tensor]]) -> torch.Tensor:
            with recorder.watching():
                unpacked.append(packed[0])
                return packed[1]()

        run = session.begin()
        with saved_tensors_hooks(pack, unpack):
            session.forward(run, look_at_saved=False)
        session.backward(run)
        recorder.plain("saved/packed", order)
        recorder.plain("saved/unpacked", unpacked)

    return scenario


def _output_deleted(session: Session) -> None:
    """Drop the output without backward and tell what stays in memory, with no collector to break cycles."""
    session.recorder.holding = False
    run = session.begin()
    with _no_collector():
        session.forward(run)
        alive = {} if run.failed else _weak_references(session.recorder, run)
        run.output = run.node = None
        left = [what for what, is_gone in alive.items() if not is_gone()]
        session.recorder.plain("saved/in memory once the output is dropped", left)


def _weak_references(recorder: Recorder, run: Pass) -> dict[str, Callable[[], bool]]:
    """Return, for the output, the context and all that this keeps beside the caller's own, what tells if it is gone."""
    found: dict[str, Callable[[], bool]] = {}
    kept = [] if run.node is None else [tensor for tensor in run.node.saved_tensors if tensor is not None]
    named = [(f"output {index}", item) for index, item in enumerate(results.items(run.output))]
    named += [(f"saved tensor {index}", item) for index, item in enumerate(kept)]
    for what, item in named:
        for name, part in parts(item).items() if recorder.is_quantized(item) else {"": item}.items():
            if isinstance(part, torch.Tensor) and recorder.meaning(part) == "fresh":
                label = f"{what}{name and f' {name}'}: {str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
                found[label] = StorageWeakRef(part.untyped_storage()).expired  # type: ignore[no-untyped-call]
    if run.node is not None:
        node = weakref.ref(run.node)
        found["context"] = lambda: node() is None
    return found


@contextmanager
def _no_collector() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _graph_capture(session: Session) -> None:
    """Run a pass, capture another as a CUDA graph, and replay it on other data: the replay is the second pass.

    Nothing is looked at during the capture: what it runs has no values yet.
    """
    _forward_and_backward(session)
    run = session.begin(2)
    live = run.live
    graphs: list[Any] = []

    def capture() -> None:
        graphs.append(graph := torch.cuda.CUDAGraph())
        if live.generator is not None:
            graph.register_generator_state(live.generator)
        with torch.cuda.graph(graph):
            run.output = session.subject.call(run.values)
            first = results.items(run.output)[0]
            if isinstance(first, torch.Tensor) and first.requires_grad:
                torch.autograd.backward([first], [live.output_grad])

    def replay() -> None:
        for name, buffer in live.buffers.items():
            if buffer.flat.is_floating_point():
                live.edit(name, lambda values: values.mul_(0.5))
        graphs[0].replay()
        torch.cuda.synchronize()

    session.replay(run, capture, replay)


SCENARIOS: dict[str, Scenario] = {
    "plain": _forward_and_backward,
    "two_graphs": _two_graphs,
    "second_backward": _second_backward,
    "inplace_edit": _between(_edit_q, broken=True),
    "environment_changed": _environment_changed,
    "scale_changed": _between(_update_scales),
    "cu_seqlens_changed": _between(_halve_lengths, broken=True),
    "recipe_changed": _recipe_changed,
    "checkpoint": _checkpointed(use_reentrant=False),
    "checkpoint_reentrant": _checkpointed(use_reentrant=True),
    "hooks_copy": _hooked(hooks.copied),
    "hooks_cpu": _hooked(hooks.through_the_host),
    "hooks_strided": _hooked(hooks.strided),
    "output_deleted": _output_deleted,
    "no_grad": _without_grad,
    "alternating": _alternating,
    "offload": _with_hooks_of_the_engine,
    "offload_v1": _with_hooks_of_the_engine,
    "fav2_backward": _forward_and_backward,
    "graph_capture": _graph_capture,
    "nvtx": _forward_and_backward,
    "debug_prints": _forward_and_backward,
}
"""Every scenario of a case; what an engine switches on for one is on around all of it."""
