"""Pins what a stage finds on a node: every input at a path of the node, sent once, and the code that we have here.

Without it a job reads a path that only exists here, trains on code of last week, or begins anew what another node had
half done. The node is another folder of this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.errors import PermanentInfraError, TransientInfraError
from rollouts.infra.jobs import JobState, cancel_job, job_status, start_or_attach
from rollouts.infra.node import Node
from rollouts.infra.session import LocalSession
from rollouts.infra.stores.object_store import ObjectStore
from rollouts.infra.stores.publication import publish_run
from rollouts.infra.sync.mirror import pull_run
from rollouts.infra.sync.push import publish_files
from rollouts.tasks import upload_inputs
from rollouts.tasks.inputs import bring_inputs
from rollouts.tasks.plan import plan_engine, plan_evaluation, plan_selection
from rollouts.tasks.records import RunScope, Stage
from rollouts.tasks.upload_inputs import NodeInputs, Placement, place_code, place_stage
from rollouts_core import sft as sft_module
from rollouts_core.checkpoint import list_checkpoints, load_manifest
from rollouts_core.config import Config, ModelConfig
from rollouts_core.data.rows import digest_path
from rollouts_core.errors import ConfigError
from rollouts_core.fingerprint import digest_model, digest_plugins
from rollouts_core.job import InputFile, InputModel
from rollouts_core.stages.planning import base_model, input_file
from tests.infra.shell_jobs import is_alive, read_pid, shell_spec, wait_for_end
from tests.infra.stores.s3_server import S3Server
from tests.kit.waiting import wait_until
from tests.tasks.finished_stages import checkpoint, config_at, finished
from tests.tasks.planned import plan_rl, plan_sft


class CountingSession(LocalSession):
    """Counts what is published, and keeps what is sent there."""

    num_published = 0
    sent = b""

    def run(self, argv, **options):  # type: ignore[no-untyped-def]
        self.num_published += "commit" in argv
        self.sent += options.get("stdin", b"")
        return super().run(argv, **options)


@pytest.fixture
def session() -> CountingSession:
    return CountingSession(sys.executable)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(
        name="a@b:22",
        kind="ssh",
        root=str(tmp_path / "node"),
        python=sys.executable,
        mirror=str(tmp_path / "store"),
    )


@pytest.fixture
def scope(tmp_path: Path) -> RunScope:
    return RunScope(run_id="run-a", run_name="small", store=str(tmp_path / "store"))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_at(tmp_path / "inputs")


def paths_in(value: object) -> list[str]:
    """Every text in a JSON value that is an absolute path."""
    if isinstance(value, dict):
        return [path for each in value.values() for path in paths_in(each)]
    if isinstance(value, list):
        return [path for each in value for path in paths_in(each)]
    return [value] if isinstance(value, str) and value.startswith("/") else []


def assert_on_node(placement: Placement, node: Node) -> None:
    paths = [*paths_in(placement.stage.job), placement.stage.run_dir, placement.code_dir]
    assert paths and all(Path(path).is_relative_to(node.root) for path in paths)
    assert all(Path(path).exists() for path in paths if path != placement.stage.run_dir)


@pytest.mark.slow
def test_every_kind_of_stage_names_only_paths_of_the_node(
    session: CountingSession, config: Config, scope: RunScope, node: Node, tmp_path: Path
) -> None:
    sft = plan_sft(config, scope, node)
    trained = checkpoint(Path(sft.run_dir) / "checkpoints" / "step_000020", b"weights")
    entry = {"name": trained.name, "digest": trained.digest, "step": 20}
    record = finished("sft", {"checkpoints": [entry]}).model_copy(update={"run_dir": sft.run_dir})
    rl = plan_rl(trained, config, scope, node)
    for stage in (sft, plan_selection(record, config, scope, node), rl, plan_engine(rl, 30000, node)):
        assert Path(stage.run_dir).is_relative_to(node.mirror)
        placement = place_stage(session, stage, node)
        assert_on_node(placement, node)
        assert (placement.stage.fingerprint, placement.stage.name) == (stage.fingerprint, stage.name)


@pytest.mark.slow
def test_what_the_node_has_is_not_sent_again(
    session: CountingSession, config: Config, scope: RunScope, node: Node
) -> None:
    stage = plan_sft(config, scope, node)
    first = place_stage(session, stage, node)
    assert session.num_published == 3  # the model, the data, the code
    assert place_stage(session, stage, node) == first and session.num_published == 3


def test_a_file_that_a_cleaner_took_from_the_node_is_sent_again(
    session: CountingSession, node: Node, tmp_path: Path
) -> None:
    """As of a scratch disk, where files go after some weeks, and folders stay."""
    (tmp_path / "rows.jsonl").write_text("{}\n")
    file = InputFile(path=str(tmp_path / "rows.jsonl"), digest=digest_path(tmp_path / "rows.jsonl"))
    inputs = NodeInputs(session, node, print)
    placed = Path(inputs.place_file(file).path)
    placed.unlink()
    assert inputs.place_file(file).path == str(placed) and placed.read_text() == "{}\n"


def break_file(path: Path, how: str) -> None:
    """As a cleaner, a disk that is full or a power cut leaves a file, or a disk with a fault, after some weeks."""
    content = path.read_bytes()
    path.unlink()  # not in its place: it may be a link to what was sent
    if how != "gone":
        path.write_bytes({"empty": b"", "half": content[: len(content) // 2], "flipped": bytes(len(content))}[how])


@pytest.mark.parametrize("how", ["gone", "empty", "half"])
def test_a_model_of_which_the_node_has_not_all_any_more_is_sent_again(
    session: CountingSession, config: Config, node: Node, how: str
) -> None:
    (Path(config.model.path) / "model.safetensors").write_bytes(b"weights")
    inputs, model = NodeInputs(session, node, print), base_model(config)
    placed = Path(inputs.place_model(model).model.path)
    break_file(placed / "model.safetensors", how)
    assert inputs.place_model(model).model.path == str(placed)
    assert digest_model(ModelConfig(path=str(placed))) == model.digest


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gone", "empty"])
def test_code_of_which_the_node_has_not_all_any_more_is_sent_again(
    session: CountingSession, node: Node, how: str
) -> None:
    folder = Path(place_code(session, node))
    (folder / "rollouts_core" / "__pycache__").mkdir()  # as Python leaves it
    break_file(folder / "rollouts_core" / "sft.py", how)
    assert Path(place_code(session, node)) == folder
    assert (folder / "rollouts_core" / "sft.py").read_bytes() == Path(sft_module.__file__).read_bytes()
    assert place_code(session, node) and session.num_published == 2


@pytest.mark.parametrize("how", ["gone", "empty", "half"])
def test_a_checkpoint_of_which_the_node_has_not_all_any_more_comes_from_the_store(
    session: CountingSession, config: Config, scope: RunScope, node: Node, how: str
) -> None:
    sft = plan_sft(config, scope, node)
    trained = checkpoint(Path(sft.run_dir) / "checkpoints" / "step_000020", b"weights")
    there = Path(node.path_on_node(trained.model.path))
    shutil.copytree(trained.model.path, there)
    break_file(there / "model.safetensors", how)
    placed = Path(NodeInputs(session, node, print).place_model(trained).model.path)
    assert placed != there
    assert load_manifest(placed).digest == trained.digest and (placed / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.slow
def test_what_a_job_found_changed_on_the_node_is_compared_and_sent_again(
    session: CountingSession, config: Config, scope: RunScope, node: Node
) -> None:
    """Its sizes are right, so nothing else tells: the job would be started with it, and refuse it, for ever."""
    stage = plan_sft(config, scope, node)
    placement = place_stage(session, stage, node)
    data = Path(placement.stage.job["data"][0]["path"])
    break_file(data, "flipped")
    assert place_stage(session, stage, node) == placement and not data.read_bytes().strip(b"\0")
    start_or_attach(session, shell_spec(Path(placement.stage.run_dir), "exit 2"))
    wait_for_end(session, Path(placement.stage.run_dir))
    assert place_stage(session, stage, node) == placement
    assert digest_path(data) == stage.job["data"][0]["digest"]
    assert session.num_published == 4, "what is right was sent, too"


def test_what_a_clone_or_a_download_keeps_beside_a_model_stays_here(
    session: CountingSession, config: Config, node: Node
) -> None:
    """It is no part of the model's digest, may be as large again, and names how the hub was logged in to."""
    folder = Path(config.model.path)
    for name in (".git/config", ".cache/huggingface/download/a.metadata", "inner/vocab.json"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("x")
    placed = NodeInputs(session, node, print).place_model(base_model(config))
    there = {each.relative_to(placed.model.path).as_posix() for each in Path(placed.model.path).rglob("*")}
    assert "inner/vocab.json" in there and not {".git", ".cache"} & there
    assert digest_model(placed.model) == placed.digest


@pytest.mark.slow
def test_models_that_grade_come_along_and_a_server_keeps_its_weights(
    session: CountingSession, scope: RunScope, node: Node, tmp_path: Path
) -> None:
    kinds = {
        "classifier": {},
        "reward_model": {"url": "http://127.0.0.1:1"},
        "judge": {"url": "http://127.0.0.1:1/generate"},
    }
    for kind in kinds:
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "tokenizer.json").write_text(kind)
        (tmp_path / kind / "model.safetensors").write_bytes(b"weights")
    rewards = [{"kind": kind, "model": str(tmp_path / kind), **more} for kind, more in kinds.items()]
    rewards.append({"kind": "judge", "model": "judge-70b", "url": "http://127.0.0.1:1/v1"})
    config = config_at(tmp_path / "inputs", rollout={"rewards": rewards})
    model = base_model(config)
    for stage in (plan_rl(model, config, scope, node), plan_evaluation({"base": model}, config, scope, node)):
        placed = [each["model"] for each in place_stage(session, stage, node).stage.job["rollout"]["rewards"]]
        assert placed.pop() == "judge-70b"
        for kind, path in zip(kinds, map(Path, placed), strict=True):
            assert path.is_relative_to(node.root) and (path / "tokenizer.json").read_text() == kind
            assert (path / "model.safetensors").exists() == (kind == "classifier")


