"""The `sft-rl` flow with the short form: it converts the form's fields to a configuration and calls `sft_rl`.

Not here: the fields and their conversion to tables (short_form.py), the stages (pipeline.py).

In Prefect, the flow `sft-rl` has two kinds of deployments. Deployments with the full form call `sft_rl`. Deployments
with the short form call `sft_rl_short`. Notifications, Cancel, restarts and reuse of stages are the same for the runs
of both kinds.
"""

# No `from __future__ import annotations`: Prefect pickles the flow by value, without the names to resolve annotations.

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, get_args
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.runtime import deployment, flow_run
from pydantic import Field, SkipValidation
from pydantic.fields import FieldInfo

from rollouts.flows.cancellation import cancelled_if_asked, release_after_cancellation
from rollouts.flows.checked_flow import checked_flow
from rollouts.flows.deployments import FLOW, check_table
from rollouts.flows.form import Pipeline, RunOptions, parse_pipeline
from rollouts.flows.pipeline import sft_rl
from rollouts.flows.short_form import FIELDS, MORE_TITLE, SOURCE, Values, check_doubled, held_tables, tables_of
from rollouts.infra.node import NODE_TYPES
from rollouts_core.algorithms.presets import AlgorithmName
from rollouts_core.config import RLTrainingConfig, RolloutConfig, SFTTrainingConfig
from rollouts_core.engine_kinds import ENGINE_CHOICES
from rollouts_core.environments import ALL_ENVIRONMENTS
from rollouts_core.errors import ConfigError
from rollouts_core.rewards import ALL_REWARDS
from rollouts_core.stages import PIPELINES

SFT, RL, ROLLOUT, RUN = SFTTrainingConfig(), RLTrainingConfig(), RolloutConfig(), RunOptions()


def shown(name: str, help_text: str, **more: Any) -> FieldInfo:  # Any: JSON schema
    """The JSON schema of a field of the form. `more` has bounds and choices.

    Only the form in the UI checks types, bounds and choices. Prefect's validation skips the fields, because the flow
    itself checks values as `rollouts validate` does, with the same error messages.
    """
    title = FIELDS[name].title if name in FIELDS else MORE_TITLE
    info: FieldInfo = Field(json_schema_extra={"title": title, "description": " ".join(help_text.split()), **more})
    return info


def _names_in(registry: Iterable[str]) -> str:
    return f"one of {', '.join(registry)}"


def run_name() -> str:
    """The name of the run in Prefect and in the store. A `run.name` in *More settings* overrides the field."""
    values = flow_run.parameters
    return str(held_tables(values).get("run", {}).get("name") or values.get("name") or RUN.name)


