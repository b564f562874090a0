"""Pins the page that compares runs in a real browser, from a file: curves, answers, keys, and no script of others.

Without it a curve could be drawn in the colour of another run, or a view could be out of reach for a keyboard.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rollouts.flows.commands.compare import load_compared
from rollouts_core.report.compared import compare_runs
from rollouts_core.report.compared_page import render_comparison_page
from tests.kit.chromium import Open, chromium, views_of
from tests.rollouts_core.report.made_run import ATTACK
from tests.tasks.stored_run import PROMPTS, SCORES, write_stored_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NAMES = ("small-11111111", "small-22222222", "small-33333333")
VIEWS = ("", "curves", "held-out", "answers/0", "sample/heldout-B-rl/0/1/0", "run")


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("compared")
    prompts = [f"first {ATTACK}", *PROMPTS[1:]]
    write_stored_run(store, NAMES[0], prompts=prompts)
    write_stored_run(store, NAMES[1], prompts=prompts, scores={**SCORES, "rl": [1.0] * 40}, rollout__seed=7)
    write_stored_run(store, NAMES[2], prompts=prompts, scores={**SCORES, "rl": [0.0] * 40}, host=ATTACK)
    (store / "stages" / "rl-2222222222222222" / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "reward": {step / 20}, "attempt": 1}}\n' for step in range(2, 21, 2))
    )
    path = store / "comparison.html"
    path.write_text(render_comparison_page(compare_runs(load_compared(store, NAMES))), encoding="utf-8")
    return path


@pytest.fixture
def open_view(browser: "Browser", page_file: Path) -> Iterator[Open]:
    with views_of(page_file, browser) as open_page:
        yield open_page


def test_the_overview_has_scores_tests_and_settings_that_differ(open_view: Open) -> None:
    page = open_view()
    assert page.locator("#views").get_by_role("link").all_inner_texts() == ["Overview", "Curves", "Held-out", "Runs"]
    card = page.locator(".difference").first.inner_text()
    assert "A (RL) → B (RL)" in card and "+5.0 points" in card
    assert page.locator("table.compared:visible tbody tr").all_inner_texts() == ["rollout.seed\t0\t7\t0"]
    assert "Each run is one training with one seed." in page.locator("#view-overview").inner_text()


def test_curves_are_overlaid_at_their_own_steps_and_a_run_can_be_hidden(open_view: Open) -> None:
    page = open_view("curves")
    figure = page.get_by_role("figure").filter(has_text="Mean over the step's completions")
    figure.locator("canvas").wait_for()
    legend = figure.locator(".legend")
    assert legend.inner_text().split("\n")[0].startswith("A 0.025 → 0.75")
    assert "B 0.1 → 1" in legend.inner_text()
    figure.locator(".plot").focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert figure.locator("figcaption span").inner_text() == "step 4"
    assert re.sub(r"\s+", "", legend.inner_text()) == "A0.1B0.2C0.1"
    colours = [each.evaluate("i => getComputedStyle(i).backgroundColor") for each in legend.locator("i").all()]
    assert len(set(colours)) == 3
    page.locator(".filters label", has_text="B").locator("input").uncheck()
    page.wait_for_timeout(100)
    assert figure.locator(".legend i").count() == 2
    page.get_by_label("Metric").fill("signal")
    page.get_by_role("figure").filter(has_text="Signal share").wait_for()
    page.wait_for_timeout(300)
    assert page.locator("#curves-live .plot:visible").count() == 1


def test_curves_are_zoomed_together(open_view: Open) -> None:
    page = open_view("curves")
    over = page.get_by_role("figure").filter(has_text="Completion length").locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 10, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40, steps=4)
    page.mouse.up()
    other = page.get_by_role("figure").filter(has_text="Mean over the step's completions")
    other.scroll_into_view_if_needed()
    box = other.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 40)
    last = int(other.locator("figcaption span").inner_text().removeprefix("step "))
    assert 12 <= last <= 18, "the right half of 30 steps is out of sight"


def test_answers_of_all_runs_are_side_by_side(open_view: Open) -> None:
    page = open_view("held-out")
    cell = page.get_by_role("link", name="B better than C: 40 prompts")
    cell.click()
    page.get_by_text("40 of 40 prompts: B gets a higher reward than C.").wait_for()
    page.locator("#held-out-live tbody tr[data-place]").nth(1).click()
    page.get_by_role("heading", name="Answers side by side").wait_for()
    heads = [each.inner_text().split("\n")[0] for each in page.locator("#view-detail .group article > header").all()]
    assert [head.split()[0] for head in heads] == ["Base", "A", "B", "C"]


def test_no_text_of_models_data_or_users_becomes_markup(open_view: Open) -> None:
    for view in VIEWS:
        page = open_view(view)
        assert page.locator("main img, main script").count() == 0, view
        assert page.evaluate("() => typeof window.attacked") == "undefined", view
    page = open_view("run")
    assert ATTACK in page.locator("#view-run").inner_text()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (390, "light"),
        (1400, "dark"),
        *(
            pytest.param(width, scheme, marks=pytest.mark.matrix)
            for width, scheme in ((390, "dark"), (900, "light"), (900, "dark"), (1400, "light"))
        ),
    ],
)
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
    printed = open_view("held-out")
    printed.emulate_media(media="print")
    for page in (plain, printed):
        for heading in (
            "Held-out results",
            "Paired tests",
            "Settings that differ",
            "Data that differ",
            "Curves",
            "Runs",
        ):
            assert page.get_by_role("heading", name=heading, exact=True).is_visible(), heading
        assert page.locator("figure svg").first.is_visible()
        assert not page.locator("#views").is_visible()
