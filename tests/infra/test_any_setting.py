"""Properties of settings that reach providers, installers, OpenSSH, engines and stores: each is refused, or arrives as
it is.

Without these tests an id could name another address of a provider, or the name of no GPU every machine there is. Paths,
commands and jobs have theirs in test_any_string.py.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from rollouts.infra import environment_builder
from rollouts.infra.errors import InfraError, PermanentInfraError
from rollouts.infra.node import NodeSettings, RentedNode
from rollouts.infra.offers import MachineSpec, Offer
from rollouts.infra.providers.http import Account
from rollouts.infra.providers.lambda_cloud import Lambda
from rollouts.infra.providers.prime import Prime
from rollouts.infra.providers.rented import set_up
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.providers.shadeform import Shadeform
from rollouts.infra.providers.vast import Vast
from rollouts.infra.session import LocalSession
from rollouts.infra.ssh.ssh_config import read_ssh_config
from rollouts.infra.stores.object_store import ObjectStore
from rollouts_core.config.engine import EngineConfig
from rollouts_core.config.model import ModelConfig
from rollouts_core.engines.launch import render_launch
from rollouts_core.job import InputModel, ServeJob
from tests.infra.test_any_string import HOSTILE, PLAIN, SHOW_ARGUMENTS, accepted, folder_of_its_own

pytestmark = pytest.mark.slow

PUBLIC_KEY = "ssh-ed25519 AAAA me@here"
TEXT = HOSTILE.filter(lambda text: "\udcff" not in text)
"""What settings can hold: pydantic takes no lone surrogates."""
OFFERS = {RunPod: "SECURE:H100", Lambda: "gpu_1x", Prime: "a:b:c:1:d:e", Shadeform: "a:b", Vast: "1"}
ACCOUNTS = list(OFFERS)
PLAIN_ID = "17"
"""What may be a machine's name at every provider."""


