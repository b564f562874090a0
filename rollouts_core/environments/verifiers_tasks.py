"""Use tasks of the package `verifiers`: convert their prompts to rows, grade samples with their rewards, and convert
their traces to samples.

    python -m rollouts_core.environments.verifiers_tasks my-taskset prompts.jsonl      writes the prompts once
    rollout.environment = "verifiers"        rollout.tasksets = ["my-taskset"]         settings of the run

For tasks with agents in containers, tool servers or simulated users, use the harnesses of `verifiers`, and convert
their traces with `samples_of_trace`. Importing a taskset runs its code, and a row names its taskset. Therefore only
tasksets that the settings list are imported.
"""

from __future__ import annotations

import inspect
import json
import signal
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollouts_core.errors import ConfigError, DataError, EnvironmentUnavailableError, InputError
from rollouts_core.system.files import write_atomically
from rollouts_core.types import Sample, Status
from rollouts_core.user_code.failures import describe_raised


class VerifiersEnvironment:
    """Rewards a completion with the weighted sum of the rewards that its `verifiers` task defines.

    Args:
        tasksets: names of the tasksets that rows may use.

    Raises:
        ConfigError: `verifiers` or a taskset is not installed, or `tasksets` is empty.
    """

    row_fields = ("taskset", "task")

    def __init__(self, *, tasksets: Collection[str] = ()) -> None:
        _check_installed()
        if not tasksets:
            raise ConfigError(
                'the environment "verifiers" needs the tasksets of its rows: list them in rollout.tasksets'
            )
        for name in tasksets:
            with _loading(name):
                _import_task(name)
        self._tasksets = tasksets

    def check_row(self, row: Mapping[str, Any]) -> None:  # Any: JSON
        """Raise ValueError for a row whose taskset is not in the settings, because only tasksets in the settings are
        imported."""
        if row["taskset"] not in self._tasksets:
            raise ValueError(f"`taskset` is {row['taskset']!r}, but rollout.tasksets does not list it")

    async def grade(self, sample: Sample) -> float:
        """The reward of a completion, computed by its task.

        Raises:
            EnvironmentUnavailableError: a judge model or another service of the task did not answer.
            ValueError: the row's taskset is not in the settings.
        """
        self.check_row(sample.metadata)
        from verifiers.v1.errors import ProviderError

        task = _load_task(sample.metadata["taskset"], sample.metadata["task"])
        trace = _build_trace(task, sample)
        try:
            await task.score(trace)
        except ProviderError as error:
            raise EnvironmentUnavailableError(f"the judge model of the task did not answer: {error}") from error
        return float(trace.reward)


def load_rows(taskset_id: str) -> list[dict[str, Any]]:  # Any: JSON
    """Convert the tasks of an installed taskset to rows of a prompt file.

    Raises:
        ConfigError: the taskset is not installed, fails to load, is infinite, or its rewards need more than the answer.
    """
    _check_installed()
    with _loading(taskset_id):
        return _read_rows(taskset_id)


@contextmanager
def _loading(taskset_id: str) -> Iterator[None]:
    """Convert errors inside the `with` block to a ConfigError that names the taskset."""
    try:
        yield
    except InputError:
        raise
    except ImportError as error:
        # If a dependency of the taskset is missing, verifiers reports the taskset itself as missing.
        missing = error.__cause__ or error.__context__ or error
        raise ConfigError(f"the taskset {taskset_id!r} cannot be loaded ({missing}): install its package") from error
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        raise ConfigError(
            f"the taskset {taskset_id!r} cannot be read, it {describe_raised(error)}: correct its name or its package"
        ) from error


def _read_rows(taskset_id: str) -> list[dict[str, Any]]:  # Any: JSON
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    taskset = load_taskset(taskset_config_type(taskset_id)(id=taskset_id))
    if not taskset.bounded:
        raise ConfigError(
            f"the taskset {taskset_id!r} is infinite: write the rows of a finite part with your own script"
        )
    rows = []
    for task in taskset:
        _check_answerable(task, taskset_id)
        rows.append(_row_of(task, taskset_id))
    return rows


def samples_of_trace(trace: Any, pending: Sample | None = None) -> list[Sample]:  # Any: verifiers' traces
    """Convert an agent's trace to graded samples: one per trainable branch, all with the same reward.

    Tokens that several branches share have a loss mask of 1 only in the first of these branches.

    Args:
        trace: a trace that was recorded through verifiers' train client, which stores tokens.
        pending: the unfinished sample that the agent answers. The results copy the prompt, position and metadata of
            this sample.

    Raises:
        EnvironmentUnavailableError: the agent failed before its trace was graded.
        DataError: the trace has no tokens.
    """
    if trace.has_error:
        reason = trace.last_error.message if trace.last_error else trace.stop_condition
        raise EnvironmentUnavailableError(f"the trace {trace.id} ended early: {reason}")
    branches = [(branch, mask) for branch, mask in _mask_branches(trace) if any(mask)]
    if not branches:
        raise DataError(f"the trace {trace.id} has no sampled tokens: record it through verifiers' train client")
    return [
        replace(
            pending or Sample(),
            response=trace.last_reply,
            tokens=branch.token_ids,
            loss_mask=mask,
            rollout_log_probs=branch.logprobs,
            reward=float(trace.reward),
            turn=number if len(branches) > 1 else None,
            status=Status.TRUNCATED if trace.is_timeout else Status.COMPLETED,
            finish_reason=trace.stop_condition or "",
        )
        for number, (branch, mask) in enumerate(branches)
    ]


