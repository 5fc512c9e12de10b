"""The reference engine computes what cuDNN computes, within the rounding of the dtype."""

from __future__ import annotations

import collections
import json
import os
from pathlib import Path

import pytest
import torch

from harness.case import Case
from harness.engines import EngineUnavailable, get_engine
from harness.inputs import build
from harness.observe.run_pass import observe
from harness.observe.seam import WatchedSeam
from harness.observe.values import Array
from harness.strategies import cases, draw_cases
from harness.subjects import resolve
from harness.subjects.subject import load

pytestmark = pytest.mark.gpu

WANTED = int(os.environ.get("HARNESS_AGREE_CASES", "120"))
TOLERANCE = {"bf16": 2e-2, "fp16": 5e-3}


def gap(reference: Array, kernel: Array) -> float:
    """Return the largest difference over the tensor's largest magnitude, on the rows that the kernel defines."""
    a, b = reference.data.double().cpu(), kernel.data.double().cpu()
    if kernel.valid is not None:
        valid = kernel.valid.cpu().expand(a.shape)
        a, b = a[valid], b[valid]
    if a.numel() == 0:
        return 0.0
    if not bool(torch.isfinite(b).all()):
        return float("inf") if bool(torch.isfinite(a).all()) else 0.0
    # The inputs are of magnitude one: a gradient far below is zero but for rounding, and no measure of itself.
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-2))


def test_reference_and_cudnn_agree_on_drawn_cases() -> None:
    try:
        kernels = get_engine("cudnn")
    except EngineUnavailable as error:
        pytest.fail(str(error))
    engines = {"reference": get_engine("reference"), "cudnn": kernels}
    source = resolve("legacy")
    seams = {name: WatchedSeam(engine.seam()) for name, engine in engines.items()}
    subjects = {name: load(source, engine, seams[name].names) for name, engine in engines.items()}
    worst: dict[str, float] = collections.defaultdict(float)
    wide: list[tuple[float, str, Case]] = []
    refused: collections.Counter[str] = collections.Counter()
    compared = 0
    for number in range(20):
        for drawn in draw_cases(cases(), 200, number):
            case = drawn.replace(dropout_p=0.0)  # the two engines draw their masks differently
            if compared >= WANTED:
                break
            refusal = engines["reference"].unsupported(case) or engines["cudnn"].unsupported(case)
            if refusal or not case.requires_grad:
                refused[str(refusal)] += 1
                continue
            seen = {
                name: observe(subjects[name], build(case, engine.device), engine, seams[name])
                for name, engine in engines.items()
            }
            assert seen["cudnn"].exception() == seen["reference"].exception() is None, (case, seen["cudnn"].exception())
            for path in ("output/0", "grad/q", "grad/k", "grad/v", "grad/attn_bias", "grad/softmax_offset"):
                pair = [seen[name].values.get(path) for name in ("reference", "cudnn")]
                if all(isinstance(value, Array) and value.data is not None for value in pair):
                    distance = gap(*pair)  # type: ignore[arg-type]
                    worst[f"{case.dtype} {path}"] = max(worst[f"{case.dtype} {path}"], distance)
                    if distance > TOLERANCE[case.dtype]:
                        wide.append((distance, path, case))
            compared += 1
    for name, distance in sorted(worst.items()):
        print(f"{name:28s} {distance:.2e}")
    print(f"compared {compared} cases; refused:")
    for reason, times in refused.most_common(12):
        print(f"  {times:4d} {reason[:160]}")
    wide.sort(key=lambda item: -item[0])
    for distance, path, case in wide[:12]:
        print(f"WIDE {distance:.3g} {path} {case.to_json()}")
    folder = os.environ.get("HARNESS_AGREE_OUT")
    if folder:
        rows = [{"gap": distance, "path": path, "case": case.to_dict()} for distance, path, case in wide]
        Path(folder, "wide.json").write_text(json.dumps(rows, indent=1))
    assert compared >= WANTED, f"only {compared} cases could be compared"
    assert not wide, f"{len(wide)} tensors differ by more than the tolerance"
