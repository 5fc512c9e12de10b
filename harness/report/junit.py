"""JUnit XML: one test case per case of the run, and one for the verdict, so that an empty run is red."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from typing import Any

from harness.judge import FINDINGS
from harness.report.describe import Results, clip, describe_case, describe_value, headline, number
from harness.report.summary import NO_REASON, replay_command

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
LIMIT = 4000


def xml_text(text: str) -> str:
    """Return the text with every character that XML 1.0 forbids replaced by U+FFFD."""
    return _FORBIDDEN.sub("�", text)


def render(results: Results, events: Sequence[Mapping[str, Any]]) -> str:
    """Return junit.xml.

    A case is named by its id and what is special about it, its class is its qkv_layout. Difference and crash fail,
    error errs, unsupported is skipped; the test case ``verdict`` fails unless the verdict is neutral.
    """
    suite = ElementTree.Element("testsuite", name="harness")
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (
        ("verdict", results["verdict"]),
        ("exit_code", str(results["exit_code"])),
        ("engine", results["engine"]),
        ("control", f"{results['control']['resolved']} sha256={results['control']['sha256']}"),
        ("candidate", f"{results['candidate']['resolved']} sha256={results['candidate']['sha256']}"),
        ("seed", str(results["seed"])),
        ("harness", results["harness"]),
    ):
        ElementTree.SubElement(properties, "property", name=name, value=xml_text(value))
    for event in events:
        if event["event"] == "case":
            _test_case(suite, event, results["run"])
    _verdict(suite, results)
    suite.attrib.update(
        tests=str(len(suite.findall("testcase"))),
        failures=str(len(suite.findall("testcase/failure"))),
        errors=str(len(suite.findall("testcase/error"))),
        skipped=str(len(suite.findall("testcase/skipped"))),
        time=_seconds(results["seconds"]),
        timestamp=xml_text(results["started"]),
    )
    root = ElementTree.Element("testsuites", {k: v for k, v in suite.attrib.items() if k != "timestamp"})
    root.append(suite)
    ElementTree.indent(root)
    return "<?xml version='1.0' encoding='utf-8'?>\n" + ElementTree.tostring(root, encoding="unicode") + "\n"


def _test_case(suite: ElementTree.Element, event: Mapping[str, Any], run: str) -> None:
    element = ElementTree.SubElement(
        suite,
        "testcase",
        classname=xml_text(event["case"]["qkv_layout"]),
        name=xml_text(f"{event['case_id']} {clip(describe_case(event['case']), 300)}"),
        time=_seconds(event["seconds"]),
    )
    outcome, reason = event["outcome"], event["reason"] or NO_REASON
    replay = replay_command(event["case_id"], run)
    if outcome in FINDINGS:
        lines = [
            f"{item['path']} ({item['kind']}): {clip(item['message'], LIMIT)}\n"
            f"  control:   {clip(describe_value(item['control'], item['kind']), LIMIT)}\n"
            f"  candidate: {clip(describe_value(item['candidate'], item['kind']), LIMIT)}"
            for item in event["differences"]
        ] or [f"{outcome}: {clip(reason, LIMIT)}"]
        failure = ElementTree.SubElement(
            element, "failure", type=outcome, message=xml_text(f"{lines[0].splitlines()[0]} | {replay}")
        )
        failure.text = xml_text("\n".join([*lines, f"replay: {replay}"]))
    elif outcome == "error":
        error = ElementTree.SubElement(element, "error", type="harness", message=xml_text(clip(reason, LIMIT)))
        error.text = xml_text(f"{clip(reason, LIMIT)}\nreplay: {replay}")
    elif outcome == "unsupported":
        ElementTree.SubElement(element, "skipped", message=xml_text(clip(reason, LIMIT)))


def _verdict(suite: ElementTree.Element, results: Results) -> None:
    element = ElementTree.SubElement(suite, "testcase", classname="harness", name="verdict", time=_seconds(0))
    if results["verdict"] != "neutral":
        failure = ElementTree.SubElement(
            element, "failure", type=results["verdict"], message=xml_text(headline(results))
        )
        failure.text = xml_text("\n".join(results["reasons"]))


def _seconds(value: Any) -> str:
    seconds = number(value)
    return f"{seconds:.3f}" if math.isfinite(seconds) else "0.000"
