"""Drive an implementation through one configuration on the stub seam, and return everything that was seen."""

import inspect
import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from .stub_seam import QUANTIZERS, SOURCES, Float8Quantizer, QuantizedTensor, Recipe, Stub, load

B, SQ, SKV, H, D, DV = 2, 4, 6, 3, 8, 5

OFFLOAD = {
    "off": {},
    "new": {"offload": True},
    "v1": {"offload": True, "v1": True},
    "v1_this_layer": {"offload": True, "v1": True, "layer_offloaded": True},
}


@dataclass(frozen=True)
class Config:
    """Name one configuration; sizes are pairwise different where the layout allows it."""

    layout: str = "bshd_bshd_bshd"
    bias: str = "no_bias"
    softmax: str = "vanilla"
    mask: str = "padding_causal"
    kind: str | None = None
    fp8_inputs: bool = False
    fp8_output: bool = False
    bf16_backward: bool = False
    fp8_backward: bool | str = True
    o_in_f16: bool = True
    training: bool = True
    fav2: bool = False
    max_logit: bool = False
    offload: str = "off"
    aux: str = "same"
    strided_stats: bool = False
    d_out: str = "plain"
    quantized_grads: bool | None = None
    padded: bool = True


@dataclass
class Observation:
    """Hold what one run showed: calls and saved tensors as plain data, gradients by the input's name."""

    stub: Stub
    module: object
    values: dict
    out: object
    saved: dict
    gradients: dict
    quantizers: tuple


def _filled(*shape):
    return torch.randn(*shape, generator=_GENERATOR).to(torch.bfloat16)


_GENERATOR = torch.Generator()


def _qkv(layout, head_size_v):
    """Return (q, k, v, packed_qkv, packed_kv) for a layout; packed ones are views of one buffer."""
    if layout in ("bs3hd", "t3hd"):
        packed = _filled(*((B, SQ) if layout == "bs3hd" else (B * SQ,)), 3, H, D)
        return (*packed.unbind(-3), packed, None)
    if layout == "bshd_bs2hd":
        packed = _filled(B, SKV, 2, 1, D)
        return (_filled(B, SQ, H, D), *packed.unbind(-3), None, packed)
    batch_q, batch_kv = {
        "bshd_bshd_bshd": ((B, SQ), (B, SKV)),
        "sbhd_sbhd_sbhd": ((SQ, B), (SKV, B)),
        "thd_thd_thd": ((B * SQ + 3,), (B * SKV + 2,)),
        "thd_bshd_bshd": ((B * SQ + 3,), (B, SKV)),
        "paged_kv_bshd_bshd_bshd": ((B, SQ), (7, 2)),
    }[layout]
    return (_filled(*batch_q, H, D), _filled(*batch_kv, 1, D), _filled(*batch_kv, 1, head_size_v), None, None)


def make_quantizers(kind):
    """Return the quantizer lists of a recipe: six differently named ones at their places, S and dP per tensor."""
    if kind is None:
        return None
    own = QUANTIZERS[kind]
    softmax = own if kind == "mxfp8" else Float8Quantizer
    forward, backward = [None] * 9, [None] * 6
    forward[2], forward[3], forward[8] = own("QKV", 2.0), own("O", 4.0), softmax("S", 8.0)
    backward[0], backward[3], backward[5] = own("dQKV", 16.0), own("dO", 32.0), softmax("dP", 64.0)
    return {"scaling_fwd": forward, "scaling_bwd": backward}


