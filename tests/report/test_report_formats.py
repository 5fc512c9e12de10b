"""Every format tells the same story, and shows whatever text a run left without running it."""

from __future__ import annotations

import functools
import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import made_up
import pytest
from made_up import JOURNALS, Event, difference, end, packed, ran, start, write
from rich.console import Console

from harness.case import SCHEMA, Case
from harness.execute.journal import JournalError
from harness.judge import empty_counts
from harness.report import FORMATS, ReportError, junit, markdown, summarise, write_reports
from harness.report.describe import (
    COUNTS,
    VERDICT_SIGNS,
    clip,
    describe_case,
    describe_value,
    families,
    headline,
    show_number,
    show_seconds,
    visible,
)
from harness.report.terminal import print_results


@functools.cache
def _summarised(journal: str) -> dict[str, Any]:
    return summarise(json.loads(journal), "out")


def summarised(events: list[Event]) -> dict[str, Any]:
    """Return the results of a journal, made once for each; they are only read."""
    return _summarised(json.dumps(events))


def rendered(name: str, events: list[Event]) -> str:
    return FORMATS[name].render(summarised(events), events)


def terminal(events: list[Event], width: int = 80, **options: Any) -> str:
    file = io.StringIO()
    print_results(summarised(events), Console(file=file, width=width, **options))
    return file.getvalue()


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


