"""The reference kernels read and write memory by the layout string, as the real ones do."""

from __future__ import annotations

import pytest
import torch
from reference_problem import (
    DENSE_LAYOUTS,
    Problem,
    backward,
    forward,
    from_format,
    make_data,
    pack,
    run,
    to_format,
)


@pytest.mark.parametrize(
    ("layout", "wrong"),
    [("bs3hd", "bsh3d"), ("sb3hd", "sbh3d"), ("bs3hd", "sb3hd"), ("bshd_bs2hd", "bshd_bsh2d"),
     ("sbhd_sb2hd", "sbhd_sbh2d"), ("bshd_bshd_bshd", "sbhd_sbhd_sbhd"), ("bshd_bs2hd", "bshd_bshd_bshd"),
     ("bs3hd", "bshd_bshd_bshd"), ("bshd_sbhd_sbhd", "bshd_bshd_bshd")],
)  # fmt: skip
def test_a_wrong_layout_string_gives_wrong_numbers_not_an_error(layout: str, wrong: str) -> None:
    problem = Problem(layout=layout)
    data = make_data(problem)
    # The wrong string may reach past the tensors' own elements but not past the buffer, hence the spare room.
    q, k, v = (spacious(tensor) for tensor in pack(layout, data.q, data.k, data.v))
    right = forward(problem, data, q=q, k=k, v=v)[0]
    misread = forward(problem, data, q=q, k=k, v=v, qkv_layout=wrong)[0]
    torch.testing.assert_close(right, forward(problem, data)[0])
    assert right.shape == misread.shape
    assert not torch.allclose(right, misread)