def make_values(config):
    """Return the 36 values by parameter name."""
    _GENERATOR.manual_seed(7)
    q, k, v, packed_qkv, packed_kv = _qkv(config.layout, D if config.fav2 else DV)
    differentiable = "paged" not in config.layout
    if config.fp8_inputs:
        q, k, v = (QuantizedTensor(x.contiguous() * 2, 2.0, None, requires_grad=True) for x in (q, k, v))
    else:
        # Detached views share the packed buffer and are leaves.
        q, k, v = (x.detach().requires_grad_(differentiable) for x in (q, k, v))
    cu_q, cu_kv = torch.tensor([0, 3, 6], dtype=torch.int32), torch.tensor([0, 5, 9], dtype=torch.int32)
    paged = "paged" in config.layout
    return {
        "is_training": config.training,
        "max_seqlen_q": SQ,
        "max_seqlen_kv": SKV,
        "cu_seqlens_q": cu_q,
        "cu_seqlens_kv": cu_kv,
        "cu_seqlens_q_padded": torch.tensor([0, 4, 8], dtype=torch.int32) if config.padded else None,
        "cu_seqlens_kv_padded": torch.tensor([0, 6, 11], dtype=torch.int32) if config.padded else None,
        "page_table_k": torch.tensor([[0, 2, 4], [6, 1, 3]], dtype=torch.int32) if paged else None,
        "page_table_v": torch.tensor([[5, 3, 1], [0, 2, 6]], dtype=torch.int32) if paged else None,
        "q": q,
        "k": k,
        "v": v,
        "attn_bias": _filled(1, H, SQ, SKV).requires_grad_() if config.bias == "post_scale_bias" else None,
        "attn_scale": 0.375,
        "dropout_p": 0.125,
        "fast_zero_fill": True,
        "qkv_layout": config.layout,
        "attn_bias_type": config.bias,
        "attn_mask_type": config.mask,
        "softmax_type": config.softmax,
        "window_size": (3, 0),
        "bottom_right_diagonal": False,
        "rng_gen": torch.default_generator,
        "fused_attention_backend": 1,
        "use_FAv2_bwd": config.fav2,
        "fp8": config.kind is not None,
        "fp8_meta": {"local_recipes": [Recipe(config.kind)]} if config.kind else None,
        "quantizers": make_quantizers(config.kind),
        "deterministic": True,
        "softmax_offset": (
            (3 * torch.randn(1, H, 1, 1, generator=_GENERATOR)).requires_grad_()
            if config.softmax == "learnable"
            else None
        ),
        "fp8_output": config.fp8_output,
        "bf16_backward": config.bf16_backward,
        "layer_number": 11,
        "return_max_logit": config.max_logit,
        "packed_qkv": packed_qkv,
        "packed_kv": packed_kv,
    }


def make_stub(config, values, **changes):
    """Return the stub seam of a configuration, which knows the caller's tensors by name."""
    labels = {name: value for name, value in values.items() if torch.is_tensor(value)}
    return Stub(
        **{
            "kind": config.kind,
            "aux": config.aux,
            "strided_stats": config.strided_stats,
            "quantized_grads": config.quantized_grads,
            "labels": labels,
            **OFFLOAD[config.offload],
            **changes,
        }
    )


@cache
def source_of(implementation):
    """Return an implementation's source text."""
    return SOURCES[implementation].read_text(encoding="utf-8")


def apply(module, values):
    """Call an implementation's FusedAttnFunc with the 36 values, in its own calling convention."""
    if hasattr(module, "FusedAttnFwdArgs"):
        bag = module.FusedAttnFwdArgs(**values)
        five = (values[name] for name in ("q", "k", "v", "attn_bias", "softmax_offset"))
        return module.FusedAttnFunc.apply(*five, bag)
    order = list(inspect.signature(module.FusedAttnFunc.forward).parameters)[1:]
    return module.FusedAttnFunc.apply(*(values[name] for name in order))


def make_d_out(config, out):
    """Return an output gradient of the configuration's kind, in O's shape."""
    if config.d_out == "expanded":
        return torch.full((), 0.25, dtype=torch.bfloat16).expand(out.shape)
    data = torch.cos(torch.arange(out.shape.numel())).reshape(out.shape).to(torch.bfloat16)
    if config.d_out == "transposed":
        return data.transpose(0, 1).contiguous().transpose(0, 1)
    return QuantizedTensor(data * 32, 32.0) if config.d_out == "quantized" else data


