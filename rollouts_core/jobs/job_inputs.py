"""Check that the inputs of a job have not changed since the stage was planned.

A data file may be rewritten between planning a stage and executing its job. The result of a training on the new file
would then be stored under the fingerprint of the old file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollouts_core.checkpoint import MANIFEST, list_checkpoints, verify_checkpoint
from rollouts_core.data.dataset import open_datasets
from rollouts_core.data.rows import RowTable, digest_path
from rollouts_core.errors import CheckpointError, DataError
from rollouts_core.fingerprint import digest_checkpoint, digest_model
from rollouts_core.job import InputDataset, InputFile, InputModel, TrainingJob
from rollouts_core.run_directory import RunDirectory


@contextmanager
def checked_file(file: InputFile) -> Iterator[None]:
    """Check a data file before and after the `with` block, in which the caller reads the file.

    Raises:
        DataError: the file is missing, or its content has changed since the stage was planned.
    """
    check_digest(file, digest_path(file.path))
    yield
    check_digest(file, digest_path(file.path))


def check_digest(file: InputFile | InputDataset, found: str) -> None:
    """Raise DataError if an input changed after planning.

    Args:
        found: the input's current digest.
    """
    if found != file.digest:
        happened = "changed" if Path(file.path).exists() else "is gone"
        raise DataError(f"{file.path} {happened} since the stage was planned: start the run again")


def check_model(model: InputModel) -> None:
    """Raise CheckpointError if a model's content has changed since the stage was planned."""
    path = Path(model.model.path)
    if (path / MANIFEST).is_file():
        verify_checkpoint(path)
    if digest_model(model.model) != model.digest:
        happened = "changed" if path.exists() else "is gone"
        raise CheckpointError(f"the model at {path} {happened} since the stage was planned: start the run again")


def check_resume(job: TrainingJob, directory: RunDirectory) -> None:
    """Raise CheckpointError if the checkpoint in `resume_from` changed after planning.

    Later attempts resume from the job's own checkpoints and skip this check.
    """
    source = job.training.resume_from
    if source and not list_checkpoints(directory.checkpoints) and digest_checkpoint(source) != job.resume_digest:
        raise CheckpointError(f"the checkpoint at {source} changed since the stage was planned: start the run again")


def open_checked_datasets(datasets: Sequence[InputDataset]) -> list[RowTable]:
    """Open datasets, and check that they have not changed after planning.

    Raises:
        DataError: a dataset no longer exists, has changed, or cannot be opened.
    """
    for dataset in datasets:
        if Path(dataset.path).is_absolute() and not Path(dataset.path).exists():
            check_digest(dataset, "")
    tables = open_datasets(datasets)
    for dataset, table in zip(datasets, tables, strict=True):
        check_digest(dataset, table.digest)
    return tables
