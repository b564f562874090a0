"""The settings of one training pipeline: frozen records with a docstring per field, one file per section.

The docstrings are the help text of the Prefect form. A default stands in its field and nowhere else. Nothing here
imports torch, so the orchestrator can read, check and fingerprint a configuration without it.

Not here: machines and clouds (infra), reading data (data/dataset.py), what a name like "arithmetic" means
(environments).

    Config           pipeline.py     put together, loaded and saved
    ├── model        model.py        which checkpoint training starts from
    ├── data         data.py         files of demonstrations and prompts
    ├── training
    │   ├── sft      sft.py          supervised fine-tuning
    │   └── rl       rl.py           reinforcement learning; its advantage, reward_shaping and loss: algorithm.py
    │       ├── policy   policy.py   precision, adapters and memory savings, of both stages
    │       └── optim    optim.py    optimizer and learning rate, of both stages
    ├── rollout      rollout.py      how completions are sampled, graded and filtered
    │   ├── engine   engine.py       the inference server
    │   └── rewards  reward.py       several rewards and services that grade
    ├── evaluation   evaluation.py   how checkpoints are compared
    ├── deployment   deployment.py   where things run: never changes a result
    └── hub          hub.py          where models and public datasets are downloaded from

What all records share is in record.py; files of settings are read by files.py.
"""

from rollouts_core.config.algorithm import AdvantageConfig, LossConfig, MismatchConfig, RewardShapingConfig
from rollouts_core.config.data import DataConfig, DatasetConfig, PrepareConfig
from rollouts_core.config.deployment import DeploymentConfig
from rollouts_core.config.engine import MIN_ENGINE_CONTEXT, EngineConfig, EngineKind, WeightTransfer
from rollouts_core.config.evaluation import EvaluationConfig
from rollouts_core.config.files import parse_config, read_settings, resolve_paths
from rollouts_core.config.filter import FilterConfig
from rollouts_core.config.hub import HubConfig
from rollouts_core.config.model import ModelConfig
from rollouts_core.config.optim import OptimConfig, RLOptimConfig
from rollouts_core.config.pipeline import Config, TrainingConfig
from rollouts_core.config.policy import PLAIN_POLICY, LoRAConfig, PolicyConfig
from rollouts_core.config.record import PLACEMENT, SELECTION, FunctionName, Record, name_of_function
from rollouts_core.config.reward import RewardConfig
from rollouts_core.config.rl import RLTrainingConfig, algorithm_preset
from rollouts_core.config.rollout import InFlight, MultiTurnConfig, RolloutConfig, SamplingConfig
from rollouts_core.config.sft import SFTTrainingConfig

__all__ = [
    "MIN_ENGINE_CONTEXT",
    "PLACEMENT",
    "PLAIN_POLICY",
    "SELECTION",
    "AdvantageConfig",
    "Config",
    "DataConfig",
    "DatasetConfig",
    "DeploymentConfig",
    "EngineConfig",
    "EngineKind",
    "EvaluationConfig",
    "FilterConfig",
    "FunctionName",
    "HubConfig",
    "InFlight",
    "LoRAConfig",
    "LossConfig",
    "MismatchConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "PolicyConfig",
    "PrepareConfig",
    "RLOptimConfig",
    "RLTrainingConfig",
    "Record",
    "RewardConfig",
    "RewardShapingConfig",
    "RolloutConfig",
    "SFTTrainingConfig",
    "SamplingConfig",
    "TrainingConfig",
    "WeightTransfer",
    "algorithm_preset",
    "name_of_function",
    "parse_config",
    "read_settings",
    "resolve_paths",
]