def test_what_is_edited_between_planning_and_sending_is_not_taken_for_what_it_was(
    session: CountingSession, config: Config, node: Node
) -> None:
    rows = Path(config.data.prompts)
    planned, content = input_file(config.data.prompts), rows.read_bytes()
    inputs = NodeInputs(session, node, print)
    rows.write_bytes(content + content)
    with pytest.raises(ConfigError, match=f"{rows} changed since the stage was planned: start the run again"):
        inputs.place_file(planned)
    rows.write_bytes(content)
    assert Path(inputs.place_file(planned).path).read_bytes() == content


def test_what_is_edited_while_it_is_sent_does_not_stay_there(
    session: CountingSession, config: Config, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Path(config.data.prompts)
    planned, content = input_file(config.data.prompts), rows.read_bytes()
    inputs = NodeInputs(session, node, print)

    def edit_and_send(*arguments: Any) -> None:
        rows.write_bytes(content + content)
        publish_files(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(upload_inputs, "publish_files", edit_and_send)
        with pytest.raises(TransientInfraError, match="was edited during its upload"):
            inputs.place_file(planned)
    rows.write_bytes(content)
    assert Path(inputs.place_file(planned).path).read_bytes() == content


@pytest.mark.slow
def test_content_arrives_as_it_is_here(session: CountingSession, config: Config, scope: RunScope, node: Node) -> None:
    placed = place_stage(session, plan_sft(config, scope, node), node)
    (data,) = placed.stage.job["data"]
    assert Path(data["path"]).read_bytes() == Path(str(config.data.sft)).read_bytes()
    assert (Path(placed.code_dir) / "rollouts_core" / "sft.py").is_file()
    assert not list(Path(placed.code_dir).rglob("__pycache__"))


def test_a_checkpoint_that_its_job_left_on_the_node_is_used_where_it_lies(
    session: CountingSession, config: Config, scope: RunScope, node: Node
) -> None:
    sft = plan_sft(config, scope, node)
    trained = checkpoint(Path(sft.run_dir) / "checkpoints" / "step_000020", b"weights")
    there = Path(node.path_on_node(trained.model.path))
    shutil.copytree(trained.model.path, there)
    placed = place_stage(session, plan_rl(trained, config, scope, node), node)
    assert placed.stage.job["model"]["model"]["path"] == str(there)


@pytest.mark.slow
def test_names_of_a_hub_stay(session: CountingSession, config: Config, scope: RunScope, node: Node) -> None:
    of_hub = InputModel(name="base", model=ModelConfig(path="org/model"), digest="0")
    placed = place_stage(session, plan_rl(of_hub, config, scope, node), node)
    assert placed.stage.job["model"]["model"]["path"] == "org/model"


@pytest.mark.slow
def test_the_checkpoint_to_continue_is_brought(
    session: CountingSession, config: Config, scope: RunScope, node: Node, tmp_path: Path
) -> None:
    earlier = checkpoint(tmp_path / "earlier" / "checkpoints" / "step_000020", b"weights")
    continued = config_at(tmp_path / "inputs", training={"sft": {"resume_from": str(tmp_path / "earlier")}})
    placed = place_stage(session, plan_sft(continued, scope, node), node)
    path = Path(placed.stage.job["training"]["resume_from"])
    assert path.is_relative_to(node.root)
    assert load_manifest(path).digest == earlier.digest


@pytest.mark.slow
def test_another_node_goes_on_from_the_checkpoints_in_the_store(
    session: CountingSession, config: Config, scope: RunScope, node: Node
) -> None:
    stage = plan_sft(config, scope, node)
    checkpoint(Path(stage.run_dir) / "checkpoints" / "step_000020", b"weights")
    (Path(stage.run_dir) / "metrics.jsonl").write_text('{"step": 20}\n')
    (Path(stage.run_dir) / "exit-1.json").write_text("{}")
    there = Path(place_stage(session, stage, node).stage.run_dir)
    assert load_manifest(there / "checkpoints" / "step_000020").step == 20
    assert sorted(path.name for path in there.iterdir()) == ["checkpoints", "metrics.jsonl"]


def lie_at(node: Node, stage: Stage, *, steps: Sequence[int], state: str = "exit 3") -> Path:
    """What a job of the stage has left on the node, or is at."""
    there = Path(node.path_on_node(stage.run_dir))
    for step in steps:
        checkpoint(there / "checkpoints" / f"step_{step:06d}", b"of the node")
    (there / "metrics.jsonl").parent.mkdir(parents=True, exist_ok=True)
    (there / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    session = LocalSession(sys.executable)
    start_or_attach(session, shell_spec(there, state))
    if state.startswith("exit"):
        wait_for_end(session, there)
    return there


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(20,), ()])
def test_a_node_that_stopped_before_another_one_went_on_goes_on_from_there(
    session: CountingSession, config: Config, scope: RunScope, node: Node, steps: Sequence[int]
) -> None:
    stage = plan_sft(config, scope, node)
    here = Path(stage.run_dir)
    there = lie_at(node, stage, steps=steps)
    for step in (30, 40):
        checkpoint(here / "checkpoints" / f"step_{step:06d}", b"of another node")
    (here / "metrics.jsonl").write_text('{"step": 40}\n')
    place_stage(session, stage, node)
    assert job_status(session, str(there)).state is JobState.ABSENT
    assert [path.name for path in list_checkpoints(there / "checkpoints")] == ["step_000030", "step_000040"]
    pull_run(session, str(there), here)
    assert [path.name for path in list_checkpoints(here / "checkpoints")] == ["step_000030", "step_000040"]
    assert (here / "metrics.jsonl").read_text() == '{"step": 40}\n'


@pytest.mark.slow
def test_a_node_that_is_as_far_as_the_store_keeps_what_it_has(
    session: CountingSession, config: Config, scope: RunScope, node: Node
) -> None:
    stage = plan_sft(config, scope, node)
    there = lie_at(node, stage, steps=(20,))
    checkpoint(Path(stage.run_dir) / "checkpoints" / "step_000020", b"of another node")
    unfinished = checkpoint(Path(stage.run_dir) / "checkpoints" / "step_000040", b"being fetched")
    Path(unfinished.model.path, "manifest.json").unlink()
    place_stage(session, stage, node)
    assert (there / "checkpoints/step_000020/model.safetensors").read_bytes() == b"of the node"
    assert job_status(session, str(there)).state is JobState.EXITED


@pytest.mark.slow
def test_a_job_that_runs_keeps_what_it_has(
    session: CountingSession, config: Config, scope: RunScope, node: Node
) -> None:
    stage = plan_sft(config, scope, node)
    there = lie_at(node, stage, steps=(20,), state="sleep 60")
    checkpoint(Path(stage.run_dir) / "checkpoints" / "step_000040", b"of another node")
    try:
        place_stage(session, stage, node)
        assert [path.name for path in list_checkpoints(there / "checkpoints")] == ["step_000020"]
        assert job_status(session, str(there)).state is JobState.RUNNING
    finally:
        cancel_job(session, str(there), grace_s=0.2)


@pytest.mark.slow
def test_what_a_killed_supervisor_left_behind_is_ended_before_its_directory_is_replaced(
    session: CountingSession, config: Config, scope: RunScope, node: Node
) -> None:
    stage = plan_sft(config, scope, node)
    there = lie_at(node, stage, steps=(), state="setsid sleep 60 & echo $! > pid; wait")
    stray = read_pid(there / "pid")
    os.kill(json.loads((there / ".job/meta-1.json").read_text())["supervisor_pid"], signal.SIGKILL)
    wait_until(lambda: job_status(session, str(there)).orphans == (stray,))
    checkpoint(Path(stage.run_dir) / "checkpoints" / "step_000040", b"of another node")
    place_stage(session, stage, node)
    assert not is_alive(stray)


@pytest.mark.slow
def test_the_users_own_package_comes_along_and_an_edit_makes_new_code(
    session: CountingSession, scope: RunScope, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own" / "my_rewards"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def score(*_): return 1.0\n")
    monkeypatch.syspath_prepend(str(package.parent))
    config = config_at(tmp_path / "inputs", rollout={"reward_fn": "my_rewards:score"})
    stage: Stage = plan_rl(base_model(config), config, scope, node)
    first = place_stage(session, stage, node).code_dir
    assert (Path(first) / "my_rewards" / "__init__.py").read_text() == "def score(*_): return 1.0\n"
    (package / "__init__.py").write_text("def score(*_): return 2.0\n")
    assert place_stage(session, stage, node).code_dir != first


@pytest.mark.slow
def test_a_program_in_the_users_own_package_can_be_run_on_the_node(
    session: CountingSession, scope: RunScope, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own" / "my_graders"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def score(*_): return 1.0\n")
    (package / "grade.sh").write_text("#!/bin/sh\necho right\n")
    monkeypatch.syspath_prepend(str(package.parent))
    config = config_at(tmp_path / "inputs", rollout={"reward_fn": "my_graders:score"})
    stage: Stage = plan_rl(base_model(config), config, scope, node)
    before = Path(place_stage(session, stage, node).code_dir)
    (package / "grade.sh").chmod(0o755)
    after = Path(place_stage(session, stage, node).code_dir)
    assert subprocess.run([after / "my_graders/grade.sh"], capture_output=True, check=True).stdout == b"right\n"
    assert not os.access(before / "my_graders/grade.sh", os.X_OK)
    assert not os.access(after / "my_graders/__init__.py", os.X_OK)


def test_a_name_that_is_no_utf_8_is_refused_in_a_sentence_that_can_be_printed(
    session: CountingSession, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own" / "my_latin"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def score(*_): return 1.0\n")
    try:
        (package / os.fsdecode(b"donn\xe9es.txt")).touch()
    except OSError:
        pytest.skip("this disk takes no such name")
    monkeypatch.syspath_prepend(str(package.parent))
    assert digest_plugins("my_latin:score")
    with pytest.raises(PermanentInfraError, match="not printable; rename it") as refused:
        place_code(session, node, {"rollout.reward_fn": "my_latin"})
    assert str(refused.value).encode()


def test_a_single_file_comes_with_what_it_imports_and_what_is_sent_is_said(
    session: CountingSession, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    (own / "rubrics_of_a_test").mkdir(parents=True)
    (own / "rubrics_of_a_test" / "math.py").write_text("def score(*_): return 1.0\n")
    (own / "graders_of_a_test.py").write_text("from rubrics_of_a_test.math import score\n")
    monkeypatch.syspath_prepend(own)
    config = config_at(tmp_path / "inputs", rollout={"reward_fn": "graders_of_a_test:score"})
    said: list[str] = []
    folder = place_code(session, node, config.rollout.modules_named, say=said.append)
    code = "import graders_of_a_test as own; print(own.score(), own.__file__)"
    found = session.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {folder!r}); {code}"], timeout_s=60
    )
    assert found.stdout.decode().split() == ["1.0", f"{folder}/graders_of_a_test.py"]
    [sentence] = said
    assert sentence.endswith(", graders_of_a_test (1 file, 0 kB), rubrics_of_a_test (1 file, 0 kB)")
    assert sentence.startswith("uploads code: rollouts_core (")
    assert place_code(session, node, config.rollout.modules_named, say=said.append) == folder and len(said) == 1


