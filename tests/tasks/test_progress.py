"""Pins what a stage says while it runs when nobody watches a terminal: plain lines, not too many.

Without it logs of schedulers fill with escape codes or with a line per step, or end without the last step.
"""

from __future__ import annotations

import io
import os
import re

import pytest
from rich.console import Console
from rich.progress import Progress

from rollouts.tasks.folded_lines import folded
from rollouts.tasks.progress import PACE_PERIOD_S, StageProgress, TimesColumn


def lines_of(*steps: int, num_steps: int, is_terminal: bool = False, width: int = 200) -> list[str]:
    """What is printed for the metrics of some steps."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=width)
    with StageProgress("sft", num_steps=num_steps, console=console) as progress:
        for step in steps:
            progress.on_metrics({"step": step, "loss": 1.23456, "tokens_per_s": 12345.6, "grad_norm": 1.0})
        progress.say("finished in 2.0 s")
    return output.getvalue().splitlines()


def test_lines_without_a_terminal_are_plain_and_name_the_stage() -> None:
    lines = lines_of(40, num_steps=40)
    assert lines == ["sft            step 40 of 40, loss 1.235, 12,346 tokens/s", "sft            finished in 2.0 s"]


def test_of_many_quick_steps_the_first_and_the_last_get_a_line() -> None:
    lines = lines_of(*range(1, 101), num_steps=100)
    assert [line.split(",")[0].split("step ")[1] for line in lines[:-1]] == ["1 of 100", "100 of 100"]


def test_steps_that_are_delivered_again_after_a_resume_do_no_harm() -> None:
    assert lines_of(21, 22, 21, 22, 40, num_steps=40)[-2].startswith("sft            step 40 of 40")


def test_what_a_machine_says_moves_no_cursor() -> None:
    output = io.StringIO()
    with StageProgress("sft", num_steps=0, console=Console(file=output, force_terminal=True, width=200)) as progress:
        progress.say("waits for GPU 0, held by run \x1b[2J\x1b]0;a title\x07mine\x9b")
    assert output.getvalue() == f"{'sft':<14} waits for GPU 0, held by run mine\n"


def test_a_terminal_gets_a_bar_instead_of_lines() -> None:
    text = "\n".join(lines_of(1, 40, num_steps=40, is_terminal=True))
    assert "\x1b[" in text
    assert "40/40" in text
    assert "step 40 of 40" not in text


@pytest.mark.parametrize(("width", "shown"), [(80, ["━", "loss 1.235"]), (60, ["━"]), (40, [])])
def test_the_bar_stays_on_one_line_of_a_narrow_terminal(width: int, shown: list[str]) -> None:
    """A bar of two lines breaks the time left in the middle: "0:46, about" above "23 s left"."""
    text = "\n".join(lines_of(1, 39, num_steps=40, is_terminal=True, width=width))
    drawn = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]", text)]
    last = [line for line in drawn if "39/40" in line][-1]
    assert last.startswith("sft") and len(last.rstrip()) <= width and re.search("39/40 +0:0", last)
    assert [text for text in ("━", "loss 1.235", "tokens/s") if text in last] == shown
    assert all("/40" in line for line in drawn if re.search(r"\d:\d\d", line))


def test_a_terminal_without_cursor_movements_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    lines = lines_of(1, 40, num_steps=40, is_terminal=True)
    assert [line.split(",")[0] for line in lines] == [
        "sft            step 1 of 40",
        "sft            step 40 of 40",
        "sft            finished in 2.0 s",
    ]


def test_a_long_sentence_is_folded_between_words_on_a_terminal_alone() -> None:
    sentence = "base has accuracy 0.0 %; sft has accuracy 41.1 %, in /a/path/that/is/much/longer/than/one/line"
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    assert folded("evaluate       ", sentence, console).split("\n") == [
        "evaluate       base has accuracy 0.0 %; sft has accuracy",
        "               41.1 %, in",
        "               /a/path/that/is/much/longer/than/one/line",
    ]
    assert folded("rl   ", f"{sentence}\nnext", Console(file=io.StringIO(), width=60)) == f"rl   {sentence}\nnext"
    assert folded("checked        ", "two\nlines", console) == "checked        two\n               lines"
    console = Console(file=io.StringIO(), force_terminal=True, width=30)
    assert folded("evaluate       ", "base has accuracy 0.0 %", console) == "evaluate       base has\n  accuracy 0.0 %"


def test_the_time_left_cannot_be_mistaken_for_the_time_that_has_passed() -> None:
    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with Progress(
        TimesColumn(),
        console=console,
        auto_refresh=False,
        get_time=lambda: now[0],
        speed_estimate_period=PACE_PERIOD_S,
    ) as progress:
        row = progress.add_task("sft", total=200)
        [task] = progress.tasks
        assert TimesColumn().render(task).plain == "0:00"
        for step in (1, 2, 3):
            now[0] = 49.0 * step
            progress.update(row, completed=step)
        assert TimesColumn().render(task).plain == "2:27, about 2.7 h left"
        progress.update(row, completed=190)
        assert TimesColumn().render(task).plain.startswith("2:27, about ")
        progress.update(row, completed=200)
        assert TimesColumn().render(task).plain == "2:27"


def test_brackets_in_a_message_are_printed_as_they_are() -> None:
    output = io.StringIO()
    with StageProgress("sft", num_steps=0, console=Console(file=output)) as progress:
        progress.say("data[0] of /data/[bold]x[/bold]")
    assert "data[0] of /data/[bold]x[/bold]" in output.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_stage_goes_on_when_nobody_is_left_who_reads(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `2>&1 | head`, or in a terminal that was closed: a run that ended for it left the machine that it rents."""
    reader, writer = os.openpty() if is_terminal else os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", nobody)
        with StageProgress("sft", num_steps=2) as progress:
            progress.on_metrics({"step": 1, "loss": 1.0})
            progress.say("said into a void")
            progress.on_metrics({"step": 2, "loss": 1.0})
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # what is left in its buffer
