"""Pins the page of a run under way in a real browser, on a real server, while a run appends to its files.

Without it an update could take away what somebody reads, a long run could fill the memory of the browser or the server,
and a page whose server is gone could look like one of a run that stands still.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest

from rollouts.flows.own_server.password import own_password
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts_core.run_directory import RunDirectory
from tests.kit.chromium import chromium
from tests.kit.waiting import wait_until
from tests.rollouts_core.report.made_run import conversation, rollout, write_tokenizer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TIMEOUT_MS = 30_000
RUN, RUN_ID = "mine-01234567", "0123456789abcdef"
SERVE = (
    "import sys, time; from pathlib import Path; from rollouts.flows.live import served_live_pages\n"
    "with served_live_pages(Path(sys.argv[1])) as live:\n    print(live.port, flush=True)\n    time.sleep(600)"
)
WARNING = "step 31: tokens are <b>9</b> publications old"
MAX_BLOCK_BYTES = 3_000_000
MAX_HEAP_MB, MAX_NODES = 100, 6_000
MAX_SERVER_MB = 400
MAX_VIEWERS_MB = 150
"""Most memory that fifty viewers may add to the server."""


def write_step(directory: RunDirectory, step: int, *, num_groups: int = 5) -> None:
    """A step as RL leaves it."""
    samples = [
        rollout(step, step * num_groups + group, i, prompt=f"what is {group}?")
        for group in range(num_groups)
        for i in range(4)
    ]
    samples += [conversation(900, i) for i in range(4)] if step == 1 else []
    directory.write_samples(f"step_{step:06d}", samples, temperature=1.0)
    with directory.metrics.open("a") as metrics:
        line = {
            "step": step,
            "attempt": 1,
            "time": time.time(),
            "reward": step % 7 / 7,
            "entropy": 1 / step,
            "loss": 0.1,
        }
        metrics.write(json.dumps(line) + "\n")


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """The run directory of RL in a store with a run that is under way."""
    (tmp_path / "prefect").mkdir()
    sft, rl = RunDirectory(tmp_path / "stages/sft-1"), RunDirectory(tmp_path / "stages/rl-1")
    for each in (sft, rl):
        each.root.mkdir(parents=True)
    sft.metrics.write_text(json.dumps({"step": 1, "attempt": 1, "time": time.time(), "loss": 1.0}) + "\n")
    sft.write_result({"checkpoints": []})
    write_tokenizer(rl.checkpoints / "step_000001")
    with Ledger(tmp_path / LEDGER_FILE) as ledger:
        ledger.note_plan(RUN, ["sft", "select-sft", "rl", "select-rl", "evaluate"])
        for stage in ("sft-1", "rl-1"):
            ledger.note_use(stage, RUN_ID, run=RUN, num_steps=100)
    return rl


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


class Served:
    """A page of a browser, and the process that serves it."""

    def __init__(self, page: Page, store: Path, stack: ExitStack) -> None:
        self.page, self.store, self.stack = page, store, stack
        self.faults: list[str] = []
        self.sizes: list[int] = []
        self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        """Serve the store at the port of the last time."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(self.store)], stdout=subprocess.PIPE, text=True
        )
        self.stack.callback(self.kill)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}/runs/{RUN}"
        return self.process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def open(self, view: str = "") -> Page:
        self.page.goto(f"{self.url}#{view}")
        self.page.locator("body[data-shown]").wait_for()
        return self.page

    def open_list(self, query: str = "") -> Page:
        """Open the list of runs, which then updates itself often."""
        self.page.goto(f"{self.url.partition('/runs/')[0]}/{query}")
        self.page.evaluate("document.body.dataset.refreshMs = 200")
        return self.page

    def await_refreshes(self, count: int) -> None:
        """Wait until the page has asked for itself so many times more."""
        read = "Number(document.body.dataset.refreshed || 0)"
        wanted = int(self.page.evaluate(read)) + count
        wait_until(lambda: int(self.page.evaluate(read)) >= wanted, what="the next update")

    def server_mb(self) -> float:
        """The most memory that the server has taken."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


@contextmanager
def serving(browser: Browser, store: Path) -> Iterator[Served]:
    user, _, password = own_password(store / "prefect").partition(":")
    with ExitStack() as stack, Ledger(store / LEDGER_FILE) as ledger, ledger.living_run(RUN_ID):
        context = browser.new_context(
            http_credentials={"username": user, "password": password}, viewport={"width": 1200, "height": 800}
        )
        stack.callback(context.close)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        served = Served(page, store, stack)
        page.on("pageerror", lambda error: served.faults.append(str(error)))
        page.on("console", lambda said: served.faults.append(said.text) if "Security Policy" in said.text else None)
        page.on(
            "request",
            lambda asked: served.faults.append(asked.url) if urlsplit(asked.url).hostname != "127.0.0.1" else None,
        )
        page.on("response", lambda answer: served.sizes.append(int(answer.headers.get("content-length", 0))))
        yield served
        assert served.faults == []


@pytest.fixture
def served(browser: Browser, directory: RunDirectory) -> Iterator[Served]:
    for step in range(1, 31):
        write_step(directory, step)
    with serving(browser, directory.root.parents[1]) as started:
        yield started


def test_ten_updates_keep_focus_selection_scroll_and_folds(served: Served, directory: RunDirectory) -> None:
    page = served.open()
    page.locator("article[id=stage-rl-1] summary").click()
    page.evaluate("document.body.dataset.refreshMs = 200")
    page.locator("#views").get_by_role("link", name="Samples").click()
    box = page.locator("#view-samples .viewport")
    page.get_by_text("604 of 604 samples").wait_for()
    box.evaluate("box => { box.scrollTop = 340; }")
    line = page.locator("#view-samples tbody tr[data-place='20']")
    line.wait_for()
    page.locator("#view-samples tbody tr[data-place='14'] a").focus()
    page.keyboard.press("ArrowDown")
    read = """() => {
      const focused = document.activeElement.closest("tr"), box = document.querySelector("#view-samples .viewport");
      const top = focused.getBoundingClientRect().top;
      return [focused.innerText, top, String(getSelection()), window.marked === focused];
    }"""
    page.evaluate(
        """() => {
          window.marked = document.activeElement.closest("tr");
          getSelection().selectAllChildren(document.querySelector("#view-samples tr[data-place='20'] td:nth-child(2)"));
        }"""
    )
    before = page.evaluate(read)
    assert before[2] == "what is 0?" and before[3]
    for step in range(31, 41):
        write_step(directory, step)
        served.await_refreshes(2)
    warned = {"event": "warning", "rule": "staleness", "message": WARNING, "attempt": 1, "time": time.time()}
    directory.events.write_text(json.dumps(warned) + "\n")
    served.await_refreshes(2)
    page.get_by_text("804 of 804 samples").wait_for()
    assert page.evaluate(read) == before, "200 rows came in above"
    page.locator("#views").get_by_role("link", name="Overview").click()
    assert page.locator("details[id=stage-rl-1-events]").get_attribute("open") is not None
    assert page.locator("#warned").inner_text() == "rl: 1 warning"
    assert page.locator("#warnings").inner_text() == f"rl {WARNING}"
    assert "step 40 of 100" in page.locator("[id=stage-rl-1-state]").inner_text()
    assert page.locator("#stages li").all_inner_texts() == [
        "✓ sft",
        "○ select-sft",
        "● rl 40 %",
        "○ select-rl",
        "○ evaluate",
    ]


def test_curves_grow_and_keep_their_zoom(served: Served, directory: RunDirectory) -> None:
    page = served.open("curves")
    page.evaluate("document.body.dataset.refreshMs = 200")
    reward = page.get_by_role("img", name=re.compile("^Reward, RL"))
    over = reward.locator(".u-over")
    over.wait_for()
    reward.focus()
    page.keyboard.press("End")
    figure = page.locator("figure", has=reward)
    figure.get_by_text("step 30:").wait_for()
    page.evaluate("window.canvas = document.querySelector('.plot canvas')")
    write_step(directory, 31)
    served.await_refreshes(2)
    page.keyboard.press("End")
    figure.get_by_text("step 31:").wait_for()
    assert page.evaluate("window.canvas.isConnected && document.activeElement.classList.contains('plot')")


def test_a_server_that_is_gone_is_told_and_that_it_is_back(served: Served, directory: RunDirectory) -> None:
    page = served.open()
    page.evaluate("document.body.dataset.refreshMs = 200")
    said = page.locator("#connection")
    served.kill()
    said.get_by_text("The server has not answered since").wait_for()
    assert said.evaluate("element => getComputedStyle(element).display") != "none"
    page.locator("#views").get_by_role("link", name="Samples").click()
    write_step(directory, 31)
    served.start()
    said.get_by_text("The server answers again since").wait_for()
    page.get_by_text("624 of 624 samples").wait_for()
    page.locator("#views").get_by_role("link", name="Overview").click()
    page.get_by_text("step 31 of 100").wait_for()


def test_the_list_updates_itself_and_keeps_filter_focus_selection_and_scroll(
    served: Served, directory: RunDirectory
) -> None:
    with Ledger(served.store / LEDGER_FILE) as ledger:
        for number in range(40):
            ledger.note_use("sft-1", f"{number:016x}", run=f"mine-too-{number:08x}")
    page = served.open_list("?q=mine")
    page.get_by_label("Name").fill("not sent yet")
    page.get_by_label("State").select_option("done")
    read = """() => {
      const row = document.activeElement.closest("tr"), inputs = [...document.querySelectorAll("form input, select")];
      const moved = Math.abs(row.getBoundingClientRect().top - window.placed);
      const names = inputs.map((input) => input.value);
      return [row.id, moved < 1, scrollY > 100, String(getSelection()), names, window.marked === row];
    }"""
    page.evaluate(
        """() => {
          const row = window.marked = document.getElementById("run-mine-too-00000014");
          row.querySelector("a").focus();
          getSelection().selectAllChildren(row.querySelector("a"));
          window.placed = row.getBoundingClientRect().top;
        }"""
    )
    before = page.evaluate(read)
    assert before[0] == f"run-{before[3]}" and before[2] and before[4] == ["not sent yet", "done"]
    mine = page.locator(f"[id='run-{RUN}']")
    assert "rl 30/100" in mine.inner_text()
    write_step(directory, 31)
    with Ledger(served.store / LEDGER_FILE) as ledger:
        ledger.note_use("rl-1", RUN_ID, run=RUN, num_steps=100)
        ledger.note_use("sft-1", "f" * 16, run="mine-new-ffffffff")
        ledger.note_use("sft-1", "e" * 16, run="another-eeeeeeee")
    served.await_refreshes(2)
    assert page.evaluate(read) == before, "rows came in above"
    rows = page.locator("#runs > tr")
    assert rows.count() == 42 and rows.first.locator("a").inner_text() == "mine-new-ffffffff"
    assert "rl 31/100" in mine.inner_text()
    (served.store / "runs/mine-new-ffffffff").mkdir(parents=True)
    (served.store / "runs/mine-new-ffffffff/report.html").touch()
    rows.first.get_by_text("done").wait_for()
    assert rows.first.get_by_role("link", name="report").is_visible()
    rows.first.get_by_role("checkbox").evaluate("box => { box.checked = true; }")  # without its focus
    served.await_refreshes(2)
    assert rows.first.get_by_role("checkbox").is_checked() and page.get_by_role("checkbox").count() == 1
    nodes = page.evaluate("document.querySelectorAll('*').length")
    served.await_refreshes(5)
    assert page.evaluate("document.querySelectorAll('*').length") == nodes
    assert page.evaluate(read) == before


def test_the_list_tells_that_its_server_is_gone_and_back_and_shows_the_first_run(served: Served) -> None:
    page = served.open_list("?q=later")
    page.get_by_text("No run matches the filter.").wait_for()
    said = page.locator("#connection")
    served.kill()
    said.get_by_text("The server has not answered since").wait_for()
    with Ledger(served.store / LEDGER_FILE) as ledger:
        ledger.note_use("sft-1", "f" * 16, run="later-ffffffff")
    served.start()
    said.get_by_text("The server answers again since").wait_for()
    page.get_by_text("1 run, the latest first").wait_for()
    assert page.locator("#runs > tr").count() == 1 and not page.get_by_text("No run matches").is_visible()


def test_a_sample_of_any_step_its_tokens_and_its_prompt_across_steps(served: Served) -> None:
    page = served.open("sample/rl/1/900/0")
    page.get_by_role("heading", name="Step 1: sample 1 of 4").wait_for()
    assert page.locator(".turn .call").is_visible() and page.locator(".tokens .t").count() > 5
    assert page.evaluate("window.attacked") is None
    served.open("prompt/rl/7/36")
    lines = page.locator("#view-detail tbody tr[data-place]")
    lines.first.wait_for()
    table = page.get_by_role("table", name="Groups")
    assert table.get_attribute("aria-rowcount") == "31" and lines.first.inner_text().startswith("step 1")
    lines.nth(11).get_by_role("link", name="step 12").click()
    page.get_by_role("heading", name="Step 12: group 61").wait_for()
    page.get_by_role("link", name="step 12").click()
    page.get_by_role("heading", name="Step 12: 5 groups").wait_for()


def test_views_appear_when_the_run_comes_to_them(served: Served, directory: RunDirectory) -> None:
    page = served.open("step/rl/30")
    page.get_by_role("heading", name="Step 30: 5 groups").wait_for()
    page.evaluate("document.body.dataset.refreshMs = 200")
    assert page.locator("#views a").all_inner_texts() == ["Overview", "Curves", "Samples"]
    write_step(directory, 31)
    page.get_by_role("link", name="step 31 →").click()
    page.get_by_role("heading", name="Step 31: 5 groups").wait_for()
    rows = [
        {"source": "a", "row": 1, "outcome": "trained", "reason": "", "tokens": [0, 3, 4, 2], "loss_mask": [0, 0, 1, 1]}
    ]
    described = {
        "num_rows": 1,
        "num_dropped": 0,
        "max_length": 8,
        "length_counts": [1],
        "trained_share": 0.5,
        "rows": rows,
    }
    RunDirectory(served.store / "stages/sft-1").rows.write_text(json.dumps(described))
    evaluation = RunDirectory(served.store / "stages/evaluate-1")
    evaluation.root.mkdir()
    for place, name in enumerate(("base", "rl")):
        answers = [rollout(1, group, (group + place) % 2, prompt=f"held {group}") for group in range(8)]
        evaluation.write_samples(name, answers, temperature=1.0)
    with Ledger(served.store / LEDGER_FILE) as ledger:
        ledger.note_use("evaluate-1", RUN_ID, run=RUN, num_steps=2)
    page.locator("#views").get_by_role("link", name="Held-out").click()
    page.get_by_role("link", name="RL better than Base: 4 prompts").click()
    page.get_by_text("4 of 8 prompts: RL gets a higher reward than Base.").wait_for()
    page.locator("#held-out-live tbody tr[data-place='0'] a").click()
    page.get_by_role("heading", name="Answers side by side").wait_for()
    assert page.locator(".group article").count() == 2
    page.locator("#views").get_by_role("link", name="SFT rows").click()
    page.locator("#view-sft-rows").get_by_text("one two<|end|>").wait_for()
    page.locator("#views").get_by_role("link", name="Overview").click()
    assert page.locator("article").first.get_attribute("id") == "stage-evaluate-1"


@pytest.mark.matrix
def test_a_run_of_10000_steps_takes_bounded_memory(browser: Browser, directory: RunDirectory) -> None:
    write_step(directory, 1)
    first = (directory.samples / "step_000001.jsonl").read_text()
    with directory.metrics.open("a") as metrics:
        for step in range(2, 10_001):
            (directory.samples / f"step_{step:06d}.jsonl").write_text(first.replace("what is", f"step {step} asks"))
            metrics.write(
                json.dumps({"step": step, "attempt": 1, "time": time.time(), "reward": 0.5, "loss": 0.1}) + "\n"
            )
    with serving(browser, directory.root.parents[1]) as served:
        page = served.open("samples")
        page.get_by_text(re.compile(r"The table has steps .* to 10,000 of 1 to 10,000")).wait_for()
        for step in (1, 2_500, 5_000, 7_500):
            page.get_by_label("Step", exact=True).fill(str(step))
            page.locator(
                "#view-samples tbody tr[data-place='0']", has_text=f"step {step} asks" if step > 1 else "what is"
            ).wait_for()
        served.open("curves")
        page.get_by_role("img", name=re.compile("^Reward, RL")).locator("canvas").wait_for()
        session = page.context.new_cdp_session(page)
        session.send("HeapProfiler.collectGarbage")
        session.send("Performance.enable")
        numbers = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        assert numbers["JSHeapUsedSize"] < MAX_HEAP_MB * 1e6 and numbers["Nodes"] < MAX_NODES, numbers
        assert 10_000 < max(served.sizes) < MAX_BLOCK_BYTES
        assert served.server_mb() < MAX_SERVER_MB


@pytest.mark.matrix
def test_fifty_viewers_are_answered_in_bounded_memory(served: Served, directory: RunDirectory) -> None:
    user, _, password = own_password(served.store / "prefect").partition(":")
    places = ("", "/blocks/curves", "/blocks/page/rl/last")
    began_mb = served.server_mb()

    def view(number: int) -> list[int]:
        with httpx.Client(auth=(user, password), timeout=120) as viewer:
            return [viewer.get(f"{served.url}{place}").status_code for _ in range(5) for place in places]

    with ThreadPoolExecutor(50) as viewers:
        answers = viewers.map(view, range(50))
        for step in range(31, 36):
            write_step(directory, step)
        assert [code for codes in answers for code in codes] == [200] * (50 * 5 * len(places))
    assert served.server_mb() < began_mb + MAX_VIEWERS_MB


def test_the_page_fits_a_phone(served: Served) -> None:
    for width in (390, 900, 1400):
        served.page.set_viewport_size({"width": width, "height": 900})
        for view in ("", "curves", "samples", "sample/rl/3/15/1", "group/rl/3/15", "step/rl/3", "prompt/rl/3/15"):
            page = served.open(view)
            wait_until(lambda: page.evaluate("document.body.dataset.shown === location.hash"), what=view)  # noqa: B023
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, view)
        assert served.open_list().evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, "list")
