"""Planted faults: small wrong edits of the refactored source, each with what must be seen of it.

To plant another one is to add a row. An edit names the text that it replaces, and that text must stand in the source
exactly once, so that a fault whose place has moved fails instead of testing nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.subjects.source import resolve

Edit = tuple[str, str]

NUMBERS = frozenset({"output", "grad", "leaf"})
"""The families that a comparison of outputs and gradients looks at."""

LINES = (
    "outputs", "gradients", "saved tensors", "aux list", "kernel calls", "number of gradients", "writes", "red zones",
    "generator state", "quantizers", "prints", "exceptions",
)  # fmt: skip
"""What the harness promises to observe; each has its faults."""

PACKED = ("sbh3d",)
SEPARATE = ("bshd_sbhd_sbhd",)
RAGGED = ("thd_thd_thd",)
RAGGED_PACKED = ("thd_t2hd",)
PAGED = ("paged_kv_bshd_bshd_bshd", "paged_kv_thd_sbhd_sbhd")
LANE_OF = {
    **dict.fromkeys(PACKED, "packed-f16"), **dict.fromkeys(SEPARATE, "dense-f16"),
    **dict.fromkeys(RAGGED + RAGGED_PACKED, "thd"), **dict.fromkeys(PAGED, "paged"),
}  # fmt: skip
"""The lane that a fault is looked for in where it names none: FP8 would show most of them in more families."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake, how to plant it and what must be seen of it.

    ``path`` and ``kind`` name a difference that must be found (a path ending in ``/`` stands for all below it).
    ``families`` are exactly those in which anything is seen over the whole run, which is of ``cases`` cases of these
    layouts and lanes and no more than it takes: every fault costs a run of its own. ``control`` are edits that control
    and candidate share, where the mistake needs something to go wrong on. ``shows`` is what the candidate has on the
    path.
    ``alone`` says that nothing is seen on any other path.
    """

    id: str
    line: str
    mistake: str
    edits: tuple[Edit, ...]
    path: str
    kind: str
    families: frozenset[str]
    control: tuple[Edit, ...] = ()
    shows: str | None = None
    alone: bool = False
    layouts: tuple[str, ...] = PACKED + SEPARATE
    lanes: tuple[str, ...] = ()
    cases: int = 8
    seed: int = 1

    def names(self, path: str) -> bool:
        """Whether this is a path, or the start of one, at which the fault must be seen."""
        return path.startswith(self.path) if self.path.endswith("/") else path == self.path

    @property
    def looked_for_in(self) -> tuple[str, ...]:
        """The lanes of the run: the fault's own, else those of its layouts."""
        return self.lanes or tuple(dict.fromkeys(LANE_OF[layout] for layout in self.layouts))

    @property
    def hidden(self) -> bool:
        """Whether comparing outputs and gradients alone would miss it."""
        return not self.families & NUMBERS


def edited(*edits: Edit) -> str:
    """Return the refactored source with every edit made; an old text must stand there exactly once."""
    text = resolve("refactored").text
    for old, new in edits:
        assert text.count(old) == 1, f"this text stands {text.count(old)} times in the source, not once:\n{old}"
        text = text.replace(old, new)
    return text


def plant(fault: Fault, folder: Path) -> tuple[str, str]:
    """Write the fault's candidate, and its control where it has one; return both as specs, control first."""
    candidate = folder / "candidate.py"
    candidate.write_text(edited(*fault.control, *fault.edits))
    if not fault.control:
        return "legacy", str(candidate)
    control = folder / "control.py"
    control.write_text(edited(*fault.control))
    return str(control), str(candidate)


FORWARD_KERNEL_DONE = '    nvtx_range_pop("transformer_engine.FusedAttnFunc.forward")\n'
BACKWARD_DONE = "    return dq, dk, dv, d_bias, d_softmax_offset\n"
GRADIENTS_RETURNED = "        return (*_fused_attn_backward_impl(bwd_args), None)"
KERNEL_CALL_STARTS = '    nvtx_range_push("transformer_engine.FusedAttnFunc.forward")\n'
REFUSAL = (
    KERNEL_CALL_STARTS,
    KERNEL_CALL_STARTS
    + "    if args.dropout_p == 0.5:\n"
    + '        raise ValueError(f"dropout_p={args.dropout_p} is refused")\n',
)
"""Shared by control and candidate where a fault is about how an error is raised: half the scores are never dropped."""


