"""What a person does in Prefect's UI: log in, fill in the form, watch a run, press Retry. In a real, headless browser.

Without these tests a setting could have no field or no bound in the form, the form could post what the flow refuses,
and Retry could train again what is there.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from rollouts.flows.own_server.lend import local_server
from rollouts.flows.prefect_api import ask
from rollouts.infra.ssh.login_keys import read_public_key
from rollouts_core.checkpoint import list_checkpoints, load_manifest
from tests.flows.test_notify import make_run, set_state
from tests.infra.ssh_server import make_key
from tests.kit.chromium import chromium
from tests.kit.commands import Rollouts
from tests.kit.runs import (
    LONG,
    assert_last_step_is_saved,
    events_of,
    exits_of,
    program_of,
    run_dir,
)
from tests.kit.serving import (
    address_of,
    api,
    state_of,
    train_endlessly,
    trigger,
    up,
    wait_for_checkpoint,
    wait_for_state,
)
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE_TIMEOUT_MS = 120_000
FLAGS = ("--disable-3d-apis", "--disable-software-rasterizer")
"""Without these two Chromium computes the graph's WebGL by the CPU, which takes 90 s of it in the longest test here,
and 16 s with them; the graph is drawn all the same."""
PICTURES = Path(__file__).parents[2] / "build" / "screenshots"
"""What the browser saw, for whoever looks at a run of the tests; a run replaces those of the last one."""


@pytest.fixture
def page() -> Iterator[Page]:
    """A page of a headless Chromium."""
    with chromium(*FLAGS) as browser:
        opened = browser.new_page(viewport={"width": 1300, "height": 1000})
        opened.set_default_timeout(PAGE_TIMEOUT_MS)
        yield opened


def open_page(page: Page, rollouts: Rollouts, path: str) -> None:
    """Open a page of the UI, and log in with the store's password where the UI asks for it."""
    address = address_of(rollouts)
    page.goto(f"{address.ui_url}{path}", wait_until="domcontentloaded")
    log_in(page, address.password)


def log_in(page: Page, password: str) -> None:
    """Log in on the page that asks for the password, and wait until that is done.

    The UI keeps the password when the server has taken it. A page that is left before asks for it again for good.
    """
    from playwright.sync_api import TimeoutError as PageTimeoutError  # where Chromium is missing, Playwright may be too

    field = page.locator("input[type=password]")
    for _ in range(10):
        try:
            field.wait_for(timeout=PAGE_TIMEOUT_MS / 6)
            break
        except PageTimeoutError:  # Prefect's UI stays empty if its first request fails, as on a busy machine
            page.reload()
    field.fill(password)
    page.keyboard.press("Enter")
    field.wait_for(state="detached")


def visit(page: Page, url: str, password: str) -> None:
    """Open a page of the UI, which asks for the password anew when its check fails on a busy machine."""
    page.goto(url, wait_until="networkidle")
    if page.locator("input[type=password]").is_visible():
        log_in(page, password)
        page.wait_for_load_state("networkidle")


def keep_picture(page: Page, name: str) -> None:
    """Keep what the page shows at this moment."""
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)


@contextmanager
def live_page(page: Page, rollouts: Rollouts, run_id: str, path: str = "") -> Iterator[Page]:
    """The page that a run links, or one below it, in a browser that has logged in there."""
    of_run = {"artifacts": {"flow_run_id": {"any_": [run_id]}, "key": {"any_": [f"live-small-{run_id[:8]}"]}}}
    (artifact,) = api(rollouts, "POST", "/artifacts/filter", of_run)
    link = re.search(r"http://127\.0\.0\.1:\d+/runs/[\w-]+", artifact["data"])
    assert link is not None, artifact
    user, _, password = address_of(rollouts).password.partition(":")
    assert page.context.browser is not None
    visitor = page.context.browser.new_context(http_credentials={"username": user, "password": password}).new_page()
    visitor.set_default_timeout(PAGE_TIMEOUT_MS)
    visitor.goto(link[0] + path)
    yield visitor
    visitor.context.close()


