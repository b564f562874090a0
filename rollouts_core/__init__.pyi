"""The public names for type checkers. At run time `__init__.py` loads each name at its first use."""

from rollouts_core.algorithms.advantages import (
    batch_advantages as batch_advantages,
    compute_advantages as compute_advantages,
    gae_advantages as gae_advantages,
    group_advantages as group_advantages,
    whiten as whiten,
)
from rollouts_core.algorithms.credit import RolloutScores as RolloutScores
from rollouts_core.algorithms.loss import (
    TokenScores as TokenScores,
    create_cross_entropy_loss as create_cross_entropy_loss,
    create_policy_loss as create_policy_loss,
    grpo_loss as grpo_loss,
    policy_loss as policy_loss,
    ppo_loss as ppo_loss,
    token_logprobs as token_logprobs,
)
from rollouts_core.algorithms.presets import ALGORITHMS as ALGORITHMS
from rollouts_core.backends.create import create_backend as create_backend
from rollouts_core.backends.fsdp import (
    FSDPTrainingBackend as FSDPTrainingBackend,
    create_fsdp_backend as create_fsdp_backend,
)
from rollouts_core.backends.optim import (
    create_adamw_optimizer as create_adamw_optimizer,
    create_warmup_cosine_scheduler as create_warmup_cosine_scheduler,
)
from rollouts_core.backends.protocol import (
    ImmediateTrainFuture as ImmediateTrainFuture,
    TrainFuture as TrainFuture,
    TrainingBackend as TrainingBackend,
)
from rollouts_core.backends.pytorch import (
    PyTorchTrainingBackend as PyTorchTrainingBackend,
    create_pytorch_backend as create_pytorch_backend,
)
from rollouts_core.backends.ranks import Ranks as Ranks, join_ranks as join_ranks
from rollouts_core.batch import (
    TrainBatch as TrainBatch,
    build_batch as build_batch,
    with_step_totals as with_step_totals,
)
from rollouts_core.checkpoint import (
    latest_intact_checkpoint as latest_intact_checkpoint,
    load_manifest as load_manifest,
    verify_checkpoint as verify_checkpoint,
)
from rollouts_core.comparison import (
    compare_paired as compare_paired,
    estimate_mean as estimate_mean,
    estimate_means as estimate_means,
    judge_improvement as judge_improvement,
    select_best as select_best,
)
from rollouts_core.config import (
    Config as Config,
    RLTrainingConfig as RLTrainingConfig,
    RolloutConfig as RolloutConfig,
    SFTTrainingConfig as SFTTrainingConfig,
    algorithm_preset as algorithm_preset,
)
from rollouts_core.data.chat import (
    compute_loss_mask as compute_loss_mask,
    tokenize_conversation as tokenize_conversation,
    tokenize_prompt as tokenize_prompt,
)
from rollouts_core.data.data_buffer import DataBuffer as DataBuffer
from rollouts_core.data.dataset import (
    SFTDataset as SFTDataset,
    load_prompts_from_jsonl as load_prompts_from_jsonl,
    load_sft_dataset as load_sft_dataset,
    open_datasets as open_datasets,
)
from rollouts_core.data.packing import pack_lengths as pack_lengths, pack_rows as pack_rows
from rollouts_core.engines import (
    Endpoint as Endpoint,
    EnginePool as EnginePool,
    InFlightEngine as InFlightEngine,
    InferenceEngine as InferenceEngine,
    PublishTarget as PublishTarget,
    RoutedPool as RoutedPool,
    SGLangEngine as SGLangEngine,
    SGLangRouter as SGLangRouter,
    ScoredTokens as ScoredTokens,
    ScoringRequest as ScoringRequest,
    VLLMEngine as VLLMEngine,
    connect as connect,
    create_engine as create_engine,
    publish_weights as publish_weights,
    sync_weights_to_engines as sync_weights_to_engines,
)
from rollouts_core.engines.in_process import serve_in_process as serve_in_process
from rollouts_core.environments import (
    CalculatorEnvironment as CalculatorEnvironment,
    Conversation as Conversation,
    ENVIRONMENTS as ENVIRONMENTS,
    Environment as Environment,
    MultiTurnEnvironment as MultiTurnEnvironment,
    Outcome as Outcome,
    Reply as Reply,
    Tool as Tool,
    ToolError as ToolError,
)
from rollouts_core.filters import (
    check_any_success as check_any_success,
    check_min_reward as check_min_reward,
    check_quality_and_diversity as check_quality_and_diversity,
    check_reasonable_length as check_reasonable_length,
    check_response_diversity as check_response_diversity,
    check_reward_nonzero_std as check_reward_nonzero_std,
    compose_filters as compose_filters,
)
from rollouts_core.metrics import (
    EventLog as EventLog,
    JSONLLogger as JSONLLogger,
    MetricsLogger as MetricsLogger,
    read_metrics as read_metrics,
)
from rollouts_core.model.loading import load_hf_model as load_hf_model, load_tokenizer as load_tokenizer
from rollouts_core.model.policy import (
    Policy as Policy,
    compute_logprobs as compute_logprobs,
    score_targets as score_targets,
)
from rollouts_core.notebook import Plot as Plot, ProgressBar as ProgressBar, plot as plot
from rollouts_core.pass_rates import majority_at_n as majority_at_n, pass_at_k as pass_at_k
from rollouts_core.rewards import (
    REWARDS as REWARDS,
    WeightedRewards as WeightedRewards,
    compute_reward as compute_reward,
    grade_group as grade_group,
)
from rollouts_core.rl import (
    run_rl_training as run_rl_training,
    score_rollouts as score_rollouts,
    train_on_rollouts as train_on_rollouts,
)
from rollouts_core.rl_batch import (
    prepare_grpo_batch as prepare_grpo_batch,
    prepare_updates as prepare_updates,
)
from rollouts_core.rollout.agent import (
    AgentTurn as AgentTurn,
    Trajectory as Trajectory,
    agent_integration as agent_integration,
)
from rollouts_core.rollout.generate import (
    create_conversation_generate_fn as create_conversation_generate_fn,
    create_engine_generate_fn as create_engine_generate_fn,
)
from rollouts_core.rollout.manager import AsyncRolloutManager as AsyncRolloutManager
from rollouts_core.rollout.offline_rollouts import OfflineRollouts as OfflineRollouts
from rollouts_core.rollout.plain_rollouts import generate_rollout_batches as generate_rollout_batches
from rollouts_core.rollout.rollout_batch import (
    apply_sample_transforms as apply_sample_transforms,
    build_batch_metadata as build_batch_metadata,
    convert_to_batch as convert_to_batch,
)
from rollouts_core.sft import (
    collate_batch as collate_batch,
    prepare_sft_batch as prepare_sft_batch,
    run_sft_training as run_sft_training,
)
from rollouts_core.types import (
    Message as Message,
    Prompt as Prompt,
    RolloutBatch as RolloutBatch,
    Sample as Sample,
    Status as Status,
    compute_response_lengths as compute_response_lengths,
    extract_sample_fields as extract_sample_fields,
)

PUBLIC_NAMES: dict[str, str]
__all__: list[str]
