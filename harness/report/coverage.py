"""The coverage of a run on its own: every combination of levels that was not executed, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from harness.ledger import STATES, Ledger, by_factors, groups, summary
from harness.report.describe import STATES as WORDS
from harness.report.describe import gap_words, one_line, percent

SHOWN = 40
NAMED = 6


def lines(found: Ledger, pairs: int = SHOWN) -> Iterator[str]:
    """Yield the ledger line by line: the counts, the pairs of factors with gaps, then the gaps by state."""
    yield (
        f"strength {found.strength}: {found.count('executed'):,} of {found.valid:,} valid combinations executed, "
        f"{percent(found.share)}"
    )
    for name, meaning in STATES.items():
        yield f"  {found.count(name):>9,}  {name}: {meaning}"
    if found.unread:
        yield f"  {found.unread:,} cases of the journal cannot be read by this version and count for nothing"
    gaps = sorted((row for row in by_factors(found) if missing(row)), key=lambda row: (-missing(row), row["factors"]))
    if gaps:
        yield ""
        yield f"by two factors ({len(gaps)} pairs with gaps): executed of valid, then what became of the rest"
    for row in gaps[:pairs]:
        rest = ", ".join(f"{row[state]:,} {words}" for state, words in WORDS.items() if row[state])
        valid = row["executed"] + missing(row)
        yield f"  {' × '.join(row['factors'])}: {row['executed']:,} of {valid:,}; {rest}"
    if len(gaps) > pairs:
        yield f"  {len(gaps) - pairs} more pairs; --json has all"
    for state, words in WORDS.items():
        own = groups(found, state, NAMED)
        if not own:
            continue
        yield ""
        yield f"{words}:"
        for group in own[:SHOWN]:
            yield one_line(f"- {gap_words(asdict(group))}")
        if len(own) > SHOWN:
            rest_count = sum(group.count for group in own[SHOWN:])
            yield f"- {len(own) - SHOWN} more groups, {rest_count:,} combinations; --json has all"


def missing(row: Mapping[str, Any]) -> int:
    """Return how many combinations of a row of ``by_factors`` were not executed."""
    return sum(row[state] for state in WORDS)


def as_json(found: Ledger) -> dict[str, Any]:
    """Return the whole ledger as JSON values: every pair of factors, and every combination that was not executed."""
    return summary(found, None, None) | {"by_factors": by_factors(found)}
