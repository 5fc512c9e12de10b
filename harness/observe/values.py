"""The values an observation holds, and the observation itself: an ordered map from path to value.

A path says what was seen (``output/0``, ``grad/q``, ``saved/k``, ``call/fused_attn_fwd/0/attn_scale``); its first part
names the family of observables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = None | bool | int | float | str | list[Any] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plain:
    """A value that is not a tensor: its type's name and itself as JSON."""

    type: str
    value: Json

    def describe(self) -> Json:
        """Return what a report prints."""
        return self.value if self.type in ("bool", "int", "float", "str", "NoneType") else [self.type, self.value]


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor: dtype, shape and stride in elements, what it is, and its elements.

    ``meaning`` says what the tensor is to the caller: ``input q``, ``view of buffer qkv``, ``output``, ``fresh``.
    ``data`` is a torch tensor that nothing writes to after the observation, or None where only the meaning counts.
    ``valid`` is a boolean tensor that broadcasts to ``data`` and marks the elements that the kernel defines; None
    means all.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    meaning: str
    data: Any = None
    valid: Any = None

    def describe(self) -> Json:
        """Return what a report prints."""
        return {"dtype": self.dtype, "shape": list(self.shape), "stride": list(self.stride), "is": self.meaning}


Value = Plain | Array


def made_by(function: str, what: str) -> str:
    """Return the meaning of a tensor that a function of the seam made: ``dq of fused_attn_bwd``."""
    return f"{what} of {function}"


def of_pass(text: str, number: int) -> str:
    """Return what a thing is called in a pass: after the first, the pass's number is part of every name."""
    return text if number == 1 else f"{text} of pass {number}"


def path_of_pass(path: str, number: int) -> str:
    """Return the path that a pass has for what the first pass has under ``path``."""
    if number == 1:
        return path
    family, _, rest = path.partition("/")
    return f"{family}/pass {number}" + (f"/{rest}" if rest else "")


KERNELS = ("fused_attn_fwd", "fused_attn_bwd", "combine_and_quantize", "combine_and_dequantize")
"""The seam's functions whose results carry a kernel's noise: equal calls, noisy results."""


def is_kernel_result(description: Json) -> bool:
    """Whether a described value is a tensor that a kernel made, or several such put together, handed on as it is.

    What the seam quantizes or dequantizes counts too: its arguments are recorded, so the noise in it is theirs.
    """
    meaning = description.get("is") if isinstance(description, dict) else None
    if not isinstance(meaning, str):
        return False
    parts = meaning.partition(", in one buffer")[0].split(" and ")
    made = rf"[a-z0-9_ ]+ of ({'|'.join(KERNELS)})( call \d+)?( of pass \d+)?"
    return all(re.fullmatch(made, part) and not part.startswith("view of") for part in parts)


@dataclass(slots=True)
class Observation:
    """All that was seen of one subject on one case, in the order in which it was seen."""

    values: dict[str, Value] = field(default_factory=dict)

    def see(self, path: str, value: Value) -> None:
        """Record a value under a path; raises KeyError where the path was seen before."""
        if path in self.values:
            raise KeyError(f"path {path!r} was seen twice")
        self.values[path] = value

    def plain(self, path: str, value: Any) -> None:
        """Record a value that is not a tensor."""
        self.see(path, plain(value))

    def __getitem__(self, path: str) -> Value:
        return self.values[path]

    def __contains__(self, path: str) -> bool:
        return path in self.values

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def exception(self) -> Mapping[str, Json] | None:
        """Return stage, type and message of what the subject raised in its first pass, or None."""
        found = {
            name: value.value
            for name in ("stage", "type", "message")
            if isinstance(value := self.values.get(f"exception/{name}"), Plain)
        }
        return found or None


def plain(value: Any) -> Plain:
    """Return a Plain of any Python value; what JSON cannot hold is given by its type and its text."""
    return Plain(type(value).__name__, _json(value))


def _json(value: Any) -> Json:
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return repr(value) if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value
    if isinstance(value, (int, float)):  # an enum member or another subclass: its value counts, its type stands beside
        return f"{value!s}"
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    return re.sub(r"0x[0-9a-fA-F]+", "0x…", str(value))  # an address differs from run to run