class NotingServer(ThreadingHTTPServer):
    """Notes what it is asked, knows our key, and has nothing else."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), NotingHandler)
        self.asked: list[tuple[str, str, bytes]] = []
        """Method, target and body."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class NotingHandler(BaseHTTPRequestHandler):
    server: NotingServer

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.command, self.path, body))
        key = {"id": "k", "name": "k", "publicKey": PUBLIC_KEY, "public_key": PUBLIC_KEY}
        known = {"data": [key], "ssh_keys": [key], "total_count": 1, "instances": [], "next_token": None}
        content = json.dumps(known).encode()
        self.send_response(200 if self.command == "GET" and re.search(r"key|/api/v1/instances/\?", self.path) else 404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def provider() -> Iterator[NotingServer]:
    with NotingServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("account", ACCOUNTS)
@given(instance_id=st.from_regex(r"[!-~]{1,40}", fullmatch=True))
@example(instance_id=".")
@example(instance_id="..")
@example(instance_id="../../account")
@example(instance_id="²")
@example(instance_id=PLAIN_ID)
@settings(max_examples=10)
def test_an_id_of_a_machine_is_one_part_of_an_address(
    provider: NotingServer, account: type[Account], instance_id: str
) -> None:
    cloud: Any = account("key", provider.url, min_interval_s=0)
    for ask in (cloud.get, cloud.terminate):
        provider.asked.clear()
        ask(instance_id)
        assert provider.asked or instance_id != PLAIN_ID
        for _, target, body in provider.asked:
            path, _, query = target.partition("?")
            if query:  # Vast.ai's list, by a number
                [wanted] = parse_qs(query)["select_filters"]
                assert json.loads(wanted) == {"id": {"eq": int(instance_id)}}
            elif body:
                assert json.loads(body) in ({}, {"instance_ids": [instance_id]})
            else:
                assert unquote(path).count(f"/{instance_id}") >= 1 and ".." not in path.split("/")
                assert path.count("/") == {RunPod: 3, Lambda: 4, Prime: 4, Vast: 5, Shadeform: 3}[account]


@given(text=TEXT, name=st.sampled_from(["runpod", "lambda", "prime", "shadeform", "vast", "sky"]))
@example(text="--all", name="sky")
@example(text=PLAIN, name="runpod")
@settings(max_examples=100)
def test_a_machine_of_yours_is_refused_or_plain(text: str, name: str) -> None:
    for value in (f"{name}:{text}", f"{name}:a{text}"):
        given = {"kind": "instance", "instance": value}
        if accepted(NodeSettings, given, "instance", is_plain=text == PLAIN):
            assert re.fullmatch(r"[a-z]+:[A-Za-z0-9][A-Za-z0-9_-]*", value, re.ASCII)


@pytest.mark.parametrize("account", ACCOUNTS)
@given(image=TEXT.filter(bool))
@settings(max_examples=10)
def test_an_image_is_sent_as_it_is(provider: NotingServer, account: type[Account], image: str) -> None:
    settings = RentedNode(max_usd=1.0, image=image)
    spec = MachineSpec(name="plr-1", public_key=PUBLIC_KEY, disk_gb=100, image=settings.image)
    offer = Offer(
        provider=account.name, id=OFFERS[account], gpu_type="H100", gpu_count=1, vram_gb=80, usd_per_hour=1, region="r"
    )
    cloud: Any = account("key", provider.url, min_interval_s=0)
    provider.asked.clear()
    with suppress(InfraError):  # there is no such machine
        cloud.create(offer, spec)
    body = json.loads(provider.asked[-1][2])
    sent = body.get("pod", body)
    assert image in (sent.get("image"), sent.get("os")) or sent["image"] == {"family": image}


@given(names=st.lists(TEXT, min_size=1, max_size=3), field=st.sampled_from(["gpu_types", "regions"]))
@example(names=["漢"], field="gpu_types")
@example(names=["  "], field="gpu_types")
@example(names=[""], field="regions")
@example(names=[PLAIN], field="gpu_types")
@example(names=[PLAIN], field="regions")
@settings(max_examples=150)
def test_a_name_of_a_gpu_or_a_region_is_refused_or_not_every_one(names: list[str], field: str) -> None:
    given = {"max_usd": 1.0, "query": {field: names}}
    node = accepted(RentedNode, given, field, is_plain=names == [PLAIN])
    if node is None:
        return
    nothing = Offer(
        provider="sky", id="1", gpu_type="_", gpu_count=1, vram_gb=80, usd_per_hour=1, region="\0", is_secure=True
    )
    assert field in node.query.misses(nothing)


@given(index=TEXT.map(lambda text: f"https://a/{text}") | TEXT)
@example(index=f"https://a/{PLAIN}")
@settings(max_examples=30, deadline=None)
def test_a_package_index_is_refused_or_one_argument_of_the_installer(index: str) -> None:
    valid = {"kind": "ssh", "host": "me@node", "python": "/usr/bin/python3", "package_index": index}
    if accepted(NodeSettings, valid, "package_index", is_plain=index == f"https://a/{PLAIN}") is None:
        return
    assume(index)
    with folder_of_its_own() as folder:
        (folder / "uv").write_text(f'#!/bin/sh\nexec {sys.executable} -c {shlex.quote(SHOW_ARGUMENTS)} "$@"\n')
        (folder / "uv").chmod(0o755)
        (folder / "job.json").write_text(json.dumps({"installer": "uv", "index": index, "requirements": ["a==1"]}))
        done = subprocess.run(
            [sys.executable, "-I", environment_builder.__file__, str(folder)],
            cwd=folder,
            env={"PATH": f"{folder}:{os.environ['PATH']}"},
            capture_output=True,
            check=True,
        )
        assert done.stdout.split(b"\0")[-1] == index.encode()


@given(text=TEXT, command=TEXT)
@settings(max_examples=20)
def test_a_command_of_the_setup_is_run_as_it_is(text: str, command: str) -> None:
    with folder_of_its_own() as folder:
        written = f"printf %s {shlex.quote(text)} > {folder}/written"
        node = RentedNode(max_usd=1.0, setup=(written,), root=f"{folder}/root")
        set_up(LocalSession(sys.executable), node, until=math.inf)
        assert (folder / "written").read_bytes() == text.encode()


@given(extra_args=st.lists(TEXT, max_size=4), kind=st.sampled_from(["sglang", "vllm"]))
@example(extra_args=[PLAIN], kind="vllm")
@settings(max_examples=20)
def test_arguments_of_an_engine_are_refused_or_arrive(extra_args: list[str], kind: str) -> None:
    given = {"kind": kind, "python": sys.executable, "extra_args": extra_args, "dtype": "float32"}
    engine = accepted(EngineConfig, given, "extra_args", is_plain=extra_args == [PLAIN])
    if engine is None:
        return
    model = InputModel(name="base", model=ModelConfig(path="/models/a"), digest="")
    job = ServeJob(model=model, port=1, context_length=128, engine=engine)
    # As it travels: in job.json.
    launch = render_launch(ServeJob.model_validate_json(job.model_dump_json()), Path("/models/a"), on_gpu=False)
    python, *words = launch.argv
    done = subprocess.run([python, "-c", SHOW_ARGUMENTS, *words], capture_output=True, check=True)
    num = len(extra_args)
    assert done.stdout.split(b"\0")[len(words) - num :] == [text.encode() for text in extra_args]


@given(text=TEXT, is_hop=st.booleans())
@example(text=PLAIN, is_hop=False)
@example(text=PLAIN, is_hop=True)
@settings(max_examples=150)
def test_a_machine_on_the_way_is_refused_or_one_word(text: str, is_hop: bool) -> None:
    value = f"bastion,{text}" if is_hop else text
    valid = {"kind": "ssh", "host": "me@node", "python": "/usr/bin/python3", "proxy_jump": value}
    if accepted(NodeSettings, valid, "proxy_jump", is_plain=text == PLAIN):
        assert not value or re.fullmatch(r"[\w.@:\[\],-]+", value, re.ASCII)
        assert not any(hop.startswith("-") for hop in value.split(","))


@given(name=TEXT.map(lambda text: text.replace("/", "|")).filter(lambda text: text not in ("", ".", "..")))
@settings(max_examples=20)
def test_a_configuration_of_openssh_is_read_where_it_lies(name: str) -> None:
    with folder_of_its_own() as folder:
        (folder / name).write_text("Host box\n  HostName 10.0.0.7\n")
        assert read_ssh_config("box", str(folder / name)).host == "10.0.0.7"


@given(text=TEXT)
@example(text=PLAIN)
@example(text="a/../../b")
@example(text="a//b")
@example(text="~")
@settings(max_examples=60)
def test_a_store_is_refused_or_lies_where_it_says(text: str) -> None:
    with folder_of_its_own() as folder:
        try:
            store = ObjectStore(f"file://{folder}/in/{text}")
        except PermanentInfraError:
            assert text != PLAIN
            return
        store.write("report.html", b"content")
        [written] = [path for path in folder.rglob("*") if path.is_file()]
        assert written == folder / "in" / text / "report.html"
        assert list(store.list()) == ["report.html"] and store.read_small("report.html") == b"content"
