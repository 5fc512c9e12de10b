"""The generator as the kernels use it, and the dropout mask that follows from what they save of it.

A forward takes a generator, advances it, with or without dropout, and returns ``rng_state`` = [seed, offset]. The
backward sees only that. So the generator's state after a run counts the forwards, and a lost or redrawn ``rng_state``
changes the gradients.
"""

from __future__ import annotations

import torch

from harness.engines.reference.backend import FusedAttnBackend

F16_ADVANCE = 16  # what one F16 forward takes from the generator
_WORD = (1 << 64) - 1


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that ``device`` uses where none is given."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def advance(backend: FusedAttnBackend, max_seqlen_q: int) -> int:
    """Return what one forward takes from the generator; the backend that is asked for settles it, not what runs.

    The FP8 backend takes a 128th of the square of ``max_seqlen_q``, made a multiple of four.
    """
    if backend != FusedAttnBackend.FP8:
        return F16_ADVANCE
    return -(-(max_seqlen_q**2) // (128 * 4)) * 4


def draw(generator: torch.Generator | None, device: torch.device, advance: int = F16_ADVANCE) -> torch.Tensor:
    """Take ``advance`` steps from the generator (None: the device's own) and return rng_state.

    rng_state is int64 [2] on ``device``: the generator's seed and an offset. On CUDA that is the Philox offset before
    the call. CPU generators have none: there ``advance`` 32-bit numbers are drawn and the first stands for it, so that
    equal states give equal pairs and each forward leaves its mark. Raises RuntimeError for a generator of another
    kind of device.
    """
    generator = default_generator(device) if generator is None else generator
    if generator.device.type != device.type:
        raise RuntimeError(f"rng_gen is a generator for {generator.device}, the tensors are on {device}")
    seed = generator.initial_seed() & _WORD
    if device.type == "cpu":
        # int32's own range is the widest that costs one 32-bit draw a number.
        offset = int(torch.empty(advance, dtype=torch.int32).random_(generator=generator)[0])
    else:
        offset = int(generator.get_offset())
        generator.set_offset(offset + advance)
    signed = seed - (1 << 64) if seed >> 63 else seed
    return torch.tensor([signed, offset], dtype=torch.int64).to(device)


def _mix(value: int) -> int:
    """Scatter 64 bits so that neighbours part (the finalizer of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def keep_mask(rng_state: torch.Tensor, shape: tuple[int, ...], p: float) -> torch.Tensor:
    """Return which scores dropout keeps: bool of ``shape``, each true with probability 1 - p.

    A pure function of the two numbers in ``rng_state``, the shape and p; made on the CPU, so equal on all devices,
    then moved to where ``rng_state`` is. It touches no generator but its own.
    """
    seed, offset = (int(value) & _WORD for value in rng_state.tolist())
    own = torch.Generator().manual_seed(_mix(_mix(seed) ^ offset))
    return (torch.rand(shape, generator=own) >= p).to(rng_state.device)
