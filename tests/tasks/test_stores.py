"""Pins that a run reaches its object stores before it rents a machine, also one that no command checked before.

Without it a run that was started in Prefect finds out at its end that its results may not be written.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.infra.errors import StoreRefusedError
from rollouts.infra.node import Node, SSHAccess
from rollouts.infra.stores.object_store import ObjectStore
from rollouts.infra.stores.publication import read_publication
from rollouts.tasks.records import RunScope
from rollouts.tasks.sync import RECORDS, publish_results, reach_stores, send_from_machine
from rollouts_core.config import Config, ModelConfig
from rollouts_core.job import InputModel
from tests.infra.stores.s3_server import S3Server

CONFIG = Config.model_validate(
    {
        "mode": "sft",
        "model": {"path": "/model"},
        "data": {"sft": "/sft.jsonl", "selection": "/a.jsonl", "heldout": "/b.jsonl"},
    }
)


def scope_of(tmp_path: Path, url: str) -> RunScope:
    return RunScope(run_id="0123456789", run_name="small", store=str(tmp_path / "store"), publish=url)


@pytest.mark.slow
def test_the_configuration_is_returned_when_results_can_be_published(bucket: str, tmp_path: Path) -> None:
    assert reach_stores.fn(CONFIG, scope_of(tmp_path, f"s3://{bucket}/team")) == CONFIG


def test_a_store_that_refuses_results_ends_the_run_before_it_begins(
    bucket: str, s3_server: S3Server, tmp_path: Path
) -> None:
    s3_server.deny(bucket, "s3:PutObject")
    with pytest.raises(StoreRefusedError, match=f"s3://{bucket}/team/small"):
        reach_stores.fn(CONFIG, scope_of(tmp_path, f"s3://{bucket}/team"))


@pytest.mark.slow
def test_the_run_publishes_its_checkpoint_and_its_records_under_its_name(bucket: str, tmp_path: Path) -> None:
    scope = scope_of(tmp_path, f"s3://{bucket}/team")
    url = publish_results.fn(write_results(scope), scope)
    assert url == f"s3://{bucket}/team/small"
    assert_published(url, scope)


def write_results(scope: RunScope) -> str:
    """What a run has at its end; returns the path of its checkpoint."""
    (scope.output_dir / "checkpoint").mkdir(parents=True)
    (scope.output_dir / "checkpoint/model.safetensors").write_bytes(b"weights")
    for name in RECORDS:
        (scope.output_dir / name).write_text(name)
    return str(scope.output_dir / "checkpoint")


def assert_published(url: str, scope: RunScope) -> None:
    publication = read_publication(ObjectStore(url))
    assert publication is not None and publication.run_id == scope.run_id
    names = {name.rpartition("/")[2] for name in publication.files}
    assert names == {"model.safetensors", *RECORDS}


def test_a_machine_that_cannot_send_the_checkpoint_leaves_that_to_the_publication(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scope = scope_of(tmp_path, f"s3://{bucket}/team")
    checkpoint = write_results(scope)
    gone = Node(
        name="a@b:1",
        kind="ssh",
        root="/root/rollouts",
        python="/usr/bin/python3",
        mirror=scope.store,
        access=SSHAccess(host="127.0.0.1", port=1, user="a"),
    )
    model = ModelConfig(path=f"{scope.store}/stages/sft-0123456789abcdef/checkpoints/step_000020")
    send_from_machine.fn(InputModel(name="step_000020", model=model, digest="0"), checkpoint, gone, scope)
    said = capsys.readouterr().err
    assert f"uploaded from here, because the node cannot upload it to s3://{bucket}/team/small (" in said
    assert_published(publish_results.fn(checkpoint, scope), scope)
