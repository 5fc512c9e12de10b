"""The reference engine as the harness sees it."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

from harness.engines.reference import addressing
from harness.engines.reference.errors import EngineUnsupported
from harness.engines.reference.masking import MASK_TYPES
from harness.engines.reference.seam_names import SEAM

if TYPE_CHECKING:
    from harness.case import Case


class ReferenceEngine:
    """Pure-PyTorch kernels on ``device``, with no TransformerEngine and no GPU needed.

    Its numbers are evidence about the code that calls the kernels, never about the kernels.
    """

    name = "reference"
    defines_padding = True  # -inf, or the softmax offset
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    def seam(self) -> dict[str, object]:
        """Return a fresh table of every name of the seam, bound to this engine."""
        return dict(SEAM)

    def unsupported(self, case: Case) -> str | None:
        """Return why the engine cannot run ``case``, in one sentence, or None."""
        try:
            addressing.require_dense_layout("qkv_layout", case.qkv_layout)
        except EngineUnsupported as reason:
            return str(reason)
        if getattr(case, "fp8", False):
            return "fp8: the reference engine has no FP8 kernels"
        if case.attn_bias_type == "pre_scale_bias":
            return "attn_bias_type='pre_scale_bias': no kernel supports it"
        if case.attn_bias_type == "alibi" and not MASK_TYPES[case.attn_mask_type].causal:
            return f"attn_bias_type='alibi': it needs a causal mask, not attn_mask_type={case.attn_mask_type!r}"
        return None

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
