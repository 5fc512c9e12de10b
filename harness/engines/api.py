"""What an engine is: the kernels and everything else that a subject calls through the seam."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from harness.case import Case

EngineName = Literal["auto", "reference", "cudnn"]
ENGINE_NAMES: tuple[EngineName, ...] = ("auto", "reference", "cudnn")


class EngineUnavailable(RuntimeError):
    """This machine cannot provide the engine; the message says what stands in the way and what to do."""


@runtime_checkable
class Engine(Protocol):
    """The seam bound to one set of kernels.

    ``seam()`` returns every name of the seam that a source file may import, bound to this engine; the two engines
    return the same keys. With ``offload_v1`` its constant NVTE_CPU_OFFLOAD_V1 is true, as where that variable was set
    when TransformerEngine was imported. ``unsupported(case)`` is None where the engine can run the case, else the
    reason, in the engine's own words. ``generator(seed)`` is a fresh generator on the engine's device.
    ``defines_padding`` is whether the kernels give a defined value to the rows of the softmax statistics past a
    sequence's end (O and the gradients are zero there on every engine); ``dtypes`` are those of a Case that are
    worth drawing; ``repeatable`` is whether the same call gives the same bits each time, so that noise can only be
    a subject's own.

    ``quantizer(kind, fp8_dtype, scale)`` is a fresh quantizer of the seam's own class: kind ``delayed`` (with a fresh
    fp32 scalar ``scale`` and an fp32 [1] ``amax`` of zero), ``current`` or ``mxfp8``; fp8_dtype E4M3 or E5M2.
    ``recipe(kind, fp8_format)`` is a recipe as ``fp8_meta["local_recipes"]`` holds it; ``recipe_in_force`` makes one
    the global recipe inside the block. ``during(case)`` switches on what the case's scenario asks of the surroundings:
    CPU offload, NVTX ranges, debug prints. It is entered around everything that a pass does.
    """

    name: str
    device: torch.device
    defines_padding: bool
    dtypes: tuple[str, ...]
    repeatable: bool

    def seam(self, *, offload_v1: bool = False) -> dict[str, object]: ...

    def unsupported(self, case: Case) -> str | None: ...

    def environment(self) -> dict[str, str]: ...

    def generator(self, seed: int) -> torch.Generator: ...

    def quantizer(self, kind: str, fp8_dtype: str, scale: float = 1.0) -> Any: ...

    def recipe(self, kind: str, fp8_format: str) -> Any: ...

    def recipe_in_force(self, recipe: Any) -> AbstractContextManager[None]: ...

    def during(self, case: Case) -> AbstractContextManager[None]: ...


def get_engine(name: str) -> Engine:
    """Return the engine called ``name``; ``auto`` is cuDNN where this machine has it, else the reference.

    Raises EngineUnavailable where ``cudnn`` is asked for by name and cannot run, and ValueError for another name.
    """
    if name not in ENGINE_NAMES:
        raise ValueError(f"engine={name!r} is unknown; use one of {', '.join(ENGINE_NAMES)}")
    if name in ("auto", "cudnn"):
        from harness.engines.cudnn import CudnnEngine

        try:
            return CudnnEngine()
        except EngineUnavailable:
            if name == "cudnn":
                raise
    from harness.engines.reference import ReferenceEngine

    return ReferenceEngine()
