"""Pins that checkpoints are in the object store while training goes on, whole ones only.

Without it a machine that is lost with its disk takes a week of training with it.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rollouts.infra.stores.publication import checkpoints_published
from tests.infra.stores.s3_server import CuttablePort, S3Server

INTERVAL_S = 0.1


def save(checkpoints: Path, step: int, *, is_whole: bool = True) -> None:
    path = checkpoints / f"step_{step:06d}"
    (path / "trainer").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "trainer/state.json").write_bytes(b"{}")
    if is_whole:
        (path / "manifest.json").write_bytes(b"{}")


def wait_for(server: S3Server, bucket: str, key: str) -> None:
    deadline = time.monotonic() + 60
    while key not in server.num_writes(bucket):
        assert time.monotonic() < deadline, f"waited for {key}"
        time.sleep(INTERVAL_S)


@pytest.mark.slow
def test_a_checkpoint_is_published_while_training_goes_on_and_the_last_one_at_its_end(
    bucket: str, s3_server: S3Server, tmp_path: Path
) -> None:
    with checkpoints_published(tmp_path, f"s3://{bucket}/sft", interval_s=INTERVAL_S):
        save(tmp_path, 10)
        wait_for(s3_server, bucket, "sft/step_000010/manifest.json")
        save(tmp_path, 20, is_whole=False)
        save(tmp_path, 15)
    assert set(s3_server.num_writes(bucket)) == {
        f"sft/step_{step}/{name}"
        for step in ("000010", "000015")
        for name in ("model.safetensors", "trainer/state.json", "manifest.json")
    }
    assert set(s3_server.num_writes(bucket).values()) == {1}


@pytest.mark.slow
def test_an_outage_does_not_end_the_training_and_the_checkpoint_comes_later(
    bucket: str, s3_server: S3Server, cuttable: CuttablePort, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cuttable.cut_after(0)
    with checkpoints_published(tmp_path, f"s3://{bucket}/sft", interval_s=INTERVAL_S):
        save(tmp_path, 10)
        deadline = time.monotonic() + 60
        while "was not published" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(INTERVAL_S)
        cuttable.mend()
        wait_for(s3_server, bucket, "sft/step_000010/manifest.json")


def test_an_interrupt_does_not_wait_for_an_upload(bucket: str, s3_server: S3Server, tmp_path: Path) -> None:
    save(tmp_path, 10)
    with pytest.raises(KeyboardInterrupt), checkpoints_published(tmp_path, f"s3://{bucket}/sft", interval_s=600.0):
        raise KeyboardInterrupt
    assert s3_server.num_writes(bucket) == {}
