"""Files to and from a machine that is reached over SSH: this project against ssh, scp, rsync and sftp.

    python benchmarks/transfer.py [--megabytes 1024] [--shards 200] [--files 2000] [--round-trip-ms 50] [--rounds 3]

An OpenSSH server of its own on loopback, all programs with the same key and cipher (AES-GCM); with --round-trip-ms
behind a proxy that holds everything back. Every contender connects anew, and they take turns within a round.

    one file    ours: publish_directory and pull_run, which verify digests on both sides and publish atomically
                ssh cat, scp, rsync -W: none of them verifies the content
    shards      of 1 MiB, as datasets and adapters have; against rsync
    many files  of 4 KiB; against paramiko's sftp.put, the usual way from Python, on a tenth of them, and rsync
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import paramiko
from side_by_side import (
    REPOSITORY,
    describe_machine,
    need_programs,
    range_of,
    render_machine,
    render_table,
    write_results,
)

sys.path.insert(0, str(REPOSITORY))
from rollouts.infra.node import SSHAccess
from rollouts.infra.ssh.ssh_session import SSHSession
from rollouts.infra.sync.mirror import pull_run
from rollouts.infra.sync.push import publish_directory
from tests.infra.delay_proxy import delayed_port
from tests.infra.ssh_server import running_server

SMALL_FILE_BYTES = 4096
SHARD_BYTES = 1 << 20
SFTP_SHARE = 10
"""sftp.put takes a tenth of the files; its time is multiplied."""
CIPHER = "aes128-gcm@openssh.com"


def main() -> None:
    options = read_options()
    need_programs("sshd", "ssh", "scp", "rsync")
    machine = describe_machine(options.threads)
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        running_server(Path(folder) / "sshd", more_config="Subsystem sftp internal-sftp") as server,
        delayed(server.port, options.round_trip_ms) as port,
    ):
        seconds = measure(Bench(Path(folder), replace(server.access, port=port)), options)
    results = {"script": "transfer", "machine": machine, "seconds": seconds, **vars(options)}
    write_results(options.out, {name: value for name, value in results.items() if name not in ("out", "folder")})
    print(render_machine(machine) + "\n\n" + render(seconds, options))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024, help="MiB of the one file (default: 1024)")
    parser.add_argument("--shards", type=int, default=200, help="number of files of 1 MiB; 0 for none (default: 200)")
    parser.add_argument("--files", type=int, default=2000, help="number of small files; 0 for none (default: 2000)")
    parser.add_argument("--round-trip-ms", type=float, default=0.0, help="distance of the machine (default: 0)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every contender (default: 3)")
    parser.add_argument("--folder", type=Path, help="where files go (default: a temporary folder), better not a disk")
    parser.add_argument("--threads", type=int, default=2, help="noted with the machine; nothing here uses them")
    parser.add_argument("--out", type=Path, help="file for the figures")
    return parser.parse_args()


@contextmanager
def delayed(port: int, round_trip_ms: float) -> Iterator[int]:
    """A port that leads to `port` over so long a way."""
    if not round_trip_ms:
        yield port
        return
    with delayed_port(port, one_way_ms=round_trip_ms / 2) as other:
        yield other


class Bench:
    """The files, and each way to bring them to the machine or back."""

    def __init__(self, folder: Path, access: SSHAccess) -> None:
        self.access = access
        self.source, self.target = folder / "source", folder / "target"
        self.small, self.shards = folder / "small", folder / "shards"
        self.programs_dir = folder / "programs"
        for directory in (self.source, self.small, self.shards, self.target):
            directory.mkdir()
        self._options = ["-i", access.key_file, "-c", CIPHER]
        settings = {"StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null", "LogLevel": "ERROR"}
        self._options += [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        self._host = f"{access.user}@{access.host}"

    @property
    def file(self) -> Path:
        """The one large file."""
        return self.source / "model.safetensors"

    def session(self) -> SSHSession:
        """A connection of ours."""
        return SSHSession(self.access, python=sys.executable, programs_dir=str(self.programs_dir))

    def push(self, source: Path) -> None:
        """Ours."""
        with self.session() as session:
            publish_directory(session, source, str(self.target / "ours"))

    def pull(self) -> None:
        """Ours, of the one large file."""
        with self.session() as session:
            pull_run(session, str(self.source), self.target / "ours")

    def ssh_cat_push(self) -> None:
        """The program that OpenSSH comes with, and a redirection."""
        with self.file.open("rb") as file:
            subprocess.run([*self._ssh(), self._host, f"cat > {self.target}/cat"], stdin=file, check=True)

    def ssh_cat_pull(self) -> None:
        """The same the other way."""
        with (self.target / "cat").open("wb") as file:
            subprocess.run([*self._ssh(), self._host, f"cat {self.file}"], stdout=file, check=True)

    def scp(self, *, is_push: bool) -> None:
        """One file by scp."""
        remote = f"{self._host}:{self.target / 'scp' if is_push else self.file}"
        ends = [str(self.file), remote] if is_push else [remote, str(self.target / "scp")]
        subprocess.run(["scp", "-q", "-P", str(self.access.port), *self._options, *ends], check=True)

    def rsync(self, source: Path, *, is_push: bool) -> None:
        """A directory by rsync."""
        remote = f"{self._host}:{self.target / 'rsync' if is_push else source}/"
        ends = [f"{source}/", remote] if is_push else [remote, str(self.target / "rsync")]
        subprocess.run(["rsync", "-aW", "-e", " ".join(self._ssh()), *ends], check=True)

    def sftp_put(self) -> None:
        """A part of the small files, one after the other."""
        transport = paramiko.Transport((self.access.host, self.access.port))
        transport.connect(
            username=self.access.user, pkey=paramiko.Ed25519Key.from_private_key_file(self.access.key_file)
        )
        client = paramiko.SFTPClient.from_transport(transport)
        assert client is not None
        client.mkdir(str(self.target / "sftp"))
        for path in sorted(self.small.iterdir())[::SFTP_SHARE]:
            client.put(str(path), str(self.target / "sftp" / path.name))
        transport.close()

    def clean(self) -> None:
        """Remove what arrived."""
        shutil.rmtree(self.target)
        self.target.mkdir()

    def _ssh(self) -> list[str]:
        return ["ssh", "-p", str(self.access.port), *self._options]


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds over the rounds, by work and by contender."""
    with bench.file.open("wb") as file:
        for _ in range(options.megabytes):
            file.write(os.urandom(1 << 20))
    for number in range(options.files):
        (bench.small / f"{number:05d}.json").write_bytes(os.urandom(SMALL_FILE_BYTES))
    for number in range(options.shards):
        (bench.shards / f"{number:05d}.arrow").write_bytes(os.urandom(SHARD_BYTES))
    works: dict[str, dict[str, Callable[[], None]]] = {
        "push": {
            "ours": lambda: bench.push(bench.source),
            "ssh cat": bench.ssh_cat_push,
            "scp": lambda: bench.scp(is_push=True),
            "rsync": lambda: bench.rsync(bench.source, is_push=True),
        },
        "pull": {
            "ours": bench.pull,
            "ssh cat": bench.ssh_cat_pull,
            "scp": lambda: bench.scp(is_push=False),
            "rsync": lambda: bench.rsync(bench.source, is_push=False),
        },
    }
    if options.shards:
        works["shards"] = {
            "ours": lambda: bench.push(bench.shards),
            "rsync": lambda: bench.rsync(bench.shards, is_push=True),
        }
    if options.files:
        works["small files"] = {
            "ours": lambda: bench.push(bench.small),
            "sftp.put": bench.sftp_put,
            "rsync": lambda: bench.rsync(bench.small, is_push=True),
        }
    seconds: dict[str, dict[str, list[float]]] = {
        work: {name: [] for name in contenders} for work, contenders in works.items()
    }
    for number in range(options.rounds):
        for work, contenders in works.items():
            for name in list(contenders) if number % 2 == 0 else reversed(contenders):
                began = time.perf_counter()
                contenders[name]()
                factor = SFTP_SHARE if name == "sftp.put" else 1
                seconds[work][name].append(factor * (time.perf_counter() - began))
                bench.clean()
    return seconds


def render(seconds: Mapping[str, Mapping[str, list[float]]], options: argparse.Namespace) -> str:
    """One table: what each took, and how many times faster ours is."""
    num_bytes_of = {"shards": options.shards * SHARD_BYTES, "small files": options.files * SMALL_FILE_BYTES}
    rows = []
    for work, contenders in seconds.items():
        num_bytes = num_bytes_of.get(work, options.megabytes << 20)
        for name, taken in contenders.items():
            ratios = [other / ours for other, ours in zip(taken, contenders["ours"], strict=True)]
            speeds = range_of([num_bytes / 1e6 / each for each in taken])
            rows.append([work, name, range_of(taken).render(2), speeds.render(0), range_of(ratios).render(2)])
    return render_table(["work", "contender", "seconds", "MB/s", "ours is faster by"], rows)


if __name__ == "__main__":
    main()
