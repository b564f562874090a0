"""Build the jobs of trainings from the settings. A job contains the digests of its start model and its data.

`tasks/plan.py` chooses the job's directory and node, and plans the jobs that evaluate models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from rollouts_core.checks.adapter_form import sends_adapters
from rollouts_core.config import Config, DatasetConfig, RLTrainingConfig, RolloutConfig
from rollouts_core.config.data import ColumnType
from rollouts_core.config.reward import GRADING_MODELS
from rollouts_core.data.rows import WEIGHTS, digest_path, resolve_revision
from rollouts_core.fingerprint import digest_checkpoint, digest_model, digest_plugins
from rollouts_core.job import InputDataset, InputFile, InputModel, RLJob, SFTJob
from rollouts_core.stages import BASE


def sft_job(start: InputModel, config: Config) -> SFTJob:
    eval_data = config.data.sft_eval
    return SFTJob(
        model=start,
        data=tuple(input_dataset(dataset) for dataset in config.demonstrations),
        eval_data=input_file(eval_data, config.data.columns_of("sft_eval")) if eval_data else None,
        streaming=config.data.streaming,
        training=config.training.sft,
        resume_digest=digest_checkpoint(config.training.sft.resume_from),
        deployment=config.deployment,
    )


def rl_job(start: InputModel, config: Config) -> RLJob:
    """The job of an RL training with trainer and engines on one machine. `tasks/plan.py` adapts it to more machines."""
    return RLJob(
        model=start,
        prompts=input_file(config.data.prompts, config.data.columns_of("prompts")) if config.data.prompts else None,
        rollouts=input_file(config.data.rollouts) if config.data.rollouts else None,
        training=config.training.rl,
        resume_digest=digest_checkpoint(config.training.rl.resume_from),
        rollout=config.rollout,
        plugin_digest=plugin_digest(config.rollout, config.training.rl),
        sends_adapters=not config.data.rollouts
        and sends_adapters(config.training.rl, config.rollout, config.deployment),
        deployment=config.deployment,
    )


def base_model(config: Config) -> InputModel:
    """The model in `model.path`, from which the run starts, with its digest."""
    return InputModel(name=BASE, model=config.model, digest=digest_model(config.model))


def input_file(path: str, columns: Mapping[str, ColumnType] | None = None) -> InputFile:
    """A data file of a job, with its digest and, for CSV, the types of its columns."""
    return InputFile(path=path, digest=digest_path(path), columns=dict(columns or {}))


def input_dataset(dataset: DatasetConfig) -> InputDataset:
    """A dataset of a job, with its digest. A dataset of the Hugging Face hub gets its current commit as revision."""
    revision = resolve_revision(dataset.path, dataset.revision)
    digest = digest_path(dataset.path, revision=revision)
    return InputDataset(**{**dataset.model_dump(), "revision": revision, "digest": digest})


def plugin_digest(rollout: RolloutConfig, training: RLTrainingConfig | None = None) -> str:
    """The digest of the user's code and models that sampling, grading, filtering and the loss use.

    The digest covers the user's Python files (`digest_plugins`) and the local folders of models that grade. Weights in
    the folder of a judge do not count, because a job reads only the judge's tokenizer.
    """
    own_loss = training.functions_named if training else {}
    tasksets = [f"{module}:" for module in rollout.taskset_modules.values()]
    code = digest_plugins(*rollout.functions_named.values(), *own_loss.values(), *tasksets)
    models = [
        digest_path(each.model, without=() if each.kind in GRADING_MODELS else WEIGHTS)
        for each in rollout.rewards
        if each.model_folder and Path(each.model).is_dir()
    ]
    return hashlib.sha256("".join([code, *models]).encode()).hexdigest() if models else code
