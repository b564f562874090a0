"""Pins that the code which the documentation tells readers to copy works as it stands there, and that the tests exist
by which it says that something is shown, and the places to which its links lead.

Without it the first environment that somebody writes would fail for a mistake of ours, or a page would promise what
nobody checks any more.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

import rollouts_core
from rollouts.flows.evaluate_settings import EvaluateConfig
from rollouts.flows.retrain_settings import RetrainConfig, ScheduleConfig
from rollouts.infra.node import FurtherNode, InstanceNode, RentedNode, SSHNode
from rollouts.infra.offers import GPUQuery
from rollouts_core.algorithms.presets import AlgorithmName
from rollouts_core.config import RolloutConfig, algorithm_preset
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.environments.protocol import Conversation
from rollouts_core.filters import FILTERS, FilterDecision, compose_filters
from rollouts_core.quickstart import build_character_tokenizer
from rollouts_core.rewards import grade_group
from rollouts_core.rollout.generate import build_pending_group, create_conversation_generate_fn
from rollouts_core.types import Message, Prompt, Sample
from tests.rollouts_core.scripted import ScriptedEngine

DOCS = Path(__file__).resolve().parents[1] / "docs"


def example_of(page: str) -> dict[str, Any]:
    """What the Python examples of a page define."""
    defined: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        exec(code, defined)
    return defined


def play(environment: Any, turns: list[str], tokenizer: PreTrainedTokenizerBase) -> Sample:
    prompt = Prompt(id="p", messages=(Message(role="user", content="?"),), answer="7")
    group = build_pending_group(prompt, group_index=0, size=1)
    engine = ScriptedEngine(turns, tokenizer)
    generate = create_conversation_generate_fn([engine], tokenizer, RolloutConfig(), environment)
    [sample] = asyncio.run(grade_group(asyncio.run(generate(group)), environment.grade))
    return sample


def test_the_environment_of_the_docs_plays_its_game() -> None:
    environment = example_of("environments.md")["GuessEnvironment"]()
    sample = play(environment, ["3", "9", "?", "7"], build_character_tokenizer())
    said = [message["content"] for message in sample.metadata["conversation"]]
    assert said == ["?", "3", "higher", "9", "lower", "?", "a number, please", "7"]
    assert (sample.reward, sample.metadata["outcomes"]) == (1.0, ["ok", "ok", "parse_failure", "ok"])
    assert play(environment, ["3"], build_character_tokenizer()).reward == 0.0


def test_the_tool_of_the_docs_is_called() -> None:
    environment = example_of("environments.md")["AddingEnvironment"]()
    said = Message(role="assistant", content='<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
    reply = asyncio.run(environment.respond(Conversation(sample=Sample(), messages=[said])))
    assert reply.messages == ({"role": "tool", "name": "add", "content": "3"},)
    assert environment.grade(Sample(response="3", metadata={"answer": "3"})) == 1.0


def test_what_the_docs_tell_users_of_other_systems_to_copy_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("all.jsonl").write_text("".join(f'{{"prompt": "{i}+1=?", "answer": "{i + 1}"}}\n' for i in range(410)))
    defined = example_of("coming_from.md")
    assert {name: len(load_prompts_from_jsonl(f"{name}.jsonl")) for name in ("selection", "heldout", "prompts")} == {
        "selection": 200,
        "heldout": 200,
        "prompts": 10,
    }
    assert defined["near_20"](Sample(response="17 letters, spaces", metadata={"answer": "7", "prompt_id": "p"})) == -2
    said = Message(
        role="assistant", content='<tool_call>{"name": "multiply", "arguments": {"a": 3, "b": 2}}</tool_call>'
    )
    asked = Conversation(sample=Sample(), messages=[said])
    reply = asyncio.run(defined["MultiplyingEnvironment"]().respond(asked))
    assert reply.messages == ({"role": "tool", "name": "multiply", "content": "6"},)


def names_of_functions(file: Path) -> set[str]:
    """The names of its functions; it is not imported."""
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_tests_that_the_docs_name_exist() -> None:
    named = {name for page in DOCS.glob("*.md") for name in re.findall(r"`(tests/\S+?\.py::\w+)`", page.read_text())}
    files = {file: DOCS.parent / file for file in {name.partition("::")[0] for name in named}}
    there = {f"{file}::{test}" for file, path in files.items() if path.is_file() for test in names_of_functions(path)}
    assert named - there == set() and len(named) > 80


def test_functions_that_the_docs_name_by_their_file_exist() -> None:
    named = re.findall(
        r"`((?:flows|tasks|infra|rollouts_core)/\S+?\.py)::(\w+)`", (DOCS / "architecture.md").read_text()
    )
    assert [(file, name) for file, name in named if name not in names_of_functions(DOCS.parent / file)] == []
    assert len(named) > 15


def prose_of(page: Path) -> str:
    """A page without its pieces of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """What GitHub calls the headings of a page in links."""
    headings = re.findall(r"^#+ +(.+?) *$", prose_of(page), re.MULTILINE)
    shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in shown}


def test_every_link_within_the_docs_leads_to_a_file_and_a_heading() -> None:
    pages = [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page))]
    broken = []
    for page, link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors_of(target))):
            broken.append(f"{page.name}: {link}")
    assert broken == [] and len(links) > 100


