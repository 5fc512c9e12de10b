"""Everything round the kernels that is switched off here: recipes, CPU offload, graph capture, NVTX ranges.

Each name does what the original does when its feature is off, which is nothing; a harness that watches them still
sees every call.
"""

from __future__ import annotations

import contextlib
from typing import Any

NVTE_CPU_OFFLOAD_V1 = False
flash_attn_cuda_bwd = None  # as where FlashAttention 2 is not installed


class Recipe:
    """The recipe in force where no autocast is: delayed scaling."""

    def delayed(self) -> bool:
        """Whether scales come from earlier steps."""
        return True

    def float8_current_scaling(self) -> bool:
        """Whether scales come from each tensor."""
        return False

    def mxfp8(self) -> bool:
        """Whether scales belong to blocks of 32 elements."""
        return False


class FP8GlobalStateManager:
    """Holder of the global FP8 state, of which only the recipe is asked for."""

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Return the recipe in force."""
        return Recipe()


def is_cpu_offload_enabled() -> bool:
    """Whether activations are being offloaded to the CPU: never here."""
    return False


def start_offload(*tensors: Any, offload_base_tensor: bool = False) -> None:
    """Mark the start of offloading ``tensors``; nothing here."""


def mark_activation_offload(*tensors: Any) -> None:
    """Mark ``tensors`` as activations to offload; nothing here."""


def is_current_layer_offloaded() -> bool:
    """Whether the layer that runs is one to offload: never here."""
    return False


def is_graph_capturing() -> bool:
    """Whether a CUDA graph is being captured: never here."""
    return False


def nvtx_range_push(msg: str) -> None:
    """Open a profiler range; nothing here."""


def nvtx_range_pop(msg: str | None = None) -> None:
    """Close a profiler range; nothing here."""


def get_nvtx_range_context(msg: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that is a profiler range; nothing here."""
    return contextlib.nullcontext()
