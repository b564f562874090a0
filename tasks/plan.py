"""Plan the next stage of a run from the settings and the finished stages: its job, its fingerprint and its directory.

The functions of this module read files to compute digests, but write no files. Not here: running the stage (stage.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rollouts.infra.node import Node
from rollouts.infra.session import LOOPBACK
from rollouts.tasks.early_end import is_left_behind
from rollouts.tasks.leases import ENGINE, FOLLOWER
from rollouts.tasks.records import EngineRecord, RunScope, Stage, StageRecord
from rollouts_core.checks.adapter_form import sends_adapters
from rollouts_core.config import (
    Config,
    EngineConfig,
    RolloutConfig,
    SamplingConfig,
    SFTTrainingConfig,
)
from rollouts_core.engine_kinds.auto import WITHOUT_GPUS
from rollouts_core.errors import ConfigError
from rollouts_core.fingerprint import fingerprint_job
from rollouts_core.job import (
    EngineAddress,
    EvalJob,
    InputFile,
    InputModel,
    Job,
    RLJob,
    ServeJob,
    TrainingJob,
    job_type,
)
from rollouts_core.keys import OWN_KEY_VARIABLE
from rollouts_core.model.remote_code import check_code_of_start
from rollouts_core.stages import EVALUATE, kind_of, selection_of
from rollouts_core.stages.kind import load
from rollouts_core.stages.planning import input_file, plugin_digest


def plan_training(name: str, start: InputModel, config: Config, scope: RunScope, node: Node) -> Stage:
    """Plan a training stage. `with_engines` later adds addresses of engines, which do not enter the fingerprint."""
    job: TrainingJob = load(kind_of(name).plan)(start, config)
    if isinstance(job, RLJob) and node.engine_nodes:
        rollout = with_engines_elsewhere(job.rollout)
        is_sent = job.sends_adapters and sends_adapters(job.training, rollout, job.deployment)
        job = job.model_copy(update={"rollout": rollout, "sends_adapters": is_sent})
    return build_stage(name, job, scope, node, num_steps=job.training.num_steps)


def plan_selection(training: StageRecord, config: Config, scope: RunScope, node: Node) -> Stage:
    """Plan a stage that scores every checkpoint of a training on the rows in `data.selection`."""
    checkpoints = checkpoints_of(training, config)
    rows = input_file(config.data.selection, config.data.columns_of("selection"))
    job = evaluation_job(checkpoints, rows, config, node).model_copy(update={"is_selection": True})
    return build_stage(selection_of(training.stage), job, scope, node, num_steps=len(checkpoints))


def with_engines_elsewhere(rollout: RolloutConfig) -> RolloutConfig:
    """The rollout settings for engines on other machines than the trainer.

    The trainer sends weights over the network, and engines require an API key.
    """
    engine = rollout.engine
    changed = {
        "weight_transfer": "gloo" if engine.weight_transfer == "auto" else engine.weight_transfer,
        "api_key_variable": engine.api_key_variable or OWN_KEY_VARIABLE,
    }
    return rollout.model_copy(update={"engine": engine.model_copy(update=changed)})


def with_engines(rl: Stage, engines: Sequence[EngineRecord]) -> Stage:
    """Add the addresses of the running engines to the job of an RL stage."""
    addresses = tuple(
        EngineAddress(
            kind=engine.kind,
            version=engine.version,
            url=engine.url,
            lease_file=engine.lease_file,
            lease_url=engine.lease_url,
        )
        for engine in engines
    )
    job = RLJob.model_validate(rl.job).model_copy(update={"engines": addresses})
    return rl.model_copy(update={"job": job.model_dump(mode="json")})


def engine_ports(rl: Stage, node: Node) -> list[int]:
    """The ports of all engines of an RL stage, node by node. Empty if the stage trains on recorded rollouts."""
    job = RLJob.model_validate(rl.job)
    return [] if job.rollouts else job.deployment.engine_ports * max(1, len(node.engine_nodes))


def plan_engine(rl: Stage, port: int, node: Node, index: int = 0) -> Stage:
    """Plan the job of one inference engine of an RL stage, with the start model and the fingerprint of the RL stage.

    Args:
        node: the engine's node.
        index: the engine's number among the engines of all nodes. Every node has the same number of engines, on the
            same GPU ranks.
    """
    rl_job = RLJob.model_validate(rl.job)
    rollout, deployment = rl_job.rollout, rl_job.deployment
    job = ServeJob(
        model=rl_job.model,
        host=node.address or LOOPBACK,
        port=port,
        context_length=rollout.engine_context(rollout.max_prompt_tokens),
        engine=installed_on(node, rollout.engine),
        adapter_rank=rl_job.training.policy.lora.rank if rl_job.sends_adapters else 0,
        deployment=deployment.of_engine(index % deployment.num_engines),
    )
    return Stage(
        name="engine",
        fingerprint=rl.fingerprint,
        run_dir=f"{node.local_root}/stages/{ENGINE}-{rl.fingerprint}-{index}",
        job=job.model_dump(mode="json"),
        num_steps=0,
        timeout_s=0.0,  # an engine has no time limit, because later attempts of the RL stage may use it
    )


def installed_on(node: Node, engine: EngineConfig) -> EngineConfig:
    """The engine's settings with the Python interpreter on the node in which the engine is installed."""
    if engine.spec.is_own or not node.engine_python:
        return engine
    return engine.model_copy(update={"python": node.engine_python})


