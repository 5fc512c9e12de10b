"""On a GPU the reference kernels use its generator as the real ones do, and give the numbers of the CPU."""

from __future__ import annotations

import pytest
import torch
from reference_problem import Data, Problem, backward, forward, make_data

from harness.engines.reference import rng

pytestmark = pytest.mark.gpu


def test_rng_state_is_seed_and_offset_before_the_call() -> None:
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(9)
    states = [rng.draw(generator, device).tolist() for _ in range(2)]
    assert states == [[9, 0], [9, 16]]
    assert generator.get_offset() == 32


def test_the_default_generator_is_the_device_s() -> None:
    torch.cuda.manual_seed(9)
    rng.draw(None, torch.device("cuda"))
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    assert (default.initial_seed(), default.get_offset()) == (9, 16)


def test_numbers_are_those_of_the_cpu() -> None:
    problem = Problem(
        mask="padding_causal",
        lengths_q=(5, 3),
        lengths_kv=(4, 5),
        bias_type="post_scale_bias",
        bias_shape="bhss",
        dropout=0.3,
    )
    data = make_data(problem)
    moved = Data(*(None if tensor is None else tensor.cuda() for tensor in vars(data).values()))
    cu_seqlens = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), (t.cuda() for t in problem.cu_seqlens()), strict=True))
    output, aux = forward(problem, moved, **cu_seqlens)
    # The CPU's forward with the GPU's rng_state is not to be had; its backward is.
    on_cpu = backward(problem, data, output.cpu(), [tensor.cpu() for tensor in aux])
    on_gpu = backward(problem, moved, output, aux, **cu_seqlens)
    for one, other in zip(on_cpu[:4], on_gpu[:4], strict=True):
        assert other.is_cuda
        torch.testing.assert_close(one, other.cpu())
