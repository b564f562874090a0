"""Pins that a machine which runs a stage can run no code here, nor on the machine where the stage continues.

A stage's files are fetched from its machine, and go along to the next one. Without these tests a `json.py` among them
would be imported by the next job, as Python imports from the folder that it stands in.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from rollouts.infra.errors import DiskFullError, PermanentInfraError
from rollouts.infra.jobs import JobSpec, start_or_attach
from rollouts.infra.session import LocalSession
from rollouts.infra.sync import mirror
from rollouts.infra.sync.mirror import is_job_file, pull_run
from rollouts_core.run_directory import RunDirectory
from tests.infra.shell_jobs import wait_for_end

REPOSITORY = Path(__file__).parents[2]
PLANTED = "import pathlib; pathlib.Path({!r}).touch()\n"
MODULES = ("rollouts_core.py", "rollouts_core/__init__.py", "json.py", "sitecustomize.py", "torch/__init__.py")


def plant(folder: Path, harm: Path) -> None:
    """Put modules into a folder that would be imported in place of the real ones."""
    for name in MODULES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(PLANTED.format(str(harm)))


def ended(session: LocalSession, run_dir: Path) -> int:
    """The exit code of the job's attempt under way."""
    status = wait_for_end(session, run_dir)
    assert status.exit is not None
    return status.exit.code


def test_only_files_that_a_job_writes_are_fetched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    kept = {"metrics.jsonl", "samples/step_000010.jsonl", "checkpoints/step_000010/manifest.json", "exit-1.json"}
    for name in kept:
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text("{}")
    plant(there, tmp_path / "harm")
    for name in ("samples/json.py", "checkpoints/json.py", "exit-1.py", "engine-1.txt/json.py", "samples/a/b.jsonl"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text(PLANTED)
    assert pull_run(LocalSession(sys.executable), str(there), here) == len(kept)
    assert {str(path.relative_to(here)) for path in here.rglob("[!.]*") if path.is_file()} == kept
    assert "is not copied: jobs do not write files of that name" in caplog.text


def test_every_file_of_a_run_directory_is_fetched() -> None:
    directory = RunDirectory(Path("/run"))
    files = [directory.job, directory.log, directory.metrics, directory.events, directory.gpu_use, directory.result]
    names = [str(path.relative_to("/run")) for path in (*files, directory.end_request)]
    further = ["checkpoints/step_000100/trainer/state.json", "checkpoints/step_000100/config.json", "engine-0.txt"]
    further.append("checkpoints/step_000100/adapter/adapter_model.safetensors")
    assert all(map(is_job_file, [*names, *further, "samples/step_000010.jsonl", "router.txt", "finish-asked"]))


def test_a_job_imports_nothing_from_where_it_stands(tmp_path: Path) -> None:
    run_dir, harm = tmp_path / "stage", tmp_path / "harm"
    run_dir.mkdir()
    plant(run_dir, harm)
    session, job = LocalSession(sys.executable), f"{run_dir}/job.json"
    started = (sys.executable, "-P", "-m", "rollouts_core", "sft", job)
    # As code of a reward may start a program, without -P.
    inside = (sys.executable, "-c", "import json, os; print(os.getcwd())")
    for argv, code in ((started, 2), (inside, 0)):
        start_or_attach(session, JobSpec(run_dir=str(run_dir), argv=argv, job={}))
        assert ended(session, run_dir) == code
        assert not harm.exists()
    assert (run_dir / "log.txt").read_text().splitlines()[-1] == str(run_dir / ".job" / "work")


def test_every_module_is_started_without_the_folder_that_it_stands_in() -> None:
    """A command line with -m and without -P imports from the current folder first."""
    wrong = []
    for folder in ("flows", "tasks", "infra", "rollouts_core"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.List | ast.Tuple):
                    words = [each.value for each in node.elts if isinstance(each, ast.Constant)]
                    if "-m" in words and "-P" not in words[: words.index("-m")]:
                        wrong.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    assert wrong == []


@pytest.mark.parametrize(
    "name",
    [
        *(
            "exit-\uff11.json",
            "metrics.jsonl\n",
            "samples/a\x1b[2J.jsonl",
            "checkpoints/step_1/a\nb.json",
            "Metrics.jsonl",
        ),
        *("checkpoints/json.py", "checkpoints//manifest.json", "checkpoints/a/b/c/d/e.json", ".job/work/json.py"),
    ],
)
def test_a_name_that_only_looks_like_a_jobs_is_not_fetched(name: str) -> None:
    assert not is_job_file(name)


@pytest.mark.parametrize(
    ("name", "size", "sentence"),
    [
        ("log.txt", mirror.MAX_TEXT_BYTES + 1, "log.txt has"),
        ("checkpoints/step_000001/model.safetensors", 1 << 60, None),
    ],
)
def test_a_machine_cannot_fill_the_disk_here(
    name: str, size: int, sentence: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    manifest = there / "checkpoints/step_000001/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    answer = {"files": {name: [size, 1], "checkpoints/step_000001/manifest.json": [2, 1]}, "digest": "sha256"}
    monkeypatch.setattr("rollouts.infra.sync.mirror.read_answer", lambda _: json.loads(json.dumps(answer)))
    with pytest.raises(PermanentInfraError if sentence else DiskFullError, match=sentence):
        pull_run(LocalSession(sys.executable), str(there), tmp_path / "here")
    assert [path.name for path in (tmp_path / "here").rglob("[!.]*")] == []


def test_a_machine_names_no_more_files_than_a_job_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(mirror, "MAX_FILES", 2)
    for number in range(3):
        (tmp_path / "there" / f"exit-{number}.json").touch()
    with pytest.raises(PermanentInfraError, match="has 3 files, and a job writes 2 at most"):
        pull_run(LocalSession(sys.executable), str(tmp_path / "there"), tmp_path / "here")
