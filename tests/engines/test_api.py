"""An engine is found by name; what the machine lacks is said, never silently replaced where it was asked for."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from harness.engines import cudnn
from harness.engines.api import ENGINE_NAMES, Engine, EngineName, EngineUnavailable, get_engine
from harness.engines.reference import ReferenceEngine


class Unavailable:
    """A cuDNN engine that this machine does not have."""

    def __init__(self) -> None:
        raise EngineUnavailable("planted: no GPU")


class Available(ReferenceEngine):
    """A cuDNN engine that this machine has."""

    name = "cudnn"


def test_every_engine_name_is_listed_once() -> None:
    assert ENGINE_NAMES == get_args(EngineName) == ("auto", "reference", "cudnn")


@pytest.mark.parametrize("name", ["", "Reference", "cuda", "reference "])
def test_another_name_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=f"engine={name!r} is unknown; use one of auto, reference, cudnn"):
        get_engine(name)


def test_the_reference_engine_is_there_on_every_machine() -> None:
    engine = get_engine("reference")
    assert isinstance(engine, ReferenceEngine)
    assert isinstance(engine, Engine)
    assert (engine.name, engine.device.type) == ("reference", "cpu")


def test_auto_falls_back_to_the_reference_and_cudnn_by_name_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "CudnnEngine", Unavailable)
    assert get_engine("auto").name == "reference"
    with pytest.raises(EngineUnavailable, match="planted: no GPU"):
        get_engine("cudnn")


def test_auto_takes_cudnn_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "CudnnEngine", Available)
    assert get_engine("auto").name == "cudnn"
    assert get_engine("cudnn").name == "cudnn"
    assert get_engine("reference").name == "reference"


def test_a_fault_of_the_cudnn_engine_is_not_taken_for_its_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self) -> None:
            raise ZeroDivisionError("planted")

    monkeypatch.setattr(cudnn, "CudnnEngine", Broken)
    with pytest.raises(ZeroDivisionError):
        get_engine("auto")


def test_a_generator_is_seeded_and_fresh() -> None:
    engine = get_engine("reference")
    first, second, other = engine.generator(3), engine.generator(3), engine.generator(4)
    assert first is not second
    assert torch.equal(first.get_state(), second.get_state())
    assert not torch.equal(first.get_state(), other.get_state())


def test_the_seam_is_a_table_of_ones_own() -> None:
    engine = get_engine("reference")
    engine.seam().clear()
    assert len(engine.seam()) == 26
