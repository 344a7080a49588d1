"""The report as JUnit's XML, for what reads test results.

1. A suite is a row of the verdict table. Its first test is the row itself, under a name that stays from run to run; each
   failure is a test of its own, and each pinned case is one, by its id.
2. What fails in the table fails here, once: by its failures, or else by the row itself, which executed nothing, did not
   finish, or never saw a sensitivity.
3. An untrusted pinned case and a regime that was left out are skipped tests, with the reason: never green.

Source: the schema that Jenkins and GitLab read: testsuites, testsuite, testcase, failure, error, skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree

from harness.ledger import Line
from harness.merge import Merged
from harness.report.failures import Failure
from harness.report.model import Part, Report
from harness.report.rows import row_name

#: What XML 1.0 cannot hold.
_FORBIDDEN = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


def junit(report: Report, merged: Merged) -> str:
    """Write a report as JUnit's XML; ``merged`` are the ledgers that it was made of."""
    root = ElementTree.Element("testsuites", name="mla-gate")
    started = str(report.headers[0].get("started", "")) if report.headers else ""
    failures: dict[tuple[str, str], list[Failure]] = {}
    for one in report.failures:
        failures.setdefault((one.backend, one.row), []).append(one)
    pinned: dict[tuple[str, str], list[Line]] = {}
    for line in merged.lines:
        if line["kind"] == "result" and line["phase"] == "pinned":
            pinned.setdefault((line["backend"], row_name(line)), []).append(line)
    for part in report.parts:
        key = (part.row.backend, part.row.regime)
        _suite(root, part, failures.get(key, ()), pinned.get(key, ()), started)
    for beside in report.comparisons:
        suite = _new_suite(root, f"{beside.backend} × {beside.regime} against {beside.baseline}", started)
        test = _test(suite, beside.backend, beside.regime, f"against {beside.baseline}", 0.0)
        if beside.reason:
            told = ElementTree.SubElement(test, "failure", type="baseline", message=_text(beside.reason))
            told.text = _text("\n".join([*beside.failing, beside.cause]))
        _count(suite)
    left = {(line["backend"], line["regime"]): line["reason"] for line in merged.lines if line["kind"] == "beyond"}
    for (backend, regime), reason in left.items():
        suite = _new_suite(root, f"{backend} × {regime}", started)
        _skip(_test(suite, backend, regime, "row", 0.0), str(reason))
        _count(suite)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{report.seconds:.3f}")
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(root: ElementTree.Element, part: Part, failures: Iterable[Failure], pinned: Iterable[Line], started: str) -> None:
    row = part.row
    suite = _new_suite(root, f"{row.backend} × {row.regime}", started, row.seconds)
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (
        ("executed", row.executed), ("untrusted", row.untrusted), ("not run", row.unrun), ("worst ratio", f"{row.worst:.6g}"),
        ("worst check", row.metric), ("never seen", ", ".join(row.unseen)),
    ):  # fmt: skip
        ElementTree.SubElement(properties, "property", name=name, value=_text(str(value)))
    failed = {(one.case, one.relation) for one in failures}
    own = [line for line in pinned if (line["case"], line["relation"]) not in failed]
    whole = _test(suite, row.backend, row.regime, "row", row.seconds - sum(line["seconds"] for line in own))
    if row.reason and not failed:
        told = ElementTree.SubElement(whole, "failure", type="row", message=_text(row.reason))
        told.text = _text(f"{row.executed} cases executed; {row.reason}")
    for one in failures:
        test = _test(suite, row.backend, row.regime, _named(one), 0.0)
        kind = "error" if one.verdict == "ERROR" else "failure"
        about = "; ".join(f"{name} {ratio:.3g} of its limit" for name, _, ratio in one.checks) or one.message
        told = ElementTree.SubElement(test, kind, type=one.fault or one.verdict.lower(), message=_text(about[:300]))
        told.text = _text(_told(one))
    for line in own:
        test = _test(suite, row.backend, row.regime, f"pinned {line['case']}", line["seconds"])
        if line["verdict"] == "UNSUPPORTED":
            # The suite fails such a case too: inside the contract, and not run.
            ElementTree.SubElement(test, "error", type="not-run", message=_text(line["message"]))
        elif line["verdict"] != "PASS":
            _skip(test, line["message"])
    _count(suite)


def _new_suite(root: ElementTree.Element, name: str, started: str, seconds: float = 0.0) -> ElementTree.Element:
    return ElementTree.SubElement(root, "testsuite", name=_text(name), timestamp=started, time=f"{seconds:.3f}")


def _named(one: Failure) -> str:
    relation = f" {one.relation}" if one.relation and not one.steps else ""
    return f"{one.phase} {one.fault or 'error'}{relation} {one.case}"


def _told(one: Failure) -> str:
    lines = [one.words, one.about, *one.steps, "", one.message, *one.shown["looks"]]
    if one.shown["neighbour"]:
        lines.append(f"passes with {one.shown['difference']}: {one.shown['neighbour']}")
    return "\n".join([*lines, *one.shown["notes"], str(one.shown["command"])])


def _test(suite: ElementTree.Element, backend: str, regime: str, name: str, seconds: float) -> ElementTree.Element:
    # A dot parts packages there, and a backend's name may have one.
    place = f"mla-gate.{backend.replace('.', '_')}.{regime.replace('.', '_')}"
    return ElementTree.SubElement(suite, "testcase", classname=_text(place), name=_text(name), time=f"{max(seconds, 0.0):.3f}")


def _skip(test: ElementTree.Element, why: str) -> None:
    ElementTree.SubElement(test, "skipped", message=_text(why))


def _count(suite: ElementTree.Element) -> None:
    tests = suite.findall("testcase")
    suite.set("tests", str(len(tests)))
    for name, child in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(test.find(child) is not None for test in tests)))


def _text(text: str) -> str:
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
