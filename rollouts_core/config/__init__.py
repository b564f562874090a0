"""The settings of one training pipeline: immutable records with a docstring per field, one file per section.

The docstrings are the help texts of the Prefect form. Each default is written only in its field. This package must not
import torch, so that the orchestrator can read, check and fingerprint a configuration without it.

    Config           pipeline.py     all sections together, loaded from a file and saved
    ├── model        model.py        checkpoint that training starts from
    ├── data         data.py         files of demonstrations and prompts
    ├── training
    │   ├── sft      sft.py          supervised fine-tuning
    │   └── rl       rl.py           reinforcement learning; its advantage, reward_shaping and loss: algorithm.py
    │       ├── policy   policy.py   precision, adapters and memory savings, of both stages
    │       └── optim    optim.py    optimizer and learning rate, of both stages
    ├── rollout      rollout.py      sampling, grading and filtering of completions
    │   ├── engine   engine.py       the inference server
    │   └── rewards  reward.py       several rewards, and services that grade
    ├── evaluation   evaluation.py   comparison of checkpoints
    ├── deployment   deployment.py   GPUs, processes and ports; they never change a result
    ├── report       report.py       samples inside the report
    └── hub          hub.py          where models and public datasets are downloaded from

`record.py` has the parts that all records share. `files.py` reads files of settings.
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
from rollouts_core.config.report import ReportConfig
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
    "ReportConfig",
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
