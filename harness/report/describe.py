"""The words that every format of the report shares: of a case, a value, a number, a verdict."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.case import SCHEMA, Case

if TYPE_CHECKING:
    from harness.ledger import State

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CountWords:
    """How a count is named: in full, in a narrow column, by a sign that needs no colour, and what it means."""

    label: str
    short: str
    sign: str
    meaning: str


COUNTS: dict[str, CountWords] = {
    "executed": CountWords("executed", "exec", "Σ", "ran to a comparison"),
    "match": CountWords("match", "match", "✓", "every bit that was seen agrees"),
    "both_raised": CountWords("both raised", "raised", "‖", "both sides raised alike: errors agree, no numbers seen"),
    "difference": CountWords("difference", "differ", "≠", "the candidate differs from the control"),
    "intended": CountWords("intended", "intend", "≐", "differs only as declared"),
    "noisy": CountWords("noisy", "noisy", "≈", "the same code varies from run to run, the candidate within that"),
    "crash": CountWords("crash", "crash", "✕", "the candidate ended the process"),
    "unsupported": CountWords("unsupported", "unsup", "–", "the engine refused the case"),
    "error": CountWords("error", "error", "!", "a fault of the harness or the machine"),
}
"""One row per count of ``judge.empty_counts``, in the order of print."""

VERDICT_SIGNS = {"neutral": "✓", "not neutral": "✕", "unverified": "?"}

ABSENT_KINDS = frozenset({"missing", "extra", "exception", "crash"})


def plural(number: int, one: str, many: str | None = None) -> str:
    """Return ``1 case`` or ``2 cases``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def visible(text: str, keep: str = "") -> str:
    """Return the text with every character that acts instead of being seen written as its escape.

    These are control characters, line and paragraph separators, bidirectional and other format marks, and halves of
    surrogate pairs; those in ``keep`` stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if char in keep or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else _escape(char)
        for char in text
    )


def _escape(char: str) -> str:
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if char in named:
        return named[char]
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clip(text: str, limit: int) -> str:
    """Return at most about ``limit`` characters of the text, and how many more there are."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text) - limit:,} more characters)"


def number(value: Any) -> float:
    """Return a number of the journal, in which ``inf``, ``-inf`` and ``nan`` are strings."""
    return float(value)


def show_number(value: Any) -> str:
    """Return a number in at most three digits, whole ones in full."""
    value = number(value)
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return f"{int(value)}"
    return f"{value:.3g}"


def show_seconds(value: Any) -> str:
    """Return a duration given in seconds, in words."""
    seconds = number(value)
    if not math.isfinite(seconds) or seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


_DEFAULTS: dict[str, Any] = {"schema": SCHEMA} | {
    field.name: list(field.default) if isinstance(field.default, tuple) else field.default
    for field in dataclasses.fields(Case)
}


