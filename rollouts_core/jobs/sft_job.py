"""Execute a job of kind sft: fine-tune a model on demonstrations, and write result.json.

The job is defined in job.py. The training loop is in sft.py. training_job.py handles processes and signals.

    job.json -> check every input -> load -> train -> result.json
                                               |
                                               +--> metrics.jsonl, events.jsonl, checkpoints/
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.backends.create import create_backend
from rollouts_core.backends.protocol import TrainingBackend
from rollouts_core.backends.ranks import Ranks
from rollouts_core.data.dataset import SFTDataset, load_sft_dataset, sample_rules
from rollouts_core.data.rows import RowTable
from rollouts_core.data.shown_rows import ShownRow, show_demonstrations
from rollouts_core.job import SFTJob
from rollouts_core.jobs.attention import settle_attention
from rollouts_core.jobs.job_inputs import check_model, check_resume, checked_file, open_checked_datasets
from rollouts_core.jobs.training_job import describe_training, run_training_job
from rollouts_core.metrics import EventLog, JSONLLogger
from rollouts_core.model.loading import load_tokenizer, pad_token_id
from rollouts_core.run_directory import FORMAT, RunDirectory
from rollouts_core.sft import run_sft_training
from rollouts_core.stopping import TrainingStop
from rollouts_core.system.files import write_json
from rollouts_core.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SHOWN_ROWS = 100
NUM_BINS = 40
"""Number of bins in the histogram of the demonstrations' lengths, from 0 to `max_length` tokens."""


def run_sft_job(job: SFTJob, directory: RunDirectory) -> None:
    """Fine-tune a model on demonstrations, and write result.json with the list of checkpoints."""
    settled = settle_attention(job, directory)
    run_training_job(
        settled,
        directory,
        create=partial(create_sft_backend, settled),
        train=partial(train_on_demonstrations, settled, directory),
    )


def create_sft_backend(job: SFTJob, ranks: Ranks | None) -> TrainingBackend:
    """The training backend of the job; with several processes, the part of the backend on this rank."""
    return create_backend(
        job.model.model,
        job.training.optim,
        create_cross_entropy_loss(),
        num_steps=job.training.num_steps,
        policy=job.training.policy,
        with_start_sample=False,
        seed=job.training.seed,
        ranks=ranks,
    )


async def train_on_demonstrations(
    job: SFTJob, directory: RunDirectory, events: EventLog, ranks: Ranks | None, stop: TrainingStop
) -> None:
    """Check the inputs, load model and data, train, and write result.json."""
    check_model(job.model)
    tables = open_checked_datasets(job.data)
    check_resume(job, directory)
    backend = create_sft_backend(job, ranks)
    tokenizer = load_tokenizer(job.model.model)
    rules = sample_rules(job.training)
    samples = SFTDataset(job.data, tables, tokenizer, rules, streaming=job.streaming)
    eval_samples = load_eval_samples(job, tokenizer)
    write_rows(job, directory, tables, samples, tokenizer)
    events.write("data_loaded", num_samples=len(samples), num_dropped=samples.num_dropped)
    with JSONLLogger(directory.metrics, attempt=events.attempt) as metrics_logger:
        await run_sft_training(
            backend,
            samples,
            job.training,
            metrics_logger,
            pad_id=pad_token_id(tokenizer),
            checkpoint_dir=directory.checkpoints,
            inputs=job.inputs,
            events=events,
            eval_samples=eval_samples,
            is_end_asked=directory.end_request.exists,
            stop=stop,
        )
    num_samples = len(samples) if job.streaming else len(samples) - samples.num_dropped
    directory.write_result({**describe_training(job, directory), "num_samples": num_samples})


def write_rows(
    job: SFTJob,
    directory: RunDirectory,
    tables: Sequence[RowTable],
    samples: SFTDataset,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write rows.json for the report: example rows as the model is trained on them, and a histogram of lengths.

    The examples are evenly spaced rows of the data and the first dropped rows.
    """
    shown: list[ShownRow] = []
    starts = [0, *itertools.accumulate(samples.sizes)]
    spread = {number * len(samples) // MAX_SHOWN_ROWS for number in range(MAX_SHOWN_ROWS)}
    wanted = sorted(spread | set(samples.first_dropped))
    for table, start, end in zip(tables, starts, starts[1:], strict=False):
        of_table = [number - start for number in wanted if start <= number < end]
        rows = table.read(of_table) if of_table else []
        shown += show_demonstrations(rows, table.path, tokenizer, sample_rules(job.training))
    lengths = samples.lengths()
    counts = Counter(min(length * NUM_BINS // job.training.max_length, NUM_BINS - 1) for length, _ in lengths)
    num_tokens = sum(length for length, _ in lengths)
    described = {
        "format": FORMAT,
        "num_rows": len(samples),
        "num_dropped": samples.num_dropped,
        "max_length": job.training.max_length,
        "length_counts": [counts[place] for place in range(NUM_BINS)] if lengths else [],
        "trained_share": sum(trained for _, trained in lengths) / num_tokens if num_tokens else None,
        "rows": [asdict(row) for row in shown],
    }
    write_json(directory.rows, described)


def load_eval_samples(job: SFTJob, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The demonstrations of `data.sft_eval`; empty without this setting."""
    if job.eval_data is None:
        return []
    training = job.training
    with checked_file(job.eval_data):
        return load_sft_dataset(
            job.eval_data.path,
            tokenizer,
            max_length=training.max_length,
            train_on=training.train_on,
            on_overlong=training.on_overlong,
            columns=job.eval_data.columns,
        )