@contextmanager
def fp8_backward_env(on):
    """Set NVTE_FP8_DPA_BWD for a while; a text is taken as it is."""
    before = os.environ.get("NVTE_FP8_DPA_BWD")
    os.environ["NVTE_FP8_DPA_BWD"] = on if isinstance(on, str) else str(int(on))
    try:
        yield
    finally:
        del os.environ["NVTE_FP8_DPA_BWD"]
        if before is not None:
            os.environ["NVTE_FP8_DPA_BWD"] = before


SLOTS = ("q_fp8", "k_fp8", "v_fp8", "out_fp8", "q", "k", "v", "out")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
AUX = ("softmax_stats", "rng_state", "aux_bias", "aux_softmax_offset")


def saved_by_meaning(config, tensors):
    """Return the saved tensors by name; a legacy list ends with just as many auxiliary ones as there were."""
    names = (*SLOTS, *LENGTHS, *AUX)
    if len(tensors) != len(names) or config.bias == "no_bias":
        present = {"aux_bias": config.bias == "post_scale_bias", "aux_softmax_offset": config.softmax == "learnable"}
        kept = [name for name in names if present.get(name, True)]
        names = kept if len(kept) == len(tensors) else names
    return {name: tensor for name, tensor in zip(names, tensors, strict=True) if tensor is not None}


def run(implementation, config, source=None):
    """Run forward and backward of an implementation (or of a changed source text) and return the Observation.

    Between the two the environment and the S quantizer's scale change, as a training loop may change them.
    """
    values = make_values(config)
    stub = make_stub(config, values)
    module = load(source or source_of(implementation), stub.seam())
    module._dpa_fp8_cs_o_in_f16 = config.o_in_f16
    with fp8_backward_env(config.fp8_backward):
        result = apply(module, values)
    out = result[0] if config.max_logit else result
    saved = saved_by_meaning(config, stub.last("prepare_for_saving")["tensors"])
    stub.labels = {**stub.labels, "out": out}
    saved = {name: stub.describe(tensor) for name, tensor in saved.items()}
    gradients = {}
    if values["q"].requires_grad:
        quantizers = values["quantizers"]
        if quantizers is not None:
            quantizers["scaling_fwd"][8].scale.mul_(3)
        five = {name: values[name] for name in ("q", "k", "v", "attn_bias", "softmax_offset")}
        named = {name: value for name, value in five.items() if value is not None}
        with fp8_backward_env(not config.fp8_backward):
            found = torch.autograd.grad(out, list(named.values()), make_d_out(config, out), allow_unused=True)
        gradients = {name: stub.describe(grad) for name, grad in zip(named, found, strict=True)}
    states = ()
    if values["quantizers"]:
        everything = values["quantizers"]["scaling_fwd"] + values["quantizers"]["scaling_bwd"]
        states = tuple(stub.describe(quantizer) for quantizer in everything)
    return Observation(stub, module, values, stub.describe(result), saved, gradients, states)


# Saving and restoring stand elsewhere in the sequence (the tensors are compared by their meaning instead), and the two
# questions change nothing, so only their number counts.
UNORDERED = {
    "prepare_for_saving",
    "restore_from_func_ctx",
    "is_current_layer_offloaded",
    "is_cpu_offload_enabled",
}


def differences(config, one, other):
    """Return what two Observations disagree on, as a list of texts."""
    found = []
    ordered = [[call for call in seen.stub.calls if call[0] not in UNORDERED] for seen in (one, other)]
    if ordered[0] != ordered[1]:
        found.append(f"calls: {[name for name, _ in ordered[0]]} / {[name for name, _ in ordered[1]]}")
        for (name, mine), (_, yours) in zip(*ordered, strict=False):
            found += [f"{name}: {key}" for key in mine.keys() | yours.keys() if mine.get(key) != yours.get(key)]
    counted = [sorted(name for name in seen.stub.names() if name in UNORDERED) for seen in (one, other)]
    if counted[0] != counted[1]:
        found.append(f"counts: {counted[0]} / {counted[1]}")
    for part in ("out", "saved", "gradients", "quantizers"):
        mine, yours = getattr(one, part), getattr(other, part)
        if mine != yours:
            where = sorted(mine.keys() ^ yours.keys()) if isinstance(mine, dict) else ""
            found.append(f"{part} differ {where}")
    return found
