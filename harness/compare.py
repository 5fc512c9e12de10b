"""Compare two observations: which paths disagree, and how.

Equality is of bytes: NaN payloads and the sign of zero count. The union of paths counts: what only one side has is a
difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from harness.observe.values import Array, Json, Observation, Plain, Value

Kind = Literal["missing", "extra", "order", "type", "shape", "dtype", "stride", "alias", "value", "exception", "crash"]
KINDS: tuple[Kind, ...] = (
    "missing", "extra", "order", "type", "shape", "dtype", "stride", "alias", "value", "exception", "crash",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two tensors of one shape and dtype are apart.

    ``elements`` is the number compared, ``different`` how many differ in a bit, ``first`` the index of the first,
    ``largest_absolute`` in the tensor's unit, infinite where exactly one side is NaN; ``largest_relative`` that over
    the larger magnitude of the control's tensor.
    """

    elements: int
    different: int
    first: tuple[int, ...]
    largest_absolute: float
    largest_relative: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A path on which two observations disagree."""

    path: str
    kind: Kind
    control: Json
    candidate: Json
    message: str
    distance: Distance | None = field(default=None, compare=False)

    @property
    def signature(self) -> tuple[str, Kind]:
        """What makes two differences the same: path and kind."""
        return self.path, self.kind


def compare(control: Observation, candidate: Observation) -> list[Difference]:
    """Return every difference, in the order in which the control saw its paths, then what only the candidate saw."""
    found: list[Difference] = []
    for path in control:
        if path not in candidate:
            found.append(_one_sided(path, control[path], None))
        else:
            difference = compare_values(path, control[path], candidate[path])
            if difference is not None:
                found.append(difference)
    found.extend(_one_sided(path, None, candidate[path]) for path in candidate if path not in control)
    return found


def _one_sided(path: str, control: Value | None, candidate: Value | None) -> Difference:
    kind: Kind = "exception" if path.startswith("exception/") else ("missing" if candidate is None else "extra")
    side = "control" if candidate is None else "candidate"
    return Difference(
        path,
        kind,
        control.describe() if control is not None else None,
        candidate.describe() if candidate is not None else None,
        f"only the {side} has it",
    )


def compare_values(path: str, control: Value, candidate: Value) -> Difference | None:
    """Return how two values of one path differ: attributes first, then elements; None where they agree."""

    def differ(kind: Kind, message: str, distance: Distance | None = None) -> Difference:
        return Difference(path, kind, control.describe(), candidate.describe(), message, distance)

    if isinstance(control, Plain) and isinstance(candidate, Plain):
        if path.startswith("exception/"):
            same = control == candidate
            return None if same else differ("exception", f"{control.value!r} became {candidate.value!r}")
        if control.type != candidate.type:
            return differ("type", f"{control.type} became {candidate.type}")
        if _plain_equal(control.value, candidate.value):
            return None
        kind: Kind = "order" if _same_items(control.value, candidate.value) else "value"
        return differ(kind, f"{control.value!r} became {candidate.value!r}")
    if not (isinstance(control, Array) and isinstance(candidate, Array)):
        names = [value.type if isinstance(value, Plain) else "Tensor" for value in (control, candidate)]
        return differ("type", f"{names[0]} became {names[1]}")
    if control.meaning != candidate.meaning:
        return differ("alias", f"{control.meaning} became {candidate.meaning}")
    if control.dtype != candidate.dtype:
        return differ("dtype", f"{control.dtype} became {candidate.dtype}")
    if control.shape != candidate.shape:
        return differ("shape", f"{list(control.shape)} became {list(candidate.shape)}")
    if control.stride != candidate.stride:
        return differ("stride", f"{list(control.stride)} became {list(candidate.stride)}")
    if (control.data is None) != (candidate.data is None):
        return differ("type", "only one side has elements to compare")
    distance = measure(control, candidate)
    if distance is None:
        return None
    return differ(
        "value",
        f"{distance.different} of {distance.elements} elements differ, first at {list(distance.first)}, "
        f"by at most {distance.largest_absolute:.3g} ({distance.largest_relative:.3g} of the largest magnitude)",
        distance,
    )


def _plain_equal(control: Json, candidate: Json) -> bool:
    """Equal with the sign of zero and the type of every number: 0.0 is not -0.0, 1 is not True or 1.0."""
    return control == candidate and repr(control) == repr(candidate)


def _same_items(control: Json, candidate: Json) -> bool:
    if not (isinstance(control, list) and isinstance(candidate, list)):
        return False
    return sorted(map(repr, control)) == sorted(map(repr, candidate))


def measure(control: Array, candidate: Array) -> Distance | None:
    """Return how far the elements of two tensors of one shape and dtype are apart; None where every bit agrees.

    Only elements that are valid on both sides count; a disagreement about which are valid raises ValueError, since
    it is the harness that marks them, from the case alone.
    """
    import torch

    left, right = control.data, candidate.data
    if left is None:
        return None
    unequal = _bits(left) != _bits(right)
    valid = control.valid
    if (valid is None) != (candidate.valid is None) or (valid is not None and not torch.equal(valid, candidate.valid)):
        raise ValueError("the two sides disagree about which elements are valid")
    if valid is not None:
        valid = valid.expand(left.shape)
        unequal = unequal & valid
    different = int(unequal.sum())
    if different == 0:
        return None
    first = tuple(int(index) for index in unequal.nonzero()[0])
    a, b = (side.detach().to(torch.float64)[unequal] for side in (left, right))
    gap = (a - b).abs()
    one_sided = a.isnan() ^ b.isnan()
    gap = torch.where(one_sided, torch.inf, torch.where(a.isnan() & b.isnan(), 0.0, gap))
    gap = torch.where(a == b, 0.0, gap)  # equal infinities, and zeros of two signs
    scale = left.detach().to(torch.float64)
    scale = scale[valid] if valid is not None else scale
    finite = scale[scale.isfinite()].abs()
    largest = float(gap.max())
    magnitude = float(finite.max()) if finite.numel() else 0.0
    relative = largest / magnitude if magnitude > 0 else (0.0 if largest == 0 else float("inf"))
    return Distance(int(unequal.numel()) if valid is None else int(valid.sum()), different, first, largest, relative)


_INTEGER_VIEWS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


def _bits(tensor: Any) -> Any:
    """Return the tensor as integers of its element size, so that equality is of bits."""
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bool:
        return tensor.to(torch.int8)
    size = tensor.element_size()
    return tensor.contiguous().view(getattr(torch, _INTEGER_VIEWS[size]))
