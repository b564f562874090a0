"""Whether the inputs of a job are, byte for byte, what it was made for.

Between planning a stage and doing it a file may be written anew: training on it would bear the wrong fingerprint.

Not here: the digests (fingerprint.py), what the inputs are (job.py).
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
    """Read a data file in the block: DataError when it is not the one that the job was made for, before or after."""
    check_digest(file, digest_path(file.path))
    yield
    check_digest(file, digest_path(file.path))


def check_digest(file: InputFile | InputDataset, found: str) -> None:
    """Raise DataError when what was found at an input's path is not what the job was made for."""
    if found != file.digest:
        happened = "changed" if Path(file.path).exists() else "is gone"
        raise DataError(f"{file.path} {happened} since the stage was planned: start the run again")


def check_model(model: InputModel) -> None:
    """Raise CheckpointError when a model's folder is not, byte for byte, the one that the job was made for."""
    path = Path(model.model.path)
    if (path / MANIFEST).is_file():
        verify_checkpoint(path)
    if digest_model(model.model) != model.digest:
        happened = "changed" if path.exists() else "is gone"
        raise CheckpointError(f"the model at {path} {happened} since the stage was planned: start the run again")


def check_resume(job: TrainingJob, directory: RunDirectory) -> None:
    """Raise CheckpointError when the run is to begin with another run's checkpoint, and that one is another now."""
    source = job.training.resume_from
    if source and not list_checkpoints(directory.checkpoints) and digest_checkpoint(source) != job.resume_digest:
        raise CheckpointError(f"the checkpoint at {source} changed since the stage was planned: start the run again")


def open_checked_datasets(datasets: Sequence[InputDataset]) -> list[RowTable]:
    """The rows of datasets that are what the job was made for.

    Raises:
        DataError: one that is gone or changed, or that cannot be opened.
    """
    for dataset in datasets:
        if Path(dataset.path).is_absolute() and not Path(dataset.path).exists():
            check_digest(dataset, "")
    tables = open_datasets(datasets)
    for dataset, table in zip(datasets, tables, strict=True):
        check_digest(dataset, table.digest)
    return tables
