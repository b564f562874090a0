"""Upload the inputs of a stage to its node, and return their paths there. A stage on this machine needs no upload.

Not here: planning a stage (plan.py), running a stage (stage.py), fetching the results (infra/sync/mirror.py).

    this machine                                            the node
    <store>/stages/<stage>/          job's own files  ──>   <root>/stages/<stage>/       if another node trained further
    data files, models, checkpoints                   ──>   <root>/inputs/<digest>/      unless already uploaded
    rollouts_core, the user's code (own_files.py)     ──>   <root>/code/<digest>/        unless already uploaded

Folders are named by a digest of their content, so each file is uploaded only once. A node that reaches the object store
downloads inputs with S3 URLs itself (inputs.py). Datasets and models of the Hugging Face hub keep their names, and the
node downloads them from the hub.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar, cast

import rollouts_core
from rollouts.infra.bootstrap import NO_MODULES
from rollouts.infra.errors import InfraError, StoreUnavailableError, TransientInfraError
from rollouts.infra.jobs import JobState, cancel_job, job_status
from rollouts.infra.node import Node
from rollouts.infra.session import Session
from rollouts.infra.stores.direct import can_presign, fetch_on_node
from rollouts.infra.stores.object_store import ObjectStore
from rollouts.infra.stores.shared_folder import real_path
from rollouts.infra.sync.mirror import LOCK, is_behind
from rollouts.infra.sync.push import has_files, is_executable, publish_files
from rollouts.tasks.inputs import find_origin, keys_at_origin
from rollouts.tasks.node_job import GRACE_S, USER_ERROR_CODE
from rollouts.tasks.records import Stage
from rollouts_core.checkpoint import find_checkpoint, list_checkpoints
from rollouts_core.config import RewardConfig, RLTrainingConfig, RolloutConfig, SFTTrainingConfig
from rollouts_core.data.rows import KEPT_BESIDE, WEIGHTS, digest_path
from rollouts_core.errors import ConfigError
from rollouts_core.fingerprint import digest_checkpoint, digest_model
from rollouts_core.job import (
    EvalJob,
    InputDataset,
    InputFile,
    InputModel,
    Job,
    ServeJob,
    TrainingJob,
    job_type,
    modules_named,
)
from rollouts_core.user_code.own_files import own_code

TrainingT = TypeVar("TrainingT", bound=SFTTrainingConfig | RLTrainingConfig)

CALL_TIMEOUT_S = 60.0
_DIGEST_CHARS = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """A stage after the upload of its inputs and code."""

    stage: Stage
    """The stage, with paths on the node in its job and `run_dir`."""
    code_dir: str
    """The folder on the node from which the job imports; empty on this machine."""


def place_stage(session: Session, stage: Stage, node: Node, *, say: Callable[[str], None] = logger.info) -> Placement:
    """Upload the inputs and the code of a stage to its node. On this machine, nothing is uploaded.

    Args:
        say: receives one sentence for each input that the node downloaded itself, or failed to download.

    Raises:
        InfraError: the upload failed.
    """
    if not node.is_remote:
        return Placement(stage, "")
    run_dir = node.path_on_node(stage.run_dir)
    ended = job_status(session, run_dir).exit
    is_doubtful = ended is not None and ended.code == USER_ERROR_CODE
    inputs = NodeInputs(session, node, say, is_doubtful=is_doubtful)
    job = place_job(job_type(stage.kind).model_validate(stage.job), inputs)
    placed = stage.model_copy(update={"job": job.model_dump(mode="json"), "run_dir": run_dir})
    bring_earlier_work(session, Path(stage.run_dir), run_dir)
    return Placement(placed, place_code(session, node, modules_named(job)))


def place_job(job: Job, inputs: NodeInputs) -> Job:
    """Upload the inputs of a job. Returns the job with the paths of its inputs on the node."""
    match job:
        case TrainingJob() if job.node_rank:  # a further machine gets its data and weights from the leader
            placed: dict[str, object] = {"model": inputs.place_description(job.model)}
        case TrainingJob():
            placed = {name: inputs.place_input(value) for name, value in job}
            placed["training"] = inputs.place_resumed(job.training, job.resume_digest)
            if job.graders:
                placed["rollout"] = inputs.place_graders(job.graders)
        case EvalJob():
            placed = {
                "checkpoints": tuple(inputs.place_model(model) for model in job.checkpoints),
                "data": inputs.place_file(job.data),
                "rollout": inputs.place_graders(job.rollout),
            }
        case ServeJob():
            placed = {"model": inputs.place_model(job.model)}
        case _:
            raise AssertionError(f"no stage has the kind {job.kind}")
    return job.model_copy(update=placed)


class NodeInputs:
    """Uploads inputs of a job to a node. Each input gets a folder that is named by a digest of its content.

    Args:
        say: receives one sentence for each input that the node downloaded itself, or failed to download.
        is_doubtful: whether an earlier attempt of the job rejected its inputs. A file on the node may then have the
            right size but wrong content, so that files are compared by content instead of size.
    """

    def __init__(self, session: Session, node: Node, say: Callable[[str], None], *, is_doubtful: bool = False) -> None:
        self._is_doubtful = is_doubtful
        self._session = session
        self._node = node
        self._say = say
        self._may_fetch = True
        """Whether the node may try to download inputs itself. False after a failed download."""

    def place_input(self, value: object) -> object:
        """Upload a model, a data file or the datasets of a job. Any other value is returned unchanged."""
        match value:
            case InputModel():
                return self.place_model(value)
            case InputDataset():
                return self.place_dataset(value)
            case InputFile():
                return self.place_file(value)
            case tuple():
                return tuple(map(self.place_input, value))
            case _:
                return value

    def place_file(self, file: InputFile) -> InputFile:
        return file.model_copy(update={"path": self._place(file.path, file.digest, digest_path)})

    def place_dataset(self, dataset: InputDataset) -> InputDataset:
        """Upload a dataset. A hub dataset keeps its name and is not uploaded."""
        return dataset.model_copy(update={"path": self._place(dataset.path, dataset.digest, digest_path)})

    def place_model(self, model: InputModel, *, without: tuple[str, ...] = ()) -> InputModel:
        """Upload a model or checkpoint. A hub model keeps its name and is not uploaded."""
        path = self._place(model.model.path, model.digest, lambda _: digest_model(model.model), without=without)
        return model.model_copy(update={"model": model.model.model_copy(update={"path": path})})

    def place_description(self, model: InputModel) -> InputModel:
        """Upload a model without its weights, for a machine that receives the weights from the leader."""
        return self.place_model(model, without=WEIGHTS)

    def place_resumed(self, training: TrainingT, digest: str) -> TrainingT:
        """Upload the checkpoint that a training resumes from. Returns the training's settings with the new path."""
        if not digest:
            return training
        path = self._place(str(find_checkpoint(Path(training.resume_from))), digest, digest_checkpoint)
        return cast("TrainingT", training.model_copy(update={"resume_from": path}))

    def place_graders(self, rollout: RolloutConfig) -> RolloutConfig:
        """Upload the models that grade completions. Only classifiers need weights: a server runs the other models."""
        rewards = tuple(self._place_grader(each) if each.model_folder else each for each in rollout.rewards)
        return rollout.model_copy(update={"rewards": rewards})

    def _place_grader(self, reward: RewardConfig) -> RewardConfig:
        without = () if reward.kind == "classifier" else WEIGHTS
        digest = partial(digest_path, without=without)
        path = self._place(reward.model, digest(reward.model), digest, without=without)
        return reward.model_copy(update={"model": path})

    def _place(
        self, given: str, digest: str, digest_now: Callable[[str], str], *, without: tuple[str, ...] = ()
    ) -> str:
        """Upload an input unless the node has it. Returns the input's path on the node.

        An input that an earlier stage made on the node itself is not copied.

        Args:
            given: the input's path on this machine. The name of a hub's model or dataset is returned unchanged.
            digest: digest of the input at the time when the stage was planned.
            digest_now: computes the current digest of a path.
            without: files with these suffixes are not uploaded.

        Raises:
            ConfigError: the input was edited after the stage was planned.
            TransientInfraError: the input was edited during the upload.
        """
        path = Path(given)
        if not path.exists():  # `given` is the name of a model or dataset on a hub
            return given
        below = files_below(path, path.name)
        wanted = [name for name in below if KEPT_BESIDE.isdisjoint(Path(name).parts[1:-1])]
        files = {name: below[name] for name in wanted if not name.endswith(without)}
        if path.is_relative_to(self._node.local_root):
            own = self._node.path_on_node(given)
            if self._has(files, str(PurePosixPath(own).parent)):
                return own
        identity = " ".join([digest, path.name, *without])
        key = hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:_DIGEST_CHARS]
        folder = f"{self._node.root}/inputs/{key}"
        if not self._has(files, folder):  # a cleanup or a power failure may have removed some files
            before = _versions_of(files.values())
            if digest_now(given) != digest:
                raise ConfigError(f"{path} changed since the stage was planned: start the run again")
            if not self._is_fetched(path, files, folder):
                publish_files(self._session, files, folder)
            _check_unedited(self._session, before, folder)
        return f"{folder}/{path.name}"

    def _has(self, files: Mapping[str, Path], folder: str) -> bool:
        """True if a folder of the node has these files. Always False if an earlier attempt rejected its inputs."""
        return not self._is_doubtful and has_files(self._session, files, folder)

    def _is_fetched(self, path: Path, files: Mapping[str, Path], folder: str) -> bool:
        """Let the node itself download an input from the input's URL. Returns whether that succeeded."""
        store = Path(self._node.local_root)
        url = find_origin(path, store)
        if not url or not self._may_fetch:
            return False
        try:
            origin = ObjectStore(url)
            if not can_presign(origin):
                return False
            keys = keys_at_origin(origin, path, store)
            if missing := [name for name, file in files.items() if file not in keys]:
                raise StoreUnavailableError(f"{missing[0]} is not in the object store")
            named = {name: keys[file] for name, file in files.items()}
            self._may_fetch = False  # remains False if this download fails, so that later inputs are not delayed
            num_bytes = fetch_on_node(self._session, origin, named, files, folder)
            self._may_fetch = True
        except InfraError as error:
            self._say(f"{path.name}: uploaded from here, because the node cannot download it from {url} ({error})")
            return False
        self._say(f"{path.name}: the node itself downloaded {num_bytes / 1e6:.1f} MB from {url}")
        return True


