"""Pins that nothing unpickles the weights of a model's folder: a pickle runs what its author wants."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerBase

from rollouts_core.config import DeploymentConfig, EngineConfig, ModelConfig, RewardConfig
from rollouts_core.engines.launch import exec_engine
from rollouts_core.errors import CheckpointError
from rollouts_core.job import InputModel, ServeJob
from rollouts_core.model.loading import load_hf_model
from rollouts_core.model.pickled_weights import refuse_pickled_weights
from rollouts_core.reward_services import create_classifier_reward


class Payload:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def pickle_weights(folder: Path, payload: Payload, name: str = "pytorch_model.bin") -> None:
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    torch.save({"payload": payload}, folder / name)


def test_a_classifier_with_pickled_weights_is_refused(
    model_dir: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    folder = tmp_path / "classifier"
    settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=len(tokenizer), num_labels=1, **settings))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reward = RewardConfig(kind="classifier", model=str(folder))
    create_classifier_reward(reward)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pickled \(pytorch_model.bin\).*: convert them to safetensors$"):
        create_classifier_reward(reward)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth", "model.pt", "weights.ckpt"])
def test_a_server_of_another_project_is_not_started_on_pickled_weights(
    name: str, model_dir: Path, tmp_path: Path
) -> None:
    pickle_weights(model_dir, Payload(tmp_path / "ran"), name)
    job = ServeJob(
        model=InputModel(name="base", model=ModelConfig(path=str(model_dir)), digest=""),
        engine=EngineConfig(kind="sglang", python="/bin/false"),
        deployment=DeploymentConfig(),
        host="127.0.0.1",
        port=1,
        context_length=64,
    )
    with pytest.raises(CheckpointError, match="pickled"):
        exec_engine(job, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_an_index_that_names_a_pickle_is_refused(model_dir: Path, tmp_path: Path) -> None:
    torch.save({"payload": Payload(tmp_path / "ran")}, model_dir / "weights.bin")
    (model_dir / "model.safetensors").rename(model_dir / "decoy.safetensors")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "weights.bin"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"pickled \(weights.bin\)"):
        load_hf_model(ModelConfig(path=str(model_dir)))
    assert not (tmp_path / "ran").exists()


def test_an_adapter_beside_the_weights_that_is_pickled_is_refused(model_dir: Path, tmp_path: Path) -> None:
    (model_dir / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model_dir)}))
    torch.save({"payload": Payload(tmp_path / "ran")}, model_dir / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled \(adapter_model.bin\)"):
        load_hf_model(ModelConfig(path=str(model_dir)))
    shutil.copyfile(model_dir / "model.safetensors", model_dir / "adapter_model.safetensors")
    refuse_pickled_weights(model_dir)
