"""What an engine is: the kernels and everything else that a subject calls through the seam."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

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
    return the same keys. ``unsupported(case)`` is None where the engine can run the case, else the reason, in the
    engine's own words. ``generator(seed)`` is a fresh generator on the engine's device. ``defines_padding`` is whether
    the kernels give a defined value to the rows of the softmax statistics past a sequence's end (O and the gradients
    are zero there on every engine); ``dtypes`` are those of a Case that are worth drawing; ``repeatable`` is
    whether the same call gives the same bits each time, so that noise can only be a subject's own.
    """

    name: str
    device: torch.device
    defines_padding: bool
    dtypes: tuple[str, ...]
    repeatable: bool

    def seam(self) -> dict[str, object]: ...

    def unsupported(self, case: Case) -> str | None: ...

    def environment(self) -> dict[str, str]: ...

    def generator(self, seed: int) -> torch.Generator: ...


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
