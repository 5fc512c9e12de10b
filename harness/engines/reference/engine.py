"""The reference engine as the harness sees it."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

from harness.engines.reference import checks
from harness.engines.reference.seam_names import SEAM
from harness.layouts import LAYOUTS

if TYPE_CHECKING:
    from harness.case import Case


class ReferenceEngine:
    """Pure-PyTorch kernels on ``device``, with no TransformerEngine and no GPU needed.

    Its numbers are evidence about the code that calls the kernels, never about the kernels.
    """

    name = "reference"
    repeatable = True
    defines_padding = True  # -inf, or the softmax offset
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    def seam(self) -> dict[str, object]:
        """Return a fresh table of every name of the seam, bound to this engine."""
        return dict(SEAM)

    def unsupported(self, case: Case) -> str | None:
        """Return why the engine cannot run ``case``, in one sentence, or None."""
        if getattr(case, "fp8", False):
            return "fp8: the reference engine has no FP8 kernels"
        reason = checks.refusal(case.qkv_layout, case.attn_bias_type, case.attn_mask_type, case.dropout_p)
        if reason is None and LAYOUTS[case.qkv_layout].paged and case.requires_grad:
            return (
                f"qkv_layout={case.qkv_layout}: paged KV has no backward, and "
                f"requires_grad={','.join(case.requires_grad)} asks for one"
            )
        return reason

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
