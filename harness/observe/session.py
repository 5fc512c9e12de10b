"""A session: one subject at work on one case, in the steps that scenarios are made of, each of them recorded."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harness.case import Case
from harness.engines.api import Engine
from harness.inputs import Inputs, Live
from harness.observe import printed, results
from harness.observe.recorder import Recorder
from harness.observe.seam import WatchedSeam
from harness.subjects.subject import PARAMETERS, Subject

FATAL = (torch.OutOfMemoryError, MemoryError)
"""What a subject raises that says nothing about the subject: it is passed on, and the case is an ``error``."""

Values = dict[str, Any]

on_step: Callable[[str], None] = lambda stage: None  # noqa: E731
"""Told the name of each step before it runs; a worker sets it, to say where it was when it died."""


@dataclass(slots=True)
class Pass:
    """One forward pass and what came of it: the values it was called with, the output, the graph's node.

    ``failed`` is whether a step of it raised; the steps after it are left out then.
    """

    number: int
    inputs: Inputs
    live: Live
    values: Values
    output: Any = None
    node: Any = None
    failed: bool = False


@dataclass(slots=True)
class Session:
    """Runs passes of a subject and records them, the first on the recorder's tensors.

    Every pass draws from the same generators and uses the same quantizers.
    """

    subject: Subject
    engine: Engine
    seam: WatchedSeam
    recorder: Recorder
    default: torch.Generator
    passes: list[Pass] = field(default_factory=list)

    @property
    def case(self) -> Case:
        """The case that the session is about."""
        return self.recorder.inputs.case

    def begin(self, number: int = 1, *, inputs: Inputs | None = None, **changes: Any) -> Pass:
        """Return a pass that is about to start: the first on the tensors at hand, a later one on fresh ones.

        ``changes`` replace values of the call by name.
        """
        recorder = self.recorder
        given, live = inputs or recorder.inputs, recorder.live
        if number > 1:
            live = given.fresh(live.generator, self.engine, live.quantizers)
        run = Pass(number, given, live, call_values(self.case, live, self.seam) | changes)
        with self._turned_to(run):
            if number > 1:
                recorder.admit()
            else:
                results.see_quantizers(recorder, "before")
        self.passes.append(run)
        return run

    def forward(
        self, run: Pass, call: Callable[[Values], Any] | None = None, *, look_at_saved: bool = True, grad: bool = True
    ) -> None:
        """Run the forward pass and record the output, what autograd saved, generators and quantizers.

        ``call`` calls the subject in another way; without ``look_at_saved`` the saved tensors are not unpacked, which
        has effects where hooks are installed; without ``grad`` autograd records nothing.
        """
        recorder = self.recorder

        def call_it() -> None:
            with torch.set_grad_enabled(grad):
                run.output = (call or self.subject.call)(run.values)
            with recorder.watching():
                results.see_outputs(recorder, run.output)

        def look() -> None:
            run.node = results.node_of(run.output)
            saved = None
            if run.node is not None and look_at_saved:
                saved = [tensor for tensor in run.node.saved_tensors if tensor is not None]
            with recorder.watching():
                results.see_saved(recorder, run.node, saved)
                results.see_generators(recorder, self.default, "after forward")
                results.see_quantizers(recorder, "after forward")

        with self._turned_to(run):
            self._step(run, "forward", call_it)
            self._step(run, "saved tensors", look)

    def backward(self, run: Pass, *, retain_graph: bool = False, broken: bool = False) -> None:
        """Run the backward pass, unless forward failed, and record what it returned and left behind.

        ``broken`` is for one that is to notice that the caller broke what it needs: how far it gets before it does is
        spelling, so neither its calls are recorded nor, if it raises, what it leaves on ctx and in the quantizers.
        """
        recorder = self.recorder
        with self._turned_to(run), self.seam.silent() if broken else contextlib.nullcontext():
            self._differentiate(run, retain_graph=retain_graph)
            results.see_generators(recorder, self.default, "after backward")
            if broken and run.failed:
                return
            if run.node is not None:
                recorder.plain("saved/on ctx after backward", results.on_ctx(recorder, run.node))
            results.see_quantizers(recorder, "after backward")

    def again(self, run: Pass, number: int, *, retain_graph: bool) -> None:
        """Run another backward over a pass's graph, recorded as a pass of its own: how it ended and what it left.

        Neither its calls nor the words of an error are recorded: it is bound to fail sooner or later, and how far it
        gets until then, and in whose words it fails, is spelling.
        """
        repeated = replace(run, number=number, failed=False)
        with self._turned_to(repeated), self.seam.silent():
            self._differentiate(repeated, retain_graph=retain_graph, words=False)

    def _differentiate(self, run: Pass, *, retain_graph: bool = False, words: bool = True) -> None:
        raw: list[Any] = []
        self.subject.on_backward[:] = [raw.append]
        self._step(run, "backward", lambda: _backward(run, retain_graph), words=words)
        results.see_raw(self.recorder, self.subject, raw)
        results.see_leaves(self.recorder, results.raw_gradients(self.recorder, self.subject, raw))

    def replay(self, run: Pass, capture: Callable[[], None], replay: Callable[[], None]) -> None:
        """Run a pass in two steps of a caller's own, unwatched, and record what they left in its tensors."""
        recorder = self.recorder
        self.subject.on_backward.clear()
        with self._turned_to(run), self.seam.silent():
            self._step(run, "capture", capture)
            self._step(run, "replay", replay)
            if not run.failed:
                results.see_outputs(recorder, run.output)
                results.see_leaves(recorder, {})
            results.see_generators(recorder, self.default, "after backward")
            results.see_quantizers(recorder, "after backward")

    def close(self) -> None:
        """Record what became of the memory that the caller handed over."""
        for run in self.passes:
            with self._turned_to(run):
                results.see_writes(self.recorder)

    @contextmanager
    def recorded_as(self, run: Pass, number: int) -> Iterator[None]:
        """Record what runs inside the block, on a pass's own tensors, as a pass of another number."""
        with self._turned_to(replace(run, number=number)):
            yield

    @contextmanager
    def _turned_to(self, run: Pass) -> Iterator[None]:
        recorder = self.recorder
        before = recorder.inputs, recorder.live, recorder.number
        recorder.turn_to(run.inputs, run.live, run.number)
        try:
            yield
        finally:
            recorder.turn_to(*before)

    def _step(self, run: Pass, stage: str, action: Callable[[], None], *, words: bool = True) -> None:
        """Run a step and record what it raises and prints; leave it out where an earlier one raised."""
        if run.failed:
            return
        recorder = self.recorder
        on_step(stage)
        try:
            with printed.captured() as heard:
                action()
        except FATAL:
            raise
        except BaseException as error:
            run.failed = True
            recorder.plain("exception/stage", stage)
            recorder.plain("exception/type", type(error).__name__)
            if words:
                message = normalise(str(error), self.subject.tensor_inputs(run.values))
                recorder.plain("exception/message", message)
        for stream, text in heard.text.items():
            recorder.plain(f"print/{stage}/{stream}", text)
        if heard.warnings:
            recorder.plain(f"print/{stage}/warnings", heard.warnings)
        recorder.check()