def assert_live_page_moves(page: Page, rollouts: Rollouts, run_id: str) -> None:
    """The run links a page with curves and samples, which goes on by itself while RL does."""
    with live_page(page, rollouts, run_id) as visitor:
        visitor.get_by_role("link", name="Curves").click()
        visitor.get_by_role("figure", name=re.compile("^Reward")).wait_for()
        visitor.get_by_role("link", name="Samples").click()
        visitor.locator("#view-samples tbody tr[data-place]").first.wait_for()
        visitor.get_by_role("link", name="Overview").click()
        assert visitor.locator("article[id^=stage-sft]").get_by_text("finished").is_visible()
        state = visitor.locator("article[id^=stage-rl] > p").first
        seen = state.inner_text()
        assert re.match(r"step \d+ of 400", seen), seen
        keep_picture(visitor, "live page")
        wait_until(lambda: state.inner_text().split(",")[0] != seen.split(",")[0], what="the next step on the page")


def test_the_ui_asks_nothing_but_this_machine(rollouts: Rollouts, page: Page) -> None:
    """Also before the login, where the UI cannot know that analytics are off."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    refused: list[str] = []  # pictures of blocks: the browser tells of them, and sends no request
    page.on("requestfailed", lambda request: refused.append(request.url) if request.failure == "csp" else None)
    broken: list[str] = []  # the UI draws its graph by code that it compiles
    page.on("console", lambda message: broken.append(message.text) if "valuat" in message.text else None)
    with local_server(rollouts.store) as address:
        page.goto(address.ui_url, wait_until="networkidle")
        log_in(page, address.password)
        run = make_run(address, "small")
        set_state(address, run, "completed")
        picture = "# Report\n\n![](https://pictures.example/one.png)"
        artifact = {"key": "report-small", "type": "markdown", "data": picture, "flow_run_id": run}
        shown = ask(address, "POST", "/artifacts/", artifact)["id"]
        for path in ("dashboard", "deployments", "settings", "automations"):
            visit(page, f"{address.ui_url}/{path}", address.password)
        visit(page, f"{address.ui_url}/runs/flow-run/{run}", address.password)
        for tab in ("Logs", "Artifacts", "Details", "Parameters"):
            page.get_by_role("tab", name=tab).click()
            page.get_by_role("tab", name=tab, selected=True).wait_for()
            page.wait_for_load_state("networkidle")
        visit(page, f"{address.ui_url}/artifacts", address.password)
        page.get_by_text("report-small").first.wait_for()
        visit(page, f"{address.ui_url}/artifacts/artifact/{shown}", address.password)
        page.locator("img").wait_for(state="attached")
        visit(page, f"{address.ui_url}/blocks/catalog", address.password)
        keep_picture(page, "blocks")
        visit(page, address.ui_url.removesuffix("/v2"), address.password)
    assert len(asked) > 50, asked
    assert any("pictures.example" in url for url in refused), "the artifact was shown"
    assert {
        urlsplit(url).hostname for url in asked if url not in refused and not url.startswith(("data:", "blob:"))
    } == {"127.0.0.1"}
    assert broken == []


@pytest.mark.matrix
def test_the_form_has_help_texts_and_bounds_and_its_run_is_watched_to_the_end(
    served: Rollouts,
    page: Page,
    tmp_path: Path,
) -> None:
    up(served, str(write_small_pipeline(tmp_path / "small", mode="sft")))
    deployment = api(served, "GET", "/deployments/name/sft-rl/small")["id"]
    posts: list[str] = []
    page.on("request", lambda request: posts.append(request.url) if "create_flow_run" in request.url else None)
    open_page(page, served, f"/deployments/deployment/{deployment}/run")
    steps = page.get_by_label(re.compile("^Num Steps")).first
    steps.wait_for()
    assert steps.input_value() == "40"
    assert page.get_by_text("Optimizer steps.").first.is_visible()

    steps.fill("0")
    submit = page.get_by_role("button", name="Submit")
    submit.click()
    refusal = steps.evaluate("input => input.validationMessage")
    assert refusal == "Value must be greater than or equal to 1."
    assert posts == []
    keep_picture(page, "form with a bound violated")

    steps.fill("20")
    with page.expect_response(lambda response: "create_flow_run" in response.url) as answer:
        submit.click()
    assert answer.value.status == 201, answer.value.text()
    run = answer.value.json()
    assert run["parameters"]["config"]["training"]["sft"]["num_steps"] == 20
    page.goto(f"{address_of(served).ui_url}/runs/flow-run/{run['id']}", wait_until="domcontentloaded")
    page.get_by_text("Completed", exact=True).first.wait_for()
    keep_picture(page, "run completed")
    assert state_of(served, run["id"]) == "COMPLETED"
    assert [path.name for path in (run_dir(served, "sft") / "checkpoints").iterdir()] == ["step_000020"]
    with live_page(page, served, run["id"], "/report") as report:
        report.get_by_role("heading", level=1).wait_for()
        report.get_by_role("figure").first.wait_for()
        keep_picture(report, "report")


@pytest.mark.matrix
def test_credentials_are_saved_in_the_ui_and_a_key_survives_its_field_of_one_line(
    served: Rollouts,
    page: Page,
    tmp_path: Path,
) -> None:
    make_key(tmp_path / "key")
    key = (tmp_path / "key").read_text()
    up(served)
    open_page(page, served, "/blocks/catalog/rollouts-credentials/create")
    page.get_by_label("Name", exact=True).fill("from-the-ui")
    page.get_by_label(re.compile("^RunPod API key")).fill("runpod-key")
    page.get_by_label(re.compile("^SSH private key")).fill(key)
    keep_picture(page, "credentials")
    page.get_by_role("button", name="Save").click()
    page.wait_for_url(re.compile("/blocks/block/"))
    code, listed = served.run("credentials")
    assert (code, listed) == (0, "from-the-ui: ROLLOUTS_SSH_KEY, RUNPOD_API_KEY\n")
    slug = "/block_types/slug/rollouts-credentials/block_documents/name/from-the-ui?include_secrets=true"
    held = api(served, "GET", slug)["data"]["rollouts_ssh_key"]
    assert "\n" not in held.strip() and key.splitlines()[1] in held, "as the field has left it"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROLLOUTS_SSH_KEY", held)
        public = read_public_key(key_file="", key_variable="ROLLOUTS_SSH_KEY")
    assert public == read_public_key(key_file=str(tmp_path / "key"), key_variable="")


@pytest.mark.promise
def test_a_run_that_failed_in_rl_is_retried_by_a_button_and_sft_is_shown_as_reused(
    served: Rollouts,
    page: Page,
    tmp_path: Path,
) -> None:
    fewer = {"training__sft__num_steps": 40, "training__rl__num_steps": 400}
    up(served, str(write_small_pipeline(tmp_path / "small", **{**LONG, **fewer})))
    run_id = trigger(served, "small")
    rl = wait_for_checkpoint(served, "rl")
    assert_live_page_moves(page, served, run_id)
    os.kill(program_of(rl), signal.SIGKILL)
    wait_for_state(served, run_id, "FAILED")

    open_page(page, served, f"/runs/flow-run/{run_id}")
    page.get_by_text("Failed", exact=True).first.wait_for()
    keep_picture(page, "run failed")
    page.get_by_role("button", name="Open menu").click()
    page.get_by_role("menuitem", name="Retry").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Retry").click()
    wait_until(lambda: state_of(served, run_id) != "FAILED", what="the retry")
    # Its RL is long enough to be looked at and killed amid it; nobody waits for the rest.
    wait_until(lambda: events_of(rl, "resumed"), what="RL that goes on")
    wait_until(lambda: served.run("finish", "small")[0] == 0, what="RL that can be asked to finish")
    wait_for_state(served, run_id, "COMPLETED")
    page.goto(f"{address_of(served).ui_url}/runs/flow-run/{run_id}?tab=TaskRuns", wait_until="domcontentloaded")
    page.get_by_text("Cached", exact=True).first.wait_for()
    keep_picture(page, "run retried, SFT cached")
    assert exits_of(run_dir(served, "sft")) == ["exit-1.json"]
    assert exits_of(rl) == ["exit-1.json", "exit-2.json"]


@pytest.mark.matrix
def test_a_run_that_is_cancelled_in_the_ui_saves_its_last_step_and_its_live_page_says_so(
    served: Rollouts,
    page: Page,
    tmp_path: Path,
) -> None:
    run_id, sft = train_endlessly(served, tmp_path / "small")
    with live_page(page, served, run_id) as visitor:
        state = visitor.locator("article[id^=stage-sft] > p").first
        assert " left" in state.inner_text()
        open_page(page, served, f"/runs/flow-run/{run_id}")
        page.get_by_role("button", name="Open menu").click()
        page.get_by_role("menuitem", name="Cancel").click()
        page.get_by_role("alertdialog").get_by_role("button", name="Cancel Flow Run").click()
        wait_for_state(served, run_id, "CANCELLED")
        assert_last_step_is_saved(sft)
        saved = load_manifest(list_checkpoints(sft / "checkpoints")[-1]).step
        state.get_by_text(f"step {saved} is saved").wait_for()
        assert " left" not in state.inner_text()
        keep_picture(visitor, "live page of a cancelled run")
