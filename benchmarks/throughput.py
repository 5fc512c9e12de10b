"""Measure how fast runs go: `python benchmarks/throughput.py [--engine cudnn] [--workers 1 2] [--cases 400]`.

Prints a table as Markdown. Rates are of the whole run, drawing and reports left out: cases over the seconds from the
first case's hand-out to the last one's result. Compare rows of one table alone: machines differ, and so do their days.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.case import Case
from harness.execute.campaign import Campaign, Plan
from harness.execute.journal import Journal
from harness.execute.result import CaseResult
from harness.run import open_pool
from harness.strategies import cases, draw_cases
from harness.subjects.source import resolve


def rate(engine: str, workers: int, drawn: Sequence[Case]) -> tuple[float, float]:
    """Return cases per second with so many workers, and the seconds until the first case was handed out."""
    begin = time.perf_counter()
    first: list[float] = []
    with open_pool((resolve("legacy"), resolve("refactored")), engine, workers) as pool:
        pool.run_all(drawn[:workers])  # every worker is up, and has its libraries in memory
        begin_again = time.perf_counter()
        pool.run_all(drawn, lambda case: first.append(time.perf_counter()) if not first else None)
        return len(drawn) / (time.perf_counter() - begin_again), first[0] - begin


def in_passes(drawn: Sequence[Case]) -> tuple[float, float]:
    """Return cases per second in this process, and the part of the time that the subjects' own passes take."""
    import torch

    from harness.engines.api import get_engine
    from harness.execute.pair import Pair
    from harness.observe.session import Session

    torch.set_num_threads(1)
    spent = 0.0
    original = Session._step

    def timed(self: Session, run: object, stage: str, action: Callable[[], None], **rest: bool) -> None:
        def inside() -> None:
            nonlocal spent
            begin = time.perf_counter()
            try:
                action()
            finally:
                spent += time.perf_counter() - begin

        original(self, run, stage, inside, **rest)  # type: ignore[arg-type]

    pair = Pair(resolve("legacy"), resolve("refactored"), get_engine("reference"))
    for case in drawn[:20]:
        pair.run(case)
    Session._step = timed  # type: ignore[method-assign, assignment]
    try:
        begin = time.perf_counter()
        for case in drawn:
            pair.run(case)
        seconds = time.perf_counter() - begin
    finally:
        Session._step = original  # type: ignore[method-assign]
    return len(drawn) / seconds, spent / seconds


class Trivial:
    """Runs no case: what is left is the judging process's own work."""

    def run(self, case: Case, *, alone: bool = False) -> CaseResult:
        return CaseResult(case, "match")

    def run_all(
        self,
        cases: Sequence[Case],
        begun: Callable[[Case], None],
        ended: Callable[[CaseResult], None],
        stop: Callable[[], bool],
    ) -> list[CaseResult | None]:
        results: list[CaseResult | None] = []
        for case in cases:
            begun(case)
            results.append(result := self.run(case))
            ended(result)
        return results


def trivial(count: int) -> None:
    """Run so many trivial cases and print the milliseconds that each took and the memory, as JSON."""
    plan = Plan(("sbhd_sbhd_sbhd", "bshd_bs2hd", "thd_thd_thd", "sbh3d"), count, 0, ("bf16", "fp16"))
    with tempfile.TemporaryDirectory() as folder, Journal(folder) as journal:
        subject = {"spec": "", "resolved": "", "sha256": ""}
        journal.write({
            "event": "start", "schema": 1, "harness": "", "control": subject, "candidate": subject, "engine": "",
            "environment": {}, "seed": 0, "asked": {"layouts": []}, "cases_asked": count, "started": "",
        })  # fmt: skip
        begin = time.perf_counter()
        campaign = Campaign(plan, Trivial(), journal, Path(folder), {})
        campaign.run()
        seconds = time.perf_counter() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"cases": campaign._executed, "ms": 1000 * seconds / campaign._executed, "MiB": memory}))


def machine() -> str:
    """Return what the figures depend on, in a line."""
    versions = [f"Python {platform.python_version()}"]
    with contextlib.suppress(ImportError):
        import torch

        versions.append(f"torch {torch.__version__}")
        if torch.cuda.is_available():
            versions.append(torch.cuda.get_device_name())
    return f"{platform.machine()}, {os.cpu_count()} cores, {', '.join(versions)}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="reference", choices=["reference", "cudnn"])
    parser.add_argument("--workers", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--trivial", nargs="*", type=int, default=[100, 1000, 10_000])
    parser.add_argument("--only-trivial", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_trivial:
        trivial(options.only_trivial)
        return
    drawn = draw_cases(cases(lanes=("plain",)), options.cases, 1)
    print(f"{len(drawn)} plain cases over all layouts, engine {options.engine}; {machine()}\n")
    print("| what | figure |\n|--|--|")
    for workers in options.workers:
        speed, start = rate(options.engine, workers, drawn)
        print(f"| {workers} worker(s) | {speed:.0f} cases/s; {start:.1f} s until the first case |", flush=True)
    if options.engine == "reference":
        speed, share = in_passes(drawn)
        print(f"| in one process, without isolation | {speed:.0f} cases/s; {share:.0%} of it in the subjects' passes |")
    for count in options.trivial:
        done = subprocess.run([sys.executable, __file__, "--only-trivial", str(count)], capture_output=True, check=True)
        found = json.loads(done.stdout)
        print(f"| {found['cases']:,} trivial cases | {found['ms']:.2f} ms each, {found['MiB']:.0f} MiB |", flush=True)


if __name__ == "__main__":
    main()
