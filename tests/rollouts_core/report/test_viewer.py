"""Pins the views of the report in a real browser, from a file: what they show by mouse and keyboard, what cannot run.

Without it a filter could hide samples, text of a model could run as a script, or a view could be out of reach for a
keyboard or a screen reader.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rollouts_core.config import ReportConfig
from rollouts_core.report import ReportInput, render_report
from rollouts_core.run_directory import RunDirectory
from tests.kit.chromium import TIMEOUT_MS, Open, chromium, views_of
from tests.rollouts_core.report.made_run import ATTACK, rollout, write_rollouts
from tests.rollouts_core.report.test_report import full_report  # noqa: F401

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

VIEWS = ("", "curves", "samples", "sample/rl/1/900/0", "group/rl/2/10", "step/rl/2", "prompt/0", "held-out",
         "answers/1", "sft-rows", "sft-row/3", "run")  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def report(full_report: ReportInput) -> ReportInput:  # noqa: F811
    return write_rollouts(full_report)


@pytest.fixture
def open_view(browser: "Browser", report: ReportInput, tmp_path: Path) -> Iterator[Open]:
    path = tmp_path / "report.html"
    path.write_text(render_report(report), encoding="utf-8")
    with views_of(path, browser) as open_page:
        yield open_page


def shown_rows(page: "Page") -> list[str]:
    return page.locator("#view-samples tbody tr[data-place]").all_inner_texts()


def status_of(page: "Page") -> str:
    return page.locator("#view-samples [role=status]").inner_text()


def test_samples_are_filtered_sorted_and_searched_and_the_address_says_how(open_view: Open) -> None:
    page = open_view("samples")
    assert status_of(page).startswith("128 of 128 samples, mean reward 0.5")
    page.get_by_label("Step", exact=True).fill("2..3")
    page.get_by_label("Reward", exact=True).fill("<1")
    page.get_by_text("20 of 128 samples").wait_for()
    page.get_by_label("Search").fill("WHAT IS 3")
    page.get_by_text("4 of 128 samples").wait_for()
    assert re.search(r"#samples\?.*step=2..3", page.url) and "q=WHAT" in page.url
    page.get_by_role("button", name="Step").click()
    page.get_by_role("button", name=re.compile("Step ↓")).wait_for()
    assert [row.split()[0] for row in shown_rows(page)] == ["3", "3", "2", "2"]
    same = open_view(page.url.partition("#")[2])
    same.get_by_text("4 of 128 samples").wait_for()
    assert shown_rows(same) == shown_rows(page)
    page.get_by_role("button", name="clear").click()
    page.get_by_text("128 of 128 samples").wait_for()


def test_samples_are_filtered_by_every_number_of_their_columns(open_view: Open) -> None:
    page = open_view("samples")
    for label, text, found in (("exact", ">0", 64), ("Version", "2", 10), ("Advantage", ">0", 0)):
        page.get_by_label(label, exact=True).fill(text)
        page.get_by_text(f"{found} of 128 samples").wait_for()
    assert "term%3Aexact=" in page.url and "version=2" in page.url
    assert open_view(page.url.partition("#")[2]).get_by_label("exact", exact=True).input_value() == ">0"


def test_the_document_holds_few_rows_of_many_samples(browser: "Browser", report: ReportInput, tmp_path: Path) -> None:
    run, path = RunDirectory(report.trainings[1].run_dir), tmp_path / "many.html"
    samples = [rollout(1, group, i, prompt=f"{group}") for group in range(2000, 2800) for i in range(4)]
    run.write_samples("step_000001", samples, temperature=1.0)
    path.write_text(render_report(report), encoding="utf-8")
    with views_of(path, browser) as open_page:
        for view, label, num_rows in (("samples", "Samples", 3300), ("step/rl/1", "Groups", 800)):
            page = open_page(view)
            table = page.get_by_role("table", name=label)
            assert int(table.get_attribute("aria-rowcount") or 0) >= num_rows, view
            for place in (0, 0.5, 1):
                page.locator(".viewport:visible").evaluate(
                    "(box, place) => { box.scrollTop = place * box.scrollHeight; }", place
                )
                page.wait_for_timeout(100)
                assert 10 < page.locator("main tr:visible").count() <= 200, view


def test_a_table_is_walked_by_keys_and_a_row_opens(open_view: Open) -> None:
    page = open_view("samples")
    page.locator("#view-samples tbody a").first.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "End", "Home", "ArrowDown"):
        page.keyboard.press(key)
    focused = page.locator("#view-samples tbody tr:focus-within")
    assert focused.get_attribute("aria-rowindex") == "3"
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Step 1: sample 2 of 4").wait_for()
    page.go_back()
    page.locator("#view-samples").wait_for()
    page.keyboard.press("/")
    assert page.locator("input[name=q]").evaluate("input => input === document.activeElement")


def test_tokens_are_coloured_and_read_out_by_mouse_and_keys(open_view: Open) -> None:
    page = open_view("sample/rl/3/15/1")
    tokens = page.locator("#view-detail .tokens")
    tokens.locator(".t").nth(5).hover()
    readout = page.locator("#view-detail .readout")
    assert "log-prob −0.01 (p 0.99) · trainer −0.02 · advantage −1 · version 2" in readout.inner_text()
    tokens.focus()
    page.keyboard.press("End")
    assert "“<|end|>” · id 2 · trained · log-prob −0.5" in readout.inner_text()
    page.keyboard.press("ArrowLeft")
    assert "id 2" not in readout.inner_text()
    for name, css in (("loss mask", "trained"), ("advantage", "down-3"), ("policy version", "hue-2"),
                      ("trainer − engine", "up-")):  # fmt: skip
        page.get_by_role("button", name=name).click()
        assert tokens.locator(f".t[class*='{css}']").count() > 0, name
    facts = page.locator("#view-detail .facts").inner_text()
    assert re.search(r"format\s+0\.5", facts) and re.search(r"Outcome\s+completed", facts)


def test_a_character_of_two_tokens_is_whole(open_view: Open) -> None:
    page = open_view("sample/rl/1/901/0")
    assert page.locator(".turn.said pre").inner_text() == "é"
    assert page.locator(".tokens .t").nth(5).inner_text() == "é"


def test_a_conversation_has_folded_thoughts_calls_and_results(open_view: Open) -> None:
    page = open_view("sample/rl/1/900/0")
    assert page.locator("details.think:not([open])").count() == 2
    assert page.locator(".call b").inner_text().startswith("calls search")
    assert "result of search" in page.locator(".turn.tool").inner_text()
    assert "not closed" in page.locator("details.think summary").nth(1).inner_text()


def test_a_group_a_step_and_a_prompt_lead_to_each_other(open_view: Open) -> None:
    page = open_view("group/rl/2/10")
    assert "4 completions, baseline (mean reward) 0.5" in page.locator("#view-detail").inner_text()
    assert page.locator("#view-detail .group article").count() == 4
    page.get_by_role("link", name="this prompt across steps").click()
    page.get_by_role("heading", name="One prompt across steps").wait_for()
    assert page.locator("#view-detail tbody tr[data-place]").count() == 6
    page.get_by_role("link", name="step 3").click()
    page.get_by_role("link", name="step 3").click()
    page.get_by_role("heading", name="Step 3: 5 groups").wait_for()
    assert page.url.endswith("#step/rl/3")
    page.get_by_role("button", name="Mean reward").click()
    page.get_by_role("button", name="Mean reward ↑").click()
    page.get_by_role("button", name="Mean reward ↓").wait_for()
    means = [float(text) for text in page.locator("#view-detail tbody td.mean").all_inner_texts()]
    assert means == sorted(means, reverse=True) and page.url.endswith("#step/rl/3?sort=-mean")


def test_the_tab_of_the_view_is_in_sight_on_a_phone(open_view: Open) -> None:
    page = open_view("run", width=390)
    box = page.get_by_role("link", name="Run", exact=True).bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390


def test_the_matrix_filters_held_out_answers(open_view: Open) -> None:
    page = open_view("held-out")
    cell = page.get_by_role("link", name=re.compile("^SFT better than Base: "))
    wins = int(cell.inner_text())
    assert 0 < wins < 40
    cell.click()
    page.get_by_text(f"{wins} of 40 prompts: SFT gets a higher reward than Base.").wait_for()
    rows = page.locator("#held-out-live tbody tr[data-place]")
    assert rows.count() == wins
    rows.first.click()
    page.get_by_role("heading", name="Answers side by side").wait_for()
    assert page.locator("#view-detail .group article").count() == 3


def test_curves_are_zoomed_together_and_lead_to_groups(open_view: Open) -> None:
    page = open_view("curves")
    page.locator(".plot canvas").first.wait_for()
    figure = page.get_by_role("figure").filter(has_text="Completion length")
    over = figure.locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 40)
    assert figure.locator("figcaption span").inner_text() == "step 30: 30"
    reward = page.get_by_role("figure").filter(has_text="Reward").first.locator("figcaption span")
    assert reward.inner_text() == "step 30: 0.75", "the crosshair is shared"
    page.mouse.move(box["x"] + 2, box["y"] + 40)
    page.mouse.click(box["x"] + 2, box["y"] + 40)
    page.get_by_role("heading", name="Step 1: 7 groups").wait_for()
    page.go_back()
    page.get_by_label("log axis").check()
    page.get_by_label("Metric").fill("clip")
    page.get_by_role("figure").filter(has_text="Clip share").wait_for()
    page.wait_for_timeout(300)
    assert page.locator("#curves-live .plot:visible").count() == 1
    figure = page.locator("#curves-live .plot").first
    figure.focus()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Step 30").wait_for()


def test_rows_of_sft_show_what_was_trained_and_what_was_left_out(open_view: Open) -> None:
    page = open_view("sft-rows")
    assert re.search(r"Left out\s+1, longer than 64 tokens", page.locator("#view-sft-rows .facts").inner_text())
    page.get_by_role("link", name="dropped").click()
    page.get_by_role("cell", name="90 tokens are too many").first.wait_for()
    page = open_view("sft-row/3")
    assert page.locator(".t.trained").all_inner_texts()[1:] == [" two", " three", "<|end|>"]
    assert "7 tokens, 3 of them trained on" in page.locator("#view-detail").inner_text()


def test_no_text_of_models_data_or_users_becomes_markup(
    report: ReportInput, browser: "Browser", tmp_path: Path
) -> None:
    """Every view is opened; the attack would set a variable, by a script or by a picture that fails to load."""
    path = tmp_path / "attacked.html"
    path.write_text(render_report(replace(report, run_name=ATTACK, verdict=ATTACK, settings_toml=ATTACK)))
    page = browser.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    for view in VIEWS:
        page.goto(f"file://{path}#{view}")
        page.reload()
        page.locator("body[data-shown]").wait_for()
        for details in page.locator("details:visible").all():
            details.evaluate("each => { each.open = true; }")
        assert page.locator("main img, main script").count() == 0, view
        assert page.evaluate("() => typeof window.attacked") == "undefined", view
    page.goto(f"file://{path}#sample/rl/1/900/0")
    page.locator(".conversation", has_text="<img src").wait_for()
    page.evaluate("() => { const own = document.createElement('script'); own.text = 'window.attacked = 1';"
                  " document.body.append(own); }")  # fmt: skip
    assert page.evaluate("() => typeof window.attacked") == "undefined", "the policy refuses a script of another text"
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_window(open_view: Open, width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = {}
    for view in VIEWS:
        page = open_view(view, width=width, scheme=scheme)
        page.wait_for_timeout(150)
        results = axe.Axe().run(page)
        if results.violations_count:
            found[view] = [(each["id"], each["nodes"][0]["html"][:120], each["nodes"][0]["failureSummary"][:300])
                           for each in results.response["violations"]]  # fmt: skip
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width, view
        page.close()
    assert found == {}


def test_without_scripts_and_in_print_the_page_is_whole(open_view: Open) -> None:
    plain = open_view(scripts=False)
    printed = open_view("samples")
    printed.emulate_media(media="print")
    for page in (plain, printed):
        for heading in ("Held-out results", "Curves", "Sample transcripts", "Stages", "Reproduce this run"):
            assert page.get_by_role("heading", name=heading, exact=True).is_visible(), heading
        assert not page.locator("#view-samples").is_visible()
        assert page.locator("figure svg").first.is_visible()
        assert not page.locator("#views").is_visible()


def test_a_browser_that_cannot_decompress_gets_the_page_without_scripts(
    report: ReportInput, browser: "Browser", tmp_path: Path
) -> None:
    path = tmp_path / "old.html"
    path.write_text(render_report(report), encoding="utf-8")
    page = browser.new_page()
    page.add_init_script("delete window.DecompressionStream")
    page.goto(f"file://{path}#samples")
    assert page.get_by_role("heading", name="Sample transcripts", exact=True).is_visible()
    assert page.locator("figure svg").first.is_visible() and not page.locator("#views").is_visible()
    page.close()


@pytest.mark.parametrize("samples", ["none", "held-out"])
def test_a_report_for_others_holds_no_prompt_or_only_held_out_ones(
    report: ReportInput, browser: "Browser", tmp_path: Path, samples: str
) -> None:
    contents = ReportConfig.model_validate({"samples": samples})
    path = tmp_path / "others.html"
    path.write_text(render_report(replace(report, contents=contents)))
    page = browser.new_page()
    page.goto(f"file://{path}#samples")
    page.locator("body[data-shown]").wait_for()
    text = page.locator("#view-samples").inner_text()
    assert ("written without samples" in text) == (samples == "none")
    assert page.get_by_role("option").all_inner_texts()[:3] == (
        ["Base, held-out", "SFT, held-out", "RL, held-out"] if samples == "held-out" else []
    )
    assert page.get_by_role("link", name="SFT rows").count() == 0
    assert ("held 1" in page.content()) == (samples == "held-out")
    page.close()
