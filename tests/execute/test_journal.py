"""The journal keeps what it was told, and says clearly what it cannot keep or read."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from harness.execute import journal as module
from harness.execute.journal import FIELDS, OPTIONAL, Journal, JournalError, read_journal

Event = dict[str, Any]
SUBJECT = {"spec": "legacy", "resolved": "legacy_impl", "sha256": "ab" * 32}
START: Event = {
    "event": "start", "schema": 1, "harness": "0.1.0", "control": SUBJECT, "candidate": SUBJECT, "engine": "reference",
    "environment": {"python": "3.11"}, "seed": 1, "asked": {"layouts": ["sbh3d"]}, "cases_asked": 2,
    "started": "2025-01-02T03:04:05+00:00", "dtypes": ["bf16", "fp16"],
}  # fmt: skip
CASE: Event = {
    "event": "case", "case_id": "0123456789ab", "case": {"schema": 1, "qkv_layout": "sbh3d"}, "outcome": "match",
    "both_raised": False, "reason": None, "lanes": ["packed-f16"], "differences": [], "noise": [], "notes": [],
    "seconds": 0.5, "origin": "explored",
}  # fmt: skip
DIFFERENCE: Event = {
    "path": "grad/q", "kind": "value", "control": 1, "candidate": 2, "message": "1 became 2", "distance": None,
}  # fmt: skip
SMALLEST: Event = {
    "event": "smallest", "path": "grad/q", "kind": "value", "from_case_id": "0123456789ab", "case_id": "ba9876543210",
    "case": {"qkv_layout": "sbh3d"}, "file": "failures/ba9876543210.json", "differences": [DIFFERENCE],
}  # fmt: skip
BEGUN: Event = {"event": "begun", "case_id": "0123456789ab", "case": {"schema": 1, "qkv_layout": "sbh3d"}}
END: Event = {"event": "end", "seconds": 1.5, "harness_error": None, "stopped": None}
WHOLE = [START, BEGUN, CASE, SMALLEST, END]


def write(folder: Path, *events: Event) -> Path:
    with Journal(folder) as journal:
        for event in events:
            journal.write(event)
    return folder / "journal.jsonl"


def lines(*events: Event) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def test_what_was_written_is_read_back_by_folder_and_by_file(tmp_path: Path) -> None:
    file = write(tmp_path / "new" / "run", *WHOLE)
    assert read_journal(file) == read_journal(file.parent) == WHOLE


def test_each_event_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for number, event in enumerate(WHOLE, start=1):
            journal.write(event)
            assert len(read_journal(tmp_path)) == number


def test_every_line_is_valid_json_with_numbers_that_are_not_finite_as_words(tmp_path: Path) -> None:
    distance = {"largest_absolute": math.inf, "largest_relative": math.nan, "elements": 4, "first": (0, -0.0)}
    difference = DIFFERENCE | {"control": -math.inf, "candidate": 1e300, "distance": distance}
    noisy = CASE | {"differences": [difference], "noise": [{"path": "grad/v", "spread": math.nan}]}
    file = write(tmp_path, START, noisy)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    for line in file.read_bytes().splitlines():
        json.loads(line, parse_constant=refuse)
    back = read_journal(file)[1]
    assert back["noise"] == [{"path": "grad/v", "spread": "nan"}]
    [found] = back["differences"]
    assert (found["control"], found["candidate"]) == ("-inf", 1e300)
    assert found["distance"]["largest_absolute"] == "inf"
    assert found["distance"]["largest_relative"] == "nan"
    assert math.copysign(1, found["distance"]["first"][1]) == -1


def test_any_text_comes_back_as_it_was(tmp_path: Path) -> None:
    reason = "a\nb\u2028c\u202e\x00\ud800 ü 漢 {}"
    file = write(tmp_path, START, CASE | {"outcome": "error", "reason": reason})
    assert file.read_bytes().count(b"\n") == 2
    assert read_journal(file)[1]["reason"] == reason


@pytest.mark.parametrize("torn", [1, 20, -2])
def test_a_torn_last_line_is_left_out(tmp_path: Path, torn: int) -> None:
    file = tmp_path / "journal.jsonl"
    file.write_bytes(lines(START, CASE) + lines(CASE)[:torn])
    assert read_journal(file) == [START, CASE]


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    file.write_bytes(lines(*WHOLE)[:-1])
    assert read_journal(file) == WHOLE


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (lines(START)[:30], "line 1 .* not JSON"),
        (lines(START) + b'{"torn\n' + lines(CASE), "line 2 .* not JSON"),
        (lines(START) + b"\n" + lines(CASE), "line 2 .* not JSON"),
        (lines(START) + b"[1]\n" + lines(CASE), "line 2 .* a JSON object, not list"),
        (lines(START) + b'{"event": "case", "seconds": NaN}\n' + lines(CASE), "NaN is no JSON number"),
        (lines(START) + b"\xff\xfe\n" + lines(CASE), "line 2"),
        (lines(START) + b"[" * 100_000 + b"\n" + lines(CASE), "line 2"),
        (lines(*WHOLE) + b'{"to', "line 6"),
        (lines(*WHOLE, CASE), "line 6 .* after the end"),
        (lines(CASE), "line 1 .*'start' comes first"),
        (lines(START, START), "line 2 .*'start' comes first and once"),
        (lines(START, CASE | {"event": "cases"}), "line 2 .*'cases' is not one of"),
        (lines(START, CASE | {"outcome": "passed"}), "outcome='passed' is not one of match"),
        (lines(START, CASE | {"both_raised": 1}), "both_raised=1"),
        (lines(START, CASE | {"seconds": True}), "seconds=True"),
        (lines(START, CASE | {"seconds": "soon"}), "seconds='soon' is no number"),
        (lines(START, CASE | {"lanes": [3]}), "lists of str"),
        (lines(START, CASE | {"case": {}}), "qkv_layout=None"),
        (lines(START, CASE | {"differences": [{"path": "grad/q"}]}), "a difference lacks 'kind'"),
        (lines(START, CASE | {"noise": [{"path": "grad/q"}]}), "noise takes"),
        (lines(START | {"control": {}}), "control has spec=None"),
        (lines(START | {"asked": {}}), "layouts=None"),
        (lines(START | {"asked": {"layouts": [], "lanes": "thd"}}), "asked has lanes='thd'; it takes a list of names"),
        (lines(START | {"asked": {"layouts": [], "strength": 4}}), "asked has strength=4; it takes 0, 2 or 3"),
        (lines(START | {"asked": {"layouts": [], "strength": True}}), "asked has strength=True"),
        (lines(START | {"asked": {"layouts": [], "min_coverage": "all"}}), "asked has min_coverage='all'"),
        (lines(START | {"dtypes": "bf16"}), "dtypes='bf16'; it takes list or null"),
        (lines(START, CASE | {"origin": 7}), "origin=7; it takes str or null"),
    ],
)
def test_a_journal_that_is_not_whole_is_refused_by_line(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "journal.jsonl"
    file.write_bytes(content)
    with pytest.raises(JournalError, match=says) as caught:
        read_journal(file)
    assert str(file) in str(caught.value)


def test_another_schema_is_refused_with_the_version_that_wrote_it(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_bytes(lines(START | {"schema": 2, "harness": "9.9"}))
    with pytest.raises(JournalError, match=r"schema=2 and this version reads schema=1; .*'9\.9'"):
        read_journal(tmp_path)


def test_a_missing_journal_is_named_with_what_to_give_instead(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"no journal .*journal\.jsonl; give the folder"):
        read_journal(tmp_path / "nothing")


@pytest.mark.parametrize("name", list(FIELDS))
def test_every_field_of_an_event_is_needed(tmp_path: Path, name: str) -> None:
    event = next(event for event in WHOLE if event["event"] == name)
    for index, field in enumerate(FIELDS[name]):
        with Journal(tmp_path / str(index)) as journal:
            if name != "start":
                journal.write(START)
            with pytest.raises(JournalError, match=rf"lacks '{field}'"):
                journal.write({key: value for key, value in event.items() if key != field})


@pytest.mark.parametrize("name", list(OPTIONAL))
def test_a_field_that_an_older_journal_lacks_is_read_as_null(tmp_path: Path, name: str) -> None:
    old = [{key: value for key, value in event.items() if key not in OPTIONAL[name]} for event in WHOLE]
    for read, event in zip(read_journal(write(tmp_path, *old)), WHOLE, strict=True):
        assert read == event | (dict.fromkeys(OPTIONAL[name]) if event["event"] == name else {})
    assert all(name_ in event for event in WHOLE if event["event"] == name for name_ in OPTIONAL[name])


def test_an_event_that_would_not_be_read_is_not_written(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        with pytest.raises(JournalError, match="'start' comes first"):
            journal.write(CASE)
        journal.write(START)
        with pytest.raises(JournalError, match="event/case/tensor is a object, which JSON does not hold"):
            journal.write(CASE | {"case": {"tensor": object()}})
        journal.write(END)
        with pytest.raises(JournalError, match="after the end"):
            journal.write(CASE)
    assert read_journal(tmp_path) == [START, END]


def test_a_journal_that_is_there_is_kept_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    write(tmp_path, *WHOLE)
    with pytest.raises(JournalError, match="holds another run; choose another folder"):
        Journal(tmp_path)
    assert read_journal(tmp_path) == WHOLE
    with Journal(tmp_path, replace=True) as journal:
        journal.write(START)
    assert read_journal(tmp_path) == [START]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"cannot write the journal .*file.*; "):
        Journal(tmp_path / "file")
    with pytest.raises(JournalError, match="cannot write the journal"):
        Journal("/proc/no-such-folder")


class Full(io.FileIO):
    """A file on a disk that fills up in the middle of a line."""

    room = 10**9

    def write(self, data: Any) -> int:  # type: ignore[override]
        if self.room <= 0:
            raise OSError(28, os.strerror(28))
        part = bytes(data)[: self.room]
        self.room -= len(part)
        return super().write(part)


def test_a_full_disk_is_said_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open", lambda path, mode, buffering: Full(path, mode), raising=False)
    with Journal(tmp_path) as journal:
        journal.write(START)
        journal._file.room = 40  # type: ignore[attr-defined]
        with pytest.raises(JournalError, match="No space left on device; its 1 events so far are kept"):
            journal.write(CASE)
        assert (tmp_path / "journal.jsonl").read_bytes().endswith(b"}\n")
        assert read_journal(tmp_path) == [START]
        journal._file.room = 10**6  # type: ignore[attr-defined]
        journal.write(CASE)
    assert read_journal(tmp_path) == [START, CASE]


def test_a_closed_journal_takes_nothing_more(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.write(START)
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.write(CASE)
