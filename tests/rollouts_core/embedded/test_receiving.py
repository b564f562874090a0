"""Pins what becomes of weights that are sent to the embedded engine: all of them are served, or the old ones.

Without it an engine whose trainer was killed amid an update could serve half of two models, or never end. Also what is
sent to an engine that has a part of it already: without that, one that was started anew keeps its start weights.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from rollouts_core.backends import process_group
from rollouts_core.config import SamplingConfig
from rollouts_core.embedded.weights import digest_tensors, read_tensors, tensor_sha256
from rollouts_core.engines import Completion, GenerationRequest, SGLangEngine
from rollouts_core.engines.transfer import to_sglang
from rollouts_core.engines.transfer.group import WeightGroup
from rollouts_core.engines.transfer.versions import HostCopies, SentWeights, flatten, split_buckets
from rollouts_core.errors import WeightSyncError
from tests.rollouts_core.embedded.tiny_models import expected_logprobs
from tests.rollouts_core.served_engine import engine_url

pytestmark = pytest.mark.timeout(120)

REQUEST = GenerationRequest(
    prompt_tokens=[3, 4, 5], sampling=SamplingConfig(max_new_tokens=8), stop_token_ids=(), seed=1
)
SERVE = """
import sys
from pathlib import Path
from rollouts_core.embedded.server import serve
serve(Path(sys.argv[1]), port=0, on_ready=lambda url: print(url, flush=True))
"""


@pytest.fixture
def url(model_dir: Path) -> Iterator[str]:
    with engine_url(model_dir) as url:
        yield url


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=60.0)


def joined_group(url: str) -> WeightGroup:
    """A group with the server, joined by both."""
    group = WeightGroup(url, "gloo", num_ranks=1)
    connecting = Thread(target=group.connect)
    connecting.start()
    answer = post(
        url,
        "/init_weights_update_group",
        master_address=group.address,
        master_port=group.port,
        rank_offset=1,
        world_size=2,
        group_name=group.name,
        backend="gloo",
    )
    connecting.join()
    assert answer.json()["success"], answer.text
    return group


def bucket_of(group: WeightGroup, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:  # Any: JSON
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": group.name,
        "load_format": "flattened_bucket",
    }


def send_bucket(url: str, group: WeightGroup, tensors: dict[str, torch.Tensor]) -> None:
    """Have the server take these tensors, amid an update."""
    sending = Thread(target=group.broadcast, args=(flatten(tensors),))
    sending.start()
    assert post(url, "/update_weights_from_distributed", **bucket_of(group, tensors)).status_code == 200
    sending.join()


def digests_of(url: str) -> Any:  # Any: JSON
    return httpx.get(f"{url}/weights_checker", timeout=60.0).json()["ranks"][0]["checksums"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_any_number_format_are_served_and_proved(
    url: str, other_dir: Path, other_model: PreTrainedModel, dtype: torch.dtype
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in read_tensors(other_dir).items()}
    weights = SentWeights(version="w-1", model_dir=other_dir, tensors=tensors, transfer="gloo")

    async def send() -> list[Completion]:
        async with SGLangEngine(url) as engine:
            await engine.load_weights(weights, "w-1")
            return await engine.generate([REQUEST])

    [completion] = asyncio.run(send())
    assert {version for version, _, _ in completion.version_spans} == {"w-1"}
    rounded = deepcopy(other_model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(dtype).float()
    expected = expected_logprobs(rounded, REQUEST.prompt_tokens, completion.tokens)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_an_update_that_broke_off_leaves_the_old_weights(url: str, other_dir: Path) -> None:
    before, tensors = digests_of(url), read_tensors(other_dir)
    group = joined_group(url)
    try:
        first = dict([next(iter(tensors.items()))])
        assert post(url, "/begin_weight_update").status_code == 200
        send_bucket(url, group, first)
        ended = post(url, "/end_weight_update")
        assert (ended.status_code, "lacks" in ended.json()["error"]["message"]) == (400, True)
        assert digests_of(url) == before
        nothing_open = post(url, "/update_weights_from_distributed", **bucket_of(group, first))
        assert (nothing_open.status_code, "no weight-update session is open" in nothing_open.text) == (400, True)
    finally:
        group.close()


def test_a_trainer_that_vanishes_amid_a_bucket_is_noticed_and_another_one_is_taken(url: str, other_dir: Path) -> None:
    tensors = read_tensors(other_dir)
    group = joined_group(url)
    assert post(url, "/begin_weight_update").status_code == 200
    closing = Thread(target=group.close)
    closing.start()
    arrived = post(url, "/update_weights_from_distributed", **bucket_of(group, tensors))
    assert (arrived.status_code, "the weights did not arrive" in arrived.text) == (503, True)

    async def send() -> None:
        async with SGLangEngine(url) as engine:
            weights = SentWeights(version="w-2", model_dir=other_dir, tensors=tensors, transfer="gloo")
            await engine.load_weights(weights, "w-2")

    asyncio.run(send())


GROUP = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/init_weights_update_group", {"backend": "nccl"}, "open the group with gloo in the trainer, too"),
        ("/init_weights_update_group", {"backend": "gloo", "master_address": 7}, "master_address"),
        ("/init_weights_update_group", {**GROUP, "master_address": "a\0"}, "`master_address`, expected an address"),
        ("/init_weights_update_group", {**GROUP, "master_port": 2**16}, "`master_port`, expected a number"),
        ("/init_weights_update_group", {**GROUP, "rank_offset": 0}, "expected a `rank_offset`"),
        ("/init_weights_update_group", {**GROUP, "world_size": 2**64}, "expected a `rank_offset`"),
        ("/update_weights_from_distributed", {"load_format": "direct"}, "use flattened_bucket"),
        (
            "/update_weights_from_distributed",
            {"load_format": "flattened_bucket", "names": ["a"], "dtypes": [], "shapes": []},
            "of the same length",
        ),
        (
            "/update_weights_from_distributed",
            {"load_format": "flattened_bucket", "names": ["a"], "dtypes": ["int64"], "shapes": [[1]]},
            "dtype str `int64` is not supported",
        ),
        (
            "/update_weights_from_distributed",
            {"load_format": "flattened_bucket", "names": ["a"], "dtypes": [["float32"]], "shapes": [[1]]},
            "dtype list `['float32']` is not supported",
        ),
        (
            "/update_weights_from_distributed",
            {"load_format": "flattened_bucket", "names": ["a"], "dtypes": ["float32"], "shapes": [[-1]]},
            "lists of non-negative integers",
        ),
        ("/end_weight_update", {}, "no weight-update session is open"),
        ("/begin_weight_update", {"kept": "all"}, "kept must be a list of names"),
    ],
)
def test_what_the_engine_cannot_take_is_refused_by_name(url: str, path: str, body: dict[str, Any], said: str) -> None:
    answer = post(url, path, **body)
    assert (answer.status_code, said in answer.text) == (400, True), answer.text


CHANGED = {"model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"}


@pytest.fixture
def sent_names(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The names of the tensors of each update that is sent."""
    seen: list[set[str]] = []

    def watched(tensors: dict[str, torch.Tensor], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        seen.append(set(tensors))
        return split_buckets(tensors, max_bytes)

    monkeypatch.setattr(to_sglang, "split_buckets", watched)
    return seen


@pytest.fixture
def versions(other_dir: Path) -> list[SentWeights]:
    """Three versions as a trainer publishes them, each with the same few tensors changed."""
    copies, weights = HostCopies(), read_tensors(other_dir)
    published = []
    for number in range(3):
        tensors = copies.take(weights)
        published.append(SentWeights(version=f"w-{number}", model_dir=other_dir, tensors=tensors, transfer="gloo"))
        weights = {name: tensor + 0.5 if name in CHANGED else tensor for name, tensor in weights.items()}
    return published


def load_all(url: str, *steps: SentWeights | Callable[[SGLangEngine], Awaitable[None]]) -> None:
    """Load one version after the other by one client; what is no version is called between them."""

    async def load() -> None:
        async with SGLangEngine(url) as engine:
            for step in steps:
                if isinstance(step, SentWeights):
                    await engine.load_weights(step, step.version)
                    assert digests_of(url) == digest_tensors(step.tensors, tensor_sha256)
                else:
                    await step(engine)

    asyncio.run(load())


def test_what_did_not_change_is_not_sent_again(
    url: str, versions: list[SentWeights], sent_names: list[set[str]]
) -> None:
    first, second, third = versions
    load_all(url, first, second, third, replace(third, version="w-3"))
    assert sent_names == [set(first.tensors), CHANGED, CHANGED]  # the last changed nothing


def test_an_engine_that_missed_a_version_is_sent_what_changed_since_the_one_that_it_has(
    url: str, versions: list[SentWeights], sent_names: list[set[str]]
) -> None:
    load_all(url, versions[0], versions[2])
    assert sent_names == [set(versions[0].tensors), CHANGED]


def test_an_engine_that_came_back_with_other_weights_is_sent_everything(
    url: str, model_dir: Path, versions: list[SentWeights], sent_names: list[set[str]]
) -> None:
    async def start_anew(_: SGLangEngine) -> None:
        async with SGLangEngine(url) as stranger:
            await stranger.load_weights(model_dir, "start")

    load_all(url, versions[0], start_anew, versions[1])
    assert sent_names == [set(versions[0].tensors)] * 2


def test_an_engine_that_handed_its_memory_over_is_sent_everything(
    url: str, versions: list[SentWeights], sent_names: list[set[str]]
) -> None:
    load_all(
        url, versions[0], lambda engine: engine.release_memory(), lambda engine: engine.resume_memory(), versions[1]
    )
    assert sent_names == [set(versions[0].tensors)] * 2


def test_a_load_that_failed_is_followed_by_everything(
    url: str, versions: list[SentWeights], sent_names: list[set[str]]
) -> None:
    wide = replace(versions[1], tensors=dict.fromkeys(versions[1].tensors, torch.zeros(1)))

    async def fail(engine: SGLangEngine) -> None:
        with pytest.raises(WeightSyncError, match="has shape"):
            await engine.load_weights(wide, "wide")

    load_all(url, versions[0], fail, versions[1])
    assert sent_names == [set(versions[0].tensors)] * 3


def test_a_part_that_makes_no_whole_is_noticed_and_everything_is_sent(
    url: str, model_dir: Path, versions: list[SentWeights], sent_names: list[set[str]]
) -> None:
    """Other weights under the name of those that were proved: no version tells them apart, but the checksums do."""

    async def replace_weights(_: SGLangEngine) -> None:
        async with SGLangEngine(url) as stranger:
            await stranger.load_weights(model_dir, versions[0].version)

    load_all(url, versions[0], replace_weights, versions[1], versions[2])
    everything = set(versions[0].tensors)
    assert sent_names == [everything, CHANGED, everything, everything]


def test_a_part_that_broke_off_leaves_the_old_weights(url: str) -> None:
    before = digests_of(url)
    name = next(iter(before))
    assert post(url, "/begin_weight_update", kept=sorted(before.keys() - CHANGED - {name})).status_code == 200
    group, tensor = joined_group(url), torch.zeros(1)
    send_bucket(url, group, {name: tensor})
    ended = post(url, "/end_weight_update")
    assert (ended.status_code, "lacks" in ended.text, digests_of(url)) == (400, True, before)
    group.close()


def test_a_bucket_of_a_group_that_nobody_joined_is_refused(url: str) -> None:
    assert post(url, "/begin_weight_update").status_code == 200
    body = {"names": [], "dtypes": [], "shapes": [], "load_format": "flattened_bucket", "group_name": "strangers"}
    answer = post(url, "/update_weights_from_distributed", **body)
    assert (answer.status_code, "Process group strangers does not exist" in answer.text) == (400, True)


@pytest.mark.slow
def test_a_server_that_waits_for_weights_ends_when_it_is_told_to(model_dir: Path, other_dir: Path) -> None:
    """Its own deadline is two minutes, and that of its supervisor ten seconds."""
    with subprocess.Popen([sys.executable, "-c", SERVE, str(model_dir)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            group = joined_group(url)
            assert post(url, "/begin_weight_update").status_code == 200
            with pytest.raises(httpx.ReadTimeout):  # it waits for a bucket that never comes
                body = bucket_of(group, read_tensors(other_dir))
                httpx.post(f"{url}/update_weights_from_distributed", json=body, timeout=2.0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
            group.close()
        finally:
            process.kill()


@pytest.mark.slow
def test_a_trainer_that_is_not_there_is_waited_for_until_a_deadline(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "TIMEOUT_S", 1.0)
    body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    answer = post(url, "/init_weights_update_group", **body)
    assert (answer.status_code, "cannot join the trainer at 127.0.0.1:1" in answer.text) == (503, True)


def test_a_group_that_nobody_joined_cannot_be_left(url: str) -> None:
    answer = post(url, "/destroy_weights_update_group", group_name="strangers")
    assert answer.status_code == 400
    assert answer.json() == {"success": False, "message": "The group to be destroyed does not exist."}


def test_a_trainer_goes_on_where_one_was_killed_amid_an_update(url: str, other_dir: Path) -> None:
    """What that one had sent is a part of the model, and is forgotten."""
    tensors = read_tensors(other_dir)
    group = joined_group(url)
    assert post(url, "/begin_weight_update").status_code == 200
    send_bucket(url, group, dict([next(iter(tensors.items()))]))
    group.close()
    assert post(url, "/begin_weight_update").status_code == 400

    async def send() -> list[Completion]:
        async with SGLangEngine(url) as engine:
            weights = SentWeights(version="w-2", model_dir=other_dir, tensors=tensors, transfer="gloo")
            await engine.load_weights(weights, "w-2")
            return await engine.generate([REQUEST])

    [completion] = asyncio.run(send())
    assert {version for version, _, _ in completion.version_spans} == {"w-2"}