def changed_fields(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a case that differ from their default, and those that this version does not know."""
    return {name: value for name, value in case.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}


def describe_case(case: Mapping[str, Any]) -> str:
    """Return one line with the fields of a case that differ from the defaults, ``name=value`` each."""
    changed = changed_fields(case)
    if not changed:
        return "all defaults"
    return visible(" ".join(f"{name}={_compact(value)}" for name, value in changed.items()))


def case_effort(case: Mapping[str, Any]) -> tuple[int, float]:
    """Return how much there is to understand in a case: fields away from the defaults, then the product of sizes."""
    size = 1.0
    for name in ("batch_size", "num_heads", "max_seqlen_q", "max_seqlen_kv", "head_dim_qk"):
        value = case.get(name, _DEFAULTS[name])
        size *= value if isinstance(value, (int, float)) else 1
    return len(changed_fields(case)), size


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def describe_value(value: Any, kind: str) -> str:
    """Return a control's or candidate's value in words; ``kind`` is the difference's, which says if None is absence."""
    if value is None:
        return "absent" if kind in ABSENT_KINDS else "None"
    if isinstance(value, Mapping) and set(value) == {"dtype", "shape", "stride", "is"}:
        return f"{value['dtype']} {_json(value['shape'])}, stride {_json(value['stride'])}, {_compact(value['is'])}"
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def compared(counts: Mapping[str, int]) -> int:
    """Return on how many cases numbers were compared."""
    return counts["executed"] - counts["both_raised"]


def headline(results: Results) -> str:
    """Return the verdict in words, one sentence."""
    counts, verdict = results["counts"], results["verdict"]
    if verdict == "neutral":
        return f"Behaviour-neutral on {plural(compared(counts), 'comparison')} on the {results['engine']} engine"
    if verdict == "not neutral":
        found, families_ = counts["difference"] + counts["crash"], len(families(results))
        return (
            f"Not behaviour-neutral: {found:,} of {plural(counts['executed'], 'executed case')} "
            f"{'differs' if found == 1 else 'differ'}, in {plural(families_, 'way')}, on the {results['engine']} engine"
        )
    return visible(f"Unverified: {clip(results['reasons'][0] if results['reasons'] else 'no reason was given', 300)}")


def not_checked_line(results: Results) -> str:
    """Return what was not checked in one sentence, or an empty string: a few lanes by name, layouts by number."""
    names: dict[str, list[str]] = {"lane": [], "layout": []}
    others: list[str] = []
    for item in results["not_checked"]:
        names[item["slice"]].append(item["name"]) if item["slice"] in names else others.append(item["what"])
    parts = others
    for slice_, found in names.items():
        few = len(found) <= (6 if slice_ == "lane" else 2)
        if found and few:
            parts.append(f"{slice_ if len(found) == 1 else slice_ + 's'} {', '.join(found)}")
        elif found:
            parts.append(f"{len(found)} of {results['tables'][slice_]} {slice_}s")
    return visible(f"Not checked: {'; '.join(parts)}.") if parts else ""


STATES: dict[State, str] = {"raised": "both sides raised", "refused": "the engine refused", "unreached": "not reached"}
"""What a combination of levels is called that was not executed; see ``harness.ledger.STATES``."""


def percent(share: float) -> str:
    """Return a part as a percentage, rounded down: only all is 100 %."""
    return f"{math.floor(share * 1000) / 10:.1f} %"


def coverage_line(results: Results) -> str:
    """Return in one sentence how many combinations of levels were executed, and what was asked for."""
    found = results["coverage"]
    least = "" if found["least"] is None else f" ({percent(found['least'])} asked for)"
    rest = ", ".join(f"{found[state]:,} {words}" for state, words in STATES.items() if found[state])
    return (
        f"{found['executed']:,} of {found['valid']:,} valid combinations of {found['strength']} levels were executed, "
        f"{percent(found['share'])}{least}{': ' + rest if rest else ''}"
    )


def coverage_gaps(results: Results, most: int) -> list[str]:
    """Return a line for each group of combinations that was not executed, the largest first, at most so many."""
    gaps = [(state, gap) for state, gaps in results["coverage"]["gaps"].items() for gap in gaps]
    gaps.sort(key=lambda item: -item[1]["count"])
    return [gap_line(state, gap) for state, gap in gaps[:most]]


def gap_line(state: State, gap: Mapping[str, Any]) -> str:
    """Return one group of combinations that was not executed, in words, and what became of it."""
    return f"{STATES[state]}: {gap_words(gap)}"


def gap_words(gap: Mapping[str, Any]) -> str:
    """Return one group of combinations that was not executed, in words."""
    some = f": {', '.join(gap['some'])}{', …' if gap['count'] > len(gap['some']) else ''}" if gap["some"] else ""
    reason = f" ({gap['reason']})" if gap["reason"] else ""
    return f"{gap['what']}, {plural(gap['count'], 'combination')}{some}{reason}"


def asked_words(results: Results) -> str:
    """Return what the run was asked for: how many cases, of which layouts and lanes, at which strength."""
    asked = results["asked"]
    parts = [plural(results["cases_asked"], "case")]
    parts += [f"{kind} {', '.join(asked[kind + 's'])}" for kind in ("layout", "lane") if asked.get(kind + "s")]
    if asked.get("strength"):
        parts.append(f"strength {asked['strength']}")
    return "; ".join(parts)


def origin_words(results: Results) -> str:
    """Return where the cases came from: ``40 stored, 428 of the covering set``; empty where that is not known."""
    words = {"stored": "stored", "covering": "of the covering set", "explored": "explored"}
    return ", ".join(f"{number_:,} {words[name]}" for name, number_ in results["origins"].items() if name in words)


def engine_line(results: Results) -> str:
    """Return what the engine is and what a verdict on it is worth."""
    if results["engine"] == "reference":
        return (
            "The reference engine is plain PyTorch: this run shows what the two implementations pass, save and return. "
            "It is no evidence about cuDNN's kernels."
        )
    if results["engine"] == "cudnn":
        return "The cudnn engine runs TransformerEngine's own kernels on the GPU named under Environment."
    return visible(f"The engine was {results['engine']}.")


@dataclass(frozen=True, slots=True)
class Family:
    """All differences of one path and kind: how many cases have it, an example, and the ids of the cases."""

    path: str
    kind: str
    case_ids: tuple[str, ...]
    example: dict[str, Any]


def families(results: Results) -> list[Family]:
    """Return the differences grouped by path and kind, those of most cases first."""
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for difference in results["differences"]:
        groups.setdefault((difference["path"], difference["kind"]), {}).setdefault(difference["case_id"], difference)
    found = [
        Family(path, kind, tuple(cases), min(cases.values(), key=lambda item: case_effort(item["case"])))
        for (path, kind), cases in groups.items()
    ]
    return sorted(found, key=lambda family: -len(family.case_ids))


def failing(results: Results) -> list[dict[str, Any]]:
    """Return one case per way to differ, easiest first: the shrunk one, or else the easiest of those that were run."""
    shrunk = {(item["path"], item["kind"]) for item in results["smallest"]}
    rest = [family.example for family in families(results) if (family.path, family.kind) not in shrunk]
    return sorted(results["smallest"], key=lambda item: case_effort(item["case"])) + sorted(
        rest, key=lambda item: case_effort(item["case"])
    )


def not_checked_groups(results: Results) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Return what was not checked by reason, and within a reason by kind of slice: ``lane``, ``lanes``, ``layouts``.

    What is neither a lane nor a layout has the kind ``""``.
    """
    groups: dict[str, dict[str, list[str]]] = {}
    for item in results["not_checked"]:
        slice_ = item["slice"] if item["slice"] in ("lane", "layout") else ""
        groups.setdefault(item["reason"], {}).setdefault(slice_, []).append(item["name"] if slice_ else item["what"])
    return [
        (reason, [(f"{slice_}s" if slice_ and len(names) > 1 else slice_, names) for slice_, names in slices.items()])
        for reason, slices in groups.items()
    ]


def further_reasons(results: Results) -> list[str]:
    """Return the reasons of the verdict that the headline does not already give."""
    words = headline(results)
    return [reason for reason in results["reasons"] if visible(reason) not in words]


def count_words(counts: Mapping[str, int]) -> str:
    """Return the counts that are not zero, in words: ``212 executed, 200 match, 12 both raised``."""
    return ", ".join(f"{counts[name]:,} {words.label}" for name, words in COUNTS.items() if counts[name]) or "no case"


def one_line(text: str) -> str:
    """Return the text on one line, runs of white space as one space, acting characters as escapes."""
    return visible(re.sub(r"\s+", " ", text).strip())
