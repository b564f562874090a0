"""Object stores as a person uses them: results are published, and a next run begins with them.

Without it everything below could be right and a run still train for a day to find out that its bucket does not exist.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.flows.commands.fetch import pull
from rollouts.flows.form import load_pipeline
from rollouts_core.checkpoint import verify_checkpoint
from rollouts_core.errors import InputError
from tests.flows.refusals import assert_refused, refusal, write_config
from tests.infra.stores.s3_server import S3Server, environment_of, use
from tests.kit.commands import Rollouts
from tests.kit.small_pipeline import write_small_pipeline


def content_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.matrix
@pytest.mark.slow
def test_a_run_publishes_its_results_and_the_next_one_begins_with_them(
    rollouts: Rollouts, bucket: str, s3_server: S3Server, tmp_path: Path
) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="sft", run__publish=f"s3://{bucket}/team/")
    url = f"s3://{bucket}/team/small"
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert f"Published:   {url}" in output
    [run] = (rollouts.store / "runs").iterdir()
    published = s3_server.contents(bucket, "team/small/")
    manifest = json.loads(published["team/small/publication.json"])
    assert published[f"team/small/{manifest['records']}/report.html"] == (run / "report.html").read_bytes()
    assert set(published) == {"team/small/publication.json", *(f"team/small/{name}" for name in manifest["files"])}
    assert not [path for path in rollouts.store.rglob("*") if path.is_file() and b"CANARY" in path.read_bytes()]

    code, output = rollouts_pull(rollouts, url, tmp_path / "pulled")
    assert code == 0, output
    verify_checkpoint(tmp_path / "pulled")
    assert content_of(tmp_path / "pulled") == content_of(run / "checkpoint")
    code, output = rollouts_pull(rollouts, url, tmp_path / "pulled")
    assert code == 2 and "pulled exists" in output

    s3_server.client().upload_file(str(tmp_path / "small/sft.jsonl"), bucket, "data/sft.jsonl")
    second = write_config(
        tmp_path / "small",
        mode="sft",
        model__path=url,
        data__sft=f"s3://{bucket}/data/sft.jsonl",
        run__name="next",
        run__publish=f"s3://{bucket}/team",
        run__publish_checkpoints=True,
    )
    code, output = rollouts.run("run", str(second))
    assert code == 0, output
    [following] = (rollouts.store / "runs").glob("next-*")
    assert json.loads((following / "run.json").read_text())["config"]["model"]["path"] == url
    assert url in (following / "config.toml").read_text()
    assert load_pipeline(following / "config.toml").run.publish_checkpoints
    [sft] = [path for path in (rollouts.store / "stages").glob("sft-*") if "inputs" in (path / "job.json").read_text()]
    newest = f"team/next/stages/{sft.name}/step_000040/"
    published = s3_server.contents(bucket, newest)
    assert {f"{newest}{name}" for name in content_of(sft / "checkpoints/step_000040")} == set(published)
    assert json.loads((sft / "job.json").read_text())["model"]["digest"] == verify_checkpoint(run / "checkpoint").digest


def test_what_is_no_url_is_told_from_what_one_could_fetch(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is on this machine already: pull downloads from an object store"):
        pull(str(tmp_path), tmp_path / "pulled")
    with pytest.raises(InputError, match="my-run is not a URL"):
        pull("my-run", tmp_path / "pulled")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("{here}/file/best", "{here}/file is a file"),
        ("{here}/file/deeper/best", "Not a directory"),
        ("/proc/none/best", "No such file or directory"),
        ("{here}/" + 300 * "x", "File name too long"),
    ],
)
def test_a_place_that_cannot_be_is_one_sentence(place: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("rows")
    target = place.format(here=tmp_path)
    result = CliRunner().invoke(app, ["pull", f"file://{tmp_path}/file", target], catch_exceptions=False)
    assert result.exit_code == 2
    assert result.stderr == f"rollouts: {target} cannot be written: {words.format(here=tmp_path)}\n"


def rollouts_pull(rollouts: Rollouts, url: str, target: Path) -> tuple[int, str]:
    """The command, which knows no store."""
    process = rollouts.start("pull", url, str(target), with_store=False)
    return process.wait(60), rollouts.said()


@pytest.mark.slow
def test_a_missing_bucket_is_refused_before_anything_is_started(folder: Path, bucket: str) -> None:
    assert_refused(write_config(folder, run__publish=f"s3://{bucket}-2/team"), f"there is no bucket {bucket}-2")


@pytest.mark.slow
def test_a_bucket_that_may_not_be_written_is_refused_before_anything_is_started(
    folder: Path, bucket: str, s3_server: S3Server
) -> None:
    s3_server.deny(bucket, "s3:PutObject")
    assert_refused(write_config(folder, run__publish=f"s3://{bucket}/team"), f"s3://{bucket}/team", "AWS_ACCESS_KEY_ID")


def test_data_that_is_not_there_is_refused(folder: Path, bucket: str) -> None:
    assert_refused(write_config(folder, data__sft=f"s3://{bucket}/sft.jsonl"), f"nothing at s3://{bucket}/sft.jsonl")


def test_a_url_with_a_password_is_refused_and_not_repeated(folder: Path) -> None:
    sentence = refusal(write_config(folder, run__publish="s3://key:PASSWORD@bucket/x"))
    assert "run.publish: the address contains a user or password" in sentence and "PASSWORD" not in sentence


def test_checkpoints_without_a_place_to_publish_them_are_refused(folder: Path) -> None:
    assert "publish_checkpoints needs publish" in refusal(write_config(folder, run__publish_checkpoints=True))


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_no_mistake_of_the_user(
    rollouts: Rollouts, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, environment_of(1))
    code, output = rollouts.run("run", str(write_config(folder, run__publish="s3://bucket/team")))
    assert code == 1
    assert "does not answer" in output and "Traceback" not in output
    assert not (rollouts.store / "stages").exists()
