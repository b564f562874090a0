"""A number of a process that was read from a file means a process only with its start, its boot and its namespace."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.infra.process_identity import ProcessIdentity, identify


def test_a_process_is_known_again_while_it_lives() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = identify(child.pid)
    assert known.is_here
    child.communicate(b"\n")
    assert not known.is_here


def test_a_number_that_was_given_again_means_another_process() -> None:
    me = identify(os.getpid())
    assert me.is_here
    assert not dataclasses.replace(me, started="1").is_here
    assert not dataclasses.replace(me, boot_id="before").is_here
    assert not dataclasses.replace(me, namespace="pid:[1]").is_here


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists() or os.geteuid() != 0, reason="needs namespaces and root")
def test_a_process_of_another_container_is_none_of_this_one() -> None:
    """The first process of a container has the number 1, which is another one's everywhere else."""
    program = "import json, dataclasses; from rollouts.infra.process_identity import identify; "
    program += "import os, sys; print(json.dumps(dataclasses.asdict(identify(os.getpid()))), flush=True); input()"
    inside = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert inside.stdout is not None
    line = inside.stdout.readline()
    if not line:
        pytest.skip("no namespaces here")
    found = ProcessIdentity(**json.loads(line))
    assert found.pid < 100 and not found.is_here
    inside.communicate("\n")
