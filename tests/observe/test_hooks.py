"""What a hook gives back has equal values in other memory, as its kind says, and room where a kernel may reach."""

from __future__ import annotations

import pytest
import torch

from harness.case import Case
from harness.engines.api import get_engine
from harness.inputs import build
from harness.observe import hooks
from harness.observe.recorder import Kinds, Recorder
from harness.quantized import parts

ENGINE = get_engine("reference")
KINDS = (hooks.copied, hooks.through_the_host, hooks.strided)
PACKED = torch.arange(2 * 3 * 4 * 8, dtype=torch.float32).view(2, 3, 4, 8).select(1, 1)
TENSORS = {
    "part of a buffer": PACKED,
    "statistics": torch.arange(24.0).view(2, 3, 4, 1),
    "offsets": torch.tensor([0, 3, 7], dtype=torch.int32),
    "number": torch.tensor(3.0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TENSORS)
def test_values_are_equal_and_memory_is_other_memory(kind: hooks.Kind, name: str) -> None:
    tensor = TENSORS[name]
    back = kind(tensor)()
    assert torch.equal(back, tensor)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", [hooks.copied, hooks.strided])
@pytest.mark.parametrize("name", TENSORS)
def test_a_copy_has_room_behind_it_for_two_neighbours_and_nothing_but_finite_numbers_there(
    kind: hooks.Kind, name: str
) -> None:
    back = kind(TENSORS[name])()
    assert back.storage_offset() == 0
    room = back.untyped_storage().nbytes() // back.element_size()
    assert room >= 3 * back.numel()
    assert bool(back.as_strided((room,), (1,)).isfinite().all())


def test_a_copy_is_contiguous_and_a_strided_one_is_not_in_its_last_dimension() -> None:
    assert hooks.copied(PACKED)().is_contiguous()
    for name in ("part of a buffer", "statistics"):
        strided = hooks.strided(TENSORS[name])()
        assert not strided.is_contiguous()
        assert strided.stride(-1) == 2
    assert hooks.strided(TENSORS["offsets"])().is_contiguous()


def test_by_way_of_the_host_strides_offset_and_neighbours_stay() -> None:
    back = hooks.through_the_host(PACKED)()
    assert (back.stride(), back.storage_offset()) == (PACKED.stride(), PACKED.storage_offset())
    whole = torch.empty(0).set_(back.untyped_storage())
    assert torch.equal(whole, torch.arange(whole.numel(), dtype=torch.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_a_quantized_tensor_goes_part_by_part_and_the_given_one_stays_as_it_is(kind: hooks.Kind, recipe: str) -> None:
    sizes = {"max_seqlen_q": 128, "max_seqlen_kv": 128, "head_dim_qk": 32, "head_dim_v": 32}
    inputs = build(Case(fp8_recipe=recipe, fp8_input=True, **sizes))  # type: ignore[arg-type]
    live = inputs.fresh(engine=ENGINE)
    recorder = Recorder(inputs, live, padding_defined=True, kinds=Kinds.of(ENGINE.seam()))
    q = live.tensors["q"]
    back = hooks.by_parts(kind, q, recorder)()
    assert type(back) is type(q)
    given, made = parts(q), parts(back)
    assert list(given) == list(made)
    for name, part in given.items():
        assert torch.equal(made[name], part)
        assert made[name].data_ptr() != part.data_ptr()
    assert torch.equal(back.dequantize(), q.detach().dequantize())
    assert recorder.meaning(q) == "input q"
    assert set(inputs.changes(live).values()) == {"unchanged"}
