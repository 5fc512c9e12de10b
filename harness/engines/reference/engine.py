"""The reference engine as the harness sees it."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from harness import constraints
from harness.engines.reference import offload, quantizers, surroundings
from harness.engines.reference.fp8 import DType
from harness.engines.reference.seam_names import SEAM

if TYPE_CHECKING:
    from harness.case import Case

_FORMATS = {"E4M3": DType.kFloat8E4M3, "E5M2": DType.kFloat8E5M2}


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_DURING: dict[str, Callable[[Case], AbstractContextManager[None]]] = {
    "offload": lambda case: offload.offloading(offload.PRESENT),
    "offload_v1": lambda case: offload.offloading(offload.V1),
    "nvtx": lambda case: _environment(NVTE_NVTX_ENABLED="1"),
    "debug_prints": lambda case: _environment(
        NVTE_DEBUG="1", NVTE_DEBUG_LEVEL="2", NVTE_PRINT_LAYER_NUMBER=str(case.layer_number)
    ),
}
"""What a scenario switches on; the others switch on nothing."""


class ReferenceEngine:
    """Pure-PyTorch kernels on ``device``, with no TransformerEngine and no GPU needed.

    Its numbers are evidence about the code that calls the kernels, never about the kernels. CPU offload and the recipe
    in force are of the process, as TransformerEngine's are.
    """

    name = "reference"
    repeatable = True
    defines_padding = True  # -inf, or the softmax offset
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    def seam(self, *, offload_v1: bool = False) -> dict[str, object]:
        """Return a fresh table of every name of the seam, bound to this engine."""
        return {**SEAM, "NVTE_CPU_OFFLOAD_V1": offload_v1}

    def unsupported(self, case: Case) -> str | None:
        """Return why the engine cannot run ``case``, in one sentence, or None."""
        if case.scenario == "graph_capture":
            return f"scenario={case.scenario} needs CUDA: the reference engine captures no graphs"
        return constraints.refusal(case)

    def environment(self) -> dict[str, str]:
        """Return what the numbers depend on: versions, device, its name or instruction set, threads."""
        found = {
            "engine": self.name,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": str(self.device),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "torch_threads": str(torch.get_num_threads()),
        }
        if self.device.type == "cuda":
            found["device_name"] = torch.cuda.get_device_name(self.device)
        return found

    def generator(self, seed: int) -> torch.Generator:
        """Return a fresh generator on the engine's device, seeded."""
        return torch.Generator(device=self.device).manual_seed(seed)

    def quantizer(self, kind: str, fp8_dtype: str, scale: float = 1.0) -> quantizers.Quantizer:
        """Return a fresh quantizer: ``kind`` is delayed, current or mxfp8, ``fp8_dtype`` E4M3 or E5M2.

        ``scale`` is that of a delayed one, whose ``amax`` is zero. Raises ValueError for another kind, KeyError for
        another format.
        """
        dtype = _FORMATS[fp8_dtype]
        if kind == "delayed":
            state = torch.tensor(scale, device=self.device), torch.zeros(1, device=self.device)
            return quantizers.Float8Quantizer(*state, dtype)
        if kind == "current":
            return quantizers.Float8CurrentScalingQuantizer(dtype, self.device)
        if kind == "mxfp8":
            return quantizers.MXFP8Quantizer(dtype)
        raise ValueError(f"kind={kind!r} is no quantizer's; use delayed, current or mxfp8")

    def recipe(self, kind: str, fp8_format: str) -> surroundings.Recipe:
        """Return a recipe as ``fp8_meta["local_recipes"]`` holds it; both values as a case has them."""
        return surroundings.Recipe(kind, fp8_format)

    def recipe_in_force(self, recipe: Any) -> AbstractContextManager[None]:
        """Make a recipe the global one inside the block."""
        return surroundings.recipe_in_force(recipe)

    @contextlib.contextmanager
    def during(self, case: Case) -> Iterator[None]:
        """Switch on what the case's scenario asks for inside the block: CPU offload, NVTX ranges, debug prints.

        No NVTX range is open at its start, whatever was before and is again at its end.
        """
        switched_on = _DURING.get(case.scenario)
        with surroundings.fresh_ranges(), switched_on(case) if switched_on else contextlib.nullcontext():
            yield
