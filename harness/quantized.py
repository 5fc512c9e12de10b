"""What is known of FP8 on every engine: the parts of a quantized tensor, and the quantizers that a caller hands over.

Only TransformerEngine's own names are used, so that the same code reads the reference engine's classes and the real
ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from harness.case import Case
    from harness.engines.api import Engine

PARTS = (
    "_data", "_transpose", "_scale_inv",
    "_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv",
)  # fmt: skip
"""The attributes that hold the tensors of a quantized tensor: those of Float8Tensor, then those of MXFP8Tensor."""

FLAGS = (
    "rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm",
    "with_amax_reduction", "force_pow_2_scales", "amax_epsilon",
)  # fmt: skip
"""The settings of a quantizer; a class has only some of them."""

SLOTS: dict[str, tuple[str, int]] = {
    "QKV": ("scaling_fwd", 2),
    "O": ("scaling_fwd", 3),
    "S": ("scaling_fwd", 8),
    "dQKV": ("scaling_bwd", 0),
    "dO": ("scaling_bwd", 3),
    "dP": ("scaling_bwd", 5),
}
"""Where each quantizer of attention stands in the caller's lists. Source: TransformerEngine 2.16 to 2.20."""

SIZES = {"scaling_fwd": 9, "scaling_bwd": 6}
FORMATS = {"HYBRID": {"scaling_fwd": "E4M3", "scaling_bwd": "E5M2"}, "E4M3": dict.fromkeys(SIZES, "E4M3")}
LARGEST = {"E4M3": 448.0, "E5M2": 57344.0}
_CURRENT_BELOW = {"scaling_fwd": 6, "scaling_bwd": 4}  # beyond are S and dP, which stay delayed


def parts(tensor: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a quantized tensor is made of, by their names without the underscore."""
    found = {name.removeprefix("_"): getattr(tensor, name, None) for name in PARTS}
    return {name: part for name, part in found.items() if part is not None}


def fp8_dtype(holder: Any) -> str:
    """Return E4M3 or E5M2 for a quantized tensor or a quantizer, else the engine's own word for its dtype."""
    dtype = getattr(holder, "_fp8_dtype", None)
    if dtype is None:
        dtype = getattr(holder, "dtype", None)
    name = str(getattr(dtype, "name", dtype))
    return next((short for short in LARGEST if name.endswith(short)), name)


def kind(recipe: str, group: str, index: int) -> str:
    """Return the kind of the quantizer at a place of the caller's lists: delayed, current or mxfp8."""
    if recipe == "current":
        return "current" if index < _CURRENT_BELOW[group] else "delayed"
    if recipe == "hybrid":
        return "current" if (group, index) in (SLOTS["QKV"], SLOTS["dO"]) else "delayed"
    return recipe


def slot_kind(recipe: str, slot: str) -> str:
    """Return the kind of one of the six quantizers of attention."""
    return kind(recipe, *SLOTS[slot])


def power_of_two(limit: float, bound: float) -> float:
    """Return the largest power of two that keeps ``bound`` within ``limit``."""
    return 2.0 ** math.floor(math.log2(limit / max(bound, 2.0**-20)))


def scales(case: Case, amax: Mapping[str, float]) -> dict[str, float]:
    """Return a scale for each of the six quantizers, powers of two and no two alike.

    ``amax`` holds the largest magnitudes of ``qkv``, ``v`` and ``output_grad``. What is computed from them is bounded
    (S and O) or taken as four times what standard normal entries give (dP and dQKV), so that little saturates and
    little falls below the smallest number.
    """
    forward, backward = (LARGEST[FORMATS[case.fp8_format][group]] for group in SIZES)
    kept = 1 / (1 - case.dropout_p)
    groups = case.num_heads // case.num_gqa_groups
    found: dict[str, float] = {}
    for name, limit, bound in (
        ("QKV", forward, amax["qkv"]),
        ("S", forward, kept),
        ("O", forward, amax["v"] * kept),
        ("dO", backward, amax["output_grad"]),
        ("dP", backward, 4 * kept * math.sqrt(case.head_dim_v)),
        ("dQKV", backward, 4 * kept * math.sqrt(case.max_seqlen_q * groups)),
    ):
        found[name] = _unused(power_of_two(limit, bound), found.values())
    return found


def _unused(scale: float, used: Any) -> float:
    while scale in used:
        scale /= 2
    return scale


@dataclass(frozen=True, slots=True)
class State:
    """A quantizer and what it was: its settings, its scale and amax, and the bits of these two."""

    quantizer: Any
    flags: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]

    @classmethod
    def of(cls, quantizer: Any) -> State:
        """Return the state of a quantizer now."""
        tensors = state_tensors(quantizer)
        return cls(quantizer, flags(quantizer), tensors, {name: item.clone() for name, item in tensors.items()})

    def changes(self, *, used: bool) -> str | None:
        """Return what became of it in a word, or None; a ``used`` one may have other settings and values."""
        now = state_tensors(self.quantizer)
        if any(now.get(name) is not tensor for name, tensor in self.tensors.items()):
            return "given other tensors"
        if used:
            return None
        same = all(torch.equal(now[name], value) for name, value in self.values.items())
        return None if same and flags(self.quantizer) == self.flags else "changed"