def test_every_fault_of_the_docs_names_a_test_that_shows_it() -> None:
    lines = (DOCS / "faults.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.endswith("| shown by |")]
    assert len(rows) == 74
    assert [row for row in rows if not re.fullmatch(r"\|[^|]+\|[^|]+\| `tests/\S+`(, `tests/\S+`)* \|", row)] == []


def test_the_docs_name_the_algorithms_that_correct_for_old_completions() -> None:
    text = (DOCS / "async_rl.md").read_text()
    sentence = text[text.index("The named algorithms") : text.index("correct by default")]
    named = set(re.findall(r"`([^`]+)`", sentence))
    assert named == {name for name in get_args(AlgorithmName) if name and algorithm_preset(name).corrects_for_age}


def snippets_of(page: str) -> list[str]:
    """The Python of a page in order, each piece on the line on which it stands there."""
    text = (DOCS / page).read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, each.start(1)) + each[1] for each in found]


def imported_from_the_core(snippet: str) -> set[str]:
    imports = [node for node in ast.walk(ast.parse(snippet)) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports if node.module == "rollouts_core" for alias in node.names}


def used_in(snippet: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(snippet)) if isinstance(node, ast.Name)}


async def run_as_a_notebook(page: str) -> None:
    """Run the snippets in one namespace and one event loop; they may await outside of functions."""
    defined: dict[str, Any] = {"__name__": "notebook"}
    for snippet in snippets_of(page):
        code = compile(snippet, f"docs/{page}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        outcome = eval(code, defined)
        if inspect.isawaitable(outcome):
            await outcome


@pytest.mark.slow
def test_the_snippets_of_the_library_page_run_in_order() -> None:
    num_threads = torch.get_num_threads()
    try:
        asyncio.run(run_as_a_notebook("library.md"))
    finally:
        torch.set_num_threads(num_threads)


def test_the_library_page_imports_and_uses_every_public_name() -> None:
    snippets = snippets_of("library.md")
    imported = [imported_from_the_core(snippet) for snippet in snippets]
    assert set().union(*imported) == set(rollouts_core.__all__)
    assert [names - used_in(snippet) for names, snippet in zip(imported, snippets, strict=True) if names] == [
        set() for names in imported if names
    ]


def test_the_library_page_says_something_about_every_public_name() -> None:
    prose = prose_of(DOCS / "library.md")
    assert set(rollouts_core.__all__) - set(re.findall(r"`(\w+)`", prose)) == set()


EVENT_WRITERS = {"write": 0, "_write_event": 0, "append_event": 2}
"""The functions that write an event, and where each is given its name."""


def written_events() -> dict[str, set[str]]:
    """Every event that the code writes, with its details but for those that come in a dictionary."""
    events: dict[str, set[str]] = {}
    for path in [*(DOCS.parent / "rollouts_core").rglob("*.py"), *(DOCS.parent / "infra/supervisor").rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            writer = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            place = EVENT_WRITERS.get(writer, len(call.args))
            name = call.args[place] if place < len(call.args) else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.isidentifier():
                events.setdefault(name.value, set()).update(each.arg for each in call.keywords if each.arg)
    return events


def test_the_docs_name_every_event_and_its_details() -> None:
    page = (DOCS / "run_directory.md").read_text()
    section = page[page.index("## Events") : page.index("## result.json")]
    told = {name: set(re.findall(r"\w+", details)) for name, details in re.findall(r"`(\w+)`\s*\(([^)]*)\)", section)}
    events = written_events()
    assert told.keys() == events.keys()
    assert {name: details - told[name] for name, details in events.items()} == {name: set() for name in events}


def test_the_docs_name_every_reason_for_which_a_group_is_dropped() -> None:
    page = (DOCS / "environments.md").read_text()
    section = page[page.index("## Which groups are trained on") : page.index("## A policy that learns")]
    told = set(re.findall(r"`(\w+)`", section))
    same, without = [scored(1.0), scored(1.0)], [scored(None), scored(None)]
    dropped = [each(group) for each in FILTERS.values() for group in (same, without, [scored(0.0), scored(0.0)])]
    own = compose_filters(lambda group: False)(same)
    outcomes = [outcome for outcome in (*dropped, own) if isinstance(outcome, FilterDecision)]
    assert {outcome.reason for outcome in outcomes if not outcome.keep} - told == set()


def scored(reward: float | None) -> Sample:
    prompt = (Message(role="user", content="?"),)
    return Sample(prompt=prompt, response="7", tokens=[1, 2], loss_mask=[0.0, 0.0], reward=reward)


@pytest.mark.parametrize(
    ("page", "settings"),
    [
        ("clusters.md", FurtherNode),
        ("evaluation.md", EvaluateConfig),
        ("machines.md", GPUQuery),
        ("machines.md", InstanceNode),
        ("machines.md", RentedNode),
        ("retraining.md", RetrainConfig),
        ("retraining.md", ScheduleConfig),
        ("ssh_nodes.md", SSHNode),
    ],
)
def test_a_page_about_settings_has_all_of_them(page: str, settings: type[BaseModel]) -> None:
    assert set(settings.model_fields) - set(re.findall(r"\w+", (DOCS / page).read_text())) == set()
