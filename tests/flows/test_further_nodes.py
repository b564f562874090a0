"""Pins what is refused about the further machines of a run, in one sentence and before anything is started.

Without it a run with two machines trains for hours until it finds that its engines cannot be given weights, or trains
on one of them twice.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rollouts.flows.form import parse_pipeline
from rollouts.flows.preflight import check_engine_nodes, check_trainer_nodes, check_weight_transfer
from rollouts.infra.node import FurtherNode, LocalNode, SSHNode, without_further_nodes
from rollouts_core.errors import ConfigError
from tests.kit.small_pipeline import small_settings

TRAINER = {"kind": "ssh", "host": "me@box", "python": "/opt/venv/bin/python"}
ENGINES = {"host": "me@10.0.0.2:2222", "python": "/opt/venv/bin/python"}
SECOND = {"host": "me@10.0.0.3", "python": "/opt/venv/bin/python"}


def node_of(*engine_nodes: dict[str, Any], **changes: Any) -> dict[str, Any]:  # Any: settings of every type
    return {**TRAINER, "engine_nodes": list(engine_nodes), **changes}


def parse(node: dict[str, Any], **overrides: Any) -> Any:  # Any: settings of every type
    return parse_pipeline(small_settings(node=node, **overrides), Path("a.toml"))


def test_engines_listen_at_the_address_in_host_unless_another_is_given() -> None:
    node = parse(node_of(ENGINES, {**ENGINES, "host": "me@far", "address": "fd00::2"})).node
    assert isinstance(node, SSHNode)
    assert [each.reached_at for each in node.engine_nodes] == ["10.0.0.2", "fd00::2"]
    alone = without_further_nodes(parse(node_of(ENGINES, trainer_nodes=[SECOND])).node)
    assert isinstance(alone, SSHNode) and alone.engine_nodes == alone.trainer_nodes == ()
    assert without_further_nodes(LocalNode()) == LocalNode()
    assert all(field["description"] for field in FurtherNode.model_json_schema()["properties"].values())


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        (node_of(ENGINES, ENGINES), "engine_nodes: 10.0.0.2:2222 is named twice"),
        (node_of({**ENGINES, "host": "you@box:22", "address": "10.0.0.2"}), "engine_nodes: box:22 is named twice"),
        (node_of({**ENGINES, "host": "me@far"}), "expected the IP address of far in the shared network"),
        (node_of({**ENGINES, "address": "far"}), "found 'far'"),
        (node_of({**ENGINES, "host": "far:22"}), "expected user@host"),
        (node_of({"host": "me@10.0.0.2"}), "engine_nodes.0.python is missing"),
        (node_of({**ENGINES, "hosts": "x"}), "unknown key node.engine_nodes.0.hosts"),
        (node_of({**ENGINES, "kind": "ssh"}), "unknown key node.engine_nodes.0.kind"),
        ({"kind": "local", "engine_nodes": [ENGINES]}, "unknown key node.engine_nodes"),
        ({**TRAINER, "engine_nodes": "me@10.0.0.2"}, "engine_nodes"),
        ({**TRAINER, "trainer_nodes": [SECOND, SECOND]}, "trainer_nodes: 10.0.0.3:22 is named twice"),
        (node_of(SECOND, trainer_nodes=[SECOND]), "engine_nodes: 10.0.0.3:22 is named twice"),
        ({**TRAINER, "trainer_nodes": [{**SECOND, "host": "me@box:22"}]}, "expected the IP address of box in the"),
        ({**TRAINER, "trainer_nodes": [{**SECOND, "gpus": 2}]}, "unknown key node.trainer_nodes.0.gpus"),
        ({"kind": "local", "trainer_nodes": [SECOND]}, "unknown key node.trainer_nodes"),
        ({"kind": "rented", "max_usd": 1.0, "trainer_nodes": [SECOND]}, "unknown key node.trainer_nodes"),
        ({"kind": "instance", "instance": "runpod:a", "trainer_nodes": [SECOND]}, "unknown key node.trainer_nodes"),
    ],
)
def test_a_misfit_is_one_sentence(node: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(node)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"mode": "sft"}, 'mode "sft" samples nothing'),
        ({"deployment__colocated": True}, "with deployment.colocated, engines and trainer share GPUs"),
        ({"rollout__engine__kind": "vllm"}, "the development endpoints of vLLM"),
        (
            {"rollout__engine": {"kind": "sglang", "weight_transfer": "tensors"}},
            '"tensors" shares memory with the trainer, which is on another node',
        ),
        ({"rollout__engine__router_url": "http://10.0.0.1:30100"}, "to the variable with the key"),
    ],
)
def test_what_engines_on_other_machines_cannot_do_is_one_sentence(overrides: dict[str, Any], sentence: str) -> None:
    pipeline = parse(node_of(ENGINES), **overrides)
    with pytest.raises(ConfigError) as caught:
        check_engine_nodes(pipeline.config, pipeline.node)
    assert str(caught.value).startswith("node.engine_nodes: ") and sentence in str(caught.value)
    check_engine_nodes(pipeline.config, without_further_nodes(pipeline.node))


@pytest.mark.parametrize(
    ("way", "deployment", "sentence"),
    [
        ("tensors", {"trainer_gpu_ranks": [0, 1], "engine_gpu_ranks": [0, 1]}, ""),
        ("tensors", {}, ""),
        (
            "tensors",
            {"trainer_gpu_ranks": [0], "engine_gpu_ranks": [1]},
            "shares memory with the trainer on GPU 0.* has only GPUs 1:",
        ),
        (
            "tensors",
            {"trainer_gpu_ranks": [0, 1], "engine_gpu_ranks": [0, 1], "num_engines": 2, "colocated": True},
            "shares memory with the trainer on GPU 0.* has only GPUs 1:",
        ),
        ("nccl", {"trainer_gpu_ranks": [0, 1], "engine_gpu_ranks": [1, 2]}, ""),
        ("nccl", {"trainer_gpu_ranks": [1], "engine_gpu_ranks": [2, 1]}, "GPU 1, from which the trainer sends: give"),
        ("nccl", {}, "GPU 0, from which the trainer sends: give"),
        ("gloo", {}, ""),
    ],
)
def test_weights_go_only_between_gpus_that_the_way_connects(
    way: str, deployment: dict[str, Any], sentence: str
) -> None:
    """Else SGLang ends at each update: handles of a GPU that it does not see end its scheduler."""
    pipeline = parse(
        {"kind": "local"}, rollout__engine={"kind": "sglang", "weight_transfer": way}, deployment=deployment
    )
    with pytest.raises(ConfigError, match=sentence) if sentence else nullcontext():
        check_weight_transfer(pipeline.config, pipeline.node)
    apart = parse(node_of(ENGINES), rollout__engine={"kind": "sglang", "weight_transfer": "nccl"})
    check_weight_transfer(apart.config, apart.node)


def test_files_that_nodes_name_lie_beside_the_configuration(tmp_path: Path) -> None:
    """Else a run, and the command that repeats it, works from one folder alone."""
    files = {"key_file": "keys/id", "requirements": "lock.txt", "known_hosts": "~/.ssh/known_hosts"}
    settings = small_settings(node=node_of({**ENGINES, "key_file": "/keys/other"}, trainer_nodes=[SECOND], **files))
    node = parse_pipeline(settings, tmp_path / "a.toml").node
    assert isinstance(node, SSHNode)
    assert (node.key_file, node.requirements) == (str(tmp_path / "keys/id"), str(tmp_path / "lock.txt"))
    assert (node.known_hosts, node.engine_nodes[0].key_file) == ("~/.ssh/known_hosts", "/keys/other")
    assert node.trainer_nodes[0].key_file == ""


def test_engines_on_other_machines_are_no_refusal_by_themselves() -> None:
    for engine in ({}, {"kind": "sglang"}, {"kind": "sglang", "weight_transfer": "nccl"}, {"weight_transfer": "gloo"}):
        pipeline = parse(node_of(ENGINES), rollout__engine=engine)
        check_engine_nodes(pipeline.config, pipeline.node)


def test_what_trains_in_one_process_does_not_train_on_several_machines() -> None:
    together = {**TRAINER, "trainer_nodes": [SECOND]}
    check_trainer_nodes(parse(together).config, parse(together).node)
    for mode, stage in (("sft", "sft"), ("sft+rl", "rl")):
        pipeline = parse(together, mode=mode, **{f"training__{stage}__policy": {"backend": "jax"}})
        with pytest.raises(ConfigError, match=rf'node.trainer_nodes: training.{stage}.policy.backend "jax" trains in'):
            check_trainer_nodes(pipeline.config, pipeline.node)
        check_trainer_nodes(pipeline.config, without_further_nodes(pipeline.node))
    unused = parse(together, mode="sft", training__rl__policy={"backend": "jax"})
    check_trainer_nodes(unused.config, unused.node)
