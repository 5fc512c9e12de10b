"""FP8 calls of a subject on the reference engine, and FP8 numbers written again from the bits of the formats.

Nothing here uses the engine's own FP8 modules: quantizers and quantized tensors come from the engine and its seam.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harness.engines.reference import ReferenceEngine
from harness.subjects.source import resolve
from harness.subjects.subject import PARAMETERS, Subject, load

ENGINE = ReferenceEngine()
SEAM: dict[str, Any] = ENGINE.seam()
FP8 = SEAM["FusedAttnBackend"]["FP8"]
F16 = SEAM["FusedAttnBackend"]["F16_arbitrary_seqlen"]
QUANTIZED = SEAM["QuantizedTensorStorage"]
SLOTS = {"QKV": ("scaling_fwd", 2), "O": ("scaling_fwd", 3), "S": ("scaling_fwd", 8),
         "dQKV": ("scaling_bwd", 0), "dO": ("scaling_bwd", 3), "dP": ("scaling_bwd", 5)}  # fmt: skip
SCALES = {"QKV": 64.0, "O": 128.0, "S": 256.0, "dQKV": 2048.0, "dO": 4096.0, "dP": 8192.0}
SPIED = ("fused_attn_fwd", "fused_attn_bwd", "combine_and_quantize", "combine_and_dequantize", "flash_attn_cuda_bwd",
         "mxfp8_quantize_fast_path", "start_offload", "mark_activation_offload")  # fmt: skip


@functools.cache
def values_of(fmt: str) -> torch.Tensor:
    """Return the value of every byte of E4M3 or E5M2, from its bits; NaN and infinity as NaN."""
    exponent_bits, bias = {"E4M3": (4, 7), "E5M2": (5, 15)}[fmt]
    mantissa_bits = 7 - exponent_bits
    found = []
    for byte in range(256):
        exponent, mantissa = (byte >> mantissa_bits) % (1 << exponent_bits), byte % (1 << mantissa_bits)
        fraction = mantissa / (1 << mantissa_bits)
        value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
        special = byte % 128 == 127 if fmt == "E4M3" else exponent == 31
        found.append(float("nan") if special else -value if byte >= 128 else value)
    return torch.tensor(found, dtype=torch.float64)


def rounded(values: torch.Tensor, fmt: str) -> torch.Tensor:
    """Round to the nearest value of a format, a tie to the even byte; larger ones to the largest."""
    table = values_of(fmt)[:128]
    table = table[~table.isnan()]
    size = values.to(torch.float64).abs().clamp(max=float(table[-1])).contiguous()
    above = torch.searchsorted(table, size).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    up, down = table[above] - size, size - table[below]
    to_even = torch.where(above % 2 == 0, above, below)
    nearest = torch.where(up < down, above, torch.where(down < up, below, to_even))
    return table[nearest] * values.to(torch.float64).sign()


def quantized_values(values: torch.Tensor, scale: float, fmt: str) -> torch.Tensor:
    """Return what is left of the values once they are quantized."""
    return rounded(values.to(torch.float64) * scale, fmt) / scale


def kind_of(slot: str, recipe: str) -> str:
    if recipe == "current":
        return "delayed" if slot in ("S", "dP") else "current"
    if recipe == "hybrid":
        return "current" if slot in ("QKV", "dO") else "delayed"
    return recipe


def make_quantizers(recipe: str) -> dict[str, list[Any]]:
    """Return the two lists, with quantizers that attention has no use for in the other places."""
    lists: dict[str, list[Any]] = {
        "scaling_fwd": [ENGINE.quantizer("delayed", "E4M3") for _ in range(9)],
        "scaling_bwd": [ENGINE.quantizer("delayed", "E5M2") for _ in range(6)],
    }
    for slot, (group, index) in SLOTS.items():
        fmt = "E4M3" if group == "scaling_fwd" else "E5M2"
        lists[group][index] = ENGINE.quantizer(kind_of(slot, recipe), fmt, SCALES[slot])
    return lists


def slot(quantizers: dict[str, list[Any]], name: str) -> Any:
    group, index = SLOTS[name]
    return quantizers[group][index]


@dataclass(frozen=True)
class Setup:
    """One FP8 call; ``changes`` are values of the function's parameters."""

    recipe: str = "delayed"
    layout: str = "bshd_bshd_bshd"
    fp8_input: bool = False
    fp8_output: bool = False
    bf16_backward: bool = False
    packed_given: bool = True
    b: int = 2
    s: int = 16
    h: int = 3
    d: int = 8
    seed: int = 0
    changes: dict[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> Setup:
        return replace(self, **changes)

    @property
    def order(self) -> str:
        return "".join(letter for letter in self.layout.split("_")[0] if letter.isalpha())


def for_recipe(setup: Setup, recipe: str) -> Setup:
    """Return the setup with a recipe, and sizes that it takes."""
    sizes = {"s": 128, "d": 32, "h": 2} if recipe == "mxfp8" else {}
    return setup.with_(recipe=recipe, **sizes)


@dataclass
class Call:
    """The values of a call, the leaves that gradients accumulate in, and the caller's quantizers."""

    setup: Setup
    values: dict[str, Any]
    leaves: dict[str, torch.Tensor]
    quantizers: dict[str, list[Any]] | None
    grad: torch.Tensor


def make_call(setup: Setup) -> Call:
    """Draw the tensors of a setup; recipe ``none`` is the same call without FP8."""
    generator = torch.Generator().manual_seed(setup.seed)
    sizes = {"b": setup.b, "s": setup.s, "h": setup.h, "d": setup.d, "3": 3, "2": 2}
    quantizers = None if setup.recipe == "none" else make_quantizers(setup.recipe)
    tensors: dict[str, torch.Tensor] = {}
    leaves: dict[str, torch.Tensor] = {}
    names = ["q", "k", "v"]
    for part in setup.layout.split("_"):
        buffer = torch.randn([sizes[letter] for letter in part], generator=generator).bfloat16()
        dim = next((place for place, letter in enumerate(part) if letter.isdigit()), None)
        count = 1 if dim is None else int(part[dim])
        own, names = names[:count], names[count:]
        leaf = leaves["".join(own)] = buffer.requires_grad_(not setup.fp8_input)
        if dim is None:
            tensors[own[0]] = leaf
        else:
            tensors |= {name: leaf.select(dim, index) for index, name in enumerate(own)}
            if setup.packed_given:
                tensors["packed_qkv" if count == 3 else "packed_kv"] = leaf
    if setup.fp8_input:
        own_quantizer = ENGINE.quantizer(kind_of("QKV", setup.recipe), "E4M3", SCALES["QKV"])
        made = SEAM["combine_and_quantize"](
            setup.layout, tensors["q"], tensors["k"], tensors["v"], own_quantizer, used_in_backward=True
        )
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in zip("qkv", made[:3], strict=True)}
        tensors = dict(leaves)
    cu = torch.arange(0, (setup.b + 1) * setup.s, setup.s, dtype=torch.int32)
    fp8 = setup.recipe != "none"
    values = {
        **dict.fromkeys(PARAMETERS),
        **tensors,
        "is_training": True,
        "max_seqlen_q": setup.s,
        "max_seqlen_kv": setup.s,
        "cu_seqlens_q": cu,
        "cu_seqlens_kv": cu.clone(),
        "dropout_p": 0.0,
        "fast_zero_fill": True,
        "qkv_layout": setup.layout,
        "attn_bias_type": "no_bias",
        "attn_mask_type": "no_mask",
        "softmax_type": "vanilla",
        "window_size": (-1, -1),
        "fused_attention_backend": F16,
        "use_FAv2_bwd": False,
        "fp8": fp8,
        "fp8_meta": {"local_recipes": [ENGINE.recipe(setup.recipe, "HYBRID")]} if fp8 else None,
        "quantizers": quantizers,
        "deterministic": False,
        "fp8_output": setup.fp8_output,
        "bf16_backward": setup.bf16_backward,
        "layer_number": 1,
        "return_max_logit": False,
    } | setup.changes
    outer = [sizes[letter] for letter in setup.order]
    grad = torch.randn(outer, generator=generator).bfloat16()
    return Call(setup, values, leaves, quantizers, grad)