def flags(quantizer: Any) -> dict[str, Any]:
    """Return the settings of a quantizer, by name."""
    return {name: getattr(quantizer, name) for name in FLAGS if hasattr(quantizer, name)}


def state_tensors(quantizer: Any) -> dict[str, torch.Tensor]:
    """Return scale and amax of a quantizer that keeps them."""
    found = {name: getattr(quantizer, name, None) for name in ("scale", "amax")}
    return {name: item for name, item in found.items() if isinstance(item, torch.Tensor)}


@dataclass(frozen=True, slots=True)
class Quantizers:
    """The caller's quantizers: the lists as they are handed over, and each as it was made, by its place in them."""

    lists: dict[str, list[Any]]
    made: dict[tuple[str, int], State]

    @classmethod
    def make(cls, case: Case, engine: Engine, amax: Mapping[str, float]) -> Quantizers:
        """Return fresh quantizers for a case, each with a scale of its own."""
        chosen = {SLOTS[name]: scale for name, scale in scales(case, amax).items()}
        lists: dict[str, list[Any]] = {}
        for group, size in SIZES.items():
            lists[group] = []
            for index in range(size):
                scale = chosen.setdefault((group, index), _unused(1.0, chosen.values()))
                lists[group].append(
                    engine.quantizer(kind(case.fp8_recipe, group, index), FORMATS[case.fp8_format][group], scale)
                )
        states = {(group, index): State.of(item) for group, items in lists.items() for index, item in enumerate(items)}
        return cls(lists, states)

    def named(self) -> dict[str, Any]:
        """Return the six quantizers of attention, by name."""
        return {name: self.made[place].quantizer for name, place in SLOTS.items()}

    def update_scales(self) -> None:
        """Write another value into every scale, as the next step's update does: no power of two, which would change
        exponents alone and, with them, hardly a number.
        """
        for state in self.made.values():
            if "scale" in state.tensors:
                state.tensors["scale"].mul_(1.5)
                state.values["scale"].mul_(1.5)

    def changes(self) -> str:
        """Return ``unchanged``, or what became of the lists and of the quantizers that attention has no use for."""
        found = []
        if set(self.lists) != set(SIZES):
            found.append("the names of the lists")
        for (group, index), state in self.made.items():
            now = self.lists.get(group, ())
            if len(now) <= index or now[index] is not state.quantizer:
                found.append(f"{group}[{index}] replaced")
            elif word := state.changes(used=(group, index) in SLOTS.values()):
                found.append(f"{group}[{index}] {word}")
        found += [f"{group} longer" for group, items in self.lists.items() if len(items) > SIZES.get(group, 0)]
        return ", ".join(found) or "unchanged"