def call_values(case: Case, live: Live, seam: WatchedSeam) -> Values:
    """Return the value of every parameter that any version of the function takes, by TransformerEngine's name.

    Every second FP8 case names the other backend: the function itself says which one FP8 runs on.
    """
    backend: Any = seam.names["FusedAttnBackend"]
    return {
        **dict.fromkeys(PARAMETERS),  # absent tensors are None
        **live.tensors,
        "is_training": case.is_training,
        "max_seqlen_q": case.max_seqlen_q,
        "max_seqlen_kv": case.max_seqlen_kv,
        "attn_scale": case.attn_scale,
        "dropout_p": case.dropout_p,
        "fast_zero_fill": case.fast_zero_fill,
        "qkv_layout": case.qkv_layout,
        "attn_bias_type": case.attn_bias_type,
        "attn_mask_type": case.attn_mask_type,
        "softmax_type": case.softmax_type,
        "window_size": case.window_size,
        "bottom_right_diagonal": case.bottom_right_diagonal,
        "rng_gen": live.generator,
        "fused_attention_backend": backend["FP8" if case.fp8 and case.seed % 2 == 0 else "F16_arbitrary_seqlen"],
        "use_FAv2_bwd": case.scenario == "fav2_backward",
        "fp8": case.fp8,
        "fp8_meta": live.fp8_meta,
        "quantizers": live.quantizers.lists if live.quantizers is not None else None,
        "deterministic": case.deterministic,
        "fp8_output": case.fp8_output,
        "bf16_backward": case.bf16_backward,
        "layer_number": case.layer_number,
        "return_max_logit": case.return_max_logit,
    }


def _backward(run: Pass, retain_graph: bool) -> None:
    """Run backward from the output, in every second case from the max logit too, whose gradient is to be ignored."""
    first, *rest = results.items(run.output)
    if not (isinstance(first, torch.Tensor) and first.requires_grad):
        return
    outputs, gradients = [first], [run.live.output_grad]
    for item in rest if run.inputs.case.seed % 2 else ():
        if isinstance(item, torch.Tensor) and item.requires_grad:
            outputs.append(item)
            gradients.append(torch.ones_like(item))
    torch.autograd.backward(outputs, gradients, retain_graph=retain_graph)


def normalise(message: str, tensor_inputs: Sequence[str]) -> str:
    """Return an exception's message without what differs from run to run or with the calling convention.

    Addresses go. Autograd names a gradient by its index among the tensor inputs, which another signature moves; the
    input's name takes its place.
    """

    def named(match: re.Match[str]) -> str:
        index = int(match[1])
        return f"for {tensor_inputs[index]}" if index < len(tensor_inputs) else match[0]

    message = re.sub(r"at index (\d+)", named, message)
    message = re.sub(r"0x[0-9a-fA-F]+", "0x…", message)
    message = re.sub(r"harness_subject_[0-9a-f]+_\d+", "subject", message)
    return message[:2000]
