"""The embedded engine receives weights from a trainer that joins and sends with SGLang's own functions.

Trainers of other projects (slime, AReaL, OpenRLHF, verl) use these functions of SGLang, or copies of them. Without this
test the engine could fit only the copies in tests/rollouts_core/embedded/test_other_trainers.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from rollouts.infra.ports import find_free_port
from rollouts.infra.session import LocalSession
from tests.engines.asking import LOGPROB_TOLERANCE, ask, with_client, worst_gap
from tests.engines.models import SavedModel
from tests.engines.servers import Server, engine_python, serving

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

GROUP = "trainer-pp_0"
GREEDY = ask(temperature=0.0)
TRAINER = """
import sys
from datetime import timedelta
from safetensors.torch import load_file
from sglang.srt.utils import init_custom_process_group
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from torch.distributed import broadcast

place, size, name = sys.argv[1:]
print("imported", flush=True)
group = init_custom_process_group(
    backend="gloo", init_method=place, world_size=int(size), rank=0, group_name=name, timeout=timedelta(seconds=100)
)
print("joined", flush=True)
for line in sys.stdin:
    load_format, path = line.split()
    tensors = list(load_file(path).items())
    if load_format == "flattened_bucket":
        broadcast(FlattenedTensorBucket(named_tensors=tensors).get_flattened_tensor(), src=0, group=group)
    else:
        for work in [broadcast(tensor, src=0, group=group, async_op=True) for _, tensor in tensors]:
            work.wait()
    print("sent", flush=True)
"""
"""Rank 0 of a group. For each line of input it sends a file of weights, as SGLang receives this `load_format`."""


class Trainer:
    """A trainer in SGLang's environment, and the engines that join its group and receive its weights."""

    def __init__(self, process: subprocess.Popen[str], port: int, engines: list[Server]) -> None:
        self._process = process
        self._port = port
        self._engines = engines

    def join(self) -> None:
        """Have the trainer and all engines form a group."""
        place = {"master_address": "127.0.0.1", "master_port": self._port, "world_size": 1 + len(self._engines)}
        ranks = [{"rank_offset": rank} for rank in range(1, 1 + len(self._engines))]
        with ThreadPoolExecutor() as pool:
            joining = pool.map(
                lambda engine, rank: post(engine, "/init_weights_update_group", **place, **rank, backend="gloo"),
                self._engines,
                ranks,
            )
            self.wait_for("joined")
            list(joining)

    def send(self, saved: SavedModel, load_format: str | None) -> None:
        """Update the weights of all engines."""
        path = saved.directory / "model.safetensors"
        tensors = load_file(path)
        announced = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "load_format": load_format,
        }
        for engine in self._engines:
            post(engine, "/begin_weight_update")
        with ThreadPoolExecutor() as pool:
            receiving = pool.map(
                lambda engine: post(engine, "/update_weights_from_distributed", **announced), self._engines
            )
            assert self._process.stdin is not None
            self._process.stdin.write(f"{load_format} {path}\n")
            self._process.stdin.flush()
            self.wait_for("sent")
            list(receiving)
        for engine in self._engines:
            post(engine, "/end_weight_update")

    def wait_for(self, word: str) -> None:
        """Return when the trainer has printed a line with this word. Imports of SGLang print other lines."""
        assert self._process.stdout is not None
        assert any(line.strip() == word for line in self._process.stdout), f"the trainer ended without {word!r}"


def post(engine: Server, path: str, **body: Any) -> None:  # Any: JSON
    answer = httpx.post(f"{engine.url}{path}", json={"group_name": GROUP, **body}, timeout=150.0)
    assert answer.json()["success"], answer.text


@contextmanager
def trainer_of(engines: list[Server]) -> Iterator[Trainer]:
    """A trainer that has imported SGLang, which takes longer than engines wait for a group."""
    port = find_free_port(LocalSession(sys.executable))
    command = [str(engine_python("sglang")), "-c", TRAINER, f"tcp://127.0.0.1:{port}", str(1 + len(engines)), GROUP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            trainer = Trainer(process, port, engines)
            trainer.wait_for("imported")
            yield trainer
        finally:
            process.kill()


def assert_serves(engine: Server, new: SavedModel, old: SavedModel) -> None:
    (completion,) = with_client(engine, lambda client: client.generate([GREEDY]))
    assert worst_gap(new, GREEDY, completion) < LOGPROB_TOLERANCE
    assert worst_gap(old, GREEDY, completion) > 100 * LOGPROB_TOLERANCE, "the models must differ"


@pytest.fixture
def second(start: SavedModel, tmp_path: Path) -> Iterator[Server]:
    with serving("embedded", start.directory, tmp_path / "second") as running:
        yield running


@pytest.mark.parametrize("server", ["embedded"], indirect=True, scope="session")
def test_a_trainer_that_joins_by_sglangs_own_function_sends_its_weights(
    server: Server, second: Server, start: SavedModel, trained: SavedModel
) -> None:
    engines = [server, second]
    with trainer_of(engines) as trainer:
        trainer.join()
        trainer.send(trained, "flattened_bucket")
        for engine in engines:
            assert_serves(engine, trained, start)
        trainer.send(start, None)
        for engine in engines:
            assert_serves(engine, start, trained)