def bring_earlier_work(session: Session, mirror: Path, run_dir: str) -> None:
    """Upload the stage's files if another node has trained further than this node, so that the job resumes from there.

    All files of the job on this node are replaced, so that no step that both nodes trained exists in two versions.

    Args:
        mirror: the stage's directory on this machine.
        run_dir: the stage's directory on the node.
    """
    if not list_checkpoints(mirror / "checkpoints"):
        return
    status = job_status(session, run_dir)
    if status.state in (JobState.RUNNING, JobState.FINISHED) or not is_behind(session, run_dir, mirror):
        return
    if status.orphans:  # end leftover processes now, because after the upload the next start could not find them
        cancel_job(session, run_dir, GRACE_S)
    files = {
        name: path
        for name, path in files_below(mirror, "").items()
        if not name.startswith((".", "damaged-", "exit-", "finish-")) and name not in (LOCK, "log.txt")
    }
    publish_files(session, files, run_dir)


def place_code(
    session: Session, node: Node, modules: Mapping[str, str] = NO_MODULES, *, say: Callable[[str], None] = logger.info
) -> str:
    """Upload this version of `rollouts_core` and the user's own code. Returns the folder of the code on the node.

    Args:
        modules: the user's Python modules, by the settings that name them.
        say: receives one sentence about the uploaded code.

    Raises:
        TransientInfraError: a file was edited during the upload.
    """
    core = source_files(Path(rollouts_core.__file__).parent)
    parts = {"rollouts_core": {f"rollouts_core/{name}": path for name, path in core.items()}}
    parts |= {code.name: code.sent for code in own_code(modules.values())}
    files = {name: path for part in parts.values() for name, path in part.items()}
    before = _versions_of(files.values())
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        mode = "\0x" if is_executable(path) else ""
        digest.update(f"{name}{mode}\0".encode(errors="surrogateescape"))  # publish_files reports bad names
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    folder = f"{node.root}/code/{digest.hexdigest()[:_DIGEST_CHARS]}"
    if not has_files(session, files, folder):
        say(f"uploads code: {', '.join(describe_files(name, part) for name, part in parts.items())}")
        publish_files(session, files, folder)
        _check_unedited(session, before, folder)
    return folder


