"""The generator moves once a forward, backward leaves it alone, and dropout follows from the saved state only."""

from __future__ import annotations

import pytest
import torch
from reference_problem import Data, Problem, backward, forward, make_data

from harness.engines.reference import rng


def one_by_one(seed: int, count: int) -> torch.Generator:
    """Return a generator that ``count`` single 32-bit numbers were drawn from."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        torch.randint(0, 2, (1,), generator=generator)
    return generator


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("forwards", [1, 3])
def test_each_forward_takes_sixteen_numbers_and_backward_none(dropout: float, forwards: int) -> None:
    problem = Problem(dropout=dropout)
    data = make_data(problem)
    generator = torch.Generator().manual_seed(4)
    default = torch.random.get_rng_state()
    for _ in range(forwards):
        output, aux = forward(problem, data, rng_gen=generator)
        backward(problem, data, output, aux)
    assert torch.equal(generator.get_state(), one_by_one(4, 16 * forwards).get_state())
    assert torch.equal(default, torch.random.get_rng_state())


def test_the_default_generator_is_used_where_none_is_given() -> None:
    problem = Problem()
    data = make_data(problem)
    torch.manual_seed(11)
    _, aux = forward(problem, data)
    assert torch.equal(torch.random.get_rng_state(), one_by_one(11, 16).get_state())
    assert aux[1][0] == 11


def test_equal_states_give_equal_rng_states_and_others_do_not() -> None:
    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(4)
    first, second = rng.draw(generator, device), rng.draw(generator, device)
    again = rng.draw(torch.Generator().manual_seed(4), device)
    assert (first.dtype, first.shape) == (torch.int64, (2,))
    assert torch.equal(first, again)
    assert first[0] == second[0] == 4
    assert first[1] != second[1]
    assert rng.draw(torch.Generator().manual_seed(5), device)[0] == 5


def test_a_seed_beyond_int64_wraps() -> None:
    seed = (1 << 64) - 3
    state = rng.draw(torch.Generator().manual_seed(seed), torch.device("cpu"))
    assert state[0] == -3
    assert rng.keep_mask(state, (2, 2), 0.5).shape == (2, 2)


def test_a_generator_of_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="rng_gen"):
        rng.draw(torch.Generator(), torch.device("cuda"))


def test_neighbouring_states_give_unrelated_masks() -> None:
    states = [torch.tensor(pair) for pair in ((1, 0), (2, 0), (1, 1), (0, 1), (1 << 32, 0), (0, 1 << 32), (0, 0))]
    masks = [rng.keep_mask(state, (1, 1, 64, 64), 0.5) for state in states]
    for index, mask in enumerate(masks):
        assert torch.equal(mask, rng.keep_mask(states[index], (1, 1, 64, 64), 0.5))
        for other in masks[:index]:
            assert 0.45 < (mask == other).double().mean() < 0.55


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_the_fraction_it_was_asked_for(p: float) -> None:
    kept = rng.keep_mask(torch.tensor([3, 5]), (2, 2, 128, 128), p).double().mean()
    assert abs(kept - (1 - p)) < 0.01


def probe(problem: Problem) -> Data:
    """Return data whose output is the probabilities themselves."""
    data = make_data(problem)
    data.v = torch.eye(problem.skv, dtype=problem.dtype).expand(problem.b, problem.hg, -1, -1)
    return data


def test_dropout_acts_in_training_only() -> None:
    problem = Problem(dropout=0.5, d_v=5)
    data = probe(problem)
    evaluation = forward(problem, data, is_training=False)[0]
    assert (evaluation != 0).all()
    assert torch.equal(evaluation, forward(problem.with_(dropout=0.0), data)[0])
    assert (forward(problem, data)[0] == 0).any()


def test_backward_drops_by_the_saved_state() -> None:
    problem = Problem(dropout=0.5, d_v=5)
    data = probe(problem)
    torch.manual_seed(2)
    output, aux = forward(problem, data)
    # dV = (dropped P)^T dO, so ones as dO give dV's rows the sums of O's columns, dropped alike.
    data.grad = torch.ones_like(data.grad)
    grad_v = backward(problem, data, output, aux)[2].transpose(1, 2)
    torch.testing.assert_close(grad_v[..., 0], output.transpose(1, 2).sum(2))
    other = backward(problem, data, output, [aux[0], aux[1] + torch.tensor([0, 1])])[2]
    assert not torch.allclose(other.transpose(1, 2), grad_v)


def test_backward_drops_nothing_without_dropout() -> None:
    problem = Problem(dropout=0.0)
    data = make_data(problem)
    output, aux = forward(problem, data)
    one = backward(problem, data, output, aux)
    other = backward(problem, data, output, [aux[0], aux[1] + 1])
    assert torch.equal(one[0], other[0])


def test_stats_know_nothing_of_dropout() -> None:
    problem = Problem(dropout=0.5)
    data = make_data(problem)
    assert torch.equal(forward(problem, data)[1][0], forward(problem.with_(dropout=0.0), data)[1][0])
