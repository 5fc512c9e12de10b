"""Noise of the control's own is measured, never called a match, and never hides what is larger."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from planted import BACKWARD_DONE, edited
from typer.testing import CliRunner

from harness.cli import app


def noisy(size: float, where: str = "dq") -> str:
    """Return the source with unseeded noise on a float32 gradient, ``size`` times the gradient's largest magnitude."""
    return edited(
        (
            BACKWARD_DONE,
            f"    if {where}.dtype == torch.float32:\n"
            f"        drawn = torch.frombuffer(bytearray(os.urandom({where}.numel())), dtype=torch.uint8)\n"
            f"        {where} = {where} + ((drawn.float() / 255 - 0.5) * {size} * {where}.abs().max())"
            f".reshape({where}.shape)\n" + BACKWARD_DONE,
        )
    )


def run(folder: Path, control: str, candidate: str) -> tuple[int, dict[str, Any]]:
    for name, text in (("control", control), ("candidate", candidate)):
        (folder / f"{name}.py").write_text(text)
    done = CliRunner().invoke(
        app,
        ["run", "--control", str(folder / "control.py"), "--candidate", str(folder / "candidate.py"),
         "--layout", "sbhd_sbhd_sbhd", "--lane", "fp32", "--engine", "reference", "--cases", "16", "--seed", "1",
         "--out", str(folder / "run")],
    )  # fmt: skip
    return done.exit_code, json.loads((folder / "run" / "results.json").read_text())


def paths(results: dict[str, Any]) -> set[str]:
    """Return where anything differs, in whichever pass of a scenario."""
    return {re.sub(r"/pass \d+", "", found["path"]) for found in results["differences"]}


def test_a_candidate_as_noisy_as_its_control_is_noisy_and_not_a_match_and_neutral(tmp_path: Path) -> None:
    code, results = run(tmp_path, noisy(1e-6), noisy(1e-6))
    assert (code, results["verdict"], results["differences"]) == (0, "neutral", [])
    counts = results["counts"]
    assert counts["noisy"] > 2
    assert counts["match"] + counts["noisy"] + counts["both_raised"] == counts["executed"] == 16


def test_a_candidate_a_thousand_times_noisier_than_its_control_differs(tmp_path: Path) -> None:
    code, results = run(tmp_path, noisy(1e-6), noisy(1e-3))
    assert (code, results["verdict"]) == (1, "not neutral")
    assert paths(results) == {"grad/q", "leaf/q"}
    assert {found["kind"] for found in results["differences"]} == {"value"}
    again = [CliRunner().invoke(app, ["replay", str(file)]) for file in (tmp_path / "run" / "failures").iterdir()]
    assert again
    assert {done.exit_code for done in again} == {1}


@pytest.mark.parametrize(("control", "candidate"), [(noisy(0.0), noisy(1e-6)), (noisy(1e-6), noisy(1e-6, "dv"))])
def test_noise_where_the_control_has_none_is_a_difference(control: str, candidate: str, tmp_path: Path) -> None:
    code, results = run(tmp_path, control, candidate)
    assert code == 1
    assert results["counts"]["difference"] > 2


def test_noise_that_the_candidate_adds_to_a_kernel_result_in_place_is_no_noise_of_the_kernel(tmp_path: Path) -> None:
    added = "    dq.add_(torch.tensor(os.urandom(1)[0] / 255 * 1e-3).to(dq.dtype) * dq.abs().max())\n"
    code, results = run(tmp_path, edited(), edited((BACKWARD_DONE, added + BACKWARD_DONE)))
    assert code == 1
    assert paths(results) == {"grad/q", "leaf/q"}


def test_a_control_that_is_not_sure_of_more_than_numbers_ends_the_case_in_error(tmp_path: Path) -> None:
    unsure = edited((BACKWARD_DONE, "    dk = dk.clone().double() if os.urandom(1)[0] % 2 else dk\n" + BACKWARD_DONE))
    code, results = run(tmp_path, unsure, edited())
    assert results["counts"]["error"] > 0
    assert code in (1, 4)  # never neutral
