"""The stage RL: reinforcement learning on graded completions."""

from __future__ import annotations

from rollouts_core.stages.kind import Curve, LearningRates, StageKind

RL = StageKind(
    name="rl",
    title="reinforcement learning",
    label="RL",
    trains=True,
    purpose="Improve a model by reinforcement learning, against engines or from recorded rollouts.",
    leaves="Resumes from the newest intact checkpoint. Writes checkpoints/, samples/ with the completions of every "
    "step, metrics.jsonl, events.jsonl and, at the end, result.json. The engines must already run, for example as a "
    "job `serve`.",
    settings="rollouts_core.config.rl:RLTrainingConfig",
    job="rollouts_core.job:RLJob",
    plan="rollouts_core.stages.planning:rl_job",
    run="rollouts_core.jobs.rl_job:run_rl_job",
    reads=("prompts", "rollouts"),
    needs=(("prompts", "rollouts"),),
    is_graded=True,
    is_judged=True,
    rules="rollouts_core.config.pipeline:rl_rules",
    warn="rollouts_core.checks.validate:warn_of_rl",
    memory="rollouts_core.checks.resource_needs:rl_memory",
    remedies="rollouts_core.checks.resource_needs:rl_remedies",
    smaller_batch="rollouts_core.less_memory:smaller_rl_batch",
    find_unused="rollouts_core.checks.no_effect:rl_without_effect",
    # Rewards carry little information per step, and large updates would destroy abilities of the start model.
    learning_rates=LearningRates(of_all="5e-7 to 5e-6", of_adapters="5e-6 to 1e-4", low_for_adapters=2e-6, share=0.1),
    curves=(
        Curve("reward", "Reward", "Mean over the step's completions, on training prompts.", is_from_zero=False),
        Curve(
            "reward_unfiltered",
            "Reward before the filter",
            "Mean reward including dropped groups. If the filter drops solved prompts, only this curve shows the "
            "progress.",
            is_from_zero=False,
        ),
        Curve("response_tokens", "Completion length", "Mean number of sampled tokens."),
        Curve(
            "kl_rollout_policy",
            "KL(rollout ‖ policy)",
            "KL divergence between the engine and the policy before each update; 0 if their log-probs are equal and "
            "each step has one update.",
            min_high=0.001,
        ),
        Curve(
            "mismatch_mean",
            "Engine against trainer",
            "Mean difference between the log-probs of engine and trainer for the same tokens and weights, in nats; "
            "different number formats alone can cause 0.02.",
            min_high=0.01,
        ),
        Curve("entropy", "Entropy", "Mean over the trained tokens, in nats."),
        Curve(
            "staleness_mean", "Staleness", "Mean age of the sampled tokens, in versions of the weights.", min_high=1.0
        ),
        Curve("clip_share", "Clip share", "Share of tokens whose gradient was clipped by the loss.", min_high=0.01),
        Curve("num_turns", "Turns", "Mean number of the policy's turns per conversation."),
        Curve("tool_error_share", "Tool errors", "Share of turns with a tool call that failed.", min_high=0.1),
        Curve(
            "parse_failure_share",
            "Parse failures",
            "Share of turns that the environment could not parse.",
            min_high=0.1,
        ),
        Curve("reward_error_share", "Ungraded", "Share of samples that could not be graded.", min_high=0.1),
        Curve(
            "update_arrived_share",
            "Update in engines",
            "Share of the weight changes that remain after rounding to the engines' number format.",
            min_high=1.0,
        ),
        Curve(
            "signal_share",
            "Signal share",
            "Share of groups whose rewards differ. Only these groups carry a learning signal.",
            min_high=1.0,
        ),
    ),
    keeps_samples=True,
    colors=("#b44e14", "#f0955c"),
    facts="rollouts_core.report.trainings:rl_facts",
)
