"""Pins that trainers of other projects reach the embedded engine as they reach SGLang.

slime, AReaL, OpenRLHF and verl open the store of their group by `torch.distributed.rendezvous`, whose first rank waits
until all members were counted. Without it such a trainer waits until its timeout, and the engine with it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from rollouts_core.embedded.weights import read_tensors
from tests.rollouts_core.embedded.tiny_models import expected_logprobs
from tests.rollouts_core.served_engine import engine_url

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TRAINER = """
import sys
from datetime import timedelta
import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous
from safetensors.torch import load_file

address, port, world_size, name, path, is_flat = sys.argv[1:]
timeout = timedelta(seconds=60)
store, rank, size = next(rendezvous(f"tcp://{address}:{port}", 0, int(world_size), timeout=timeout))
store.set_timeout(timeout)
group, _ = _new_process_group_helper(
    size, rank, [], Backend("gloo"), PrefixStore(name, store), group_name=name, timeout=timeout
)
_world.pg_group_ranks[group] = {i: i for i in range(size)}
print("joined", flush=True)
tensors = list(load_file(path).values())
if is_flat == "flat":
    tensors = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])]
sys.stdin.readline()
for tensor in tensors:
    dist.broadcast(tensor.contiguous(), 0, group=group)
print("sent", flush=True)
sys.stdin.readline()
"""
"""Rank 0 of a trainer: the copy of torch's `init_process_group` that all four of them carry, and what they send."""


@pytest.fixture
def url(model_dir: Path) -> Iterator[str]:
    with engine_url(model_dir) as url:
        yield url


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=100.0)


class Trainer:
    """A process of a trainer that has its group with the engines at some URLs."""

    def __init__(self, path: Path, urls: list[str], *, is_flat: bool, is_port_text: bool) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        size = 1 + len(urls)
        place = ["127.0.0.1", str(port), str(size), "trainer-pp_0", str(path), "flat" if is_flat else "each"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, *place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        answers: list[httpx.Response] = []

        def join(rank: int, url: str) -> None:
            body = {"master_address": "127.0.0.1", "master_port": str(port) if is_port_text else port}
            body |= {"rank_offset": rank, "world_size": size, "group_name": "trainer-pp_0", "backend": "gloo"}
            answers.append(post(url, "/init_weights_update_group", **body))

        joining = [Thread(target=join, args=(rank, url)) for rank, url in enumerate(urls, start=1)]
        for thread in joining:
            thread.start()
        for thread in joining:
            thread.join()
        assert [answer.json()["success"] for answer in answers] == [True] * len(urls), [each.text for each in answers]
        assert self.says() == "joined"

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def description_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:  # Any: JSON
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": "trainer-pp_0",
    }


def assert_serves(url: str, model: PreTrainedModel) -> None:
    body = {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 4, "temperature": 1}, "return_logprob": True}
    meta = post(url, "/generate", **body).json()["meta_info"]
    logprobs, tokens = zip(*[(each[0], each[1]) for each in meta["output_token_logprobs"]], strict=True)
    torch.testing.assert_close(
        torch.tensor(logprobs), expected_logprobs(model, [3, 4, 5], list(tokens)), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(("is_port_text", "is_flat"), [(False, True), (True, True), (False, False)])
def test_a_trainer_that_joins_by_a_rendezvous_sends_its_weights(
    is_port_text: bool, is_flat: bool, url: str, model_dir: Path, other_dir: Path, other_model: PreTrainedModel
) -> None:
    path = other_dir / "model.safetensors"
    with engine_url(model_dir) as second:
        trainer = Trainer(path, [url, second], is_flat=is_flat, is_port_text=is_port_text)
        try:
            tensors = read_tensors(other_dir)
            for each in (url, second):
                assert post(each, "/begin_weight_update").status_code == 200
            body = description_of(tensors) | ({"load_format": "flattened_bucket"} if is_flat else {})
            receiving = [
                Thread(target=post, args=(each, "/update_weights_from_distributed"), kwargs=body)
                for each in (url, second)
            ]
            for thread in receiving:
                thread.start()
            trainer.go_on()
            assert trainer.says() == "sent"
            for thread in receiving:
                thread.join()
            for each in (url, second):
                assert post(each, "/end_weight_update").status_code == 200
                assert_serves(each, other_model)
        finally:
            trainer.end()


def test_the_questions_of_older_releases_of_sglang_are_answered(url: str) -> None:
    for path in ("model_info", "server_info"):
        old, new = (httpx.get(f"{url}/{name}", timeout=60.0).json() for name in (f"get_{path}", path))
        assert old.keys() == new.keys() and old["model_path"] == new["model_path"]


@pytest.mark.parametrize("start", [0, 2, -1, [0]])
def test_a_start_of_logprobs_is_harmless_if_none_are_wanted(start: object, url: str) -> None:
    body = {"input_ids": [[3, 4, 5]], "sampling_params": {"max_new_tokens": 2}, "logprob_start_len": start}
    body |= {"top_logprobs_num": 2, "token_ids_logprob": [1]}
    for wanted in ({}, {"return_logprob": False}, {"return_logprob": None}):
        answer = post(url, "/generate", **body, **wanted)
        assert answer.status_code == 200, answer.text
        assert "output_token_logprobs" not in answer.json()[0]["meta_info"]
