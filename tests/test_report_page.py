"""The HTML report in a real browser: it sorts, unfolds, copies, changes its theme, fits a phone, and asks for nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.merge import merge
from harness.report.html import html
from harness.report.model import make_report
from tests import browser as browsers
from tests import report_run

#: Why a page is opened with its own colours and width: someone reads it there.
SCHEMES, WIDTHS = ("light", "dark"), (1280, 390)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    browsers.need()
    folder = tmp_path_factory.mktemp("page")
    path = folder / "report.html"
    path.write_text(html(make_report(merge([report_run.run(folder)]))), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chromium(page_file: Path) -> Iterator[Any]:
    with browsers.browser() as started:
        yield started


class Visit:
    """One page opened, and everything that it said or asked for."""

    def __init__(self, chromium: Any, path: Path, **options: Any) -> None:
        self.context = chromium.new_context(**options)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())


@pytest.fixture
def visit(chromium: Any, page_file: Path) -> Iterator[Visit]:
    made = Visit(chromium, page_file)
    yield made
    made.context.close()


def wait_until_copied(page: Any) -> None:
    from playwright.sync_api import expect

    expect(page.locator("#said")).to_have_text("copied")


def column(page: Any, number: int) -> list[str]:
    rows = page.locator("#verdict tbody tr")
    return [row.locator("th, td").nth(number).inner_text() for row in rows.all()]


def test_tables_sort_by_number_and_by_word_both_ways(visit: Visit) -> None:
    head = visit.page.locator("#verdict thead th")
    names = head.all_inner_texts()
    cases, backend = names.index("cases"), names.index("backend")
    before = column(visit.page, cases)
    head.nth(cases).locator("button").click()
    up = column(visit.page, cases)
    assert up == sorted(before, key=int) and head.nth(cases).get_attribute("aria-sort") == "ascending"
    head.nth(cases).locator("button").click()
    assert column(visit.page, cases) == up[::-1] and head.nth(cases).get_attribute("aria-sort") == "descending"
    head.nth(backend).locator("button").click()
    assert column(visit.page, backend) == sorted(column(visit.page, backend))
    assert head.nth(cases).get_attribute("aria-sort") is None


def test_sections_unfold_one_by_one_and_all_at_once(visit: Visit) -> None:
    page = visit.page
    one = page.locator("#regimes > details").first
    assert not one.locator(".bars").first.is_visible()
    one.locator("> summary").click()
    assert one.locator("h4").first.is_visible()
    page.locator("#unfold").click()
    assert page.evaluate("[...document.querySelectorAll('details')].every((one) => one.open)")
    page.locator("#unfold").click()
    assert not page.evaluate("[...document.querySelectorAll('details')].some((one) => one.open)")


def test_a_link_to_a_folded_section_unfolds_it(visit: Visit) -> None:
    visit.page.locator("#verdict tbody tr td a").last.click()
    assert visit.page.evaluate("document.getElementById(location.hash.slice(1)).open")


def test_every_copy_button_copies_what_it_stands_beside(visit: Visit) -> None:
    page = visit.page
    page.locator("#unfold").click()
    buttons = page.locator("button.copy")
    assert buttons.count() >= 9
    for button in buttons.all():
        page.evaluate("navigator.clipboard.writeText('nothing')")
        button.click()
        wait_until_copied(page)
        beside = page.locator(f"[id='{button.get_attribute('data-copy')}']").text_content()
        assert page.evaluate("navigator.clipboard.readText()") == beside != ""
        page.evaluate("document.getElementById('said').textContent = ''")
    command = page.locator("#failure-0-0-command").text_content()
    assert command.startswith("mla-gate replay v1:H=1:S=1:N=33:end --backend fault:last-split-dropped@splits")


def test_a_page_without_a_clipboard_copies_by_a_selection(chromium: Any, page_file: Path) -> None:
    made = Visit(chromium, page_file)
    made.page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no leave')); }")
    made.page.locator("button.copy").first.click()
    wait_until_copied(made.page)
    assert made.page.evaluate("navigator.clipboard.readText()") == made.page.locator("#failure-0-0-case").text_content()
    made.context.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_is_asked_for_nothing_complains_and_nothing_runs_off_the_page(
    chromium: Any, page_file: Path, scheme: str, width: int
) -> None:
    made = Visit(chromium, page_file, color_scheme=scheme, viewport={"width": width, "height": 900})
    made.page.locator("#unfold").click()
    made.page.locator("#theme").click()
    made.page.wait_for_timeout(200)
    assert made.said == []
    assert [url for url in made.requests if not url.startswith(("data:,", page_file.as_uri()))] == []
    assert made.page.evaluate("document.documentElement.scrollWidth") <= width
    made.context.close()


def test_a_request_and_a_complaint_would_be_noticed(chromium: Any, page_file: Path, tmp_path: Path) -> None:
    loose = tmp_path / "loose.html"
    text = page_file.read_text(encoding="utf-8")
    loose.write_text(text.replace("</main>", '<img src="other.png" alt=""><script>evil()</script></main>'), encoding="utf-8")
    made = Visit(chromium, loose)
    made.page.wait_for_timeout(200)
    # The page's own policy refuses both, aloud.
    assert len([line for line in made.said if "Content Security Policy" in line]) == 2
    bare = tmp_path / "bare.html"
    bare.write_text('<img src="other.png" alt="">', encoding="utf-8")
    other = Visit(chromium, bare)
    other.page.wait_for_timeout(200)
    assert any(url.endswith("other.png") for url in other.requests)
    made.context.close()
    other.context.close()


def test_light_and_dark_differ_and_text_stands_out_in_both(chromium: Any, page_file: Path) -> None:
    grounds = set()
    for scheme in SCHEMES:
        made = Visit(chromium, page_file, color_scheme=scheme)
        grounds.add(made.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        for selector in ("body", ".small", ".bad", "a"):
            # WCAG's 4.5 to 1 for text.
            assert made.page.evaluate(CONTRAST, selector) >= 4.5, (scheme, selector)
        made.page.locator("#theme").click()  # light, whatever the system says
        assert made.page.evaluate("document.documentElement.dataset.theme") == "light"
        made.context.close()
    assert len(grounds) == 2


#: Contrast of an element's text with the page's ground, by WCAG's formula.
CONTRAST = """(selector) => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const one = light(getComputedStyle(document.querySelector(selector)).color);
  const two = light(getComputedStyle(document.body).backgroundColor);
  return (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
}"""


def test_it_is_read_and_used_by_keyboard(visit: Visit) -> None:
    page = visit.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    head = page.locator("#verdict thead button").first
    head.focus()
    page.keyboard.press("Enter")
    assert page.locator("#verdict thead th").first.get_attribute("aria-sort") == "ascending"
    summary = page.locator("#regimes > details > summary").first
    summary.focus()
    page.keyboard.press("Space")
    assert page.evaluate("document.querySelector('#regimes > details').open")
    # What scrolls sideways is reached, and what is pressed has a name.
    assert page.evaluate("[...document.querySelectorAll('.wide')].every((one) => one.tabIndex === 0 && one.ariaLabel)")
    assert page.evaluate("[...document.querySelectorAll('button')].every((one) => one.textContent.trim())")


def test_without_javascript_everything_is_there(chromium: Any, page_file: Path) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    assert not page.locator("button").first.is_visible()
    assert page.locator("#verdict tbody tr").count() == 4
    assert page.locator("#failure-0-0-command").is_visible()
    folded = page.locator("#regimes > details").last
    folded.locator("> summary").click()
    assert folded.locator("svg").first.is_visible()
    context.close()


def test_a_missing_browser_is_a_skip_that_says_so_and_a_failure_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browsers, "program", lambda: None)
    monkeypatch.delenv("MLA_GATE_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no browser test: "):
        browsers.need()
    monkeypatch.setenv("MLA_GATE_BROWSER", "required")
    with pytest.raises(pytest.fail.Exception, match="MLA_GATE_BROWSER=required"):
        browsers.need()


@pytest.mark.parametrize("there", [True, False])
def test_ci_installs_a_browser_where_there_is_none(tmp_path: Path, there: bool) -> None:
    script = (Path(__file__).parent.parent / ".ci" / "run").read_text(encoding="utf-8")
    (function,) = re.findall(r"^browser\(\) \{\n.*?^\}\n", script, re.MULTILINE | re.DOTALL)
    for name in ("apt-get", *(["chromium"] if there else [])):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/asked\n', encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    # Whoever runs this test: the function is asked as root would be.
    asked = f"{function.replace('$EUID', '$ROOT')}browser"
    environment = {"PATH": str(tmp_path), "ROOT": "0"}
    subprocess.run([str(shutil.which("bash")), "-c", asked], env=environment, check=True, timeout=30)
    found = (tmp_path / "asked").read_text(encoding="utf-8") if (tmp_path / "asked").exists() else ""
    assert ("install" in found and "chromium" in found) is not there
    environment["ROOT"] = "1000"
    done = subprocess.run(
        [str(shutil.which("bash")), "-c", asked], env=environment, check=False, timeout=30, capture_output=True
    )
    assert (done.returncode == 0) is there
