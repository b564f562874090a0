"""The stage SFT: supervised fine-tuning on demonstrations."""

from __future__ import annotations

from rollouts_core.stages.kind import Curve, StageKind

SFT = StageKind(
    name="sft",
    title="supervised fine-tuning",
    label="SFT",
    trains=True,
    purpose="Fine-tune a model on demonstrations.",
    leaves="Resumes from the newest intact checkpoint. Writes checkpoints/, metrics.jsonl, events.jsonl and, at the "
    "end, result.json.",
    settings="rollouts_core.config.sft:SFTTrainingConfig",
    job="rollouts_core.job:SFTJob",
    plan="rollouts_core.stages.planning:sft_job",
    run="rollouts_core.jobs.sft_job:run_sft_job",
    reads=("sft", "sft_eval"),
    needs=(("sft",),),
    rules="rollouts_core.config.pipeline:sft_rules",
    memory="rollouts_core.checks.resource_needs:sft_memory",
    remedies="rollouts_core.checks.resource_needs:sft_remedies",
    smaller_batch="rollouts_core.less_memory:smaller_sft_batch",
    find_unused="rollouts_core.checks.no_effect:sft_without_effect",
    curves=(
        Curve("loss", "Loss", "Mean negative log-likelihood of the trained tokens, in nats."),
        Curve("eval_loss", "Evaluation loss", "Mean over data.sft_eval, which is not trained on, in nats per token."),
        Curve("lr", "Learning rate", "The optimizer's learning rate in each step."),
        Curve("tokens_per_s", "Throughput", "Tokens per second, including tokens without loss."),
    ),
    colors=("#2f6fd0", "#6ea3f5"),
    facts="rollouts_core.report.trainings:sft_facts",
)
