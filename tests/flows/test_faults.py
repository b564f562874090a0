"""What is promised when something dies: real runs whose programs, flows and engines are killed, and then run again.

Without these tests a retry could train anew what is there, go on from a broken checkpoint, sample from old weights,
or leave processes behind that nobody stops; every one of them would still end with a report that looks right.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import tomli_w

from rollouts.flows.own_server.lend import local_server
from rollouts.flows.prefect_api import ask
from rollouts_core.metrics import read_json_lines, read_metrics
from tests.kit.commands import Rollouts, join_home
from tests.kit.runs import (
    LONG,
    NUM_STEPS,
    assert_goes_on,
    assert_last_step_is_saved,
    assert_nothing_is_left,
    assert_resumed,
    digests_of,
    end_flow,
    events_of,
    exits_of,
    flip_a_byte,
    last_run,
    paused,
    program_of,
    run_dir,
    run_until,
    task_states,
)
from tests.kit.small_pipeline import small_settings, write_small_pipeline
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow


# ── the kills ──


@pytest.mark.matrix
def test_a_killed_rl_fails_the_run_and_the_same_command_goes_on_from_its_checkpoint(
    rollouts: Rollouts, after_sft: Path
) -> None:
    config = after_sft
    config.write_text(tomli_w.dumps(small_settings(**LONG, training__sft__checkpoint_every=100)))
    process, rl = run_until(rollouts, config, "rl")
    os.kill(program_of(rl), signal.SIGKILL)
    assert process.wait(60) == 1
    assert "signal 9 killed it" in rollouts.said()
    assert rollouts.said().endswith("Finished work is kept: the same command continues from there.\n")
    assert "Traceback" not in rollouts.said()
    assert_nothing_is_left(rollouts)

    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    states = task_states(rollouts.store, of_run=last_run(rollouts)["run_id"])
    for stage in ("sft", "select-sft"):  # of the run before both
        assert exits_of(run_dir(rollouts, stage)) == ["exit-1.json"]
        assert states[stage] == "Cached"
    assert exits_of(rl) == ["exit-1.json", "exit-2.json"]
    assert states["rl"] == "Completed"
    assert_resumed(rl, attempt=2)


@pytest.mark.matrix
def test_a_run_whose_supervisor_is_killed_resumes_by_itself(rollouts: Rollouts, tmp_path: Path) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="sft", **LONG)
    process, sft = run_until(rollouts, config, "sft")
    os.kill(json.loads((sft / ".job/meta-1.json").read_text())["supervisor_pid"], signal.SIGKILL)
    assert process.wait(120) == 0, rollouts.said()
    assert exits_of(sft) == ["exit-2.json"]  # nobody was left to write down how the first attempt ended
    assert_resumed(sft, attempt=2)


@pytest.mark.matrix
def test_ctrl_c_ends_the_job_although_a_dead_flow_wanted_it_too_and_the_next_run_resumes_it(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="rl", **LONG)
    process, rl = run_until(rollouts, config, "rl")
    end_flow(process, signal.SIGKILL)
    assert_goes_on(rl)
    with paused(program_of(rl)):
        process = rollouts.start("run", str(config))
        rollouts.wait_until_said("rl             attached to the running job", process)
        process.send_signal(signal.SIGINT)
        wait_until((rl / ".job/cancel-1").exists, what=f"the cancel request of {rl}")
    assert process.wait(60) == 130, rollouts.said()
    assert "Finished work is kept: the same command continues from there." in rollouts.said()
    assert "Traceback" not in rollouts.said()
    assert_nothing_is_left(rollouts)
    assert json.loads((rl / "exit-1.json").read_text())["cancelled"]

    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert "rl             resumes from step " in output
    assert_resumed(rl, attempt=2)


@pytest.mark.matrix
def test_of_two_engines_one_may_be_gone_for_good_and_rl_goes_on_with_the_other(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="rl", deployment__num_engines=2, **LONG)
    process, rl = run_until(rollouts, config, "rl")
    (gone,) = rollouts.store.glob("stages/engine-*-1")
    os.kill(json.loads((gone / ".job/meta-1.json").read_text())["supervisor_pid"], signal.SIGKILL)
    os.kill(program_of(gone), signal.SIGKILL)
    assert process.wait(120) == 0, rollouts.said()
    port = json.loads((gone / "job.json").read_text())["port"]
    assert f"engine http://127.0.0.1:{port} was quarantined" in (rl / "log.txt").read_text()
    assert exits_of(rl) == ["exit-1.json"]
    assert read_metrics(rl / "metrics.jsonl")[-1]["step"] == NUM_STEPS
    assert_nothing_is_left(rollouts)


@pytest.mark.matrix
def test_a_killed_engine_comes_back_on_its_port_and_nothing_is_sampled_from_its_start_weights(
    rollouts: Rollouts, tmp_path: Path, after_sft: Path
) -> None:
    start = sorted((run_dir(rollouts, "sft") / "checkpoints").iterdir())[-1]
    config = write_small_pipeline(tmp_path / "rl", mode="rl", model__path=str(start), **LONG)
    process, rl = run_until(rollouts, config, "rl", event="weights_published")
    engine = run_dir(rollouts, "engine")
    os.kill(program_of(engine), signal.SIGKILL)
    assert process.wait(150) == 0, rollouts.said()

    assert len(events_of(engine, "started")) == 2
    assert exits_of(rl) == exits_of(engine) == ["exit-1.json"]
    assert json.loads((engine / "exit-1.json").read_text())["restarts"] == 1
    metrics = read_metrics(rl / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, NUM_STEPS + 1))
    # Each update makes one version: a step is sampled from as many updates as there were before it.
    num_updates = 0
    for line in metrics:
        samples = read_json_lines(rl / "samples" / f"step_{int(line['step']):06d}.jsonl")
        assert {version for sample in samples for version, _, _ in sample["policy_versions"]} == {num_updates}
        num_updates += not line["skipped"]
    assert num_updates > 5, "hardly anything was trained: the test shows nothing"


# ── two runs at once ──


@pytest.mark.matrix
def test_two_runs_at_once_train_their_common_sft_once(rollouts: Rollouts, tmp_path: Path) -> None:
    config = write_small_pipeline(tmp_path / "small")
    other_config = config.with_name("other.toml")
    other_config.write_text(tomli_w.dumps(small_settings(training__rl__replicate=1, run__name="other")))
    other = dataclasses.replace(rollouts, output=tmp_path / "other.txt")
    processes = [rollouts.start("run", str(config)), other.start("run", str(other_config))]
    codes = [process.wait(240) for process in processes]
    assert codes == [0, 0], f"{rollouts.said()}\n{other.said()}"
    for stage in ("sft", "select-sft"):  # of the run before both
        assert exits_of(run_dir(rollouts, stage)) == ["exit-1.json"]
        assert len(events_of(run_dir(rollouts, stage), "started")) == 1
    assert len(list(rollouts.store.glob("stages/rl-*"))) == 2
    assert len(list(rollouts.store.glob("runs/*/report.html"))) == 2
    assert_nothing_is_left(rollouts)


@pytest.mark.matrix
def test_ctrl_c_of_one_of_two_runs_leaves_their_common_sft_to_the_other(rollouts: Rollouts, tmp_path: Path) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="sft", **LONG)
    first, sft = run_until(rollouts, config, "sft")
    other = dataclasses.replace(rollouts, output=tmp_path / "other.txt")
    with paused(program_of(sft)):
        second = other.start("run", str(config))
        other.wait_until_said("sft            attached to the running job", second)
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130, rollouts.said()
    assert second.wait(120) == 0, other.said()
    assert exits_of(sft) == ["exit-1.json"]


@pytest.mark.matrix
def test_cancel_in_prefect_ends_a_run_of_a_terminal_as_ctrl_c_does(rollouts: Rollouts, tmp_path: Path) -> None:
    process, sft = run_until(rollouts, write_small_pipeline(tmp_path / "small", mode="sft", **LONG), "sft")
    (run_id,) = re.findall(r"/runs/flow-run/(\S+)", rollouts.said())
    with local_server(rollouts.store) as address:
        with paused(program_of(sft)):
            cancel = {"state": {"type": "CANCELLING"}, "force": False}  # what the UI's button sends
            ask(address, "POST", f"/flow_runs/{run_id}/set_state", cancel)
            wait_until((sft / ".job/cancel-1").exists, what=f"the cancel request of {sft}")
        assert process.wait(60) == 130, rollouts.said()
        assert ask(address, "GET", f"/flow_runs/{run_id}")["state_type"] == "CANCELLED"
    assert_last_step_is_saved(sft)
    assert_nothing_is_left(rollouts)


# ── what an earlier run left ──


@pytest.mark.matrix
def test_sft_alone_ends_with_the_selected_sft_checkpoint(finished_sft: Path) -> None:
    (run,) = (finished_sft / "store/runs").iterdir()
    record = json.loads((run / "run.json").read_text())
    assert [stage["stage"] for stage in record["stages"]] == ["sft", "select-sft", "evaluate"]
    selected = record["selected"]["sft"]
    (sft,) = (finished_sft / "store/stages").glob("sft-*")
    assert (run / "checkpoint/model.safetensors").read_bytes() == (
        sft / "checkpoints" / selected / "model.safetensors"
    ).read_bytes()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("harm", "step", "resumed_from"),
    [("changed", 100, None), ("deleted", 100, None), ("changed", 200, 100)],
)
def test_a_damaged_checkpoint_is_trained_again_and_is_the_same_as_before(
    rollouts: Rollouts, after_sft: Path, harm: str, step: int, resumed_from: int | None
) -> None:
    sft = run_dir(rollouts, "sft")
    digests = digests_of(sft)
    checkpoint = sft / "checkpoints" / f"step_{step:06d}"
    if harm == "changed":
        flip_a_byte(checkpoint / "model.safetensors")
    else:
        shutil.rmtree(checkpoint)

    code, output = rollouts.run("run", str(after_sft))
    assert code == 0, output
    assert "sft            run again, because the result of an earlier run is damaged" in output
    assert checkpoint.name in output
    assert digests_of(sft) == digests
    assert [event["step"] for event in events_of(sft, "resumed")] == ([resumed_from] if resumed_from else [])
    assert exits_of(run_dir(rollouts, "select-sft")) == ["exit-1.json"]  # equal checkpoints: not scored again


@pytest.mark.matrix
def test_a_store_that_was_moved_and_lost_a_record_of_prefects_cache_is_used_where_it_is(
    rollouts: Rollouts, after_sft: Path
) -> None:
    (record,) = rollouts.store.glob("prefect/results/sft-*")
    record.write_bytes(record.read_bytes()[:100])
    code, output = rollouts.run("run", str(after_sft))  # the fixture made the store in another folder
    assert code == 0, output
    stages = last_run(rollouts)["stages"]
    assert [stage["how"] for stage in stages] == ["reused"] * 3
    assert all(Path(stage["run_dir"]).is_relative_to(rollouts.store) for stage in stages)


@pytest.mark.matrix
def test_a_demonstration_more_trains_sft_anew(rollouts: Rollouts, after_sft: Path) -> None:
    data = after_sft.with_name("sft.jsonl")
    data.write_text(data.read_text() + data.read_text().splitlines()[0] + "\n")
    code, output = rollouts.run("run", str(after_sft))
    assert code == 0, output
    assert [len(exits_of(sft)) for sft in rollouts.store.glob("stages/sft-*")] == [1, 1]
    assert last_run(rollouts)["stages"][0]["how"] == "ran"


@pytest.mark.matrix
def test_fresh_trains_sft_anew_in_another_directory(rollouts: Rollouts, after_sft: Path) -> None:
    sft = run_dir(rollouts, "sft")
    code, output = rollouts.run("run", str(after_sft), "--fresh", "sft")
    assert code == 0, output
    (other,) = set(rollouts.store.glob("stages/sft-*")) - {sft}
    assert exits_of(sft) == exits_of(other) == ["exit-1.json"]
    assert digests_of(sft) == digests_of(other)


# ── what the tests are made of ──


@pytest.fixture(scope="module")
def finished_sft(tmp_path_factory: pytest.TempPathFactory, served_home: Path) -> Path:
    """A folder with the store of a finished run of SFT alone, and beside it the files of that run."""
    folder = tmp_path_factory.mktemp("finished")
    join_home(served_home, folder / "store")
    config = write_small_pipeline(
        folder / "small", mode="sft", training__sft__num_steps=NUM_STEPS, training__sft__checkpoint_every=100
    )
    code, output = Rollouts(folder / "store", folder / "output.txt").run("run", str(config))
    assert code == 0, output
    return folder


@pytest.fixture
def after_sft(rollouts: Rollouts, tmp_path: Path, finished_sft: Path) -> Path:
    """The configuration of a run that the store of `rollouts` holds already, finished."""
    shutil.rmtree(rollouts.store)
    shutil.copytree(finished_sft / "store", rollouts.store, symlinks=True, ignore=shutil.ignore_patterns("runs"))
    shutil.copytree(finished_sft / "small", tmp_path / "small")
    return tmp_path / "small/small.toml"
