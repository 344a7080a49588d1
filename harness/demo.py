"""The demonstration: a kernel broken on purpose, found, shrunk, explained and replayed, in words for a newcomer.

1. It does what a run does: the same search, shrinking, explanation, repro and report, in one regime with one seed.
2. The kernel is the embedded one with one line of its source changed; where Triton is missing, the model with that mistake.
3. It ends with 0 where everything comes as it is told: the broken kernel fails, fails again, and the right one passes.
"""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path
from typing import Any

from harness.backends import registry
from harness.backends.protocol import NotInstalled
from harness.backends.triton_splitkv_mistakes import MISTAKES
from harness.gate import Gate
from harness.merge import merge
from harness.options import Options
from harness.report.forms import write_forms
from harness.repro import replay_command
from harness.script.text import in_words

#: The mistake: its name among those of the kernel and among the faults of the model.
MISTAKE = "merge-without-lse"
#: Broken and right backend, and the regime that is searched: of the kernel, and of the model in its stead.
KERNEL = (f"triton-splitkv!{MISTAKE}", "triton-splitkv", "splitkv-bf16")
MODEL = (f"fault:{MISTAKE}@splits", "model:splits", "model-splits")
#: Random cases that are asked at most.
EXAMPLES = 60


def demo(given: Any) -> int:
    """Break a kernel and walk through what the gate makes of it; return the exit status."""
    began = time.monotonic()
    broken, right, regime = _choose()
    folder = Path(given.folder) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    options = Options(
        backends=(broken,),
        regimes=(regime,),
        examples=EXAMPLES,
        device=given.device,
        run_dir=folder,
        repro_dir=folder / "repros",
    )
    gate = Gate(options, say=lambda line: None)
    _ = gate.plan  # what cannot be planned, as a device that is not there, is said before the story begins
    try:
        _tell_break(broken)
        status = _walk(gate, broken, right)
    finally:
        gate.close()
    page = folder / "report.html"
    write_forms(merge([folder]), html_file=page, summary=False)
    _say(
        "Next",
        f"{page} is the report of this demonstration; open it in a browser.",
        f"It took {time.monotonic() - began:.0f} s.",
    )
    print("   nox -s gate                         gate the kernels that can run here, and print the verdict table")
    print("   nox -s mla-gate -- --help           everything else")
    return status


def _choose() -> tuple[str, str, str]:
    try:
        registry.make(KERNEL[0])
    except NotInstalled:
        return MODEL
    return KERNEL


def _walk(gate: Gate, broken: str, right: str) -> int:
    """Find, shrink, explain, replay; return the exit status."""
    (pair,) = gate.plan.pairs
    _say(
        "1. Find",
        "Random cases go to the kernel. A case is one decode problem: how many requests and heads, how many cached tokens, "
        "which formats, where the pages lie. Each answer is held to a reference in fp32 that is computed over the same "
        "cache, and to the rounding that the kernel's arithmetic allows, no more. This takes some seconds …",
    )
    outcome = gate.search(pair)
    finding = next(iter(outcome.findings), None)
    if finding is None:
        print(f"   nothing was found in {outcome.executed} cases, and something should have been: please report this")
        return 1
    print(f"\n   Case {outcome.executed} came out wrong:\n\n      {finding.first}")
    walk, case = finding.walk, finding.result.case
    _say(
        "2. Shrink",
        "That case is large and strange, and most of it has nothing to do with the mistake. Smaller and plainer cases near it "
        "were asked, until none failed that is smaller than this one:",
    )
    print(f"\n      {case}\n\n{textwrap.indent(in_words(case), '         ')}\n")
    needs = ""
    if case.lengths == (129,):
        needs = (
            " What the two cases differ in is what the mistake needs: the kernel cuts a context into splits of 128 tokens, and "
            "it takes a second split for their merging to go wrong."
        )
    _say("", f"It passes with {walk.difference}.{needs}")
    gate.failed(finding.result, pair.backend, finding)
    failure = next(line for line in merge([gate.options.run_dir]).lines if line["kind"] == "failure")
    _say(
        "3. Explain",
        "Where the output is wrong; then the known mistakes whose answers to the same case come nearest to it, best first:",
    )
    print()
    for line in failure["looks"]:
        print(textwrap.fill(line, 116, initial_indent="      ", subsequent_indent="             "))
    _say("4. Replay", "The failure is kept as a file, and as a script that needs only torch and the kernel:")
    print("\n" + "\n".join(f"      {note}" for note in failure["notes"]))
    _say("", "Anybody can ask the same again. The broken kernel, and the right one:")
    verdicts = []
    for name in (broken, right):
        verdict = gate.isolation.run(case, registry.make(name), None).verdict
        verdicts.append(verdict.kind)
        print(f"\n      {replay_command(case, name, gate.device)}\n         {verdict.kind} {verdict.fault or ''}".rstrip())
    return int(verdicts != ["FAIL", "PASS"])


def _tell_break(broken: str) -> None:
    mistake = MISTAKES[MISTAKE]
    print("mla-gate demo: a decode kernel, broken on purpose")
    _say(
        "0. Break",
        "Decode attention reads the cached tokens of a request. A kernel that is in a hurry cuts them into splits, works on "
        "all splits at once, and merges the partial answers, each with the weight that its log-sum-exp gives it.",
        f"In {broken} {mistake.about}. It raises no error, and short requests still come out right.",
    )
    if broken == KERNEL[0]:
        print(f"\n      the line was  {mistake.old}\n      and is now    {mistake.new}")


def _say(title: str, *paragraphs: str) -> None:
    print(f"\n{title}" if title else "")
    for text in paragraphs:
        print(textwrap.fill(text, 116, initial_indent="   ", subsequent_indent="   "))
