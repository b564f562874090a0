"""Pins that a model and a dataset of the hub are fetched once, at a commit, from the mirror that the settings name.

Without it a run could train from another commit than its record names, or fill a disk before it fails.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollouts.flows.form import parse_pipeline
from rollouts.tasks.hub_models import bring_hub_model, needs_download
from rollouts.tasks.preparing import prepare_data
from rollouts_core.config import Config
from rollouts_core.errors import ConfigError
from tests.rollouts_core.data.hub import Hub, serve_hub

pytestmark = pytest.mark.slow
FILES = {"config.json": b"{}", "model.safetensors": b"12345678", "pytorch_model.bin": b"12345678", "onnx/a.json": b"{}"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    with serve_hub() as served:
        yield served


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def config_of(served: Hub, folder: Path, **settings: Any) -> Config:  # Any: settings of every type
    given: dict[str, Any] = {
        "mode": "sft",
        "model": {"path": "org/name"},
        "data": {name: f"{name}.jsonl" for name in ("sft", "selection", "heldout")},
        "hub": {"url": served.url},
        **settings,
    }
    return parse_pipeline(given, folder / "my.toml").config


def test_a_model_is_fetched_once_at_its_commit(hub: Hub, tmp_path: Path) -> None:
    old = hub.commit("org/name", FILES)
    hub.commit("org/name", {**FILES, "config.json": b'{"newer": 1}'})
    said: list[str] = []
    config = config_of(hub, tmp_path, model={"path": "org/name", "revision": old})
    model = bring_hub_model(config, tmp_path / "store", said.append).model
    names = sorted(path.relative_to(model.path).as_posix() for path in Path(model.path).rglob("*"))
    assert names == ["config.json", "model.safetensors"]
    assert (Path(model.path) / "config.json").read_bytes() == b"{}"
    assert Path(model.path).name == "name" and f"downloads org/name at {old}" in said[0]
    hub.requests.clear()
    assert bring_hub_model(config, tmp_path / "store", said.append).model == model
    assert hub.requests == [] and len(said) == 2


def test_a_gated_model_needs_the_token_of_the_variable(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit("org/name", FILES)
    hub.gated.add("org/name")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"cannot be downloaded, because it is gated: accept the terms.*HF_TOKEN"):
        bring_hub_model(config_of(hub, tmp_path), tmp_path / "store", print)
    named = config_of(hub, tmp_path, hub={"url": hub.url, "token_variable": "MY_TOKEN"})
    with pytest.raises(ConfigError, match="hub: token_variable MY_TOKEN is not set"):
        bring_hub_model(named, tmp_path / "store", print)
    monkeypatch.setenv("MY_TOKEN", hub.token)
    assert Path(bring_hub_model(named, tmp_path / "store", print).model.path).is_dir()


def test_what_the_hub_does_not_give_is_one_sentence(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"because the hub has no repository of this name .*: correct model\.path"
    ) as unknown:
        bring_hub_model(config_of(hub, tmp_path), tmp_path / "store", print)
    nowhere = config_of(hub, tmp_path, hub={"url": "http://127.0.0.1:9"})
    with pytest.raises(
        ConfigError, match=r"set model\.path to a local folder, set hub\.url to a mirror"
    ) as unreachable:
        bring_hub_model(nowhere, tmp_path / "store", print)
    hub.commit("org/name", FILES)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 8, 2))
    with pytest.raises(ConfigError, match=r"takes 0\.0 GB, and the disk of .* has 0\.0 GB free: free some space"):
        bring_hub_model(config_of(hub, tmp_path), tmp_path / "store", print)
    assert all("\n" not in str(each.value) for each in (unknown, unreachable))


def test_a_model_whose_loss_is_compared_stays_on_the_hub_without_a_mirror(hub: Hub, tmp_path: Path) -> None:
    by_loss: dict[str, Any] = {"evaluation": {"metric": "loss"}}
    assert not needs_download(config_of(hub, tmp_path, hub={}, **by_loss))  # its identity is that of earlier versions
    assert needs_download(config_of(hub, tmp_path, **by_loss))
    assert needs_download(config_of(hub, tmp_path, hub={}))


def test_a_dataset_of_a_mirror_is_prepared_at_its_newest_commit(hub: Hub, tmp_path: Path) -> None:
    def files(number: int) -> dict[str, bytes]:
        rows = [{"question": f"{i}?", "answer": f"{number} #### {i}"} for i in range(4)]
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n"
        return {
            "README.md": (card + "  - split: test\n    path: test.jsonl\n---\n").encode(),
            "train.jsonl": text,
            "test.jsonl": text.replace(b'"question": "', b'"question": "test '),
        }

    sizes = {"num_train": 2, "num_selection": 2, "num_heldout": 2}
    data = {"prepare": {"name": "gsm8k", "source": "org/rows", "settings": sizes}}
    paths = []
    for number in (1, 2):
        commit = hub.commit("org/rows", files(number))
        said: list[str] = []
        found = prepare_data(config_of(hub, tmp_path, data=data), tmp_path / "store", said.append)
        paths.append(str(found.data.sft))
        assert f"reads org/rows at {commit}" in said[0]
        assert f'"completion": "{number} #### 0"' in Path(paths[-1]).read_text()
    assert paths[0] != paths[1]