def test_code_that_is_edited_while_it_is_sent_is_not_taken_for_what_it_was_before(
    session: CountingSession, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "own" / "grader_that_is_edited.py"
    module.parent.mkdir()
    module.write_text("def score(*_): return 1.0\n")
    monkeypatch.syspath_prepend(module.parent)
    modules = {"rollout.reward_fn": "grader_that_is_edited"}

    def edit(_: str) -> None:
        module.write_text("def score(*_): return 0.25\n")

    with pytest.raises(TransientInfraError, match="was edited during its upload"):
        place_code(session, node, modules, say=edit)
    module.write_text("def score(*_): return 1.0\n")
    folder = place_code(session, node, modules)
    assert Path(folder, module.name).read_text() == module.read_text()


def test_on_this_machine_nothing_is_copied(
    session: CountingSession, config: Config, scope: RunScope, tmp_path: Path
) -> None:
    node = Node(name="local", kind="local", root=str(tmp_path / "store"), python=sys.executable)
    stage = plan_sft(config, scope, node)
    assert place_stage(session, stage, node) == Placement(stage, "") and session.num_published == 0


# ── what a URL named ──

WEIGHTS = os.urandom(100_000)


def published_config(url: str, config: Config, scope: RunScope, folder: Path) -> Config:
    """The configuration with a model that lies below the URL, and was fetched from there."""
    model = checkpoint(folder / "step_000020", WEIGHTS)
    publish_run(ObjectStore(url), run_id="0123456789", checkpoint=Path(model.model.path), records={})
    by_url = config.model_copy(update={"model": ModelConfig(path=url)})
    return bring_inputs(by_url, Path(scope.store), lambda sentence: None)


def weights_on_node(placement: Placement) -> bytes:
    return (Path(placement.stage.job["model"]["model"]["path"]) / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_what_a_url_named_the_node_fetches_itself(
    session: CountingSession, config: Config, scope: RunScope, node: Node, bucket: str, tmp_path: Path
) -> None:
    url = f"s3://{bucket}/team/small"
    stage = plan_sft(published_config(url, config, scope, tmp_path), scope, node)
    said: list[str] = []
    placed = place_stage(session, stage, node, say=said.append)
    assert_on_node(placed, node)
    assert said == [f"small: the node itself downloaded 0.1 MB from {url}"]
    assert weights_on_node(placed) == WEIGHTS and WEIGHTS not in session.sent
    assert place_stage(session, stage, node, say=said.append) == placed and len(said) == 1


@pytest.mark.slow
def test_a_single_file_that_a_url_named_the_node_fetches_itself(
    session: CountingSession, config: Config, scope: RunScope, node: Node, bucket: str, s3_server: S3Server
) -> None:
    rows = b"".join(b'{"n": %d}\n' % number for number in range(1000))
    s3_server.client().put_object(Bucket=bucket, Key="data/rows.jsonl", Body=rows)
    named = config.data.model_copy(update={"sft": f"s3://{bucket}/data/rows.jsonl"})
    by_url = config.model_copy(update={"data": named})
    stage = plan_sft(bring_inputs(by_url, Path(scope.store), lambda sentence: None), scope, node)
    [dataset] = place_stage(session, stage, node).stage.job["data"]
    assert Path(dataset["path"]).read_bytes() == rows and rows not in session.sent


@pytest.mark.slow
def test_a_node_without_a_way_to_the_store_gets_it_from_here(
    config: Config, scope: RunScope, node: Node, bucket: str, tmp_path: Path
) -> None:
    url = f"s3://{bucket}/team/small"
    stage = plan_sft(published_config(url, config, scope, tmp_path), scope, node)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nunset no_proxy NO_PROXY\nhttp_proxy=http://127.0.0.1:1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    cut_off, said = CountingSession(str(python)), list[str]()
    placed = place_stage(cut_off, stage, node, say=said.append)
    assert weights_on_node(placed) == WEIGHTS and WEIGHTS in cut_off.sent
    [sentence] = said
    assert sentence.startswith(f"small: uploaded from here, because the node cannot download it from {url} (127.0.0.1:")
    assert "cannot be reached: [Errno 111] Connection refused" in sentence


@pytest.mark.slow
def test_what_changed_at_its_url_is_sent_as_it_was(
    session: CountingSession, config: Config, scope: RunScope, node: Node, bucket: str, tmp_path: Path
) -> None:
    url = f"s3://{bucket}/team/small"
    stage = plan_sft(published_config(url, config, scope, tmp_path), scope, node)
    other = checkpoint(tmp_path / "step_000040", b"other weights")
    publish_run(ObjectStore(url), run_id="0123456789", checkpoint=Path(other.model.path), records={})
    said: list[str] = []
    assert weights_on_node(place_stage(session, stage, node, say=said.append)) == WEIGHTS
    assert len(said) == 1 and f"{url} has changed since it was fetched" in said[0]


@pytest.mark.slow
def test_what_came_from_a_folder_of_this_machine_is_sent_without_a_word(
    session: CountingSession, config: Config, scope: RunScope, node: Node, tmp_path: Path
) -> None:
    stage = plan_sft(published_config(f"file://{tmp_path}/published", config, scope, tmp_path), scope, node)
    said: list[str] = []
    assert weights_on_node(place_stage(session, stage, node, say=said.append)) == WEIGHTS
    assert said == [] and WEIGHTS in session.sent
