"""Pins that a run needs nothing of its node but SSH, and survives a link that is cut for longer than a hiccup.

Without it the node of the other tests, which is this machine under another folder, could lend files, memory or ports to
a run that would fail on a machine elsewhere.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.checkpoint import verify_checkpoint
from tests.infra.separate_node import SeparateNode, separate_node
from tests.kit.commands import Rollouts, digest_of_the_run, digest_trained_here
from tests.kit.processes import Watch
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.ssh_nodes import SHORTER, stages_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.namespaces]

CUT_S = 25.0
CANARY = "sk-canary-51f0a7c2e9"
KEY_VARIABLE = "TESTS_ENGINE_KEY"


@pytest.fixture
def node(rollouts: Rollouts, tmp_path: Path) -> Iterator[SeparateNode]:
    """A node that sees neither the store nor the files of the configuration."""
    small = tmp_path / "small"
    small.mkdir()
    with separate_node(tmp_path / "node", hidden=[rollouts.store, small]) as node:
        yield node


def node_settings(node: SeparateNode) -> dict[str, Any]:
    return {
        "kind": "ssh",
        "host": f"{node.access.user}@{node.address}",
        "key_file": node.access.key_file,
        "host_key": node.access.host_key,
        "root": str(node.folder / "root"),
        "python": sys.executable,
        "min_free_gb": 0.1,
    }


def write_classifier(folder: Path, *, tokenizer_of: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification  # heavy

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.matrix  # with an engine elsewhere in test_cluster.py
def test_a_run_on_a_machine_that_shares_nothing_ends_as_here_and_its_key_is_seen_nowhere(
    rollouts: Rollouts, served_home: Path, node: SeparateNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that grades goes there too."""
    monkeypatch.setenv(KEY_VARIABLE, CANARY)
    graded = [{"weight": 0.5}, {"kind": "classifier", "model": "grader"}]
    keyed = SHORTER | {"rollout__engine__api_key_variable": KEY_VARIABLE, "rollout__rewards": graded}
    config = write_small_pipeline(tmp_path / "small", node=node_settings(node), **keyed)
    write_classifier(tmp_path / "grader", tokenizer_of=tmp_path / "small" / "base_model")
    shutil.copytree(tmp_path / "grader", tmp_path / "small" / "grader")
    with Watch(CANARY) as sightings:
        code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert list(node.folder.iterdir()) == [] and len(node.files("root/stages/*/result.json")) == 5
    assert node.commands() == []
    assert sightings == []
    ours = [path for path in (*rollouts.store.rglob("*"), tmp_path / "small", rollouts.output) if path.is_file()]
    theirs = [path for path in node.files("**/*") if path.is_file()]
    assert len(ours) > 50 and len(theirs) > 50
    assert [path for path in (*ours, *theirs) if CANARY.encode() in path.read_bytes()] == []

    local_config = write_small_pipeline(tmp_path / "small", **keyed)
    (tmp_path / "grader").rename(tmp_path / "small" / "grader")
    assert digest_of_the_run(rollouts) == digest_trained_here(local_config, served_home, tmp_path)


@pytest.mark.matrix
def test_training_goes_on_while_the_link_is_cut_and_its_results_come_afterwards(
    rollouts: Rollouts, node: SeparateNode, tmp_path: Path
) -> None:
    longer = SHORTER | {"training__sft__num_steps": 60}
    config = write_small_pipeline(tmp_path / "small", mode="sft", node=node_settings(node), **longer)
    process = rollouts.start("run", str(config))
    rollouts.wait_until_said("sft            started", process)
    with node.cut_off():
        deadline = time.monotonic() + CUT_S
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
        assert process.poll() is None, rollouts.said()
        assert node.files("root/stages/sft-*/result.json"), "training waited for the link"
    assert process.wait(300) == 0, rollouts.said()
    (run,) = (rollouts.store / "runs").iterdir()
    verify_checkpoint(run / "checkpoint")
    assert len(node.files("root/stages/sft-*/exit-*.json")) == 1
    (theirs,) = node.files("root/stages/sft-*/metrics.jsonl")
    assert (stages_of(rollouts.store)["sft"] / "metrics.jsonl").read_bytes() == theirs.read_bytes()
