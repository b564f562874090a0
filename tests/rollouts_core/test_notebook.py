"""Pins what a notebook shows of a training: its curves, a bar, and completions of an engine in the same process.

Without it a plot would stay empty, a bar would end short of its last step, or the name of a metric would run as markup.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rollouts_core import ProgressBar, plot, serve_in_process
from rollouts_core.config import ModelConfig, SamplingConfig
from rollouts_core.engines import GenerationRequest
from rollouts_core.errors import InputError
from tests.kit.chromium import chromium

HISTORY = [{"loss": 3.0 - 0.1 * step, "lr": 1e-4, "mine": float(step % 3)} for step in range(20)]


def test_the_curves_of_the_report_are_drawn_by_default_and_others_by_name() -> None:
    assert [chart.title for chart in plot(HISTORY).charts] == ["Loss", "Learning rate"]
    [loss, mine] = plot(HISTORY, "loss", "mine").charts
    assert (loss.headline, mine.title) == ("3 → 1.1", "mine")
    assert loss.x_ticks[0].label == "5" and loss.lines[0].path.count("L") == len(HISTORY) - 1


def test_the_metrics_of_a_run_directory_are_drawn_with_their_steps(tmp_path: Path) -> None:
    lines = [{"step": step, "attempt": 1, "time": 0.0, "reward": step / 100} for step in (10, 20, 30)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [reward] = plot(tmp_path).charts
    assert (reward.headline, [tick.label for tick in reward.x_ticks]) == ("0.1 → 0.3", ["10", "15", "20", "25", "30"])


@pytest.mark.parametrize(
    ("training", "names", "said"),
    [
        ([], (), "plot: no step has a metric that the report draws; metrics: none"),
        (HISTORY, ("reward", "kl"), "plot: no step has a metric reward or kl; metrics: loss, lr, mine, step"),
    ],
)
def test_nothing_to_draw_is_a_sentence(training: list[dict[str, float]], names: tuple[str, ...], said: str) -> None:
    with pytest.raises(InputError, match=f"^{said}$"):
        plot(training, *names)


@pytest.mark.slow
def test_a_browser_shows_the_curves_and_no_name_is_read_as_markup(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    plot([{"loss": 1.0, name: 2.0}, {"loss": 0.5, name: 1.0}], "loss", name).save(tmp_path / "plot.html")
    with chromium() as browser:
        page = browser.new_page()
        page.goto((tmp_path / "plot.html").as_uri())
        assert page.locator("svg .line").count() == 2
        assert page.locator("img").count() == 0
        assert page.locator("figcaption b").all_inner_texts() == ["Loss", name]


def test_a_bar_shows_the_newest_numbers_and_ends_at_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(4)
    for step in (1, 2, 4):
        bar.log({"loss": 1 / step, "lr": 1.0}, step)
    shown = capsys.readouterr()
    assert "100%" in shown.out and "4/4" in shown.out and "loss=0.250" in shown.out and "lr" not in shown.out
    assert shown.err == ""


def test_an_engine_in_this_process_answers_and_ends_with_its_block(base_model: ModelConfig) -> None:
    async def complete() -> list[int]:
        async with serve_in_process(base_model.path, max_running_requests=2) as engine:
            request = GenerationRequest(
                prompt_tokens=[4, 8], sampling=SamplingConfig(max_new_tokens=3), stop_token_ids=(), seed=0
            )
            [completion] = await engine.complete([request])
            return list(completion.tokens)

    assert len(asyncio.run(complete())) == 3
