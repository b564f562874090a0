"""Pins that text of machines, models, data and users is shown as text, in Markdown, in tables and in messages."""

from __future__ import annotations

import re
from types import SimpleNamespace

import jinja2.sandbox
import pytest
from markdown_it import MarkdownIt

from rollouts.flows.commands.notify import BODY, SUBJECT
from rollouts.flows.reap import table_of
from rollouts.infra.foreign_text import shown_line
from rollouts.infra.renting.reaper import ReapReport
from rollouts.tasks.candidate import render_comparison
from rollouts_core.report import render_results_markdown
from rollouts_core.report.markdown import as_code, escaped
from rollouts_core.report.results import Results, ScoreDisplay, ShownDifference, ShownScore

ATTACKS = (
    *("[click](https://evil.example)", "![](https://evil.example/x.png)", "<img src=x onerror=alert(1)>", "# heading"),
    *("<https://evil.example>", "a | b | c", "**bold**", "`code`", "``", "~~gone~~", "- item", "1. item", "> quote"),
    *(
        "a\n\n# heading",
        "a\n---\n",
        "&lt;b&gt;",
        "[a]: https://evil.example",
        "\\[click\\](x)",
        "_x_",
        "\\",
        "a\u2028b",
    ),
    *("\x1b[31mred", "\u202edlrow", "<!-- -->", "$x$", "*", "==", "```\nx\n```", "1) item", "a \\| b", "`a", "+ item"),
)


def texts_of(markdown: str) -> list[str]:
    """The visible text of each cell, paragraph and item; fails if there is anything but text and code."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)
    inline = [token for token in tokens if token.type == "inline"]
    for token in inline:
        kinds = {child.type for child in token.children or ()}
        assert kinds <= {"text", "code_inline", "text_special"}, (markdown, kinds)
    return ["".join(child.content for child in token.children or ()) for token in inline]


def plain(text: str) -> str:
    """The text in one line, without what does not print."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


@pytest.mark.parametrize("text", ATTACKS)
def test_a_text_is_shown_as_it_is(text: str) -> None:
    tokens = MarkdownIt("commonmark").parse(escaped(text))
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    assert texts_of(escaped(text)) == [plain(text)]
    assert texts_of(f"a {as_code(text)}") == [f"a {plain(text)}"]


def test_names_with_underscores_and_numbers_stay_readable() -> None:
    assert escaped("run_1: accuracy of step_000100 is 0.512 (+1.2)") == "run_1: accuracy of step_000100 is 0.512 (+1.2)"


def make_results(text: str) -> Results:
    """Two scores and a difference, called by the text."""
    score = ShownScore(
        name="x", label=text, checkpoint=text, mean="1", interval="0 to 1", num_rows=1, mean_at=0, low_at=0, high_at=0
    )
    difference = ShownDifference(
        title="", outcome="better", difference="1", interval="", p_value="", sentence=f"So: {text}"
    )
    display = ScoreDisplay(title="a", rows="r", factor=1, unit="", difference_unit="", decimals=1)
    return Results(display=display, scores=(score, score), ticks=(), differences=(difference,), finding="")


@pytest.mark.parametrize("text", ATTACKS)
def test_the_tables_of_reports_keep_their_cells(text: str) -> None:
    results = make_results(text)
    cells = texts_of(render_results_markdown(results))
    assert cells[4:12:4] == [plain(f"{text} {text}")] * 2 and cells[-1] == plain(f"So: {text}")
    numbers = dict.fromkeys(
        f"{which}{what}" for which in ("", "against_", "difference_") for what in ("mean", "low", "high")
    )
    evaluation = {**dict.fromkeys(numbers, 0.0), "difference": 0.0, "against": text, "sentence": f"So: {text}"}
    cells = texts_of(render_comparison(f"n{text}", evaluation))
    assert (cells[3], cells[6], cells[-1]) == (plain(text), plain(f"n{text}"), plain(f"So: {text}"))


def test_a_terminal_shows_the_results_without_escapes_and_obeys_nothing() -> None:
    shown = render_results_markdown(make_results("[x] \x1b[31mp < 0.001"), show=shown_line)
    assert "| [x] p < 0.001 [x] p < 0.001 | 1 | 0 to 1 | 1 |" in shown and shown.endswith("- So: [x] p < 0.001")


def test_what_a_provider_calls_its_machine_is_no_link_in_the_table() -> None:
    report = ReapReport(ended=["[x](https://evil.example)"])
    assert [row["machine"] for row in table_of(report)] == [r"\[x\](https://evil.example)"]


@pytest.mark.parametrize(
    "text", ["<!channel>", "<https://evil.example|Retry>", "[Retry](https://evil.example)", "@everyone"]
)
def test_a_message_has_no_link_or_mention_but_the_page_of_the_run(text: str) -> None:
    state = SimpleNamespace(name="Failed", message=text)
    run, environment = SimpleNamespace(name=text, state=state), jinja2.sandbox.ImmutableSandboxedEnvironment()
    environment.filters["ui_url"] = lambda _: "PAGE"
    for template in (SUBJECT, BODY):
        said = environment.from_string(template).render(flow_run=run, flow=SimpleNamespace(name="flow"))
        assert not re.search(r"[<>]|\]\(|@\w", said), said
