"""Map names of settings in other systems to the settings of this project, for hints about unknown keys.

The names come from TRL, the TrainingArguments of Transformers, verl, slime and OpenRLHF, and from frequent guesses. A
key of FOREIGN_NAMES is a name that no setting of this project has, or `section.name` if that section has no such
setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rollouts_core.engine_kinds import ENGINES
from rollouts_core.stages import TRAININGS

STAGE = "training.STAGE"
"""Placeholder in a hint, which is replaced by the stage in whose table the unknown key was found."""

EPOCHS = (
    f"{STAGE}.num_steps: training counts optimizer steps. An epoch is rows / training.sft.batch_size steps, or for RL "
    "prompts / rollout.batch_size"
)
ACCUMULATION = (
    "training.sft.micro_batch_size or training.rl.max_micro_batch_tokens: the amount computed at a time, while the "
    "size of a step is training.sft.batch_size or rollout.batch_size"
)
MINIBATCHES = "training.rl.num_minibatches: number of updates that share the prompts of a step (rollout.batch_size)"
TRAINED_DATA = "data.sft (demonstrations) or data.prompts (prompts of RL)"
COMPARED_DATA = (
    "data.selection (chooses a checkpoint), data.heldout (for the report) or data.sft_eval (loss while SFT trains)"
)
KL = "training.rl.loss.kl_coef (a term of the loss) or training.rl.reward_shaping.kl_coef (taken from the reward)"
CLIP = "training.rl.loss.clip_low and training.rl.loss.clip_high"
KL_ESTIMATOR = "training.rl.loss.kl_estimator or training.rl.reward_shaping.kl_estimator"
TRAINER_GPUS = "deployment.trainer_gpu_ranks, with one process per GPU"
GPUS = "deployment.trainer_gpu_ranks (the trainer's) and deployment.engine_gpu_ranks (the engines')"
ENGINE_GPUS = "deployment.engine_gpu_ranks (GPUs) and deployment.num_engines (number of engines that share them)"


TRUNCATED_SAMPLING = (
    "no setting: the loss compares log-probs of the whole distribution, which only rollout.sampling.temperature changes"
)
FIELDS = (
    "no setting: rows have fixed field names: `messages`, `prompt` and `completion`, or `text` in data.sft, "
    "`prompt` and `answer` in data.prompts"
)
SHUFFLED = "no setting: every epoch is shuffled, by training.sft.seed or rollout.seed"
OWN_ENGINE = "no setting: a run starts and ends its own engines of rollout.engine.kind"
BEST_CHECKPOINT = "no setting: the best checkpoint on data.selection, by evaluation.metric, is used"


def _all(names: str, hint: str) -> Mapping[str, str]:
    return dict.fromkeys(names.split(), hint)


FOREIGN_NAMES: Mapping[str, str] = {
    # model and data
    **_all("model_name_or_path model_name model.name hf_checkpoint pretrain", "model.path"),
    "actor_rollout_ref": "model.path (the model), training.rl (the actor) and rollout.engine (the rollout)",
    "trainer": f"{STAGE}.num_steps, {STAGE}.checkpoint_every, run.name and run.report_to",
    **_all("data.train train_file train_files train_dataset dataset dataset_name prompt_data", TRAINED_DATA),
    "data.path": TRAINED_DATA,
    **_all("data.eval data.test data.val data.validation", COMPARED_DATA),
    **_all("eval_dataset val_files eval_prompt_data", COMPARED_DATA),
    **_all("dataset_text_field input_key label_key prompt_key response_key reward_fn_key", FIELDS),
    **_all("shuffle shuffle_dataset rollout_shuffle", SHUFFLED),
    **_all("data_seed data.seed", "training.sft.seed or rollout.seed"),
    **_all("data.truncation data.filter_overlong_prompts", "rollout.max_prompt_tokens"),
    "truncation_mode": "training.sft.on_overlong",
    # length of a training and of its steps
    **_all("num_train_epochs sft.num_epochs num_epoch epochs max_epochs total_epochs num_episodes", EPOCHS),
    **_all("max_steps total_training_steps train_iters num_rollout", f"{STAGE}.num_steps"),
    **_all("gradient_accumulation_steps per_device_train_batch_size micro_train_batch_size", ACCUMULATION),
    **_all("ppo_micro_batch_size ppo_micro_batch_size_per_gpu", ACCUMULATION),
    **_all("max_tokens_per_gpu ppo_max_token_len_per_gpu use_dynamic_bsz", "training.rl.max_micro_batch_tokens"),
    **_all("use_dynamic_batch_size log_prob_micro_batch_size_per_gpu", "training.rl.max_micro_batch_tokens"),
    **_all("ppo_mini_batch_size num_mini_batches num_steps_per_rollout", MINIBATCHES),
    **_all("generation_batch_size steps_per_generation", MINIBATCHES),
    **_all("num_iterations ppo_epochs num_ppo_epochs", "training.rl.num_epochs"),
    **_all("global_batch_size train_batch_size", "training.sft.batch_size (rows) or rollout.batch_size (prompts)"),
    **_all("max_seq_length max_seq_len max_len", "training.sft.max_length"),
    # optimizer
    **_all("learning_rate actor_learning_rate", f"{STAGE}.optim.lr"),
    **_all(
        "warmup_ratio lr_warmup_ratio lr_warmup_fraction lr_warmup_steps_ratio",
        f"{STAGE}.optim.num_warmup_steps, a number of steps",
    ),
    **_all("warmup_steps lr_warmup_steps lr_warmup_iters", f"{STAGE}.optim.num_warmup_steps"),
    **_all("lr_scheduler_type lr_scheduler lr_decay_style warmup_style", f"{STAGE}.optim.schedule"),
    **_all("adam_beta1 adam_beta2 adam_betas optim.beta", f"{STAGE}.optim.betas"),
    **_all("adam_epsilon adam_eps", f"{STAGE}.optim.eps"),
    **_all("grad_clip clip_grad max_norm", f"{STAGE}.optim.max_grad_norm"),
    # computation of the model
    **_all("bf16 fp16 torch_dtype model.dtype", f"{STAGE}.policy.precision"),
    **_all("gradient_checkpointing recompute_granularity", f"{STAGE}.policy.activation_checkpointing"),
    **_all("attn_implementation flash_attn", f"{STAGE}.policy.attention"),
    **_all("torch_compile", f"{STAGE}.policy.compile"),
    **_all("padding_free use_remove_padding sample_packing", f"{STAGE}.packing"),
    **_all("n_gpus_per_node actor_num_gpus_per_node nproc_per_node fsdp deepspeed", TRAINER_GPUS),
    **_all("peft_config lora_config", f"{STAGE}.policy.lora"),
    **_all("use_peft lora_r lora_rank lora.r", f"{STAGE}.policy.lora.rank"),
    **_all("lora_alpha", f"{STAGE}.policy.lora.alpha"),
    **_all("lora_dropout", f"{STAGE}.policy.lora.dropout"),
    **_all("lora_target_modules", f"{STAGE}.policy.lora.target_modules"),
    **_all("assistant_only_loss completion_only_loss", "training.sft.train_on"),
    # learning from rewards
    **_all("beta kl_loss_coef init_kl_coef kl_coeff rl.kl_coef", KL),
    **_all("use_kl_loss use_kl_in_reward", KL),
    **_all("kl_loss_type kl_penalty", KL_ESTIMATOR),
    **_all("epsilon eps_clip clip_ratio clip_range cliprange", CLIP),
    **_all("epsilon_low clip_ratio_low", "training.rl.loss.clip_low"),
    **_all("epsilon_high eps_clip_high clip_ratio_high", "training.rl.loss.clip_high"),
    **_all("delta clip_ratio_c eps_clip_c", "training.rl.loss.dual_clip"),
    **_all("importance_sampling_level", 'training.rl.loss.objective: "ppo" by token, "gspo" by completion'),
    **_all("use_tis tis_clip vllm_importance_sampling_correction", "training.rl.loss.mismatch"),
    **_all("vllm_importance_sampling_mode vllm_importance_sampling_cap", "training.rl.loss.mismatch"),
    **_all("entropy_coeff", "training.rl.loss.entropy_coef"),
    **_all("loss_type", "training.rl.algorithm (a system's algorithm by name) or training.rl.loss"),
    **_all("loss_agg_mode", "training.rl.loss.aggregation"),
    **_all("adv_estimator advantage_estimator scale_rewards", "training.rl.advantage.estimator"),
    **_all("norm_adv_by_std_in_grpo grpo_std_normalization", "training.rl.advantage.estimator"),
    "normalize_advantages": "training.rl.advantage.whiten",
    "critic": 'training.rl.advantage.estimator = "gae", with a value head on the policy',
    **_all("lam lambd", "training.rl.advantage.gae_lambda"),
    **_all("mask_truncated_completions", "training.rl.reward_shaping.mask_truncated"),
    **_all("reward_funcs reward_weights", "rollout.rewards"),
    **_all("rm_type custom_rm_path reward_func custom_reward_function", "rollout.reward_fn"),
    "reward_model": "rollout.rewards (reward models and others) or rollout.reward_fn (a function)",
    # sampling
    **_all("num_generations num_return_sequences rollout.n group_size", "rollout.n_samples_per_prompt"),
    **_all("num_generations_eval n_samples_per_eval_prompt", "evaluation.samples_per_prompt"),
    **_all("rollout_batch_size num_prompts_per_step", "rollout.batch_size"),
    **_all("max_prompt_length prompt_max_len rollout_max_prompt_len", "rollout.max_prompt_tokens"),
    **_all("max_completion_length max_response_length response_length", "rollout.sampling.max_new_tokens"),
    **_all("rollout_max_response_len generate_max_len", "rollout.sampling.max_new_tokens"),
    **_all("rollout.max_tokens sampling.max_tokens", "rollout.sampling.max_new_tokens"),
    **_all("eval_max_response_len", "rollout.sampling.max_new_tokens"),
    **_all("rollout_temperature", "rollout.sampling.temperature"),
    **_all("top_p top_k min_p repetition_penalty generation_kwargs rollout_top_p rollout_top_k", TRUNCATED_SAMPLING),
    **_all("rollout_seed", "rollout.seed"),
    "rl.seed": "rollout.seed (prompts and sampling) or training.rl.replicate (all random numbers)",
    "over_sampling_batch_size": "rollout.over_sampling_factor, a multiple of rollout.batch_size",
    **_all("dynamic_sampling_filter_path filter_groups", "rollout.filter_fn"),
    **_all("custom_generate_function_path rollout_function_path rollout_func", "rollout.generate_fn"),
    **_all("tools environment_factory tool_config_path", "rollout.environment"),
    **_all("max_tool_calling_iterations max_assistant_turns", "rollout.multi_turn.max_turns"),
    **_all("partial_rollout", "rollout.max_partial_staleness"),
    **_all("update_weights_interval", "training.rl.sync_every"),
    **_all("vllm_max_model_length max_model_len rollout_max_context_len", "rollout.engine.context_length"),
    **{f"use_{name}": f'rollout.engine.kind = "{name}"' for name, each in ENGINES.items() if not each.is_own},
    **{f"rollout.{name}": f'rollout.engine.kind = "{name}"' for name, each in ENGINES.items() if not each.is_own},
    "rollout.name": "rollout.engine.kind",
    **_all("engine.url engine.base_url engine.host engine.port", OWN_ENGINE),
    **_all("vllm_gpu_memory_utilization gpu_memory_utilization", "rollout.engine.extra_args"),
    **_all("sglang_mem_fraction_static mem_fraction_static", "rollout.engine.extra_args"),
    **_all("tensor_model_parallel_size vllm_tensor_parallel_size vllm_num_engines", ENGINE_GPUS),
    **_all("tensor_parallel_size tp_size engine.tp", ENGINE_GPUS),
    **_all("rollout_num_gpus rollout_num_gpus_per_engine", ENGINE_GPUS),
    **_all("gpus num_gpus gpu_ranks", GPUS),
    **_all("colocate colocate_all_models", "deployment.colocated"),
    # checkpoints and logs
    **_all("save_steps save_freq save_interval save_strategy", f"{STAGE}.checkpoint_every"),
    **_all("save_total_limit max_ckpt_num", f"{STAGE}.keep_checkpoints"),
    **_all("logging_steps", f"{STAGE}.log_every"),
    **_all("eval_steps eval_interval test_freq eval_strategy", "training.sft.eval_every"),
    **_all("resume_from_checkpoint", f"{STAGE}.resume_from"),
    **_all("output_dir default_local_dir save_path", "run.store"),
    **_all("run_name experiment_name", "run.name"),
    **_all("load_best_model_at_end metric_for_best_model", BEST_CHECKPOINT),
    **_all("use_wandb wandb tensorboard trackio logger", "run.report_to"),
    **_all("wandb_project project_name run.project", "the environment variable WANDB_PROJECT, beside run.report_to"),
    **_all("sft.report_to rl.report_to training.report_to", "run.report_to"),
    **_all("push_to_hub hub_model_id", "run.publish"),
}
"""For each name in other systems, a hint with this project's settings."""


def find_foreign_name(path: Sequence[str]) -> str | None:
    """Return the hint for the name at the end of `path`; None if the name is unknown.

    Args:
        path: the sections that contain the key, then the key.
    """
    *around, name = path
    sections = [each for each in around if not each.isdecimal()]
    hint = FOREIGN_NAMES.get(".".join([*sections[-1:], name])) or FOREIGN_NAMES.get(name)
    return hint and _for_stages(hint, [stage for stage in TRAININGS if stage in sections] or TRAININGS)


def _for_stages(hint: str, stages: Iterable[str]) -> str:
    """Replace STAGE in a hint by the first stage. If there is a second stage, the hint says that it has the same
    setting."""
    first, *others = (f"training.{stage}" for stage in stages)
    same = f", and the same in {others[0]}" if others and STAGE in hint else ""
    return hint.replace(STAGE, first) + same
