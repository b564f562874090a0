"""Pins what people may write about a machine over SSH, and what a node record of it says.

Without it a typing error becomes a wrong login, or text from a setting reaches a shell.
"""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from rollouts.flows.form import parse_pipeline
from rollouts.infra.errors import LoginError
from rollouts.infra.node import LocalNode, Node, NodeSettings, SSHNode
from rollouts.infra.providers import open_session, provision_node, release_node
from rollouts.infra.providers.ssh import read_access
from rollouts_core.errors import ConfigError
from tests.infra.ssh_server import SSHServer, make_key

GIVEN = {"kind": "ssh", "host": "me@box:2222", "python": "/opt/venv/bin/python"}
DATA = {name: f"/data/{name}.jsonl" for name in ("sft", "prompts", "selection", "heldout")}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("me@box", ("me", "box", 22)),
        ("me@10.0.0.7:2222", ("me", "10.0.0.7", 2222)),
        ("me@[fe80::1]", ("me", "fe80::1", 22)),
        ("me@[::1]:2222", ("me", "::1", 2222)),
    ],
)
def test_an_address_is_read(text: str, parts: tuple[str, str, int]) -> None:
    access = read_access(SSHNode(host=text, python="/p"), Path("/store"))
    assert (access.user, access.host, access.port) == parts


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        *(
            ("host", host, "expected user@host, user@host:port or a name in ~/.ssh/config")
            for host in (
                "-box",
                "bo x",
                "box:22",
                "me@",
                "-o@box",
                "me@-oProxyCommand=x",
                "me@a b",
                "me@box:0",
                "me@box:70000",
                "me@::1",
            )
        ),
        ("host", "me@box:22\n", "expected user@host"),
        ("host_key", "SHA256:short", "expected a fingerprint"),
        ("host_key", "aa:bb:cc", "expected a fingerprint"),
        *(
            ("proxy_jump", jump, "expected user@host:port")
            for jump in ("-oProxyCommand=x", "a b", "a,", "a;b", "$(x)", "a\n")
        ),
        ("root", "runs", "expected a path on the machine that begins with / or ~/"),
        ("python", "python3", "expected the absolute path of a Python interpreter"),
        ("python", "/bin/$(x)", "expected the absolute path of a Python interpreter"),
    ],
)
def test_a_misfit_is_one_sentence(setting: str, value: str, expected: str) -> None:
    settings = {"model": {"path": "/model"}, "data": DATA, "node": {**GIVEN, setting: value}}
    with pytest.raises(ConfigError) as caught:
        parse_pipeline(settings, Path("a.toml"))
    assert expected in str(caught.value) and repr(value) in str(caught.value)


def test_unknown_providers_and_keys_are_named() -> None:
    for node, sentence in (
        ({"kind": "shh"}, "node.kind is 'shh': expected one of local, ssh"),
        ({**GIVEN, "hots": "x"}, "unknown key node.hots; did you mean host?"),
        ({"kind": "ssh", "python": "/p"}, "host is missing"),
        ({"kind": "local", "host": "me@box"}, "unknown key node.host"),
    ):
        with pytest.raises(ConfigError, match=sentence.replace(".", r"\.")):
            parse_pipeline({"model": {"path": "/model"}, "data": DATA, "node": node}, Path("a.toml"))


def test_the_form_tells_providers_apart() -> None:
    adapter: TypeAdapter[NodeSettings] = TypeAdapter(NodeSettings)
    assert isinstance(adapter.validate_python(GIVEN), SSHNode)
    assert isinstance(adapter.validate_python({"kind": "local"}), LocalNode)
    with pytest.raises(ValidationError):
        adapter.validate_python({"kind": "moon"})
    assert all(field["description"] for field in SSHNode.model_json_schema()["properties"].values())


@pytest.mark.slow
def test_a_machine_becomes_a_node_that_is_plain_json(
    ssh_server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = ssh_server.access
    settings = SSHNode(
        host=access.address,
        key_file=access.key_file,
        host_key=access.host_key,
        root="~/some runs/$(x)",
        python=sys.executable,
    )
    node = provision_node(settings, tmp_path / "store")
    assert node.root == str(Path.home() / "some runs" / "$(x)") and node.mirror == str(tmp_path / "store")
    assert node.believed_by == "pinned" and not Path(node.root).exists()
    record = json.loads(json.dumps(dataclasses.asdict(node)))
    assert TypeAdapter(Node).validate_python(record) == node
    with open_session(node) as session:
        assert session.run(["echo", "there"], timeout_s=30).stdout == b"there\n"
    release_node(node)


@pytest.mark.slow
def test_a_login_that_fails_is_said_before_there_is_a_node(ssh_server: SSHServer, tmp_path: Path) -> None:
    make_key(tmp_path / "stranger")
    settings = SSHNode(
        host=ssh_server.access.address,
        key_file=str(tmp_path / "stranger"),
        host_key=ssh_server.access.host_key,
        python=sys.executable,
    )
    with pytest.raises(LoginError, match="cannot log in with"):
        provision_node(settings, tmp_path / "store")
