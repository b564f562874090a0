"""The training library: SFT, rollouts, RL, checkpoints and evaluation.

The library works without Prefect and without rented machines.

    from rollouts_core import SFTTrainingConfig, create_pytorch_backend, run_sft_training

A public name is imported when it is first used, so importing the package or its settings does not import torch.
"""

from importlib import import_module
from typing import Any

PUBLIC_NAMES = {
    "rollout.agent": "AgentTurn Trajectory agent_integration",
    "algorithms.presets": "ALGORITHMS",
    "algorithms.credit": "RolloutScores",
    "algorithms.advantages": "batch_advantages compute_advantages gae_advantages group_advantages whiten",
    "backends.protocol": "ImmediateTrainFuture TrainFuture TrainingBackend",
    "backends.create": "create_backend",
    "backends.fsdp": "FSDPTrainingBackend create_fsdp_backend",
    "backends.ranks": "Ranks join_ranks",
    "batch": "TrainBatch build_batch with_step_totals",
    "data.chat": "compute_loss_mask tokenize_conversation tokenize_prompt",
    "checkpoint": "latest_intact_checkpoint load_manifest verify_checkpoint",
    "comparison": "compare_paired estimate_mean estimate_means judge_improvement select_best",
    "config": "Config algorithm_preset RLTrainingConfig RolloutConfig SFTTrainingConfig",
    "data.data_buffer": "DataBuffer",
    "data.dataset": "SFTDataset load_prompts_from_jsonl load_sft_dataset open_datasets",
    "engines": "Endpoint EnginePool InFlightEngine InferenceEngine PublishTarget RoutedPool SGLangEngine SGLangRouter "
    "ScoredTokens ScoringRequest VLLMEngine connect create_engine publish_weights sync_weights_to_engines",
    "engines.in_process": "serve_in_process",
    "rollout.generate": "create_conversation_generate_fn create_engine_generate_fn",
    "environments": "ENVIRONMENTS CalculatorEnvironment Conversation Environment MultiTurnEnvironment Outcome Reply "
    "Tool ToolError",
    "filters": "check_any_success check_min_reward check_quality_and_diversity check_reasonable_length "
    "check_response_diversity check_reward_nonzero_std compose_filters",
    "algorithms.loss": "TokenScores create_cross_entropy_loss create_policy_loss grpo_loss policy_loss ppo_loss "
    "token_logprobs",
    "metrics": "EventLog JSONLLogger MetricsLogger read_metrics",
    "model.loading": "load_hf_model load_tokenizer",
    "notebook": "Plot ProgressBar plot",
    "backends.optim": "create_adamw_optimizer create_warmup_cosine_scheduler",
    "data.packing": "pack_lengths pack_rows",
    "pass_rates": "majority_at_n pass_at_k",
    "model.policy": "Policy compute_logprobs score_targets",
    "backends.pytorch": "PyTorchTrainingBackend create_pytorch_backend",
    "rewards": "REWARDS WeightedRewards compute_reward grade_group",
    "rl": "run_rl_training score_rollouts train_on_rollouts",
    "rl_batch": "prepare_grpo_batch prepare_updates",
    "rollout.offline_rollouts": "OfflineRollouts",
    "rollout.plain_rollouts": "generate_rollout_batches",
    "rollout.manager": "AsyncRolloutManager",
    "rollout.rollout_batch": "apply_sample_transforms build_batch_metadata convert_to_batch",
    "sft": "collate_batch prepare_sft_batch run_sft_training",
    "types": "Message Prompt RolloutBatch Sample Status compute_response_lengths extract_sample_fields",
}
"""The public names of each module of this package."""

_MODULE_OF = {name: module for module, names in PUBLIC_NAMES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:  # Any: a public name can be a class, a function or a value
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
