"""Pins that a stage which has to be done says in what it differs from the one that was done and is most like it.

Without it an edit, or a file that was written again, has days of training done anew without a word about why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollouts.tasks.closest_stage import describe_difference, find_older_version, find_shorter
from rollouts.tasks.records import Stage
from rollouts_core.config import ModelConfig, SFTTrainingConfig
from rollouts_core.fingerprint import SEMANTICS_VERSION, fingerprint_job
from rollouts_core.job import InputDataset, InputModel, SFTJob
from rollouts_core.run_directory import RunDirectory
from rollouts_core.system.files import write_atomically


def sft_stage(store: Path, *, data: str = "d", model: str = "m", **training: Any) -> Stage:  # Any: settings
    job = SFTJob(
        model=InputModel(name="base", model=ModelConfig(path="/model"), digest=model),
        data=(InputDataset(path="/data.jsonl", digest=data),),
        training=SFTTrainingConfig.model_validate(training),
    )
    fingerprint = fingerprint_job("sft", job)
    return Stage(
        name="sft",
        fingerprint=fingerprint,
        run_dir=str(store / f"sft-{fingerprint}"),
        job=job.model_dump(mode="json"),
        num_steps=1,
        timeout_s=1,
    )


def finished(stage: Stage) -> str:
    """Write what a finished stage leaves; returns the name of its directory."""
    directory = RunDirectory(Path(stage.run_dir))
    directory.root.mkdir(parents=True)
    write_atomically(directory.job, SFTJob.model_validate(stage.job).model_dump_json().encode())
    write_atomically(directory.result, b"{}")
    return directory.root.name


def test_the_first_stage_of_its_name_differs_from_none(tmp_path: Path) -> None:
    assert describe_difference(sft_stage(tmp_path)) == ""


def test_settings_that_changed_are_named_as_a_configuration_names_them(tmp_path: Path) -> None:
    name = finished(sft_stage(tmp_path, num_steps=100))
    said = describe_difference(sft_stage(tmp_path, num_steps=200, optim={"lr": 0.5}))
    assert said == (
        f"unlike {name}: training.sft.num_steps was 100 and is 200; training.sft.optim.lr was its default and is 0.5"
    )


def test_content_that_changed_is_named_without_its_digest(tmp_path: Path) -> None:
    name = finished(sft_stage(tmp_path))
    said = describe_difference(sft_stage(tmp_path, data="other", model="other"))
    assert said == f"unlike {name}: the demonstrations changed; the start model changed"


def test_the_stage_that_is_most_like_it_is_named(tmp_path: Path) -> None:
    near = finished(sft_stage(tmp_path, num_steps=100))
    finished(sft_stage(tmp_path, num_steps=100, batch_size=4, seed=3))
    assert describe_difference(sft_stage(tmp_path, num_steps=100, seed=1)).startswith(
        f"unlike {near}: training.sft.seed"
    )


def test_other_work_unfinished_work_and_what_cannot_be_read_is_not_compared_with(tmp_path: Path) -> None:
    finished(sft_stage(tmp_path, data="a", model="b", num_steps=9, batch_size=4, seed=3))
    damaged, under_way = (RunDirectory(Path(sft_stage(tmp_path, seed=seed).run_dir)) for seed in (4, 5))
    finished(sft_stage(tmp_path, seed=4))
    write_atomically(damaged.job, b"{")
    finished(sft_stage(tmp_path, seed=5))
    under_way.result.unlink()
    assert describe_difference(sft_stage(tmp_path)) == ""


def test_a_stage_of_older_code_is_named_as_the_reason(tmp_path: Path) -> None:
    stage = sft_stage(tmp_path, num_steps=100)
    job = SFTJob.model_validate(stage.job)
    older = fingerprint_job("sft", job, semantics=SEMANTICS_VERSION - 1)
    name = finished(stage.model_copy(update={"run_dir": str(tmp_path / f"sft-{older}")}))
    assert find_older_version("sft", job, tmp_path) == name
    assert describe_difference(stage) == (
        f"unlike {name}, which an older version of rollouts computed: the same settings give other results now"
    )
    assert find_older_version("sft", SFTJob.model_validate(sft_stage(tmp_path, seed=1).job), tmp_path) == ""


def test_a_finished_training_with_fewer_steps_alone_is_found(tmp_path: Path) -> None:
    shorter = finished(sft_stage(tmp_path, num_steps=100, checkpoint_every=10))
    longer = sft_stage(tmp_path, num_steps=200, checkpoint_every=20).model_copy(update={"num_steps": 200})
    assert find_shorter(longer) == shorter
    others = [
        sft_stage(tmp_path, num_steps=200, seed=1).model_copy(update={"num_steps": 200}),
        sft_stage(tmp_path, num_steps=50).model_copy(update={"num_steps": 50}),
        sft_stage(tmp_path, num_steps=200, data="other").model_copy(update={"num_steps": 200}),
    ]
    assert [find_shorter(each) for each in others] == ["", "", ""]
