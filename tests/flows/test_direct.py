"""A node and an object store that reach each other: models go between them, not through this machine.

Without it a run could say that a node fetches and sends by itself, and both would still go through a home's uplink.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.infra.ssh_server import running_server
from tests.infra.stores.s3_server import CuttablePort, S3Server
from tests.kit.commands import Rollouts, digest_of_the_run, digest_trained_here
from tests.kit.small_pipeline import write_small_pipeline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OF_NODE = "User-Agent: Python-urllib"
SECRET = b"X-Amz-Signature"


def keys_of(cuttable: CuttablePort, method: str, *, by_node: bool) -> set[str]:
    """The objects that the node, or this machine, has used the method on."""
    heads = [head for head in cuttable.request_heads if (OF_NODE in head) == by_node and head.startswith(f"{method} ")]
    return {head.split()[1].partition("?")[0].split("/", 2)[2] for head in heads}


@pytest.mark.matrix
def test_a_model_goes_from_the_store_to_the_node_and_back_again(
    rollouts: Rollouts, served_home: Path, bucket: str, s3_server: S3Server, cuttable: CuttablePort, tmp_path: Path
) -> None:
    sft = {"training__sft__num_steps": 20, "training__sft__checkpoint_every": 10}
    here = write_small_pipeline(tmp_path / "small", mode="sft", **sft)
    usual = digest_trained_here(here, served_home, tmp_path)
    model = tmp_path / "small/base_model"
    names = [str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()]
    for name in names:
        s3_server.client().upload_file(str(model / name), bucket, f"models/base_model/{name}")
    with running_server(tmp_path / "sshd") as server:
        config = write_small_pipeline(
            tmp_path / "small",
            mode="sft",
            model__path=f"s3://{bucket}/models/base_model",
            run__publish=f"s3://{bucket}/team",
            node={
                "kind": "ssh",
                "host": f"{server.access.user}@127.0.0.1:{server.access.port}",
                "key_file": server.access.key_file,
                "host_key": server.access.host_key,
                "root": str(tmp_path / "node"),
                "python": sys.executable,
                "min_free_gb": 0.1,
            },
            **sft,
        )
        code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert digest_of_the_run(rollouts) == usual
    assert f"base_model: the node itself downloaded 0.1 MB from s3://{bucket}/models/base_model" in output
    assert keys_of(cuttable, "GET", by_node=True) == {f"models/base_model/{name}" for name in names}

    published = json.loads(s3_server.contents(bucket, "team/small/")["team/small/publication.json"])
    sizes = {
        f"team/small/{name}": file["size"]
        for name, file in published["files"].items()
        if name.startswith(published["checkpoint"])
    }
    manifest = f"team/small/{published['checkpoint']}/manifest.json"
    assert keys_of(cuttable, "PUT", by_node=True) == sizes.keys() - {manifest} and len(sizes) > 3
    assert keys_of(cuttable, "PUT", by_node=False) & sizes.keys() == {manifest}
    assert {s3_server.num_writes(bucket)[key] for key in sizes} == {1}
    num_megabytes = (sum(sizes.values()) - sizes[manifest]) / 1e6
    assert f"the node itself uploaded {num_megabytes:.1f} MB to s3://{bucket}/team/small" in output
    written = [path for root in (rollouts.store, tmp_path / "node") for path in root.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET in path.read_bytes()] and SECRET.decode() not in output
