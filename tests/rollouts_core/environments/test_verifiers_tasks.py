"""Tasks of the real package verifiers, as rows and as an environment.

Without these tests a task could be scored on another text than the policy wrote, or with some of its rewards left out.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed: pip install 'rollouts[verifiers]'")

import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, Error, Reward, TraceTask

from rollouts_core.config import RolloutConfig
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.environments.verifiers_tasks import VerifiersEnvironment, load_rows, main, samples_of_trace
from rollouts_core.errors import ConfigError, DataError, EnvironmentUnavailableError, RewardError
from rollouts_core.rewards import grade_sample
from rollouts_core.rollout.generate import build_pending_group
from rollouts_core.rollout.resolve import resolve_environment
from rollouts_core.types import Sample

TASKSET = """
import verifiers.v1 as vf


class CapitalData(vf.TaskData):
    answer: str


class CapitalTask(vf.Task[CapitalData]):
    {attributes}

    @vf.reward(weight=2.0)
    async def right(self, trace{runtime}) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        assert [message.role for message in trace.messages] == ["system", "user", "assistant"]
        if trace.last_reply == "crash":
            raise KeyError("crash")
        return float(len(trace.last_reply) < 10)


class CapitalTaskset(vf.Taskset[CapitalTask, vf.TasksetConfig]):
    def load(self):
        for country, capital in (("France", "Paris"), ("Italy", "Rome")):
            yield CapitalTask(CapitalData(prompt=f"Capital of {{country}}?", answer=capital, system_prompt="Be brief."))


__all__ = ["CapitalTaskset"]
"""


def write_taskset(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, attributes: str = "", runtime: str = ""
) -> str:
    (folder / f"{name}.py").write_text(TASKSET.format(attributes=attributes or "pass", runtime=runtime))
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop(name, None)
    return name


def grade(sample: Sample) -> float | None:
    environment = VerifiersEnvironment(tasksets=[sample.metadata["taskset"]])
    return asyncio.run(grade_sample(sample, environment.grade)).reward


@pytest.mark.slow
def test_a_taskset_becomes_prompts_whose_answers_its_own_rewards_grade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write_taskset(tmp_path, monkeypatch, "capitals_one")
    assert main([name, str(tmp_path / "prompts.jsonl")]) == 0
    prompts = load_prompts_from_jsonl(tmp_path / "prompts.jsonl")
    assert [message["content"] for message in prompts[1].messages] == ["Be brief.", "Capital of Italy?"]
    [pending] = build_pending_group(prompts[1], group_index=0, size=1)
    restored = json.loads(json.dumps(pending.to_json()))
    for response, reward in (("Rome", 2.5), ("Paris", 0.5), ("It is certainly Rome", 0.0)):
        sample = Sample(prompt=pending.prompt, response=response, metadata=restored["metadata"])
        assert grade(sample) == reward


def test_a_reward_that_raises_ends_the_run_and_names_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write_taskset(tmp_path, monkeypatch, "capitals_two")
    row = load_rows(name)[0]
    sample = Sample(prompt=tuple(row["prompt"]), response="crash", metadata={"prompt_id": row["id"], **row})
    with pytest.raises(RewardError, match=r"on prompt 'capitals_two-0' raised .*crash"):
        grade(sample)


@pytest.mark.parametrize(
    "named", ["capitals_evil", "owner/capitals_evil", "Capitals-Evil", "capitals_evil@1", "x.capitals_evil", ["a"]]
)
def test_a_row_imports_no_taskset_that_the_settings_do_not_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: Any
) -> None:
    (tmp_path / "x").mkdir()
    harm = f"import pathlib; pathlib.Path({str(tmp_path / 'harm')!r}).touch()\n"
    for place in ("capitals_evil.py", "x/__init__.py", "x/capitals_evil.py"):
        (tmp_path / place).write_text(harm)
    write_taskset(tmp_path, monkeypatch, "capitals_four")
    environment = resolve_environment(RolloutConfig(environment="verifiers", tasksets=("capitals_four",)))
    row = load_rows("capitals_four")[0] | {"taskset": named}
    with pytest.raises(ValueError, match=r"but rollout\.tasksets does not list it"):
        environment.check_row(row)  # type: ignore[attr-defined]
    sample = Sample(prompt=tuple(row["prompt"]), response="Paris", metadata={"prompt_id": row["id"], **row})
    with pytest.raises(RewardError, match=r"but rollout\.tasksets does not list it"):
        asyncio.run(grade_sample(sample, environment.grade))
    assert not (tmp_path / "harm").exists()


def test_tasksets_must_be_listed_and_belong_to_this_environment() -> None:
    with pytest.raises(ConfigError, match=r"list them in rollout\.tasksets"):
        resolve_environment(RolloutConfig(environment="verifiers"))
    with pytest.raises(ValueError, match='tasksets are for environment = "verifiers"'):
        RolloutConfig(environment="arithmetic", tasksets=("capitals",))


@pytest.mark.parametrize(
    ("attributes", "runtime", "sentence"),
    [
        ("NEEDS_CONTAINER = True", "", "its tasks run in containers"),
        ("async def setup(self, trace, runtime): ...", "", "its tasks run code before or after"),
        ("", ", runtime", "its rewards need a container"),
        ("toolsets = classmethod(lambda cls, config: [object()])", "", "its tasks have tool servers"),
    ],
)
def test_a_taskset_that_needs_more_than_an_answer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attributes: str, runtime: str, sentence: str
) -> None:
    name = write_taskset(tmp_path, monkeypatch, "capitals_three", attributes=attributes, runtime=runtime)
    with pytest.raises(ConfigError, match=sentence):
        load_rows(name)


def make_trace(**changes: Any) -> vf.Trace:
    """A question, two turns of which the second branches off the first, and a tool's answer."""
    user, tool = vf.UserMessage(content="57+83?"), vf.ToolMessage(tool_call_id="0", content="140")
    call, right, wrong = (vf.AssistantMessage(content=text) for text in ("calc", "140", "141"))
    nodes = [
        MessageNode(message=user, token_ids=[1, 2], mask=[False, False]),
        MessageNode(parent=0, message=call, sampled=True, token_ids=[3, 4], mask=[False, True], logprobs=[-0.5]),
        MessageNode(parent=1, message=tool, token_ids=[5], mask=[False]),
        MessageNode(parent=2, message=wrong, sampled=True, token_ids=[3, 7], mask=[False, True], logprobs=[-2.0]),
        MessageNode(parent=2, message=right, sampled=True, token_ids=[3, 6], mask=[False, True], logprobs=[-0.1]),
    ]
    settings = {"nodes": nodes, "ok": True, "rewards": {"right": Reward(score=1.0, weight=2.0)}, **changes}
    return vf.Trace(
        task=TraceTask(type="T", data=vf.TaskData(prompt="57+83?")),
        agent=AgentInfo(config=vf.AgentConfig()),
        **settings,
    )


