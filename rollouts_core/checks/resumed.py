"""Check before a run starts that each training can resume from the checkpoint in its setting `resume_from`.

Not here: checking the checkpoints that a training itself wrote (run_checkpoints.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rollouts_core.checkpoint import find_checkpoint, load_manifest
from rollouts_core.config import Config, RLTrainingConfig, RolloutConfig, SFTTrainingConfig
from rollouts_core.config.messages import closest_name, settings_of
from rollouts_core.errors import ConfigError
from rollouts_core.job import TrainingJob
from rollouts_core.run_checkpoints import check_same_settings, check_step, describe_settings
from rollouts_core.seeds import replicate_seed
from rollouts_core.stages import kind_of

INPUTS = ("model", "data", "samples", "plugins", "semantics")
"""Names in a checkpoint's manifest that are not settings: digests of the training's inputs, and a version number."""


def check_resumed(config: Config) -> None:
    """Check the settings and the step of the checkpoints in `training.*.resume_from`.

    A checkpoint with a URL is not checked before its download. `check_resumed_inputs` checks the inputs of the
    training.

    Raises:
        CheckpointError: the checkpoint has other settings, or its step is later than the training's last step.
        ConfigError: `training.*.allow_changed` has an unknown name.
    """
    for name, training in config.trainings.items():
        section = f"training.{name}"
        further: dict[str, BaseModel] = {"rollout": _rollout_of_job(config)} if kind_of(name).is_graded else {}
        if not training.resume_from or "://" in training.resume_from:
            _check_names(training, {}, section=section)
            continue
        checkpoint = find_checkpoint(Path(training.resume_from))
        manifest = load_manifest(checkpoint)
        _check_names(training, manifest.settings, section=section)
        compared = {*type(training).model_fields, *further, "semantics"}
        saved, current = (
            {name: value for name, value in named.items() if name.partition(".")[0] in compared}
            for named in (manifest.settings, describe_settings(training, {}, **further))
        )
        check_same_settings(saved, current, allowed=training.allow_changed, checkpoint=checkpoint)
        check_step(manifest.step, training.num_steps, checkpoint=checkpoint)


def check_resumed_inputs(job: TrainingJob, *, knows_model: bool = True) -> None:
    """Raise CheckpointError if the checkpoint in `resume_from` was trained with other data, model or reward code.

    The job itself would also reject the checkpoint, but only after a machine was rented.

    Args:
        knows_model: False if the job starts from a model that an earlier stage of the run has yet to train.
    """
    if not job.training.resume_from:
        return
    checkpoint = find_checkpoint(Path(job.training.resume_from))
    settings = load_manifest(checkpoint).settings
    # Checkpoints of older versions of rollouts lack some inputs, so only inputs with a saved digest are compared.
    compared = job.inputs.keys() & settings.keys() - (set() if knows_model else {"model"})
    saved, current = ({name: named[name] for name in compared} for named in (settings, job.inputs))
    check_same_settings(saved, current, allowed=job.training.allow_changed, checkpoint=checkpoint)


def _rollout_of_job(config: Config) -> RolloutConfig:
    """The rollout settings as in the job of RL, where the seed depends on `training.rl.replicate`."""
    if config.data.rollouts:  # recorded rollouts are not generated again, so the seed has no effect
        return config.rollout
    seed = replicate_seed(config.rollout.seed, config.training.rl.replicate)
    return config.rollout.model_copy(update={"seed": seed})


def _check_names(
    training: SFTTrainingConfig | RLTrainingConfig,
    saved: Mapping[str, Any],  # Any: JSON
    *,
    section: str,
) -> None:
    """Raise ConfigError for a name in `allow_changed` that is not a setting, section or input of the training.

    Args:
        saved: the settings in the checkpoint's manifest. An older version may have had settings with other names.
    """
    known = [*settings_of(type(training), with_lists=True), *INPUTS, *_with_sections(saved)]
    if isinstance(training, RLTrainingConfig):
        known += ["rollout", *(f"rollout.{name}" for name in settings_of(RolloutConfig, with_lists=True))]
    for name in training.allow_changed:
        if name not in known:
            raise ConfigError(f"{section}.allow_changed: unknown setting {name}{_closest(name, known)}")


def _with_sections(names: Iterable[str]) -> Iterator[str]:
    """Yield the names and all their sections: for "optim.lr" also "optim"."""
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[:number]) for number in range(1, len(parts) + 1))


def _closest(name: str, known: list[str]) -> str:
    """A hint for an unknown setting: settings with the same last name, else the closest name, else all sections."""
    last = name.rpartition(".")[2]
    if same := [each for each in dict.fromkeys(known) if each.rpartition(".")[2] == last]:
        return f"; did you mean {' or '.join(same)}?"
    hint = closest_name(name, known)
    return closest_name(name, sorted({each.partition(".")[0] for each in known})) if "; known are" in hint else hint