class Page(HTMLParser):
    """The elements and the text of a page."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def test_every_count_and_every_verdict_has_its_words() -> None:
    assert set(COUNTS) == set(empty_counts())
    assert len({words.sign for words in COUNTS.values()}) == len(COUNTS)
    assert set(VERDICT_SIGNS) == {"neutral", "not neutral", "unverified"}


def test_files_are_written_whole_and_alone(tmp_path: Path) -> None:
    results = write_reports(write(tmp_path, *made_up.neutral()))
    assert {path.name for path in tmp_path.iterdir()} == {
        "journal.jsonl", "results.json", "report.html", "junit.xml", "summary.md",
    }  # fmt: skip
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert results["exit_code"] == 0


@pytest.mark.parametrize("name", list(JOURNALS))
def test_the_journal_alone_gives_identical_files(name: str, tmp_path: Path) -> None:
    def files() -> dict[str, bytes]:
        return {format_.file: (tmp_path / format_.file).read_bytes() for format_ in FORMATS.values()}

    write(tmp_path, *JOURNALS[name]())
    write_reports(tmp_path, run="out")
    first = files()
    for format_ in FORMATS.values():
        (tmp_path / format_.file).write_text("stale")
    write_reports(tmp_path / "journal.jsonl", run="out")
    assert files() == first


def test_a_report_that_cannot_be_written_is_named_and_the_old_one_stays(tmp_path: Path) -> None:
    write(tmp_path, *made_up.neutral())
    (tmp_path / "junit.xml").mkdir()
    with pytest.raises(ReportError, match=r"cannot write .*junit\.xml: .*; free the disk or choose"):
        write_reports(tmp_path)
    assert not list(tmp_path.glob(".*tmp"))


def test_without_a_journal_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(JournalError):
        write_reports(tmp_path)
    assert not list(tmp_path.iterdir())


def test_reports_start_without_torch() -> None:
    code = (
        "import sys, harness.report, harness.report.terminal, harness.execute.journal; "
        "sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("neutral", "Behaviour-neutral on 215 comparisons on the reference engine"),
        ("different", "Not behaviour-neutral: 126 of 720 executed cases differ, in 5 ways, on the reference engine"),
        ("unsupported", "Unverified: no case was executed"),
        ("killed", "Unverified: the run did not end"),
    ],
)
def test_every_format_leads_with_the_same_verdict(name: str, words: str) -> None:
    events = JOURNALS[name]()
    results = summarised(events)
    assert headline(results) == words
    assert flat(terminal(events)).startswith(f" {VERDICT_SIGNS[results['verdict']]} {words}")
    assert rendered("markdown", events).startswith(f"# {VERDICT_SIGNS[results['verdict']]} {words}\n")
    page = Page(rendered("html", events))
    assert words in page.text
    assert page.text.index(words) < page.text.index("Compared")
    assert results["verdict"] in rendered("junit", events)


@pytest.mark.parametrize("engine", ["reference", "cudnn"])
def test_the_reference_engine_is_said_to_be_no_evidence_about_kernels(engine: str) -> None:
    events = [start(engine=engine), ran(), end()]
    for text in (terminal(events), rendered("markdown", events), Page(rendered("html", events)).text):
        assert ("no evidence about cuDNN's kernels" in flat(text)) == (engine == "reference")


def test_every_format_shows_what_was_not_checked_with_the_reason() -> None:
    events = made_up.unsupported()
    for text in (terminal(events), rendered("markdown", events), Page(rendered("html", events)).text):
        assert "THD comes with a later release" in flat(text)
        assert "Not checked" in text


def test_every_format_replays_the_failing_cases() -> None:
    events = made_up.different()
    for item in summarised(events)["smallest"]:
        assert item["replay"] == f"harness replay {item['case_id']} --run out"
        for text in (terminal(events), rendered("markdown", events), Page(rendered("html", events)).text):
            assert item["replay"] in text
    first = next(event for event in events if event.get("outcome") == "difference")
    assert f"harness replay {first['case_id']} --run out" in rendered("junit", events)


def test_a_way_to_differ_that_was_not_shrunk_is_shown_all_the_same() -> None:
    events = [start(), ran("difference", packed(seed=4)), end()]
    for text in (terminal(events), rendered("markdown", events), Page(rendered("html", events)).text):
        assert f"harness replay {packed(seed=4).id} --run out" in text


def test_nothing_compared_is_not_called_free_of_noise() -> None:
    assert "agreed with itself" not in rendered("html", made_up.unsupported())
    assert "agreed with itself" in rendered("html", [start(), ran(), end()])


# -- hostile text


def test_hostile_text_is_shown_on_the_page_and_not_run() -> None:
    page = Page(rendered("html", made_up.hostile()))
    assert not {"script", "img", "iframe", "link"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert "<script>alert(1)</script>" in page.text
    assert "{{ 7*7 }}" in page.text
    assert "\\u202e" in page.text
    assert len(page.text) < 200_000


@pytest.mark.parametrize("name", ["html", "markdown", "terminal"])
def test_no_character_that_acts_unseen_is_left(name: str) -> None:
    events = made_up.hostile()
    text = terminal(events) if name == "terminal" else rendered(name, events)
    assert visible(text, keep="\n") == text


def test_the_page_needs_no_network() -> None:
    text = rendered("html", made_up.different())
    assert not re.search(r"https?:|url\(|@import|<script|<link|<img", text)
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text


def test_hostile_text_is_valid_xml() -> None:
    root = ElementTree.fromstring(rendered("junit", made_up.hostile()))
    assert any("<script>alert(1)</script>" in (item.get("message") or "") for item in root.iter("failure"))


def test_xml_has_no_character_that_xml_forbids() -> None:
    forbidden = "".join(map(chr, [*range(9), 11, 12, *range(14, 32), 0xD800, 0xDFFF, 0xFFFE, 0xFFFF]))
    assert set(junit.xml_text(forbidden)) == {"\ufffd"}
    kept = "\t\n\r \x7f\ud7ff\ue000\ufffd\U00010000\U0010ffff<&"
    assert junit.xml_text(kept) == kept


def test_hostile_text_leaves_no_markdown_behind() -> None:
    text = rendered("markdown", made_up.hostile())
    outside = re.sub(r"(`{3,})text\n.*?\n\1\n", "", text, flags=re.DOTALL)
    assert "script" in outside
    assert "<script" not in outside
    assert not re.search(r"(?<!\\)`", outside)
    for line in outside.splitlines():
        if line.startswith("| "):
            assert len(re.findall(r"(?<!\\)\|", line)) in (4, 5, 11)


@pytest.mark.parametrize("text", ["a|b", "`code`", "**b**", "<i>", "[a](b)", "a\nb", "@you", "https://x.y", "\\|"])
def test_markdown_text_is_escaped(text: str) -> None:
    escaped = markdown.escape(text)
    assert escaped != text
    assert "\n" not in escaped
    assert not re.search(r"(?<!\\)(\\\\)*[|`*\[<]", re.sub(r"\\[^\\]", "", escaped))


def test_a_code_block_cannot_be_left() -> None:
    block = markdown.fence("a\n```\n````\nb")
    assert block.startswith("`````text\n")
    assert block.endswith("\n`````")


# -- sizes


def flood() -> list[Event]:
    """A journal with more of everything than fits."""
    cases = []
    for index in range(400):
        long = f"{index} " + "|`<" * 500
        cases.append(ran("difference", packed(seed=index), differences=[difference(long, message=long)], notes=[long]))
        cases.append(ran("unsupported", Case(seed=index), reason=long))
        cases.append(ran("error", Case(seed=index), reason=long))
        cases.append(ran("noisy", Case(seed=index), noise=[{"path": long, "spread": 1.0}]))
    for index, event in enumerate(cases):
        event["lanes"] = [f"lane {index} " + "|" * 300]
        event["case"] = event["case"] | {"qkv_layout": f"layout {index}" + "`" * 300}
    return [start([f"{i}" + "|" * 500 for i in range(300)]), *cases, end()]


def test_the_summary_stays_short_whatever_the_run_left() -> None:
    text = rendered("markdown", flood())
    assert 10_000 < len(text) < 60_000
    assert "cut here" in text
    for events in (made_up.different(), made_up.neutral()):
        assert "cut here" not in rendered("markdown", events)


def test_a_cut_never_leaves_a_code_block_open(monkeypatch: pytest.MonkeyPatch) -> None:
    events = made_up.different()
    whole = rendered("markdown", events)
    for limit in range(800, len(whole), 53):
        monkeypatch.setattr(markdown, "LIMIT", limit)
        text = rendered("markdown", events)
        assert len(text) < limit
        assert "cut here" in text
        assert len(re.findall(r"^```", text, flags=re.MULTILINE)) % 2 == 0


def test_the_page_stays_light_whatever_the_run_left() -> None:
    text = rendered("html", flood())
    assert len(text) < 6_000_000
    assert "360 more in results.json" in text


def test_the_terminal_shows_only_the_smallest_three() -> None:
    events = made_up.different()
    text = terminal(events)
    assert len(text.splitlines()) < 80
    assert text.count("harness replay") == 3
    assert "2 more ways to differ" in text


@pytest.mark.parametrize("name", ["neutral", "different", "unsupported", "killed", "everything"])
def test_the_terminal_fits_80_columns_without_colour(name: str) -> None:
    if name == "everything":
        outcomes = ("match", "difference", "intended", "noisy", "unsupported", "crash", "error")
        layout = Case(qkv_layout="paged_kv_bshd_bshd_bshd", page_size=16)
        cases = [ran(outcome, layout, reason=outcome) for outcome in outcomes]
        events = [start(), *cases, ran(case=layout, both_raised=True), ran(case=packed()), end()]
    else:
        events = JOURNALS[name]()
    text = terminal(events)
    assert "\x1b" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "out/results.json" in text
    if name == "everything":
        line = next(line for line in text.splitlines() if line.startswith("paged_kv_bshd_bshd_bshd"))
        assert line.split()[1:] == ["6", "1", "1", "1", "1", "1", "1", "1", "1"]


def test_a_replay_command_is_never_broken_over_lines() -> None:
    file = io.StringIO()
    folder = "a/very/long/folder  with gaps/" * 8
    print_results(summarise([start(), ran("difference"), end()], folder), Console(file=file, width=80))
    assert f"harness replay {Case().id} --run '{folder}'\n" in file.getvalue()


def test_markup_of_the_terminal_is_text() -> None:
    events = [start(), ran("error", reason="[bold]x[/nonsense] :smile:"), end()]
    assert "[bold]x[/nonsense] :smile:" in terminal(events, force_terminal=True, color_system="truecolor")


# -- JUnit


def suite(events: list[Event]) -> ElementTree.Element:
    root = ElementTree.fromstring(rendered("junit", events))
    assert root.tag == "testsuites"
    found = root.find("testsuite")
    assert found is not None
    return found


def test_junit_has_one_test_case_per_case_and_one_for_the_verdict() -> None:
    cases = [
        ran(case=packed()),
        ran(case=packed(seed=1), both_raised=True),
        ran("noisy"),
        ran("difference", packed(seed=2)),
        ran("crash", reason="signal 11"),
        ran("error", reason="out of memory"),
        ran("unsupported", reason="no THD"),
        ran("intended"),
    ]
    found = suite([start(), *cases, end()])
    assert {name: found.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "9", "failures": "3", "errors": "1", "skipped": "1",
    }  # fmt: skip
    elements = found.findall("testcase")
    tags = [[child.tag for child in element] for element in elements]
    assert tags == [[], [], [], ["failure"], ["failure"], ["error"], ["skipped"], [], ["failure"]]
    assert elements[0].get("classname") == "sbh3d"
    assert elements[0].get("name") == f"{packed().id} qkv_layout=sbh3d"
    assert elements[6][0].get("message") == "no THD"
    assert "signal 11" in (elements[4][0].text or "")
    assert "grad/q (value)" in (elements[3][0].get("message") or "")
    assert f"harness replay {packed(seed=2).id} --run out" in (elements[3][0].text or "")


@pytest.mark.parametrize(
    ("events", "red"),
    [
        ([start(), ran(), end()], False),
        ([start(), end()], True),
        ([start(), ran("unsupported"), end()], True),
        ([start(), ran(both_raised=True), end()], True),
        ([start(["t3hd"]), ran(), end()], True),
        ([start(), ran()], True),
        ([start(), ran(), end("worker lost")], True),
        ([start(), ran("difference"), end()], True),
    ],
)
def test_junit_is_green_only_where_the_verdict_is_neutral(events: list[Event], red: bool) -> None:
    verdict = suite(events).findall("testcase")[-1]
    assert verdict.get("name") == "verdict"
    assert (verdict.find("failure") is not None) == red
    assert (summarise(events)["exit_code"] != 0) == red


def test_numbers_that_are_not_finite_pass_through_every_format(tmp_path: Path) -> None:
    distance = {"elements": 1, "different": 1, "first": [0], "largest_absolute": "inf", "largest_relative": "nan"}
    events = [
        start(),
        ran("difference", differences=[difference(distance=distance, control="inf")], seconds=float("inf")),
        ran("noisy", noise=[{"path": "grad/v", "spread": float("inf")}]),
        end(seconds=float("nan")),
    ]
    results = write_reports(write(tmp_path, *events))
    assert results["noise"][0]["largest_spread"] == "inf"
    assert json.loads((tmp_path / "results.json").read_text())["seconds"] == "nan"
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("time") == "0.000"
    assert "inf" in Page((tmp_path / "report.html").read_text()).text
    assert "inf" in terminal(events)


# -- words


def test_a_case_is_described_by_what_is_special_about_it() -> None:
    assert describe_case(Case().to_dict()) == "all defaults"
    case = Case(qkv_layout="sbh3d", attn_scale=0.5, window_size=(4, 0), is_training=False, requires_grad=())
    assert describe_case(case.to_dict()) == (
        "qkv_layout=sbh3d window_size=[4,0] attn_scale=0.5 is_training=false requires_grad=[]"
    )
    assert describe_case({"schema": SCHEMA + 1, "new": "a\nb"}) == f"schema={SCHEMA + 1} new=a\\nb"
    assert describe_case({"schema": 1, "dropout_p": 0.5}) == "schema=1 dropout_p=0.5"


def test_absence_is_not_none() -> None:
    assert describe_value(None, "missing") == "absent"
    assert describe_value(None, "value") == "None"
    assert describe_value(0.5, "value") == "0.5"
    assert describe_value(made_up.ARRAY, "value") == "bfloat16 [16, 2, 4, 8], stride [64, 32, 8, 1], fresh"


def test_differences_are_grouped_by_path_and_kind_most_cases_first() -> None:
    cases = [
        ran("difference", packed(seed=1), differences=[difference("b"), difference("b", "shape")]),
        ran("difference", packed(), differences=[difference("b"), difference("b")]),
    ]
    found = families(summarise([start(), *cases, end()]))
    assert [(family.path, family.kind, len(family.case_ids)) for family in found] == [
        ("b", "value", 2),
        ("b", "shape", 1),
    ]
    assert found[0].example["case_id"] == packed().id


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\u202eb", "a\\u202eb"), ("\x1b[0m", "\\x1b[0m"), ("\ud800", "\\ud800"), ("\n", "\\n"), ("ü漢", "ü漢")],
)
def test_characters_that_act_unseen_are_written_as_escapes(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_numbers_and_durations_are_short() -> None:
    assert [show_number(x) for x in (3, 0.25, 1 / 3, "inf", "nan", 1e9)] == [
        "3",
        "0.25",
        "0.333",
        "inf",
        "nan",
        "1e+09",
    ]
    assert [show_seconds(x) for x in (0.42, 59.0, 754, 7322, "nan")] == [
        "0.4 s", "59.0 s", "12 min 34 s", "2 h 2 min", "nan s",
    ]  # fmt: skip
    assert clip("abcdef", 3) == "abc… (3 more characters)"
    assert clip("abc", 3) == "abc"