@checked_flow(
    name=FLOW,
    flow_run_name=run_name,
    on_cancellation=[release_after_cancellation],
    on_crashed=[cancelled_if_asked],
)
def sft_rl_short(
    name: Annotated[
        SkipValidation[str], shown("name", "Name of the run in the UI, in the store and in the report.")
    ] = RUN.name,
    model: Annotated[
        SkipValidation[str], shown("model", "Folder or URL of the Hugging Face checkpoint that training starts from.")
    ] = "",
    data: Annotated[
        SkipValidation[str],
        shown(
            "data",
            """Data files, as TOML: sft (demonstrations), prompts (for RL), selection (prompts to choose the best
            checkpoint with), heldout (prompts for the final scores). Each is a path or URL. Or prepare, a function
            that makes the files.""",
        ),
    ] = "",
    mode: Annotated[
        SkipValidation[str],
        shown("mode", "Stages of the run: SFT, RL from the model, or RL after SFT.", enum=list(PIPELINES)),
    ] = "sft+rl",
    sft_steps: Annotated[SkipValidation[int], shown("sft_steps", "Optimizer steps of SFT.", minimum=1)] = SFT.num_steps,
    sft_learning_rate: Annotated[
        SkipValidation[float], shown("sft_learning_rate", "Peak learning rate of SFT.", minimum=0)
    ] = SFT.optim.lr,
    sft_batch: Annotated[SkipValidation[int], shown("sft_batch", "Rows per step of SFT.", minimum=1)] = SFT.batch_size,
    rl_steps: Annotated[
        SkipValidation[int], shown("rl_steps", "Steps of RL: one batch of completions each.", minimum=1)
    ] = RL.num_steps,
    rl_learning_rate: Annotated[
        SkipValidation[float], shown("rl_learning_rate", "Peak learning rate of RL.", minimum=0)
    ] = RL.optim.lr,
    rl_batch: Annotated[
        SkipValidation[int],
        shown("rl_batch", "Prompts per step of RL, with rollout.n_samples_per_prompt completions each.", minimum=1),
    ] = ROLLOUT.batch_size,
    algorithm: Annotated[
        SkipValidation[str],
        shown(
            "algorithm",
            """Algorithm of RL, as another system defines it. It fills in settings of training.rl that More settings
            omits. Empty: use only More settings and the defaults.""",
            enum=list(get_args(AlgorithmName)),
        ),
    ] = "",
    environment: Annotated[
        SkipValidation[str],
        shown(
            "environment",
            f"Environment that answers and grades the model: {_names_in(ALL_ENVIRONMENTS)}, or package.module:Class.",
        ),
    ] = "",
    reward: Annotated[
        SkipValidation[str],
        shown(
            "reward",
            f"Function that grades completions: {_names_in(ALL_REWARDS)}, or package.module:function. "
            "Empty: the environment grades.",
        ),
    ] = "",
    engine: Annotated[
        SkipValidation[str],
        shown(
            "engine",
            """Inference engine of RL. embedded: for small models on a CPU. auto: sglang on a node with a free GPU, else
            embedded.""",
            enum=list(ENGINE_CHOICES),
        ),
    ] = ROLLOUT.engine.kind,
    node: Annotated[
        SkipValidation[str],
        shown(
            "node",
            """Machine of the run. local: this machine. ssh: a machine over SSH, with node.host and node.python in More
            settings. instance: a machine that you rented. rented: the run rents a machine and releases it at the
            end.""",
            enum=list(NODE_TYPES),
        ),
    ] = "local",
    budget: Annotated[
        SkipValidation[float],
        shown("budget", "Most US dollars that the run spends on a rented node. Ignored for other nodes.", minimum=0),
    ] = 0.0,
    more_settings: Annotated[
        SkipValidation[str],
        shown(
            "more_settings",
            """All settings without a field, as TOML, with the keys of a configuration file. `rollouts explain KEY`
            explains a setting.""",
        ),
    ] = "",
) -> State[Any]:  # Any: PipelineResult, or the error
    """Turn a base model and data into a trained, evaluated checkpoint, with the usual settings.

    The run ends in the same states as a run of `sft_rl`.
    """
    pipeline = read_values(dict(locals()))  # `locals()` has only the parameters at this point
    result: State[Any] = sft_rl.fn(pipeline.config, pipeline.node, pipeline.run)
    return result


def read_values(values: Values) -> Pipeline:
    """The pipeline that the values of the form describe.

    Raises:
        ConfigError: the values have mistakes. The error has a line per mistake, with the setting's name in a file.
    """
    check_doubled(values, _offered_values)
    tables = tables_of(values)
    for table in tables:
        try:
            check_table(FLOW, table)
        except ConfigError as error:
            raise ConfigError(f"{SOURCE}: {error}") from error
    if isinstance(run := tables.setdefault("run", {}), dict):
        run.setdefault("name", RUN.name)  # otherwise parse_pipeline would name the run after SOURCE
    return parse_pipeline(tables, Path(SOURCE))


def _offered_values() -> Values:
    """The default values in the run's deployment ({} without a deployment). The user has changed all other values."""
    if deployment.id is None:
        return {}
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):  # the deployment may be deleted
        return client.read_deployment(UUID(str(deployment.id))).parameters
    return {}
