"""Pins the chain of identities: what makes a stage the same work as before, and what makes it another.

Without it a change that matters is answered with an old checkpoint, or hours of training are done again for a port.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollouts.infra.node import LocalNode, Node
from rollouts.infra.providers import provision_node
from rollouts.tasks.node_job import job_environment
from rollouts.tasks.plan import (
    check_plugins,
    plan_engine,
    plan_evaluation,
    plan_selection,
    selected_model,
    with_engines,
)
from rollouts.tasks.records import EngineRecord, RunScope, Stage
from rollouts_core.checkpoint import new_checkpoint
from rollouts_core.config import MIN_ENGINE_CONTEXT, Config, DataConfig, ReportConfig
from rollouts_core.engine_kinds import SGLANG
from rollouts_core.engines.transfer.canary import canary_requests
from rollouts_core.errors import CheckpointError, ConfigError
from rollouts_core.fingerprint import fingerprint_job
from rollouts_core.job import EvalJob
from rollouts_core.keys import OWN_KEY_VARIABLE
from rollouts_core.stages.planning import base_model
from tests.tasks.finished_stages import checkpoint, config_at, finished
from tests.tasks.planned import plan_rl, plan_sft


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return provision_node(LocalNode(), tmp_path / "store")


@pytest.fixture
def scope(tmp_path: Path) -> RunScope:
    return RunScope(run_id="run-a", run_name="small", store=str(tmp_path / "store"))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_at(tmp_path / "inputs")


def test_a_run_directory_is_named_after_the_stage_and_its_identity(config: Config, scope: RunScope, node: Node) -> None:
    stage = plan_sft(config, scope, node)
    assert Path(stage.run_dir) == Path(node.root) / "stages" / f"sft-{stage.fingerprint}"


def test_the_same_inputs_elsewhere_are_the_same_sft(
    config: Config, tmp_path: Path, scope: RunScope, node: Node
) -> None:
    moved = config_at(tmp_path / "elsewhere")
    assert plan_sft(moved, scope, node).fingerprint == plan_sft(config, scope, node).fingerprint


def test_values_for_the_chat_template_make_another_sft_another_rl_and_another_evaluation(
    config: Config, scope: RunScope, node: Node
) -> None:
    model = config.model.model_copy(update={"chat_template_kwargs": {"enable_thinking": False}})
    changed = config.model_copy(update={"model": model})
    training = finished("sft", {"checkpoints": [{"name": "step_000020", "step": 20, "digest": "a"}]})
    plans: list[Callable[[Config], Stage]] = [
        lambda each: plan_sft(each, scope, node),
        lambda each: plan_rl(base_model(each), each, scope, node),
        lambda each: plan_selection(training, each, scope, node),
        lambda each: plan_evaluation({"base": base_model(each)}, each, scope, node),
    ]
    for plan in plans:
        assert plan(changed).fingerprint != plan(config).fingerprint
    selected = selected_model(training, finished("select-sft", {"best": "step_000020"}), changed)
    assert selected.model.chat_template_kwargs == {"enable_thinking": False}


def test_the_contents_of_the_report_change_no_stage(config: Config, scope: RunScope, node: Node) -> None:
    shown = config.model_copy(update={"report": ReportConfig(samples="none", max_mb=1.0)})
    training = finished("sft", {"checkpoints": [{"name": "step_000020", "step": 20, "digest": "a"}]})
    plans: list[Callable[[Config], Stage]] = [
        lambda each: plan_sft(each, scope, node),
        lambda each: plan_rl(base_model(each), each, scope, node),
        lambda each: plan_selection(training, each, scope, node),
        lambda each: plan_evaluation({"base": base_model(each)}, each, scope, node),
    ]
    assert [plan(shown).fingerprint for plan in plans] == [plan(config).fingerprint for plan in plans]


@pytest.mark.parametrize("name", ["sft.jsonl", "model/config.json"])
def test_changed_content_is_another_sft(config: Config, tmp_path: Path, scope: RunScope, node: Node, name: str) -> None:
    before = plan_sft(config, scope, node).fingerprint
    (tmp_path / "inputs" / name).write_text('{"rows": "changed"}\n')
    assert plan_sft(config, scope, node).fingerprint != before


def test_data_of_other_stages_leaves_sft_the_same(config: Config, tmp_path: Path, scope: RunScope, node: Node) -> None:
    before = plan_sft(config, scope, node).fingerprint
    for name in ("prompts", "selection", "heldout"):
        (tmp_path / "inputs" / f"{name}.jsonl").write_text("changed\n")
    assert plan_sft(config, scope, node).fingerprint == before


def test_rl_settings_leave_sft_the_same_and_make_another_rl(
    config: Config, tmp_path: Path, scope: RunScope, node: Node
) -> None:
    changed = config_at(tmp_path / "inputs", training={"rl": {"replicate": 1}})
    assert plan_sft(changed, scope, node).fingerprint == plan_sft(config, scope, node).fingerprint
    start = base_model(config)
    assert plan_rl(start, changed, scope, node).fingerprint != plan_rl(start, config, scope, node).fingerprint


def test_rl_is_another_when_the_weights_of_its_start_model_are_and_the_same_when_they_only_lie_elsewhere(
    config: Config, tmp_path: Path, scope: RunScope, node: Node
) -> None:
    first, moved, other = (
        plan_rl(checkpoint(tmp_path / place / "step_000020", weights), config, scope, node).fingerprint
        for place, weights in (("a", b"weights"), ("b", b"weights"), ("c", b"others"))
    )
    assert first == moved
    assert first != other


@pytest.mark.parametrize(
    ("reward", "file"),
    [
        ({"kind": "classifier"}, "model.safetensors"),
        ({"kind": "reward_model", "url": "http://127.0.0.1:1"}, "model.safetensors"),
        ({"kind": "judge", "url": "http://127.0.0.1:1/generate"}, "tokenizer_config.json"),
    ],
)
def test_another_model_that_grades_in_the_same_folder_is_another_rl_and_another_evaluation(
    tmp_path: Path, scope: RunScope, node: Node, reward: dict[str, str], file: str
) -> None:
    grader = tmp_path / "grader"
    grader.mkdir()
    config = config_at(tmp_path / "inputs", rollout={"rewards": [{**reward, "model": str(grader)}]})
    identities = []
    for content in (b"first", b"first", b"second"):
        (grader / file).write_bytes(content)
        stages = (
            plan_rl(base_model(config), config, scope, node),
            plan_evaluation({"base": base_model(config)}, config, scope, node),
        )
        identities.append([stage.fingerprint for stage in stages])
    first, again, other = identities
    assert first == again
    assert not set(first) & set(other)


def test_a_reward_that_is_edited_between_planning_and_starting_is_not_trained_on(
    tmp_path: Path, scope: RunScope, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "edited_reward_of_a_test.py"
    code.write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = config_at(tmp_path / "inputs", rollout={"reward_fn": "edited_reward_of_a_test:score"})
    model = base_model(config)
    graded = [plan_rl(model, config, scope, node), plan_evaluation({"base": model}, config, scope, node)]
    stages = [plan_sft(config, scope, node), *graded, plan_rl(model, config_at(tmp_path / "inputs"), scope, node)]
    for stage in stages:
        check_plugins(stage)
    code.write_text("A = 2\n")
    for stage in graded:
        with pytest.raises(ConfigError, match="changed since the stage was planned: start the run again"):
            check_plugins(stage)
    for stage in (stages[0], stages[-1]):
        check_plugins(stage)


def test_the_code_of_a_loss_is_part_of_the_identity_of_rl_alone(
    tmp_path: Path, scope: RunScope, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "edited_loss_of_a_test.py"
    code.write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = config_at(tmp_path / "inputs", training={"rl": {"loss_fn": "edited_loss_of_a_test:loss"}})
    model = base_model(config)

    def plan() -> list[Stage]:
        evaluation = plan_evaluation({"base": model}, config, scope, node)
        return [plan_rl(model, config, scope, node), plan_sft(config, scope, node), evaluation]

    before = plan()
    check_plugins(before[0])
    code.write_text("A = 2\n")
    assert [one.fingerprint == other.fingerprint for one, other in zip(before, plan(), strict=True)] == [
        False,
        True,
        True,
    ]
    with pytest.raises(ConfigError, match=r"environments or the loss, .* changed since the stage was planned"):
        check_plugins(before[0])


def test_engines_and_ports_are_no_part_of_the_identity_of_rl(
    config: Config, tmp_path: Path, scope: RunScope, node: Node
) -> None:
    rl = plan_rl(base_model(config), config, scope, node)
    placed = with_engines(rl, [EngineRecord(url="http://127.0.0.1:30000", run_dir="/engine")])
    assert (placed.fingerprint, placed.run_dir) == (rl.fingerprint, rl.run_dir)
    assert placed.job["engines"] == [
        {
            "kind": "embedded",
            "version": "",
            "url": "http://127.0.0.1:30000",
            "lease_file": "/engine/.job/lease",
            "lease_url": "",
        }
    ]
    on_other_port = config_at(tmp_path / "inputs", deployment={"engine_port": 30001, "trainer_threads": 2})
    assert plan_rl(base_model(config), on_other_port, scope, node).fingerprint == rl.fingerprint


def test_the_engine_has_the_identity_of_its_rl_and_serves_its_start_model(
    config: Config, scope: RunScope, node: Node
) -> None:
    rl = plan_rl(base_model(config), config, scope, node)
    engines = [plan_engine(rl, port, node) for port in (30000, 30001)]
    assert engines[0].run_dir == engines[1].run_dir == str(Path(node.root) / "stages" / f"engine-{rl.fingerprint}-0")
    assert engines[0].job["model"] == rl.job["model"]


def test_an_engine_is_not_ended_before_the_time_of_the_rl_that_asks_it_is_up(
    config: Config, scope: RunScope, node: Node
) -> None:
    rl = plan_rl(base_model(config), config, scope, node)
    assert rl.timeout_s > 0
    assert plan_engine(rl, 30000, node).timeout_s == 0  # another attempt at the RL may have begun with it just now


def test_several_engines_of_an_rl_share_its_gpus_and_have_directories_of_their_own(
    tmp_path: Path, scope: RunScope, node: Node
) -> None:
    placement = {"num_engines": 2, "engine_gpu_ranks": [4, 5, 6, 7]}
    config = config_at(tmp_path / "inputs", deployment=placement, rollout={"engine": {"kind": "vllm"}})
    rl = plan_rl(base_model(config), config, scope, node)
    engines = [plan_engine(rl, 0, node, index) for index in range(2)]
    assert [job_environment(engine)["CUDA_VISIBLE_DEVICES"] for engine in engines] == ["4,5", "6,7"]
    assert len({engine.run_dir for engine in engines}) == 2
    with pytest.raises(ValidationError, match="names 3 GPUs for num_engines 2"):
        config_at(tmp_path / "inputs", deployment={"num_engines": 2, "engine_gpu_ranks": [0, 1, 2]})


def test_engines_on_nodes_of_their_own_are_sent_weights_and_ask_for_a_key_and_rl_stays_the_same(
    config: Config, tmp_path: Path, scope: RunScope, node: Node
) -> None:
    cluster = replace(node, engine_nodes=(replace(node, name="far", address="10.0.0.2"),))
    alone, elsewhere = (plan_rl(base_model(config), config, scope, each) for each in (node, cluster))
    assert elsewhere.fingerprint == alone.fingerprint
    engine = elsewhere.job["rollout"]["engine"]
    assert (engine["weight_transfer"], engine["api_key_variable"]) == ("gloo", OWN_KEY_VARIABLE)
    named = {"engine": {"kind": "sglang", "weight_transfer": "nccl", "api_key_variable": "MY_KEY"}}
    kept = plan_rl(base_model(config), config_at(tmp_path / "inputs", rollout=named), scope, cluster)
    assert kept.job["rollout"]["engine"].items() >= named["engine"].items()


def test_each_node_has_as_many_engines_which_share_its_gpus(tmp_path: Path, scope: RunScope, node: Node) -> None:
    placement = {"num_engines": 2, "engine_gpu_ranks": [4, 5, 6, 7]}
    config = config_at(tmp_path / "inputs", deployment=placement, rollout={"engine": {"kind": "sglang"}})
    far = [replace(node, name=f"far{number}", address=f"10.0.0.{number}") for number in (2, 3)]
    cluster = replace(node, engine_nodes=tuple(far))
    nodes = [cluster.node_of_engine(index, num_per_node=2) for index in range(4)]
    assert nodes == [far[0], far[0], far[1], far[1]]
    assert node.node_of_engine(1, num_per_node=2) is node
    rl = plan_rl(base_model(config), config, scope, cluster)
    engines = [plan_engine(rl, 0, each, index) for index, each in enumerate(nodes)]
    assert [engine.job["host"] for engine in engines] == ["10.0.0.2", "10.0.0.2", "10.0.0.3", "10.0.0.3"]
    ranks = [engine.job["deployment"]["engine_gpu_ranks"] for engine in engines]
    assert ranks == [[4, 5], [6, 7], [4, 5], [6, 7]]
    assert len({engine.run_dir for engine in engines}) == 4


@pytest.mark.parametrize(("kind", "context"), [("embedded", 8), ("sglang", 26), ("vllm", 26)])
def test_an_engine_has_room_for_what_it_is_asked_to_prove_itself(
    tmp_path: Path, scope: RunScope, node: Node, kind: str, context: int
) -> None:
    rollout = {"engine": {"kind": kind}, "max_prompt_tokens": 4, "sampling": {"max_new_tokens": 3}}
    config = config_at(tmp_path / "inputs", rollout=rollout)
    engine = plan_engine(plan_rl(base_model(config), config, scope, node), 0, node)
    assert engine.job["context_length"] == context
    longest = max(len(request.prompt_tokens) + request.sampling.max_new_tokens for request in canary_requests(1.0))
    assert longest + SGLANG.reserved_tokens == MIN_ENGINE_CONTEXT == 26


def test_the_engine_that_samples_is_part_of_the_identity_of_rl_and_where_it_is_installed_is_not(
    tmp_path: Path, scope: RunScope, node: Node
) -> None:
    def identity(engine: dict[str, object]) -> str:
        config = config_at(tmp_path / "inputs", rollout={"engine": engine})
        return plan_rl(base_model(config), config, scope, node).fingerprint

    assert identity({}) == identity({"kind": "embedded"})
    assert identity({"kind": "sglang"}) != identity({})
    assert identity({"kind": "sglang"}) == identity({"kind": "sglang", "python": "/opt/sglang/bin/python"})


def test_scores_of_another_engine_are_other_scores(tmp_path: Path, scope: RunScope, node: Node) -> None:
    def plan(node: Node = node, **sections: Any) -> Stage:  # Any: settings of every type
        config = config_at(tmp_path / "inputs", **sections)
        return plan_evaluation({"base": base_model(config)}, config, scope, node)

    sglang: dict[str, Any] = {"rollout": {"engine": {"kind": "sglang", "dtype": "bfloat16"}}}
    assert plan(**sglang).fingerprint != plan().fingerprint
    assert plan(**sglang).job["rollout"]["engine"]["dtype"] == "bfloat16"
    by_embedded = [plan(**sglang, evaluation={"engine": "embedded"}), plan(evaluation={"engine": "embedded"})]
    unused = {"kind": "embedded", "context_length": 4096}  # the decoder has no use for this length
    by_embedded.append(plan(rollout={"engine": unused}))
    assert {stage.fingerprint for stage in by_embedded} == {plan().fingerprint}
    by_loss = [plan(**each, mode="sft", evaluation={"metric": "loss"}) for each in (sglang, {})]
    assert by_loss[0].fingerprint == by_loss[1].fingerprint


@pytest.mark.parametrize(
    ("trainer", "engines", "num_engines", "expected"),
    [
        ((0, 1, 2, 3), (4, 5, 6, 7), 2, ((0, 1, 2, 3), 2)),
        ((0, 1, 2), (0, 1, 2, 3), 2, ((0, 1), 1)),
        ((0,), (0, 1, 2, 3), 1, ((0,), 1)),
        ((), (0, 1), 2, ((), 1)),
        ((0, 1), (), 2, ((), 1)),
    ],
)
def test_where_engines_have_their_own_nodes_an_evaluation_has_the_trainers_gpus(
    tmp_path: Path,
    scope: RunScope,
    node: Node,
    trainer: tuple[int, ...],
    engines: tuple[int, ...],
    num_engines: int,
    expected: tuple[tuple[int, ...], int],
) -> None:
    deployment = {"trainer_gpu_ranks": trainer, "engine_gpu_ranks": engines, "num_engines": num_engines}
    config = config_at(tmp_path / "inputs", deployment=deployment, rollout={"engine": {"kind": "sglang"}})
    cluster = replace(node, engine_nodes=(replace(node, name="there"),))
    for place, ranks in ((cluster, expected), (node, (engines, num_engines))):
        found = plan_evaluation({"base": base_model(config)}, config, scope, place).job["deployment"]
        assert (tuple(found["engine_gpu_ranks"]), found["num_engines"]) == ranks


def test_fresh_makes_another_identity_of_this_stage_for_this_run_alone(
    config: Config, scope: RunScope, node: Node
) -> None:
    fresh = scope.model_copy(update={"fresh": ("sft",)})
    identities = {
        plan_sft(config, each, node).fingerprint
        for each in (scope, fresh, fresh, fresh.model_copy(update={"run_id": "run-b"}))
    }
    assert len(identities) == 3
    start = base_model(config)
    assert plan_rl(start, config, fresh, node).fingerprint == plan_rl(start, config, scope, node).fingerprint


def test_the_selected_checkpoint_is_the_one_that_the_selection_names(config: Config) -> None:
    training = finished(
        "sft", {"checkpoints": [{"name": f"step_0000{s}", "step": s, "digest": f"digest-{s}"} for s in (20, 40)]}
    )
    selected = selected_model(training, finished("select-sft", {"best": "step_000020"}), config)
    assert (selected.model.path, selected.digest) == ("/s/sft/checkpoints/step_000020", "digest-20")


def test_a_selection_is_another_when_a_checkpoint_or_its_rows_are(
    config: Config, tmp_path: Path, scope: RunScope, node: Node
) -> None:
    def identity(digest: str) -> str:
        training = finished("sft", {"checkpoints": [{"name": "step_000020", "step": 20, "digest": digest}]})
        return plan_selection(training, config, scope, node).fingerprint

    before = identity("a")
    assert identity("a") == before != identity("b")
    (tmp_path / "inputs/selection.jsonl").write_text("changed\n")
    assert identity("a") != before


def test_a_selection_chooses_and_an_evaluation_compares_under_the_identity_of_what_they_score(
    config: Config, scope: RunScope, node: Node
) -> None:
    """One leaves a checkpoint without a score out, the other ends; what is scored decides which stage it is."""
    training = finished("sft", {"checkpoints": [{"name": "step_000020", "step": 20, "digest": "a"}]})
    selection = plan_selection(training, config, scope, node)
    evaluation = plan_evaluation({"base": base_model(config)}, config, scope, node)
    assert (selection.job["is_selection"], evaluation.job["is_selection"]) == (True, False)
    job = EvalJob.model_validate(selection.job)
    assert fingerprint_job("x", job) == fingerprint_job("x", job.model_copy(update={"is_selection": False}))


def test_settings_of_training_and_of_rl_alone_leave_selection_and_evaluation_the_same(
    tmp_path: Path, scope: RunScope, node: Node
) -> None:
    training = finished("sft", {"checkpoints": [{"name": "step_000020", "step": 20, "digest": "a"}]})

    def identities(**changes: dict[str, Any]) -> tuple[str, str]:  # Any: settings of every type
        config = config_at(tmp_path / "inputs", **changes)
        evaluation = plan_evaluation({"base": base_model(config)}, config, scope, node)
        return plan_selection(training, config, scope, node).fingerprint, evaluation.fingerprint

    before = identities()
    assert identities(rollout={"batch_size": 4, "n_samples_per_prompt": 2, "seed": 7}) == before
    assert identities(training={"rl": {"num_steps": 7}, "sft": {"num_steps": 8}}) == before
    graded_otherwise = identities(rollout={"environment": "math"})
    assert graded_otherwise[0] != before[0] and graded_otherwise[1] != before[1]
    longer = identities(rollout={"sampling": {"max_new_tokens": 9}})
    assert longer[0] != before[0] and longer[1] != before[1]
    in_fewer_turns = identities(rollout={"multi_turn": {"max_turns": 2}})
    assert in_fewer_turns[0] != before[0] and in_fewer_turns[1] != before[1]
    by_two_rewards = identities(rollout={"rewards": [{"weight": 0.5}, {"name": "last_number"}]})
    assert by_two_rewards[0] != before[0] and by_two_rewards[1] != before[1]


def test_limits_of_time_reach_selection_and_evaluation_and_are_no_part_of_their_identity(
    tmp_path: Path, scope: RunScope, node: Node
) -> None:
    limits = {"max_outage_minutes": 0.0, "reward_timeout_s": 7.0, "request_timeout_s": 8.0, "silence_timeout_s": 9.0}

    def plan(**rollout: Any) -> Stage:  # Any: settings of every type
        config = config_at(tmp_path / "inputs", rollout=rollout)
        return plan_evaluation({"base": base_model(config)}, config, scope, node)

    limited = plan(**limits)
    assert {name: limited.job["rollout"][name] for name in limits} == limits
    assert limited.fingerprint == plan().fingerprint


def test_the_evaluation_names_models_by_their_part_in_the_run(config: Config, scope: RunScope, node: Node) -> None:
    models = {"base": base_model(config), "rl": base_model(config)}
    stage = plan_evaluation(models, config, scope, node)
    assert [model["name"] for model in stage.job["checkpoints"]] == ["base", "rl"]
    assert stage.num_steps == 2


def write_checkpoint(run_dir: Path, step: int, content: str) -> Path:
    path = run_dir / "checkpoints" / f"step_{step:06d}"
    with new_checkpoint(path, step=step) as directory:
        (directory / "model.safetensors").write_text(content)
    return run_dir


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_what_a_stage_goes_on_from_is_part_of_its_identity_and_where_it_lies_is_not(
    stage: str, config: Config, scope: RunScope, node: Node, tmp_path: Path
) -> None:
    def fingerprint(source: Path | str) -> str:
        training = config.training.model_copy(
            update={stage: getattr(config.training, stage).model_copy(update={"resume_from": str(source)})}
        )
        changed = config.model_copy(update={"training": training})
        if stage == "sft":
            return plan_sft(changed, scope, node).fingerprint
        return plan_rl(base_model(changed), changed, scope, node).fingerprint

    first, copy = (write_checkpoint(tmp_path / name, 4, "weights") for name in ("first", "copy"))
    other = write_checkpoint(tmp_path / "other", 4, "other weights")
    assert fingerprint(first) == fingerprint(copy) == fingerprint(first / "checkpoints/step_000004")
    assert len({fingerprint(""), fingerprint(first), fingerprint(other)}) == 3


def test_going_on_from_nothing_is_told_before_anything_starts(
    config: Config, scope: RunScope, node: Node, tmp_path: Path
) -> None:
    sft = config.training.sft.model_copy(update={"resume_from": str(tmp_path / "nothing")})
    changed = config.model_copy(update={"training": config.training.model_copy(update={"sft": sft})})
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*nothing"):
        plan_sft(changed, scope, node)


def sft_identity(scope: RunScope, node: Node, config: Config, sft: object, **settings: object) -> str:
    """The identity of SFT on these demonstrations."""
    data = DataConfig.model_validate({**config.data.model_dump(), "sft": sft, **settings})
    return plan_sft(config.model_copy(update={"data": data}), scope, node).fingerprint


@pytest.mark.parametrize(
    ("share", "is_same"),
    [
        ({}, True),
        ({"max_samples": None, "repeat": 1.0, "split": "train"}, True),
        ({"max_samples": 1}, False),
        ({"repeat": 2.0}, False),
        ({"split": "test"}, False),
    ],
)
def test_the_share_of_a_dataset_is_part_of_its_identity(
    scope: RunScope, node: Node, config: Config, share: dict[str, Any], is_same: bool
) -> None:
    one_path = sft_identity(scope, node, config, config.data.sft)
    assert (sft_identity(scope, node, config, [{"path": config.data.sft, **share}]) == one_path) is is_same


def test_the_order_of_datasets_is_part_of_their_identity_and_streaming_is_not(
    scope: RunScope, node: Node, config: Config
) -> None:
    both = [{"path": config.data.sft}, {"path": config.data.prompts}]
    assert sft_identity(scope, node, config, both) != sft_identity(scope, node, config, both[::-1])
    assert sft_identity(scope, node, config, both) == sft_identity(scope, node, config, both, streaming=True)


def test_a_hub_dataset_is_planned_with_its_commit(scope: RunScope, node: Node, config: Config) -> None:
    commits = ["0" * 40, "1" * 40]
    first, second = ([{"path": "org/name", "revision": commit}] for commit in commits)
    assert sft_identity(scope, node, config, first) != sft_identity(scope, node, config, second)
