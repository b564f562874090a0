"""Pins which host keys are believed, and why; OpenSSH's own programs make the files.

Without it somebody in between reads every secret that a run sends to its node.
"""

import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.infra.errors import HostKeyError
from rollouts.infra.ssh.host_keys import HostKey, HostKeyEvidence, HostKeyPolicy, noted_fingerprint, parse_known_hosts
from tests.infra.ssh_server import fingerprint_of, make_key


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    make_key(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def key(key_file: Path) -> HostKey:
    [(_, found)] = parse_known_hosts("h " + Path(f"{key_file}.pub").read_text(), "h")
    return found


@pytest.fixture
def known_hosts(tmp_path: Path) -> Path:
    return tmp_path / "known_hosts"


@pytest.fixture
def policy(known_hosts: Path) -> HostKeyPolicy:
    return HostKeyPolicy(host="h", port=22, pinned="", known_hosts=(known_hosts,), first_use_file=None)


OTHER = HostKey("ssh-ed25519", b"another")


def test_a_fingerprint_is_the_one_that_openssh_prints(key: HostKey, key_file: Path) -> None:
    assert key.fingerprint == fingerprint_of(key_file)


def test_a_pinned_key_is_believed_and_no_other_even_if_a_file_knows_it(
    policy: HostKeyPolicy, key: HostKey, key_file: Path, known_hosts: Path
) -> None:
    known_hosts.write_text("h " + Path(f"{key_file}.pub").read_text())
    assert replace(policy, pinned=key.fingerprint).check(key) is HostKeyEvidence.PINNED
    with pytest.raises(HostKeyError, match=r"h shows the host key SHA256:\S+, but expected is SHA256:x"):
        replace(policy, pinned="SHA256:x").check(key)


def test_a_pinned_key_is_noted_once_for_who_reads_the_file(policy: HostKeyPolicy, key: HostKey, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    noting = replace(policy, pinned=key.fingerprint, known_hosts=(ours,), first_use_file=ours)
    for _ in range(2):
        assert noting.check(key) is HostKeyEvidence.PINNED
    assert len(ours.read_text().splitlines()) == 1 and noted_fingerprint(ours) == key.fingerprint


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("port", [22, 2222])
def test_a_key_in_known_hosts_is_believed_and_another_is_a_change(
    policy: HostKeyPolicy, key: HostKey, key_file: Path, known_hosts: Path, port: int, hashed: bool
) -> None:
    name = "h" if port == 22 else "[h]:2222"
    known_hosts.write_text(f"{name},other " + Path(f"{key_file}.pub").read_text())
    if hashed:
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known_hosts)], check=True, capture_output=True)
        assert known_hosts.read_text().startswith("|1|")
    policy = replace(policy, port=port)
    assert policy.check(key) is HostKeyEvidence.KNOWN_HOSTS
    with pytest.raises(HostKeyError, match=r"known_hosts has another one.*ssh-keygen -R"):
        policy.check(OTHER)
    with pytest.raises(HostKeyError, match="that key is unconfirmed"):
        replace(policy, port=port + 1).check(key)


def test_a_configuration_may_name_the_null_device_for_no_known_hosts(policy: HostKeyPolicy, key: HostKey) -> None:
    with pytest.raises(HostKeyError, match="that key is unconfirmed"):
        replace(policy, known_hosts=(Path("/dev/null"),)).check(key)


@pytest.mark.parametrize("hashed", [False, True])
def test_a_name_is_found_however_its_letters_are_written(
    policy: HostKeyPolicy, key: HostKey, key_file: Path, known_hosts: Path, hashed: bool
) -> None:
    """As OpenSSH's client writes them, and Debian's hashes what it writes."""
    known_hosts.write_text("box.lab " + Path(f"{key_file}.pub").read_text())
    if hashed:
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known_hosts)], check=True, capture_output=True)
    assert replace(policy, host="Box.Lab").check(key) is HostKeyEvidence.KNOWN_HOSTS


def test_a_host_with_an_alias_is_looked_up_under_it_whatever_its_port(
    policy: HostKeyPolicy, key: HostKey, key_file: Path, known_hosts: Path
) -> None:
    known_hosts.write_text("compute.12 " + Path(f"{key_file}.pub").read_text())
    aliased = replace(policy, port=2222, alias="compute.12")
    assert aliased.check(key) is HostKeyEvidence.KNOWN_HOSTS
    with pytest.raises(HostKeyError, match=r"ssh-keygen -R 'compute\.12'"):
        aliased.check(OTHER)


def test_patterns_and_markers_mean_what_openssh_says(policy: HostKeyPolicy, key: HostKey, key_file: Path) -> None:
    public = Path(f"{key_file}.pub").read_text()
    assert list(parse_known_hosts(f"*.lab,!bad.lab {public}", "a.lab")) == [("", key)]
    assert list(parse_known_hosts(f"*.lab,!bad.lab {public}", "bad.lab")) == []
    assert list(parse_known_hosts(f"@cert-authority h {public}", "h")) == []
    assert list(parse_known_hosts("# h x\n\nh ssh-ed25519 !!!\nh short", "h")) == []


def test_a_revoked_key_is_refused_even_when_it_is_pinned(
    policy: HostKeyPolicy, key: HostKey, key_file: Path, known_hosts: Path
) -> None:
    known_hosts.write_text("@revoked * " + Path(f"{key_file}.pub").read_text())
    with pytest.raises(HostKeyError, match="revoked"):
        replace(policy, pinned=key.fingerprint).check(key)


def test_an_unknown_host_is_refused_unless_first_use_is_allowed_and_then_it_is_known(
    policy: HostKeyPolicy, key: HostKey, tmp_path: Path
) -> None:
    with pytest.raises(HostKeyError, match=r"that key is unconfirmed.*node\.host_key"):
        policy.check(key)
    ours = tmp_path / "store" / "known_hosts"
    trusting = replace(policy, known_hosts=(*policy.known_hosts, ours), first_use_file=ours)
    assert trusting.check(key) is HostKeyEvidence.FIRST_USE
    assert stat.S_IMODE(ours.stat().st_mode) == 0o600
    assert trusting.check(key) is HostKeyEvidence.KNOWN_HOSTS
    with pytest.raises(HostKeyError, match="another one"):
        trusting.check(OTHER)
