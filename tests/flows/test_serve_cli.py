"""Pins: `rollouts serve` and `rollouts chat` find what is meant, and a chat works from a pipe.

Without it a user talks to another checkpoint than the named one, or needs a program of another project to talk at all.
"""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from rollouts.flows.commands.chat import Settings, obey
from rollouts.flows.commands.serve import find_checkpoint, render_examples
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.registry import promote
from rollouts_core.errors import InputError
from tests.flows.test_cli import running
from tests.flows.test_models_cli import register
from tests.kit.commands import clean_environment
from tests.rollouts_core.embedded.scripted_model import STORY, THOUGHTS, write_scripted_model
from tests.rollouts_core.embedded.test_openai_api import client_of

SAID = "".join(STORY)


@pytest.fixture(scope="module")
def story_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("story"), STORY)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with three runs of two names, two models of a line, the second in production."""
    store = tmp_path / "store"
    for name in ("mine-5793d50a", "other-11111111", "other-22222222"):
        (store / "runs" / name / "checkpoint").mkdir(parents=True)
    register(store, 1)
    second = register(store, 2)
    with Ledger(store / LEDGER_FILE) as ledger:
        promote(ledger, second, by="a test", reason="it is newer")
    return store


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("mine-5793d50a", "runs/mine-5793d50a/checkpoint"),
        ("mine", "runs/mine-5793d50a/checkpoint"),
        ("small-1", "runs/small-1/checkpoint"),
        ("small", "runs/small-2/checkpoint"),
    ],
)
def test_a_run_a_model_and_a_line_have_a_checkpoint_each(store: Path, given: str, found: str) -> None:
    assert find_checkpoint(given, store) == store / found


def test_of_several_runs_with_a_name_the_latest_is_meant(store: Path) -> None:
    first, second = (store / f"runs/other-{each}/checkpoint" for each in ("11111111", "22222222"))
    for latest, other in ((first, second), (second, first)):
        os.utime(latest, (2e9, 2e9))
        os.utime(other, (1e9, 1e9))
        assert find_checkpoint("other", store) == latest


def test_a_folder_is_meant_itself_or_has_the_checkpoint_of_a_run(store: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run/checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").touch()
    for given in (checkpoint, checkpoint.parent):
        assert find_checkpoint(str(given), store) == checkpoint
    with pytest.raises(InputError, match=r"has no config\.json"):
        find_checkpoint(str(tmp_path), store)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nothing", "nothing is not a folder, nor a finished run or a registered model of the store"),
        ("", "MODEL is empty: give a run"),
    ],
)
def test_what_names_no_checkpoint_is_refused(store: Path, given: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        find_checkpoint(given, store)
    with pytest.raises(InputError, match="nothing is not a folder"):
        find_checkpoint("nothing", store / "nowhere")


def test_the_examples_fit_the_model_and_keep_the_key_to_themselves(tmp_path: Path) -> None:
    assert '"input_ids": [1, 2, 3]' in render_examples("http://h:1", "m", tmp_path, has_key=False)
    (tmp_path / "tokenizer.json").touch()
    shown = render_examples("http://h:1", "m", tmp_path, has_key=True)
    assert "Bearer $ROLLOUTS_API_KEY" in shown and 'os.environ["ROLLOUTS_API_KEY"]' in shown
    assert 'model="m"' in shown
    name = 'it\'s a "m\\ödel"'
    curl, _, *lines = render_examples("http://h:1", name, tmp_path, has_key=False).removeprefix("try: ").splitlines()
    assert json.loads(shlex.split(curl)[-1])["model"] == name
    program = ast.parse(dedent("\n".join(lines)))
    assert name in [each.value for each in ast.walk(program) if isinstance(each, ast.Constant)]


@pytest.mark.slow
def test_a_model_is_served_under_the_name_that_was_given(story_dir: Path) -> None:
    with running("serve", str(story_dir), "--port", "0") as url:
        answer = client_of(url).chat.completions.create(
            model=str(story_dir), messages=[{"role": "user", "content": "Say it."}], temperature=0
        )
    assert answer.choices[0].message.content == SAID


def say(lines: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollouts.flows.cli", "chat", *arguments]
    return subprocess.run(command, input=lines, capture_output=True, text=True, env=clean_environment(), timeout=120)


@pytest.mark.slow
def test_each_line_of_a_pipe_is_answered(story_dir: Path) -> None:
    lines = "Say it.\n\n/set max_tokens=2\nAgain.\n/reset\n/what\nSay it."  # the last line has no end
    said = say(lines, str(story_dir), "--temperature", "0", "--system", "Be brief.")
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines() == [SAID, "Once upon [...]", "Once upon [...]"]
    assert "/what is not a command" in said.stderr and "started a new conversation" in said.stderr


@pytest.mark.matrix
@pytest.mark.slow
def test_two_models_answer_the_same(story_dir: Path, tmp_path: Path) -> None:
    other = write_scripted_model(tmp_path / "other", [*THOUGHTS, " it is."])
    said = say("Say it.\n", str(story_dir), str(other), "--temperature", "0")
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith(f"[{story_dir}]\n{SAID}\n[{other}]\n")
    assert said.stdout.endswith("Four it is.\n")


@pytest.mark.slow
def test_too_long_a_message_is_refused_and_the_chat_goes_on(story_dir: Path) -> None:
    said = say("x" * 2000 + "\nSay it.\n", str(story_dir), "--temperature", "0", "--json")
    answer = {"kind": "answer", "model": str(story_dir), "prompt": "Say it."}
    assert said.returncode == 0 and json.loads(said.stdout) == answer | {
        "message": {"role": "assistant", "content": SAID}
    }
    assert "longer than the model's context length (1024 tokens)" in said.stderr


@pytest.mark.slow
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_not_utf_8_is_a_message(errors: str, story_dir: Path) -> None:
    """Without it the chat ends with a traceback, or the answer is empty without a reason."""
    said = subprocess.run(
        [sys.executable, "-m", "rollouts.flows.cli", "chat", str(story_dir), "--temperature", "0"],
        input=b"\xff\xfe\n/reset\nSay it.\n",
        capture_output=True,
        env={**clean_environment(), "PYTHONIOENCODING": f"utf-8:{errors}"},
        timeout=120,
    )
    assert said.returncode == 0, said.stderr
    answers = said.stdout.decode().splitlines()
    assert len(answers) == 2 and answers[0] and answers[1] == SAID


@pytest.mark.slow
def test_a_chat_with_a_model_without_a_tokenizer_is_refused_at_once(story_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(story_dir / name)
    said = say("Say it.\n", str(story_dir), str(tmp_path))
    assert said.returncode == 2
    assert f"{tmp_path} has no tokenizer.json, which a chat needs: add it to {tmp_path}" in said.stderr


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal that knows no colors and no cursor."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)


@pytest.mark.slow
def test_a_dumb_terminal_has_a_prompt_and_an_end(story_dir: Path, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    command = [sys.executable, "-m", "rollouts.flows.cli", "chat", str(story_dir), "--temperature", "0"]
    environment = {**clean_environment(), "TERM": "dumb"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = read_until(ours, b"> ")
    os.write(ours, b"Say it.\n")
    shown += read_until(ours, b"> ")
    os.write(ours, b"\x04")  # Ctrl-D
    assert process.wait(60) == 0
    text = shown.decode()
    assert SAID in text and "/help shows the commands" in text
    assert not re.search(r"\x1b\[(?!\?2004)", text), "it moves no cursor and has no colors"


def read_until(descriptor: int, end: bytes) -> bytes:
    shown, deadline = b"", time.monotonic() + 120
    while not shown.endswith(end):
        assert time.monotonic() < deadline, shown
        shown += os.read(descriptor, 4096)
    return shown


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("/set temperature=0.5", Settings(temperature=0.5)),
        ("/set seed = 3", Settings(seed=3)),
        ("/set seed=x", Settings()),
        ("/set max_tokens=0", Settings()),
        ("/set system=x", Settings()),
        ("/set", Settings()),
        ("/system Be brief.", Settings(system="Be brief.")),
        ("/reset", Settings()),
    ],
)
def test_commands_change_settings(line: str, changed: Settings) -> None:
    assert obey(line, Settings(), []) == changed