def _families(*names: str) -> frozenset[str]:
    return frozenset(names)


FAULTS: tuple[Fault, ...] = (
    # Outputs.
    Fault(
        "output-list",
        "outputs",
        "the pair of output and max logit comes back as a list, which autograd does not look into",
        (("return (out, max_logit) if", "return [out, max_logit] if"),),
        "output/type",
        "value",
        _families("output", "saved", "call", "calls", "aux", "backward", "grad", "leaf", "exception"),
        shows="list",
        lanes=("max-logit",),
    ),
    Fault(
        "output-copied",
        "outputs",
        "the caller gets a copy of the kernel's output, and backward keeps the other one alive",
        (("        out_f16 = out\n\n    nvtx", "        out_f16 = out\n        out = out.clone()\n\n    nvtx"),),
        "output/0",
        "alias",
        _families("output"),
    ),
    Fault(
        "max-logit-not-differentiable",
        "outputs",
        "the max logit is marked as having no gradient, which the caller can ask of it",
        (
            (
                "        return (out, max_logit) if",
                "        if max_logit is not None:\n            ctx.mark_non_differentiable(max_logit)\n"
                "        return (out, max_logit) if",
            ),
        ),
        "output/1/requires_grad",
        "value",
        _families("output"),
        lanes=("max-logit",),
    ),
    # Gradients.
    Fault(
        "gradients-swapped",
        "gradients",
        "the gradients of k and v come back in each other's place",
        ((BACKWARD_DONE, BACKWARD_DONE.replace("dk, dv", "dv, dk")),),
        "grad/k",
        "alias",
        _families("grad", "leaf"),
        layouts=PACKED,
    ),
    Fault(
        "gradient-in-float32",
        "gradients",
        "v's gradient is handed to autograd in float32, which rounds it back silently at the cost of memory",
        ((BACKWARD_DONE, "    dv = dv.float()\n" + BACKWARD_DONE),),
        "grad/v",
        "alias",
        _families("grad", "leaf"),
        layouts=SEPARATE,
    ),
    Fault(
        "packed-gradients-unpacked",
        "gradients",
        "the gradients of a packed buffer are copied apart, so the buffer's own gradient is put together again later",
        ((BACKWARD_DONE, "    dk = dk.clone()\n" + BACKWARD_DONE),),
        "grad/q",
        "alias",
        _families("grad", "leaf"),
        layouts=PACKED,
    ),
    Fault(
        "frozen-gradients-left-out",
        "gradients",
        "gradients that nobody asked for are left out, which a caller of backward itself would miss",
        (
            (
                GRADIENTS_RETURNED,
                "        gradients = _fused_attn_backward_impl(bwd_args)\n"
                "        wanted = ctx.needs_input_grad[:5]\n"
                "        kept = (grad if need else None for grad, need in zip(gradients, wanted, strict=True))\n"
                "        return (*kept, None)",
            ),
        ),
        "grad/",
        "type",
        _families("grad"),
        layouts=SEPARATE,
        lanes=("partial-gradients",),
    ),
    Fault(
        "gradient-clipped-by-a-hook",
        "gradients",
        "a hook from debugging clips v's gradient on its way to the caller, after backward has returned it",
        (
            (
                "        out, max_logit, tensors_to_save, ctx_attrs = _fused",
                "        if v.requires_grad:\n"
                "            v.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))\n"
                "        out, max_logit, tensors_to_save, ctx_attrs = _fused",
            ),
        ),
        "leaf/",
        "alias",
        _families("leaf"),
    ),
    Fault(
        "offset-gradient-dropped",
        "gradients",
        "no gradient of the softmax offset comes back where one of q, k and v needs none, though the offset may",
        (
            (
                GRADIENTS_RETURNED,
                "        gradients = _fused_attn_backward_impl(bwd_args)\n"
                "        if not all(ctx.needs_input_grad[:3]):\n            gradients = (*gradients[:4], None)\n"
                "        return (*gradients, None)",
            ),
        ),
        "leaf/softmax_offset",
        "type",
        _families("grad", "leaf"),
        layouts=SEPARATE,
        lanes=("partial-gradients",),
    ),
    # Saved tensors.
    Fault(
        "statistics-saved-as-a-copy",
        "saved tensors",
        "the softmax statistics are saved as a copy, so they are held twice",
        (('        slots["softmax_stats"],\n', '        slots["softmax_stats"].clone(),\n'),),
        "saved/softmax_stats of fused_attn_fwd",
        "missing",
        _families("saved", "aux"),
    ),
    Fault(
        "k-saved-as-a-copy",
        "saved tensors",
        "k is copied before it is saved, which costs its memory until backward",
        (("out_fp8, q, k, v, out_f16, *_aux", "out_fp8, q, k.clone(), v, out_f16, *_aux"),),
        "saved/k",
        "missing",
        _families("saved", "call"),
        layouts=SEPARATE,
    ),
    Fault(
        "packed-q-saved-contiguous",
        "saved tensors",
        "q of a packed buffer is made contiguous before it is saved, and the kernel reads it by the packed layout",
        (("out_fp8, q, k, v, out_f16, *_aux", "out_fp8, q.contiguous(), k, v, out_f16, *_aux"),),
        "saved/q",
        "missing",
        _families("saved", "call", "backward", "grad", "leaf", "exception"),
        layouts=PACKED,
    ),
    Fault(
        "saved-on-ctx",
        "saved tensors",
        "q is kept as an attribute of ctx instead of a saved tensor, so autograd guards it no more",
        (
            (
                "        ctx.save_for_backward(*tensors)\n",
                "        ctx.kept_q = tensors[4]\n        ctx.save_for_backward(*tensors[:4], None, *tensors[5:])\n",
            ),
            (
                "        bwd_args.setup_saved_tensors(ctx)\n",
                "        bwd_args.setup_saved_tensors(ctx)\n        bwd_args.q = ctx.kept_q\n",
            ),
        ),
        "saved/q",
        "missing",
        _families("saved", "call"),
        layouts=SEPARATE,
        cases=4,
    ),
    Fault(
        "kept-on-ctx-too",
        "saved tensors",
        "q is kept as an attribute of ctx beside being saved, so its memory outlives backward and no hook moves it",
        (
            (
                "        ctx.save_for_backward(*tensors)\n",
                "        ctx.save_for_backward(*tensors)\n        ctx.kept_q = q\n",
            ),
        ),
        "saved/outside save_for_backward",
        "value",
        _families("saved"),
        shows="['list', ['input q']]",
        layouts=SEPARATE + RAGGED_PACKED,
    ),
    Fault(
        "padded-offsets-saved-as-a-copy",
        "saved tensors",
        "the padded offsets of k and v are copied before they are saved: the same numbers, and a copy for every layer",
        (
            (
                "        to_keep[field] = getattr(fwd_args, field)\n",
                "        to_keep[field] = getattr(fwd_args, field)\n"
                '    to_keep["cu_seqlens_kv_padded"] = to_keep["cu_seqlens_kv_padded"].clone()\n',
            ),
        ),
        "saved/cu_seqlens_kv_padded",
        "missing",
        _families("saved", "call"),
        layouts=RAGGED,
    ),
    Fault(
        "padded-offsets-of-kv-lost",
        "saved tensors",
        "backward gets no padded offsets of k and v, and reads the gaps between the sequences as their tokens",
        (
            (
                "        to_keep[field] = getattr(fwd_args, field)\n",
                "        to_keep[field] = getattr(fwd_args, field)\n"
                '    to_keep["cu_seqlens_kv_padded"] = None\n',
            ),
        ),
        "call/fused_attn_bwd/0/cu_seqlens_kv_padded",
        "type",
        _families("saved", "call", "grad", "leaf"),
        layouts=RAGGED,
    ),
    Fault(
        "packed-buffer-saved-too",
        "saved tensors",
        "the packed buffer is saved beside its views, and nothing reads it",
        (("save_for_backward(*tensors)\n", "save_for_backward(*tensors, fwd_args.packed_qkv)\n"),),
        "saved/packed_qkv",
        "extra",
        _families("saved"),
        layouts=PACKED,
    ),
    Fault(
        "padded-offsets-saved-as-lengths",
        "saved tensors",
        "backward gets the padded offsets where the lengths belong; in a dense batch both hold the same numbers",
        (
            (
                "        to_keep[field] = getattr(fwd_args, field)\n",
                "        to_keep[field] = getattr(fwd_args, field)\n"
                "    if fwd_args.cu_seqlens_q_padded is not None:\n"
                '        to_keep["cu_seqlens_q"] = fwd_args.cu_seqlens_q_padded\n',
            ),
        ),
        "saved/cu_seqlens_q",
        "missing",
        _families("saved", "call"),
        cases=16,
    ),
    Fault(
        "alias-by-storage-address",
        "saved tensors",
        "a saved tensor is taken for the first input on the same storage, so q, k and v of one buffer become one",
        (
            (
                "    saved_from = tuple(\n"
                "        source if source is not None and _same_view(tensor, sources[source]) else None\n",
                "    by_address = {\n"
                "        tensor.untyped_storage().data_ptr(): name\n"
                "        for name, tensor in reversed(sources.items())\n"
                "        if tensor is not None\n"
                "    }\n"
                "    saved_from = tuple(\n"
                "        by_address.get(tensor.untyped_storage().data_ptr()) if tensor is not None else None\n",
            ),
        ),
        "saved/k",
        "missing",
        _families("saved", "call", "grad", "leaf"),
        layouts=PACKED,
    ),
    # The aux list.
    Fault(
        "aux-slots-swapped",
        "aux list",
        "the bias and the softmax offset change places in the list that the backward kernel takes",
        (
            (
                "optional = (self.aux_bias, self.aux_softmax_offset)",
                "optional = (self.aux_softmax_offset, self.aux_bias)",
            ),
        ),
        "aux/2",
        "alias",
        _families("aux", "backward", "grad", "exception"),
        lanes=("softmax-offset",),
        cases=12,
    ),
    Fault(
        "statistics-always-copied",
        "aux list",
        "the statistics are copied before every backward, not only where they are not contiguous",
        (
            (
                "    if not aux_ctx_tensors[0].is_contiguous():\n"
                "        aux_ctx_tensors[0] = aux_ctx_tensors[0].contiguous()\n",
                "    aux_ctx_tensors[0] = aux_ctx_tensors[0].clone()\n",
            ),
        ),
        "aux/0",
        "alias",
        _families("aux"),
    ),
    Fault(
        "rng-state-lost",
        "aux list",
        "backward gets an empty RNG state, so dropout drops other scores than in forward",
        (('        slots["rng_state"],\n', '        torch.zeros_like(slots["rng_state"]),\n'),),
        "aux/1",
        "alias",
        _families("saved", "aux", "grad", "leaf"),
        cases=16,
    ),
    # Kernel calls.
    Fault(
        "fast-zero-fill-lost",
        "kernel calls",
        "backward falls back on the kernel's default for fast_zero_fill",
        (("                fast_zero_fill=bwd_args.fast_zero_fill,\n", ""),),
        "call/fused_attn_bwd/0/fast_zero_fill",
        "value",
        _families("call"),
    ),
    Fault(
        "deterministic-lost",
        "kernel calls",
        "backward falls back on the kernel's default for deterministic",
        (("                deterministic=bwd_args.deterministic,\n", ""),),
        "call/fused_attn_bwd/0/deterministic",
        "value",
        _families("call"),
        cases=16,
    ),
    Fault(
        "window-lost",
        "kernel calls",
        "backward falls back on an unbounded window",
        (("                window_size=bwd_args.window_size,\n", ""),),
        "call/fused_attn_bwd/0/window_size",
        "value",
        _families("call", "grad", "leaf"),
        cases=16,
    ),
    Fault(
        "diagonal-forced",
        "kernel calls",
        "an undecided bottom_right_diagonal becomes False for backward; with equal lengths no number shows it",
        (
            (
                "                bottom_right_diagonal=bwd_args.bottom_right_diagonal,\n",
                "                bottom_right_diagonal=bool(bwd_args.bottom_right_diagonal),\n",
            ),
        ),
        "call/fused_attn_bwd/0/bottom_right_diagonal",
        "type",
        _families("call"),
        layouts=PACKED,
    ),
    Fault(
        "scale-computed",
        "kernel calls",
        "the default scale is computed by the caller of the kernel; another kernel may have another default",
        (
            (
                "                attn_scale=bwd_args.attn_scale,\n",
                "                attn_scale=bwd_args.attn_scale or 1.0 / bwd_args.q.shape[-1] ** 0.5,\n",
            ),
        ),
        "call/fused_attn_bwd/0/attn_scale",
        "type",
        _families("call"),
    ),
    Fault(
        "backend-as-number",
        "kernel calls",
        "the backend reaches the forward kernel as a bare number",
        (
            (
                "            fused_attention_backend=args.fused_attention_backend,\n",
                "            fused_attention_backend=int(args.fused_attention_backend),\n",
            ),
        ),
        "call/fused_attn_fwd/0/fused_attention_backend",
        "type",
        _families("call"),
    ),
    Fault(
        "fp8-backend-without-fp8",
        "kernel calls",
        "the forward kernel of the other precision is asked for, and the generator advances as far as that one draws",
        (
            (
                "            fused_attention_backend=args.fused_attention_backend,\n",
                '            fused_attention_backend=FusedAttnBackend["FP8"],\n',
            ),
        ),
        "call/fused_attn_fwd/0/fused_attention_backend",
        "value",
        _families("call", "generator"),
        layouts=PACKED,
    ),
    Fault(
        "page-table-of-k-for-both",
        "kernel calls",
        "v is read through the page table of k, which in many callers is the same one",
        (("            page_table_v=args.page_table_v,\n", "            page_table_v=args.page_table_k,\n"),),
        "call/fused_attn_fwd/0/page_table_v",
        "alias",
        _families("output", "call"),
        layouts=PAGED,
    ),
    Fault(
        "page-table-copied",
        "kernel calls",
        "the page table of k is copied on its way to the kernel: the same pages, and one launch more for every call",
        (("            page_table_k=args.page_table_k,\n", "            page_table_k=args.page_table_k.clone(),\n"),),
        "call/fused_attn_fwd/0/page_table_k",
        "alias",
        _families("call"),
        alone=True,
        layouts=PAGED,
    ),
    Fault(
        "padded-offsets-of-q-left-out",
        "kernel calls",
        "the forward kernel looks for q's sequences one after another, without the gaps between them",
        (
            (
                "            cu_seqlens_q_padded=args.cu_seqlens_q_padded,\n"
                "            cu_seqlens_kv_padded=args.cu_seqlens_kv_padded,\n            page_table_k",
                "            cu_seqlens_q_padded=args.cu_seqlens_q,\n"
                "            cu_seqlens_kv_padded=args.cu_seqlens_kv_padded,\n            page_table_k",
            ),
        ),
        "call/fused_attn_fwd/0/cu_seqlens_q_padded",
        "alias",
        _families("output", "saved", "call", "aux", "grad", "leaf"),
        layouts=RAGGED,
    ),
    Fault(
        "longest-sequences-swapped",
        "kernel calls",
        "the longest sequences of q and of k and v change places for backward; in self-attention both are the same",
        (
            (
                "                max_seqlen_q=bwd_args.max_seqlen_q,\n"
                "                max_seqlen_kv=bwd_args.max_seqlen_kv,\n",
                "                max_seqlen_q=bwd_args.max_seqlen_kv,\n"
                "                max_seqlen_kv=bwd_args.max_seqlen_q,\n",
            ),
        ),
        "call/fused_attn_bwd/0/max_seqlen_q",
        "value",
        _families("call", "backward", "grad", "leaf", "exception"),
        layouts=RAGGED_PACKED,
    ),
    Fault(
        "contiguity-guard-dropped",
        "kernel calls",
        "a strided gradient of the output goes to the kernel as it is, and the kernel reads it by the layout's name",
        (("        d_out = d_out.contiguous()\n", "        pass\n"),),
        "call/fused_attn_bwd/0/d_o",
        "alias",
        _families("call", "grad", "leaf"),
        lanes=("strided-output-gradient",),
        cases=12,
    ),
    Fault(
        "copied-with-its-strides",
        "kernel calls",
        "a strided gradient of the output is copied, and the copy keeps its strides",
        (
            (
                "        d_out = d_out.contiguous()\n",
                "        d_out = d_out if d_out.is_contiguous() else d_out.clone()\n",
            ),
        ),
        "call/fused_attn_bwd/0/d_o",
        "stride",
        _families("call", "grad", "leaf"),
        lanes=("strided-output-gradient",),
        cases=12,
    ),
    Fault(
        "nvtx-label-changed",
        "kernel calls",
        "the range that profiles look for has another label",
        ((KERNEL_CALL_STARTS, '    nvtx_range_push("transformer_engine.FusedAttnFunc.fwd")\n'),),
        "call/nvtx_range_push/0/msg",
        "value",
        _families("call"),
    ),
    Fault(
        "nvtx-range-empty",
        "kernel calls",
        "the profiling range is closed before the kernel runs",
        ((FORWARD_KERNEL_DONE, ""), (KERNEL_CALL_STARTS, KERNEL_CALL_STARTS + FORWARD_KERNEL_DONE)),
        "calls/sequence",
        "order",
        _families("calls"),
    ),
    Fault(
        "input-touched-in-place",
        "kernel calls",
        "q is scaled by one in place: no bit changes, and autograd counts a new version of the caller's tensor",
        ((KERNEL_CALL_STARTS, KERNEL_CALL_STARTS + "    args.q.mul_(1)\n"),),
        "call/fused_attn_fwd/0/q",
        "type",
        _families("saved", "call"),
        layouts=SEPARATE,
        cases=4,
    ),
    # Number of gradients.
    Fault(
        "surplus-gradient",
        "number of gradients",
        "backward returns one None more than forward has inputs, which autograd swallows",
        ((GRADIENTS_RETURNED, GRADIENTS_RETURNED.replace("None)", "None, None)")),),
        "backward/results beyond the inputs",
        "value",
        _families("backward"),
        shows="1",
    ),
    Fault(
        "missing-gradient",
        "number of gradients",
        "backward returns no entry for the bag",
        ((GRADIENTS_RETURNED, "        return _fused_attn_backward_impl(bwd_args)"),),
        "backward/results beyond the inputs",
        "value",
        _families("backward", "leaf", "exception"),
        shows="-1",
    ),
    Fault(
        "gradient-for-the-bag",
        "number of gradients",
        "the gradients move one place to the right, so the bag gets the softmax offset's",
        (
            (
                GRADIENTS_RETURNED,
                "        dq, dk, dv, d_bias, d_offset = _fused_attn_backward_impl(bwd_args)\n"
                "        return dq, dk, dv, d_bias, None, d_offset",
            ),
        ),
        "backward/gradients for what has none",
        "value",
        _families("backward", "grad", "leaf", "exception"),
        cases=16,
    ),
    # Writes.
    Fault(
        "padding-of-k-cleared",
        "writes",
        "the rows of k past each sequence's end are zeroed in the caller's memory once the kernel has run",
        (
            (
                BACKWARD_DONE,
                "    ends = bwd_args.cu_seqlens_kv\n"
                "    for index, length in enumerate((ends[1:] - ends[:-1]).tolist()):\n"
                "        bwd_args.k[length:, index] = 0\n" + BACKWARD_DONE,
            ),
        ),
        "write/k",
        "value",
        _families("write"),
        shows="written",
        layouts=SEPARATE,
        seed=2,
    ),
    Fault(
        "output-gradient-cleared",
        "writes",
        "the gradient of the output serves as scratch memory once the kernel has read it",
        ((BACKWARD_DONE, "    bwd_args.grad_output.zero_()\n" + BACKWARD_DONE),),
        "write/output_grad",
        "value",
        _families("write"),
        shows="written",
        layouts=SEPARATE,
    ),
    # Red zones.
    Fault(
        "written-past-the-end",
        "red zones",
        "a loop runs one element too far and writes past the end of q",
        (
            (
                BACKWARD_DONE,
                "    q = bwd_args.q\n"
                "    q.as_strided((1,), (1,), q.storage_offset() + q.numel()).zero_()\n" + BACKWARD_DONE,
            ),
        ),
        "write/q",
        "value",
        _families("write"),
        shows="red zone written",
        layouts=SEPARATE,
    ),
    # Generator state.
    Fault(
        "one-draw-too-many",
        "generator state",
        "a random number is drawn after the kernel, so the next layer drops other scores",
        ((FORWARD_KERNEL_DONE, FORWARD_KERNEL_DONE + "    torch.rand(1)\n"),),
        "generator/default/after forward",
        "value",
        _families("generator"),
    ),
    Fault(
        "drawn-in-backward",
        "generator state",
        "backward draws a random number",
        ((BACKWARD_DONE, "    torch.rand(1)\n" + BACKWARD_DONE),),
        "generator/default/after backward",
        "value",
        _families("generator"),
    ),
    Fault(
        "environment-left-changed",
        "generator state",
        "backward sets a variable of the environment and leaves it set",
        ((BACKWARD_DONE, '    os.environ["NVTE_FP8_DPA_BWD"] = "0"\n' + BACKWARD_DONE),),
        "state/environment",
        "value",
        _families("state"),
        alone=True,
    ),
    Fault(
        "bag-left-on-ctx",
        "saved tensors",
        "backward leaves its bag, and with it every restored tensor, on ctx, so memory lives as long as the graph",
        (("        ctx.backward_objects = None\n", ""),),
        "saved/on ctx after backward",
        "value",
        _families("saved"),
        alone=True,
    ),
    Fault(
        "own-generator-ignored",
        "generator state",
        "the caller's generator is passed on only where something is dropped, and the default one advances instead",
        (
            (
                "            rng_gen=args.rng_gen,\n            softmax_offset=args.softmax_offset,\n"
                "            return_max_logit",
                "            rng_gen=args.rng_gen if args.dropout_p else None,\n"
                "            softmax_offset=args.softmax_offset,\n            return_max_logit",
            ),
        ),
        "generator/own/after forward",
        "value",
        _families("saved", "call", "aux", "generator"),
        cases=24,
    ),
    # Quantizers.
    Fault(
        "amax-cleared",
        "quantizers",
        "backward clears the amax of the gradients' quantizer, so the next step's scale comes from nothing",
        ((BACKWARD_DONE, "    if bwd_args.fp8:\n        bwd_args.dQKV_quantizer.amax.zero_()\n" + BACKWARD_DONE),),
        "quantizer/dQKV/after backward/amax",
        "value",
        _families("quantizer"),
        layouts=PACKED,
        lanes=("fp8-delayed",),
    ),
    # Prints.
    Fault(
        "print-left-in",
        "prints",
        "a print from debugging is left in backward",
        ((BACKWARD_DONE, '    print("backward done")\n' + BACKWARD_DONE),),
        "print/backward/stdout",
        "extra",
        _families("print"),
    ),
    # Exceptions.
    Fault(
        "other-exception",
        "exceptions",
        "what was a ValueError is now a TypeError",
        (('ValueError(f"dropout_p={args', 'TypeError(f"dropout_p={args'),),
        "exception/type",
        "exception",
        _families("exception"),
        control=(REFUSAL,),
        shows="TypeError",
        lanes=("dropout",),
        cases=12,
    ),
    Fault(
        "value-left-out-of-the-message",
        "exceptions",
        "the message no longer says which value was wrong",
        (('f"dropout_p={args.dropout_p} is refused"', '"dropout_p is refused"'),),
        "exception/message",
        "exception",
        _families("exception"),
        control=(REFUSAL,),
        shows="dropout_p is refused",
        lanes=("dropout",),
        cases=12,
    ),
    Fault(
        "refused-in-backward",
        "exceptions",
        "the check moved from forward to backward, so the caller learns of it after a whole forward pass",
        (
            (REFUSAL[1], REFUSAL[0]),
            (
                "    d_out = bwd_args.grad_output\n",
                "    d_out = bwd_args.grad_output\n"
                + REFUSAL[1].removeprefix(REFUSAL[0]).replace("args.", "bwd_args."),
            ),
        ),
        "exception/stage",
        "exception",
        _families("output", "saved", "call", "calls", "generator", "quantizer", "exception"),
        control=(REFUSAL,),
        shows="backward",
        lanes=("dropout",),
        cases=12,
    ),
    Fault(
        "error-swallowed",
        "exceptions",
        "a bias gradient of the wrong shape, which autograd refuses, becomes zeros of the right one",
        (
            (
                BACKWARD_DONE,
                "    if d_bias is not None and d_bias.shape != bwd_args.aux_bias.shape:\n"
                "        d_bias = torch.zeros_like(bwd_args.aux_bias)\n" + BACKWARD_DONE,
            ),
        ),
        "exception/type",
        "exception",
        _families("grad", "leaf", "exception"),
        layouts=PACKED,
    ),
)  # fmt: skip