def _mask_branches(trace: Any) -> list[tuple[Any, list[float]]]:  # Any: verifiers' traces and branches
    """Return the trainable branches of a trace with their loss masks. A node that several branches share counts only in
    the first of these branches."""
    masked = []
    trained: set[int] = set()
    for branch in trace.branches:
        if not branch.trainable:
            continue
        mask: list[float] = []
        for node in branch.nodes:
            is_first = id(node) not in trained  # branches with a common part have the same node objects
            trained.add(id(node))
            mask += [float(is_sampled and is_first) for is_sampled in node.mask]
        masked.append((branch, mask))
    return masked


def _row_of(task: Any, taskset_id: str) -> dict[str, Any]:  # Any: verifiers' tasks, JSON
    prompt = task.data.prompt
    messages = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else [message.model_dump(mode="json", exclude_none=True) for message in prompt]
    )
    system = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
    return {
        "id": f"{taskset_id}-{task.data.idx}",
        "prompt": [*system, *messages],
        "taskset": taskset_id,
        "task": task.data.model_dump(mode="json", exclude_none=True),
    }


def _check_answerable(task: Any, taskset_id: str) -> None:  # Any: verifiers' tasks
    """Raise ConfigError if a task needs more than the policy's answer, for instance a container or tool servers."""
    from verifiers.v1 import Task

    scorers = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
    parameters = [inspect.signature(scorer).parameters.get("runtime") for scorer in scorers]
    problem = ""
    if task.data.prompt is None:
        problem = "a simulated user starts its conversations"
    elif task.NEEDS_CONTAINER or task.data.image:
        problem = "its tasks run in containers"
    elif (type(task).setup, type(task).finalize) != (Task.setup, Task.finalize):
        problem = "its tasks run code before or after the answer"
    elif type(task).toolsets(task.config):
        problem = "its tasks have tool servers"
    elif any(each is not None and each.default is inspect.Parameter.empty for each in parameters):
        problem = "its rewards need a container"
    elif not scorers:
        problem = "its tasks have no reward"
    if problem:
        raise ConfigError(
            f"the taskset {taskset_id!r} cannot be used as an environment ({problem}): run it with verifiers, and "
            "train on its traces (samples_of_trace)"
        )


def _import_task(taskset_id: str) -> Any:  # Any: a class of verifiers
    """Import a taskset and return the class of its tasks."""
    from verifiers.v1.utils.loaders import task_type

    return task_type(taskset_id)


def _load_task(taskset_id: str, data: dict[str, Any]) -> Any:  # Any: JSON, verifiers' tasks
    from verifiers.v1.utils.loaders import taskset_config_type

    task = _import_task(taskset_id)
    return task(task.data_type().model_validate(data), taskset_config_type(taskset_id)().task)


def _build_trace(task: Any, sample: Sample) -> Any:  # Any: verifiers' tasks and traces
    """Convert a conversation to a trace of verifiers."""
    import verifiers.v1 as vf
    from pydantic import TypeAdapter
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, TraceTask

    parse = TypeAdapter(vf.Message).validate_python
    said = [*sample.messages, {"role": "assistant", "content": sample.response}]
    nodes = [
        MessageNode(parent=place - 1 if place else None, message=parse(message), sampled=place == len(said) - 1)
        for place, message in enumerate(said)
    ]
    return vf.Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        is_completed=True,
        ok=True,
        stop_condition=sample.finish_reason or None,
    )


def _check_installed() -> None:
    try:
        import verifiers.v1  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            'the environment "verifiers" needs the package verifiers: pip install "rollouts[verifiers]"'
        ) from error


def main(arguments: list[str]) -> int:
    """Write the rows of a taskset to a prompt file; returns the exit code."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m rollouts_core.environments.verifiers_tasks TASKSET PROMPTS.jsonl\n")
        return 2
    name, target = arguments[0], Path(arguments[1])
    try:
        rows = load_rows(name)
        write_atomically(target, "".join(json.dumps(row) + "\n" for row in rows))
    except InputError as error:
        sys.stderr.write(f"rollouts: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"rollouts: {target} cannot be written ({error.strerror or error}): choose another file\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"rollouts: interrupted, {target} was not written\n")
        return 128 + signal.SIGINT
    sys.stderr.write(f"wrote {len(rows)} prompts to {target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
