"""Made-up journals, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.case import Case
from harness.execute.journal import Journal
from harness.lanes import lanes_of

Event = dict[str, Any]
ARRAY = {"dtype": "bfloat16", "shape": [16, 2, 4, 8], "stride": [64, 32, 8, 1], "is": "fresh"}


def start(layouts: Sequence[str] = (), engine: str = "reference", asked: int = 0, **changes: Any) -> Event:
    return {
        "event": "start",
        "schema": 1,
        "harness": "0.1.0",
        "control": {"spec": "legacy", "resolved": "legacy_impl/backends.py", "sha256": "ab" * 32},
        "candidate": {"spec": "refactored", "resolved": "refactored_impl/backends.py", "sha256": "cd" * 32},
        "engine": engine,
        "environment": {"python": "3.11.2", "torch": "2.13.0+cpu", "NVTE_FUSED_ATTN": "unset"},
        "seed": 7,
        "asked": {"layouts": list(layouts)},
        "cases_asked": asked,
        "started": "2025-01-02T03:04:05+00:00",
    } | changes


def difference(path: str = "grad/q", kind: str = "value", **changes: Any) -> Event:
    return {
        "path": path,
        "kind": kind,
        "control": ARRAY,
        "candidate": ARRAY,
        "message": "3 of 2048 elements differ, first at [0, 1, 0, 3], by at most 0.0156 (0.0031 of the largest "
        "magnitude)",
        "distance": {
            "elements": 2048, "different": 3, "first": [0, 1, 0, 3], "largest_absolute": 0.0156,
            "largest_relative": 0.0031,
        },
    } | changes  # fmt: skip


def ran(outcome: str = "match", case: Case | None = None, **changes: Any) -> Event:
    case = case if case is not None else Case()
    event = {
        "event": "case",
        "case_id": case.id,
        "case": case.to_dict(),
        "outcome": outcome,
        "both_raised": False,
        "reason": "THD comes with a later release" if outcome == "unsupported" else None,
        "lanes": list(lanes_of(case)),
        "differences": [difference()] if outcome == "difference" else [],
        "noise": [{"path": "grad/v", "spread": 0.25}] if outcome == "noisy" else [],
        "notes": [],
        "seconds": 0.125,
    }
    return event | changes


def smallest(path: str, kind: str, from_case_id: str, case: Case, **changes: Any) -> Event:
    return {
        "event": "smallest",
        "path": path,
        "kind": kind,
        "from_case_id": from_case_id,
        "case_id": case.id,
        "case": case.to_dict(),
        "file": f"failures/{case.id}.json",
        "differences": [difference(path, kind, **changes)],
    }


def end(harness_error: str | None = None, seconds: float = 12.5) -> Event:
    return {"event": "end", "seconds": seconds, "harness_error": harness_error}


def packed(**changes: Any) -> Case:
    return Case(qkv_layout="sbh3d", **changes)


def write(folder: Path, *events: Event) -> Path:
    with Journal(folder) as journal:
        for event in events:
            journal.write(event)
    return folder


def neutral() -> list[Event]:
    cases = [ran(case=packed(seed=seed, dtype=("bf16", "fp16")[seed % 2])) for seed in range(212)]
    cases += [ran(case=packed(seed=seed), both_raised=True) for seed in range(300, 308)]
    cases += [ran("noisy", packed(seed=seed, dropout_p=0.5)) for seed in range(400, 403)]
    cases[0]["notes"] = ["attn_scale comes from the caller, not from the head size"]
    return [start(["sbh3d"], asked=len(cases)), *cases, end()]


FAMILIES = (
    ("grad/q", "value", {}),
    (
        "call/fused_attn_bwd/0/attn_scale", "value",
        {"control": 0.35355339059327373, "candidate": 0.5, "message": "0.35355339059327373 became 0.5",
         "distance": None},
    ),
    (
        "saved/q", "alias",
        {"candidate": ARRAY | {"is": "view of buffer qkv"}, "message": "fresh became view of buffer qkv",
         "distance": None},
    ),
    (
        "exception/message", "exception",
        {"control": None, "candidate": "zip() argument 2 is shorter than argument 1",
         "message": "only the candidate has it", "distance": None},
    ),
)  # fmt: skip


def different() -> list[Event]:
    layouts = ("sbh3d", "bs3hd", "bshd_bs2hd", "sbhd_sbhd_sbhd", "paged_kv_bshd_bshd_bshd")
    events: list[Event] = []
    for seed in range(900):
        packed_ = seed % 5 < 2
        case = Case(
            qkv_layout=layouts[seed % 5], seed=seed, num_heads=(3, 4)[seed % 2], num_gqa_groups=(3, 4)[seed % 2],
            max_seqlen_q=17, max_seqlen_kv=17, head_dim_qk=16, head_dim_v=16,
            dropout_p=0.25 if seed % 11 == 0 else 0.0, page_size=17 if seed % 5 == 4 else None,
        )  # fmt: skip
        if seed % 5 == 4:
            events.append(ran("unsupported", case, reason="paged KV is not part of the reference engine yet"))
        elif packed_ and seed % 3 == 0:
            path, kind, changes = FAMILIES[seed % 4]
            events.append(ran("difference", case, differences=[difference(path, kind, **changes)]))
        elif seed % 97 == 0:
            events.append(ran("crash", case, reason="the candidate ended with signal 11"))
        else:
            events.append(ran("noisy" if seed % 13 == 0 else "match", case))
    from_id = next(event["case_id"] for event in events if event["outcome"] == "difference")
    small = [smallest(path, kind, from_id, packed(batch_size=1, max_seqlen_q=2, max_seqlen_kv=2, seed=i), **changes)
             for i, (path, kind, changes) in enumerate(FAMILIES[:3])]  # fmt: skip
    return [start(asked=900), *events, *small, end(seconds=754.2)]


def unsupported() -> list[Event]:
    cases = [
        ran("unsupported", Case(qkv_layout="thd_thd_thd", seed=seed, attn_mask_type="padding")) for seed in range(40)
    ]
    return [start(["thd_thd_thd"], asked=40), *cases, end(seconds=0.4)]


def killed() -> list[Event]:
    return [
        start(["sbh3d", "t3hd"], engine="cudnn", asked=200),
        *neutral()[1:40],
        ran("error", packed(seed=999), reason="CUDA out of memory: tried to allocate 2.00 GiB"),
    ]


HOSTILE = "<script>alert(1)</script>\"'`|*_ \u202eabc\u2066 {{ 7*7 }} ]]> \x00\x1b[31m\ud800 " + "x" * 3000


def hostile() -> list[Event]:
    case = packed().to_dict() | {"unknown": HOSTILE}
    bad = difference(HOSTILE, HOSTILE, control=HOSTILE, candidate={HOSTILE: [HOSTILE]}, message=HOSTILE)
    subject = {"spec": HOSTILE, "resolved": HOSTILE, "sha256": HOSTILE}
    return [
        start([HOSTILE], control=subject, candidate=subject, environment={HOSTILE: HOSTILE}, asked=9, harness=HOSTILE,
              started=HOSTILE),
        ran("difference", case_id=HOSTILE, differences=[bad]) | {"case": case, "lanes": [HOSTILE], "notes": [HOSTILE]},
        ran("unsupported", reason=HOSTILE) | {"lanes": [HOSTILE]},
        ran("error", reason=HOSTILE) | {"case": case | {"qkv_layout": HOSTILE}},
        ran("noisy", noise=[{"path": HOSTILE, "spread": float("nan")}]),
        ran("intended", differences=[bad]),
        smallest(HOSTILE, HOSTILE, HOSTILE, packed(), control=HOSTILE, message=HOSTILE)
        | {"case": case, "file": HOSTILE, "case_id": HOSTILE},
        end(HOSTILE),
    ]  # fmt: skip


JOURNALS = {
    "neutral": neutral, "different": different, "unsupported": unsupported, "killed": killed, "hostile": hostile,
}  # fmt: skip