@dataclass
class Spied:
    """A subject, and the arguments of every call that it makes through the seam, by name, in order."""

    subject: Subject
    calls: list[tuple[str, dict[str, Any]]]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [arguments for called, arguments in self.calls if called == name]


@contextmanager
def variables(**given: str) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@functools.cache
def spied(spec: str, *, o_in_f16: bool = True, offload_v1: bool = False) -> Spied:
    """Load a subject, with NVTE_DPA_FP8CS_O_in_F16 as it finds it then; its calls accumulate until cleared."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def spy(name: str, function: Any) -> Any:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            if "aux_ctx_tensors" in arguments:
                arguments["aux_ctx_tensors"] = list(arguments["aux_ctx_tensors"])
            calls.append((name, arguments))
            arguments["result"] = function(*args, **kwargs)
            return arguments["result"]

        return watched

    seam = ENGINE.seam(offload_v1=offload_v1)
    seam |= {name: spy(name, seam[name]) for name in SPIED}
    with variables(NVTE_DPA_FP8CS_O_in_F16=str(int(o_in_f16))):
        return Spied(load(resolve(spec), ENGINE, seam), calls)


def run(loaded: Spied, call: Call, *, bwd: str = "1", grad: torch.Tensor | None = None) -> Any:
    """Run forward and backward, with NVTE_FP8_DPA_BWD set in the former alone; return the output."""
    loaded.calls.clear()
    with variables(NVTE_FP8_DPA_BWD=bwd):
        output = loaded.subject.call(call.values)
    output.backward(call.grad if grad is None else grad)
    return output


def spread(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the root of the mean square difference, as a part of the range of the other."""
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).pow(2).mean().sqrt() / (other.max() - other.min()))
