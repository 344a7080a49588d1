"""The commands about ledgers: report, compare.

1. Several ledgers are merged first (harness/merge.py); what a reader must know of them stands below the table.
2. Exit status: 1 where a row fails, or where the change fails and the base does not.
"""

from __future__ import annotations

from typing import Any

from harness.cli_case import print_json


def report(given: Any) -> int:
    """Print the verdict table of ledgers; return the exit status."""
    from harness.compare import comparisons
    from harness.ledger import plain
    from harness.merge import merge
    from harness.report.comparison import section
    from harness.report.forms import write_forms
    from harness.report.rows import left_out
    from harness.report.terminal import notes, table, verdict

    merged = merge(given.ledgers)
    found, beside = merged.rows, comparisons(merged.lines)
    said = []
    if given.html or given.markdown or given.junit:
        files = {"html_file": given.html, "markdown_file": given.markdown, "junit_file": given.junit}
        said = write_forms(merged, **files, summary=given.markdown is not None)
    bad = any(row.reason for row in found) or any(one.reason for one in beside)
    if given.json:
        rows = [plain(row) | {"reason": row.reason} for row in found]
        compared = [plain(one) | {"reason": one.reason} for one in beside]
        print_json({"rows": rows, "compared": compared, "cut": plain(merged.cut), "remarks": merged.remarks})
        return int(bad)
    print("\n".join([*table(found), *notes(found), *left_out(merged.lines), *section(beside), "", verdict(found)]))
    for remark in (*merged.remarks, *said):
        print(f"mla-gate: {remark}")
    return int(bad or not found)


def compare(given: Any) -> int:
    """Compare the ledgers of two runs; return the exit status."""
    from harness.compare import across
    from harness.ledger import plain
    from harness.merge import merge
    from harness.report.comparison import section

    base, change = merge([given.base]), merge([given.change])
    found = across(base.lines, change.lines)
    worse = any(one.reason for one in found) or (given.fail_on == "all" and any(row.reason for row in change.rows))
    if given.json:
        print_json([plain(one) | {"reason": one.reason} for one in found])
        return int(worse)
    print("\n".join(section(found)))
    for what, merged in (("base", base), ("change", change)):
        for remark in merged.remarks:
            print(f"mla-gate: {what}: {remark}")
    return int(worse)