def _versions_of(paths: Iterable[Path]) -> dict[Path, tuple[int, int, int] | None]:
    return {path: _version_of(path) for path in paths}


def _check_unedited(session: Session, before: Mapping[Path, tuple[int, int, int] | None], folder: str) -> None:
    """Raise TransientInfraError and remove the uploaded folder if a file was edited during the upload.

    The folder's name is the digest of the files before the edit, so later runs would use the edited files by mistake.

    Args:
        before: the versions of the files before the upload (`_versions_of`).
    """
    if edited := [path for path in before if _version_of(path) != before[path]]:
        session.run(["rm", "-rf", "--", folder], timeout_s=CALL_TIMEOUT_S, may_repeat=True)
        raise TransientInfraError(f"{edited[0]} was edited during its upload: start the run again")


def _version_of(path: Path) -> tuple[int, int, int] | None:
    """A value that changes with every edit of a file. None for a missing file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def describe_files(name: str, files: Mapping[str, Path]) -> str:
    """Text for messages, such as "my_rewards (3 files, 12 kB)"."""
    num_bytes = sum(path.stat().st_size for path in files.values())
    return f"{name} ({len(files)} file{'s' if len(files) > 1 else ''}, {num_bytes / 1000:,.0f} kB)"


def source_files(package: Path) -> dict[str, Path]:
    """The files of a Python package, without compiled files."""
    return {name: path for name, path in files_below(package, "").items() if "__pycache__" not in Path(name).parts}


def files_below(path: Path, name: str) -> Mapping[str, Path]:
    """The files to upload, by their names on the node: `path` itself, or all files below it. Symlinks are resolved.

    Args:
        name: the name of `path` on the node.

    Raises:
        PermanentInfraError: a symlink of another user points outside of the folder, perhaps to a private file.
    """
    top = path.absolute()
    if top.is_file():
        return {name: real_path(top)}
    below, within = sorted(each for each in top.rglob("*") if each.is_file()), real_path(top)
    return {str(Path(name) / each.relative_to(top)): real_path(each, within=within) for each in below}


def exists_on_node(session: Session, path: str) -> bool:
    return session.run(["test", "-e", path], timeout_s=CALL_TIMEOUT_S, check=False, may_repeat=True).exit_code == 0
