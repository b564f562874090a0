"""The job of the stage `polish`. torch loads only when the job runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from pydantic import Field

from rollouts_core.config import Config
from rollouts_core.findings import Caution
from rollouts_core.fingerprint import digest_checkpoint, digest_datasets
from rollouts_core.job import InputDataset, InputModel, TrainingJob
from rollouts_core.metrics import EventLog, JSONLLogger
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages.planning import input_dataset
from rollouts_core.stopping import TrainingStop

from .settings import PolishConfig

if TYPE_CHECKING:
    from rollouts_core.backends.protocol import TrainingBackend
    from rollouts_core.backends.ranks import Ranks


class PolishJob(TrainingJob):
    """Fine-tune a model on the first demonstrations."""

    kind: Literal["polish"] = "polish"
    data: tuple[InputDataset, ...] = Field(min_length=1)
    """Demonstrations."""
    training: PolishConfig
    """The settings of the stage."""

    @property
    def inputs(self) -> dict[str, str]:
        """Digests of what is trained on and from."""
        return {"model": self.model.digest, "data": digest_datasets(self.data)}


def polish_job(start: InputModel, config: Config) -> PolishJob:
    """The job of polishing."""
    training = cast("PolishConfig", config.trainings["polish"])
    datasets = [input_dataset(dataset) for dataset in config.demonstrations]
    return PolishJob(
        model=start,
        data=tuple(each.model_copy(update={"max_samples": training.num_rows}) for each in datasets),
        training=training,
        resume_digest=digest_checkpoint(training.resume_from),
        deployment=config.deployment,
    )


def warn_of_few_steps(config: Config) -> list[Caution]:
    """A warning for fewer steps than demonstrations."""
    training = cast("PolishConfig", config.trainings["polish"])
    found = f"training.polish.num_steps {training.num_steps} is less than num_rows {training.num_rows}"
    return [Caution(found)] if training.num_steps < training.num_rows else []


def polish_facts(job: PolishJob, run_dir: Path) -> list[tuple[str, str]]:
    """What polishing read, for the report."""
    return [("Polished on", f"the first {job.training.num_rows} rows of {', '.join(each.path for each in job.data)}")]


def run_polish_job(job: PolishJob, directory: RunDirectory) -> None:
    """Fine-tune on the first demonstrations; the record exists when this returns."""
    from rollouts_core.jobs.training_job import run_training_job

    run_training_job(job, directory, create=partial(_create_backend, job), train=partial(_train, job, directory))


def _create_backend(job: PolishJob, ranks: Ranks | None) -> TrainingBackend:
    from rollouts_core.algorithms.loss import create_cross_entropy_loss
    from rollouts_core.backends.create import create_backend

    training = job.training
    return create_backend(
        job.model.model,
        training.optim,
        create_cross_entropy_loss(),
        num_steps=training.num_steps,
        policy=training.policy,
        with_start_sample=False,
        seed=training.seed,
        ranks=ranks,
    )


async def _train(
    job: PolishJob, directory: RunDirectory, events: EventLog, ranks: Ranks | None, stop: TrainingStop
) -> None:
    from rollouts_core.data.dataset import SFTDataset, sample_rules
    from rollouts_core.jobs.job_inputs import check_model, open_checked_datasets
    from rollouts_core.jobs.training_job import describe_training
    from rollouts_core.model.loading import load_tokenizer, pad_token_id
    from rollouts_core.sft import run_sft_training

    check_model(job.model)
    tables = open_checked_datasets(job.data)
    tokenizer = load_tokenizer(job.model.model)
    samples = SFTDataset(job.data, tables, tokenizer, sample_rules(job.training), streaming=False)
    with JSONLLogger(directory.metrics, attempt=events.attempt) as metrics_logger:
        await run_sft_training(
            _create_backend(job, ranks),
            samples,
            job.training,
            metrics_logger,
            pad_id=pad_token_id(tokenizer),
            checkpoint_dir=directory.checkpoints,
            inputs=job.inputs,
            events=events,
            is_end_asked=directory.end_request.exists,
            stop=stop,
        )
    directory.write_result(describe_training(job, directory))