def test_a_trace_gives_a_sample_per_branch_with_the_tokens_that_were_sampled() -> None:
    samples = samples_of_trace(make_trace(), Sample(group_index=3, index=1))
    assert [sample.tokens for sample in samples] == [[1, 2, 3, 4, 5, 3, 7], [1, 2, 3, 4, 5, 3, 6]]
    assert [sample.loss_mask for sample in samples] == [[0, 0, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1]]
    assert samples[1].rollout_log_probs == [0, 0, 0, -0.5, 0, 0, -0.1]
    assert [(s.reward, s.turn, s.group_index, s.index, s.response) for s in samples] == [
        (2.0, number, 3, 1, "140") for number in range(2)
    ]


def test_a_branch_that_adds_nothing_sampled_is_no_sample() -> None:
    trace = make_trace()
    trace.nodes[3:] = [
        MessageNode(parent=2, message=vf.AssistantMessage(content="140"), sampled=True, token_ids=[6], mask=[True]),
        MessageNode(parent=1, message=vf.UserMessage(content="?"), token_ids=[8], mask=[False]),
    ]
    [sample] = samples_of_trace(trace)
    assert (sample.tokens, sample.loss_mask, sample.turn) == ([1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 0, 1], None)


def test_a_trace_that_failed_or_has_no_tokens_gives_no_sample() -> None:
    with pytest.raises(EnvironmentUnavailableError, match="ended early: no box"):
        samples_of_trace(make_trace(ok=False, errors=[Error(type="BoxError", message="no box")]))
    nodes = [MessageNode(message=vf.AssistantMessage(content="140"), sampled=True)]
    with pytest.raises(DataError, match="train client"):
        samples_of_trace(make_trace(nodes=nodes))


def test_a_taskset_of_the_settings_that_is_not_installed_is_missing_and_no_reward_that_raised() -> None:
    with pytest.raises(ConfigError, match=r"^the taskset 'no-such-taskset' cannot be loaded .*: install its package$"):
        resolve_environment(RolloutConfig(environment="verifiers", tasksets=("no-such-taskset",)))


def test_a_taskset_that_is_not_installed_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"no-such-taskset.*install its package"):
        load_rows("no-such-taskset")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("raise ValueError('no key')", "raised ValueError: no key"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("def broken(:", "raised SyntaxError"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'): install its package"),
        ("x = 1", "raised AttributeError: taskset module 'broken_taskset'"),
    ],
)
def test_a_taskset_that_cannot_be_read_is_one_sentence(
    source: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_taskset.py").write_text(source)
    sys.modules.pop("broken_taskset", None)
    assert main(["broken_taskset", str(tmp_path / "prompts.jsonl")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("rollouts: the taskset 'broken_taskset' cannot be ") and sentence in line
    assert not (tmp_path / "prompts.jsonl").exists()


@pytest.mark.slow
def test_the_command_ends_with_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollouts_core.environments.verifiers_tasks", "gone", str(tmp_path / "p.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("rollouts: the taskset 'gone' cannot be ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["", ".", "/", "..", "a b", "json", "\x00", "ü" * 300])
def test_any_name_of_a_taskset_is_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, str(tmp_path / "prompts.jsonl")]) == 2
    assert capsys.readouterr().err.startswith("rollouts: the taskset ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", [".", "missing/prompts.jsonl", "file/prompts.jsonl", "x" * 300, "/proc/prompts.jsonl"]
)
def test_a_file_that_cannot_be_written_is_one_sentence(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = write_taskset(tmp_path, monkeypatch, "capitals_unwritten")
    (tmp_path / "file").touch()
    assert main([name, str(tmp_path / target)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("rollouts: ") and "cannot be written (" in line
