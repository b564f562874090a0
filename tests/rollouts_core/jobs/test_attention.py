"""Pins that a job settles its attention kernel once: in job.json and events.jsonl, for all later attempts.

Without it an attempt on a machine that was updated would go on with another kernel than it began with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.config import ModelConfig, PolicyConfig, SFTTrainingConfig
from rollouts_core.fingerprint import fingerprint_job
from rollouts_core.job import InputDataset, InputModel, SFTJob, load_job
from rollouts_core.jobs import attention
from rollouts_core.jobs.attention import settle_attention
from rollouts_core.metrics import read_json_lines
from rollouts_core.model.attention_choice import Choice
from rollouts_core.run_directory import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def write_job(directory: RunDirectory, **policy: Any) -> SFTJob:
    """Write a job as a node does before each attempt."""
    job = SFTJob(
        model=InputModel(name="base", model=ModelConfig(path="model"), digest="1"),
        data=(InputDataset(path="data.jsonl", digest="2"),),
        training=SFTTrainingConfig(policy=PolicyConfig(precision="bfloat16", **policy)),
    )
    directory.job.write_text(job.model_dump_json())
    return job


def test_the_first_attempt_chooses_and_the_later_ones_keep(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = write_job(directory)
    monkeypatch.setattr(attention, "choose_kernel", lambda *job, **place: Choice("varlen", "it fits"))
    settled = settle_attention(planned, directory)
    assert settled.training.policy.attention == "varlen"
    assert load_job(directory.job) == settled
    assert fingerprint_job("sft", settled) == fingerprint_job("sft", planned)

    monkeypatch.setattr(attention, "choose_kernel", lambda *job, **place: Choice("flash_attention_2", "updated"))
    assert settle_attention(write_job(directory), directory) == settled == load_job(directory.job)
    [event] = read_json_lines(directory.events)
    assert (event["event"], event["kernel"], event["reason"]) == ("attention_chosen", "varlen", "it fits")


def test_a_kernel_that_is_named_is_taken_as_it_is(directory: RunDirectory) -> None:
    job = write_job(directory, attention="eager")
    before = directory.job.read_text()
    assert settle_attention(job, directory) == job
    assert directory.job.read_text() == before and not directory.events.exists()


def test_a_job_that_names_no_policy_gets_one(directory: RunDirectory) -> None:
    job = write_job(directory)
    content = json.loads(directory.job.read_text())
    del content["training"]["policy"]
    directory.job.write_text(json.dumps(content))
    settle_attention(job, directory)
    assert json.loads(directory.job.read_text())["training"]["policy"] == {"attention": "sdpa"}  # a CPU trains
