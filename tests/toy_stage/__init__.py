"""The stage `polish` of tests/flows/test_toy_stage.py: trains on the first demonstrations once more.

The test copies this folder to `rollouts_core/stages/polish`, as a person would who adds a stage.
"""

from __future__ import annotations

from rollouts_core.stages.kind import Curve, StageKind

POLISH = StageKind(
    name="polish",
    title="polishing",
    label="Polish",
    trains=True,
    purpose="Fine-tune a model on the first demonstrations once more.",
    leaves="Leaves checkpoints/, metrics.jsonl, events.jsonl and, at the end, result.json.",
    settings="rollouts_core.stages.polish.settings:PolishConfig",
    job="rollouts_core.stages.polish.job:PolishJob",
    plan="rollouts_core.stages.polish.job:polish_job",
    run="rollouts_core.stages.polish.job:run_polish_job",
    warn="rollouts_core.stages.polish.job:warn_of_few_steps",
    facts="rollouts_core.stages.polish.job:polish_facts",
    reads=("sft",),
    needs=(("sft",),),
    curves=(Curve("loss", "Loss of polishing", "Mean negative log-likelihood of the trained tokens, in nats."),),
    colors=("#7a3fb0", "#b58ae0"),
)