def spacious(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the whole storage into one with as much again behind it, and view it as ``tensor`` does."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    old = torch.as_strided(tensor, (size,), (1,), 0)
    return torch.cat([old, torch.ones_like(old)]).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def test_a_wrong_gradient_layout_string_gives_another_arrangement() -> None:
    problem = Problem(layout="bs3hd")
    data = make_data(problem)
    output, aux = forward(problem, data)
    right = backward(problem, data, output, aux)
    other = backward(problem, data, output, aux, dqkv_layout="bsh3d")
    assert torch.equal(right[1], other[1])
    assert right[1].stride() != other[1].stride()


def test_strides_of_the_tensor_itself_are_not_looked_at() -> None:
    problem = Problem(sq=5, h=4, hg=4)
    data = make_data(problem)
    q = to_format(data.q, "bshd")
    same_memory = q.as_strided((2, 5, 4, 3), (1, 2, 3, 4))
    assert torch.equal(forward(problem, data)[0], forward(problem, data, q=same_memory)[0])


def test_a_storage_offset_is_honoured() -> None:
    problem = Problem()
    data = make_data(problem)
    q = to_format(data.q, "bshd")
    shifted = torch.cat([torch.full((7,), torch.nan, dtype=q.dtype), q.flatten()])[7:].view(q.shape)
    assert torch.equal(forward(problem, data)[0], forward(problem, data, q=shifted)[0])


def test_reading_past_a_storage_is_an_error() -> None:
    problem = Problem()
    data = make_data(problem)
    with pytest.raises(RuntimeError, match=r"k: .*leaves its storage"):
        forward(problem, data, max_seqlen_kv=6)
    output, aux = forward(problem, data)
    with pytest.raises(RuntimeError, match=r"d_o: .*leaves its storage"):
        backward(problem, data, output, aux, d_o=torch.ones((), dtype=torch.float64).expand(2, 5, 4, 3))


@pytest.mark.parametrize("name", ["o", "d_o"])
def test_output_and_its_gradient_are_read_as_if_contiguous(name: str) -> None:
    problem = Problem()
    data = make_data(problem)
    output, aux = forward(problem, data)
    right = {"o": output, "d_o": to_format(data.grad, "bshd")}[name]
    transposed = right.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(right, transposed)
    good = backward(problem, data, output, aux, **{name: right.clone()})
    bad = backward(problem, data, output, aux, **{name: transposed})
    assert torch.equal(good[0], backward(problem, data, output, aux)[0])
    assert not torch.allclose(good[0], bad[0])


@pytest.mark.parametrize("name", ["o_format", "do_format"])
def test_the_formats_of_output_and_gradient_are_taken_from_their_strings(name: str) -> None:
    problem = Problem(sq=5, b=2)
    data = make_data(problem)
    output, aux = forward(problem, data)
    tensor_name, tensor = ("o", output) if name == "o_format" else ("d_o", to_format(data.grad, "bshd"))
    right = backward(problem, data, output, aux)
    wrong = backward(problem, data, output, aux, **{name: "sbhd"})
    moved = backward(problem, data, output, aux, **{name: "sbhd", tensor_name: tensor.transpose(0, 1).contiguous()})
    assert torch.equal(right[0], moved[0])
    assert not torch.allclose(right[0], wrong[0])


def test_the_output_follows_o_format() -> None:
    problem = Problem(d_v=2)
    data = make_data(problem)
    in_bshd, in_sbhd = forward(problem, data)[0], forward(problem, data, o_format="sbhd")[0]
    assert (in_bshd.shape, in_sbhd.shape) == ((2, 5, 4, 2), (5, 2, 4, 2))
    assert in_sbhd.is_contiguous()
    assert torch.equal(in_bshd, in_sbhd.transpose(0, 1))


def test_the_bias_is_read_as_if_contiguous() -> None:
    problem = Problem(bias_type="post_scale_bias")
    data = make_data(problem)
    assert data.bias is not None
    transposed = data.bias.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(transposed, data.bias)
    assert not torch.allclose(forward(problem, data)[0], forward(problem, data, attn_bias=transposed)[0])


def test_the_statistics_are_read_as_if_contiguous() -> None:
    problem = Problem()
    data = make_data(problem)
    output, aux = forward(problem, data)
    transposed = aux[0].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(transposed, aux[0])
    right = backward(problem, data, output, aux)
    assert not torch.allclose(right[2], backward(problem, data, output, [transposed, aux[1]])[2])


@pytest.mark.parametrize("layout", sorted(DENSE_LAYOUTS))
def test_gradients_share_buffers_as_the_layout_does(layout: str) -> None:
    got = run(Problem(layout=layout))
    _, _, one_buffer, two_buffers = DENSE_LAYOUTS[layout]
    storages = [grad.untyped_storage().data_ptr() for grad in got.raw_grads[:3]]
    distinct = 1 if one_buffer else 2 if two_buffers else 3
    assert len(set(storages)) == distinct
    assert (storages[1] == storages[2]) == (one_buffer is not None or two_buffers is not None)
    for grad, tensor in zip(got.raw_grads[:3], got.inputs, strict=True):
        assert grad.shape == tensor.shape
        assert grad.stride() == tensor.stride()
        assert grad.storage_offset() == tensor.storage_offset()
        assert grad.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


def test_results_share_no_memory_with_what_went_in() -> None:
    problem = Problem(bias_type="post_scale_bias", softmax="vanilla")
    data = make_data(problem)
    q, k, v = pack(problem.layout, data.q, data.k, data.v)
    output, aux = forward(problem, data, q=q, k=k, v=v)
    grads = backward(problem, data, output, aux, q=q, k=k, v=v)
    given = [q, k, v, data.bias, data.grad, output, *aux]
    fresh = [output, aux[0], aux[1]]
    pointers = {tensor.untyped_storage().data_ptr() for tensor in given if tensor is not None}
    assert all(grad is None or grad.untyped_storage().data_ptr() not in pointers for grad in grads)
    assert len({tensor.untyped_storage().data_ptr() for tensor in fresh}) == 3
    assert not {t.untyped_storage().data_ptr() for t in fresh} & {t.untyped_storage().data_ptr() for t in (q, k, v)}


def test_inputs_are_left_as_they_were() -> None:
    problem = Problem(mask="padding", lengths_q=(2, 3), bias_type="post_scale_bias", dropout=0.2)
    data, untouched = make_data(problem), make_data(problem)
    run(problem, data)
    for name, tensor in vars(data).items():
        assert tensor is None or torch.equal(tensor, getattr(untouched, name))


def test_results_carry_no_autograd_history() -> None:
    problem = Problem(bias_type="post_scale_bias")
    data = make_data(problem)
    q, k, v = (tensor.requires_grad_() for tensor in pack(problem.layout, data.q, data.k, data.v))
    output, aux = forward(problem, data, q=q, k=k, v=v)
    grads = backward(problem, data, output, aux, q=q, k=k, v=v)
    assert not any(t.requires_grad for t in [output, aux[0], *grads] if t is not None)


def test_mixed_formats_put_each_gradient_where_its_tensor_is() -> None:
    problem = Problem(layout="sbhd_bshd_bshd", sq=5, skv=6)
    data = make_data(problem)
    same = problem.with_(layout="bshd_bshd_bshd")
    mixed, plain = run(problem, data), run(same, data)
    assert mixed.raw_output.shape == (5, 2, 4, 3)
    assert mixed.raw_grads[0].shape == (5, 2, 4, 3)
    assert mixed.raw_grads[1].shape == (2, 6, 4, 3)
    assert torch.equal(from_format(mixed.raw_grads[0], "sbhd"), plain.grads[0])