def plan_follower(stage: Stage, node: Node, node_rank: int) -> Stage:
    """Plan the job of a further machine in a training. The job equals the leader's job, except for `node_rank`.

    Args:
        node: the further machine.
        node_rank: the number of the further machine; the leader has 0.
    """
    changed = {
        "name": "follower",
        "run_dir": f"{node.local_root}/stages/{FOLLOWER}-{stage.fingerprint}-{node_rank}",
        "begins_with": "",
        "job": {**stage.job, "node_rank": node_rank},
        "timeout_s": 0.0,
    }
    return stage.model_copy(update=changed)


def plan_evaluation(models: Mapping[str, InputModel], config: Config, scope: RunScope, node: Node) -> Stage:
    """Plan a stage that scores models on the rows in `data.heldout`. The keys of `models` are the models' names."""
    renamed = [model.model_copy(update={"name": name}) for name, model in models.items()]
    rows = input_file(config.data.heldout, config.data.columns_of("heldout"))
    job = evaluation_job(renamed, rows, config, node)
    return build_stage(EVALUATE.name, job, scope, node, num_steps=len(renamed))


def selected_model(training: StageRecord, selection: StageRecord, config: Config) -> InputModel:
    """The checkpoint of a training that the selection stage scored best."""
    by_name = {model.name: model for model in checkpoints_of(training, config)}
    return by_name[selection.result["best"]]


def checkpoints_of(training: StageRecord, config: Config) -> list[InputModel]:
    """The checkpoints of a finished training stage, in order of steps.

    Raises:
        CheckpointError: `model.trust_remote_code` is set, and a checkpoint contains code that the start model lacks.
    """
    if config.model.trust_remote_code:
        for entry in training.result["checkpoints"]:
            check_code_of_start(Path(training.run_dir, "checkpoints", entry["name"]), Path(config.model.path))
    return [
        InputModel(
            name=entry["name"],
            model=config.model.at(f"{training.run_dir}/checkpoints/{entry['name']}"),
            digest=entry["digest"],
            step=entry["step"],
        )
        for entry in training.result["checkpoints"]
    ]


def evaluation_job(checkpoints: Sequence[InputModel], rows: InputFile, config: Config, node: Node) -> EvalJob:
    """A job that scores models on the rows of a file, with the settings in `config.evaluation`.

    The job contains only settings that can change a score, so its fingerprint does not depend on other settings.
    For example, runs with different RL batch sizes share the evaluation of the same SFT model.
    """
    config = with_engines_of_trainer(config) if node.engine_nodes else config
    rollout, sft = config.rollout, config.training.sft
    is_generating = config.evaluation.metric == "accuracy"
    sampled = RolloutConfig(
        engine=installed_on(node, config.evaluation_engine) if is_generating else EngineConfig(kind=WITHOUT_GPUS),
        environment=rollout.environment,
        multi_turn=rollout.multi_turn,
        max_environment_retries=rollout.max_environment_retries,
        max_outage_minutes=rollout.max_outage_minutes,
        reward_fn=rollout.reward_fn,
        rewards=rollout.rewards,
        reward_timeout_s=rollout.reward_timeout_s,
        request_timeout_s=rollout.request_timeout_s,
        silence_timeout_s=rollout.silence_timeout_s,
        sampling=SamplingConfig(max_new_tokens=rollout.sampling.max_new_tokens),
    )
    return EvalJob(
        checkpoints=tuple(checkpoints),
        data=rows,
        evaluation=config.evaluation.model_copy(update={"engine": "rollout"}),  # the engine is in `sampled`
        rollout=sampled,
        training=SFTTrainingConfig(max_length=sft.max_length, train_on=sft.train_on, on_overlong=sft.on_overlong),
        plugin_digest=plugin_digest(sampled),
        deployment=config.deployment,
    )


def with_engines_of_trainer(config: Config) -> Config:
    """The settings for evaluating on the trainer's machine if the run's RL engines are on other machines."""
    return config.model_copy(update={"deployment": config.deployment.with_engines_of_trainer()})


def check_plugins(stage: Stage) -> None:
    """Raise ConfigError if the user's code or grading models changed since the stage was planned.

    Minutes can pass between planning and training, while engines start. Code that a user edits in these minutes would
    run under the fingerprint of the old code.
    """
    if not (planned := stage.job.get("plugin_digest")):
        return
    job = job_type(stage.kind).model_validate(stage.job)
    assert isinstance(job, RLJob | EvalJob), "only RL and evaluation jobs have a plugin_digest"
    if plugin_digest(job.rollout, job.training if isinstance(job, RLJob) else None) != planned:
        raise ConfigError(
            "the code of rewards, environments or the loss, or a model that grades, changed since the stage was "
            "planned: start the run again"
        )


def build_stage(name: str, job: Job, scope: RunScope, node: Node, *, num_steps: int) -> Stage:
    """Build a stage from its job. The fingerprint of the job determines the stage's directory.

    The fingerprint of a stage in `run.fresh` is unique to this run. If another run ended the stage early, the stage
    gets a new fingerprint and a second directory (early_end.py).
    """
    salt = scope.run_id if name in scope.fresh else ""
    stages = Path(node.local_root) / "stages"
    fingerprint, begins_with = fingerprint_job(name, job, salt=salt), ""
    while True:
        directory = stages / f"{name}-{fingerprint}"
        following = fingerprint_job(name, job, salt=f"{salt} after {fingerprint}")
        if not is_left_behind(directory, stages / f"{name}-{following}", scope.run_id):
            break
        fingerprint, begins_with = following, str(directory)
    return Stage(
        name=name,
        fingerprint=fingerprint,
        run_dir=str(directory),
        begins_with=begins_with,
        job=job.model_dump(mode="json"),
        num_steps=num_steps,
        timeout_s=job.deployment.stage_timeout_minutes * 60.0,
    )
