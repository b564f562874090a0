"""Pins who may see the live pages and what they tell of a run, finished or torn in the middle of a line.

Without it a page could show a run's samples to whoever asks, run what a model wrote, or fail while a job is writing.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollouts.flows.live import MAX_RUNS, find_live_pages, served_live_pages
from rollouts.flows.own_server.password import own_password
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts_core.report.live import MAX_EVENTS, describe_readable, describe_stage, seconds_left
from rollouts_core.report.live_run import LiveStage
from rollouts_core.system.gpu_use import sampled_gpu_use
from tests.kit.commands import Rollouts
from tests.kit.nvidia_smi import install_nvidia_smi
from tests.kit.waiting import wait_until

NOW = 1_000_000.0
HOSTILE = "<script>alert(1)</script>"


def write_rl(run_dir: Path, *, num_steps: int = 5) -> Path:
    """A run directory as RL leaves it in the middle of a line."""
    (run_dir / "samples").mkdir(parents=True)
    lines = [
        {"step": step, "attempt": 1, "time": NOW - 100 + 10 * step, "reward": step / 10, "response_tokens": 7.0}
        for step in range(1, num_steps + 1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 6, "att')
    events = [{"event": "weights_published", "attempt": 1, "time": NOW, "version": f"v{n}"} for n in range(20)]
    (run_dir / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    samples = [sample(index, reward=index / 4, response=f"{HOSTILE} {index}") for index in range(4)]
    (run_dir / "samples/step_000004.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in samples))
    (run_dir / "samples/step_000005.jsonl").write_text('{"torn')
    return run_dir


def sample(index: int, *, reward: float, response: str) -> dict[str, object]:
    return {
        "prompt": f"question {HOSTILE}",
        "response": response,
        "tokens": [1, 2],
        "loss_mask": [0, 1],
        "rollout_log_probs": [0.0, -1.0],
        "reward": reward,
        "index": index,
        "group_index": 0,
        "status": "completed",
        "policy_versions": [],
        "metadata": {},
    }


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a run that is in RL, and one that came to the same stage before."""
    (tmp_path / "prefect").mkdir()
    run_dir = write_rl(tmp_path / "stages/rl-1")
    with Ledger(tmp_path / LEDGER_FILE) as ledger:
        ledger.note_use(run_dir.name, "fedcba9876543210", run="earlier-fedcba98", num_steps=10)
        ledger.note_use(run_dir.name, "0123456789abcdef", run="mine-01234567", num_steps=10)
        ledger.note_use(run_dir.name, "0123456789abcdef", run="mine-01234567", num_steps=10)
    return tmp_path


@pytest.fixture
def visitor(store: Path) -> Iterator[httpx.Client]:
    """Somebody who knows the password."""
    user, _, password = own_password(store / "prefect").partition(":")
    with served_live_pages(store) as live, httpx.Client(base_url=live.url, auth=(user, password)) as client:
        yield client


def test_pages_are_for_those_who_know_the_password_alone(store: Path, visitor: httpx.Client) -> None:
    run = "/runs/mine-01234567"
    for path in ("/", run, f"{run}/report", f"{run}/blocks/page/rl/last", f"{run}/blocks/viewer", "/runs/nothing"):
        refused = httpx.get(f"{str(visitor.base_url).rstrip('/')}{path}")
        assert refused.status_code == 401 and "mine" not in refused.text
        assert httpx.get(f"{str(visitor.base_url).rstrip('/')}{path}", auth=("rollouts", "guess")).status_code == 401
    assert visitor.post("/runs/mine-01234567").status_code == 405
    assert visitor.get("/runs/..%2F..%2Fprefect%2Fpassword").status_code == 404
    for name in (
        "page/../4",
        "page/rl/x",
        "chunk/rl/4/9/v",
        "chunk/rl/4/-9/v",
        "prompt/rl/4/77",
        "page",
        "../job.json",
    ):
        assert visitor.get(f"/runs/mine-01234567/blocks/{name}").status_code == 404, name


def block(visitor: httpx.Client, name: str) -> Any:  # Any: JSON
    return visitor.get(f"/runs/mine-01234567/blocks/{name}").raise_for_status().json()


def test_a_run_is_listed_and_shown_and_its_samples_come_in_blocks(store: Path, visitor: httpx.Client) -> None:
    listed = visitor.get("/").text
    assert listed.index("/runs/mine-01234567") < listed.index("/runs/earlier-fedcba98") and listed.count(">mine-") == 1
    page = visitor.get("/runs/mine-01234567")
    assert page.status_code == 200 and "step 5 of 10" in page.text and "question" not in page.text
    policy = page.headers["content-security-policy"]
    assert "'unsafe" not in policy and "default-src 'none'" in policy and policy.endswith("connect-src 'self'")
    assert policy.count("'sha256-") == 5 and page.text.count("<script") == 1, "loader, viewer, plot, and two styles"
    samples = block(visitor, "page/rl/last")
    assert samples["page"]["newest"] == 5 and samples["reward"] == [0, 0.25, 0.5, 0.75]
    [name] = set(samples["chunkNames"])
    assert [each["text"] for each in block(visitor, name)["rest"]] == [f"{HOSTILE} {index}" for index in range(4)]
    [curves] = block(visitor, "curves")
    assert [metric["name"] for metric in curves["metrics"]] == ["reward", "response_tokens"]
    assert curves["steps"] == [1, 2, 3, 4, 5]


def test_a_record_that_is_nested_without_end_hides_no_page(store: Path, visitor: httpx.Client) -> None:
    results = store / "runs/mine-01234567"
    results.mkdir(parents=True)
    for name in ("evaluation.json", "run.json"):
        (results / name).write_text("[" * 100_000)
    page = visitor.get("/runs/mine-01234567")
    assert page.status_code == 200 and "step 5 of 10" in page.text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", '{"step": 1e999, "attempt": 1, "time": 1}'),
        ("metrics.jsonl", '{"step": 1, "attempt": 1, "time": 1, "reward": "<b>"}'),
        ("events.jsonl", '{"event": "started", "time": 1e300}'),
    ],
)
def test_a_stage_whose_files_no_job_of_ours_wrote_hides_no_other(
    store: Path, visitor: httpx.Client, name: str, content: str
) -> None:
    with Ledger(store / LEDGER_FILE) as ledger:
        ledger.note_use(write_rl(store / "stages/rl-2").name, "0123456789abcdef", run="mine-01234567", num_steps=10)
    (store / "stages/rl-2" / name).write_text(f"{content}\n")
    page = visitor.get("/runs/mine-01234567")
    assert page.status_code == 200 and "its files cannot be read" in page.text and "step 5 of 10" in page.text


def test_a_line_of_metrics_that_is_nested_without_end_is_passed_over(store: Path, visitor: httpx.Client) -> None:
    with (store / "stages/rl-1/metrics.jsonl").open("a") as metrics:
        metrics.write("[" * 100_000 + "\n")
    page = visitor.get("/runs/mine-01234567")
    assert page.status_code == 200 and "its files cannot be read" not in page.text and "step 5 of 10" in page.text


def test_a_line_of_samples_that_no_job_of_ours_wrote_hides_no_other(store: Path, visitor: httpx.Client) -> None:
    lines = [
        '{"prompt": 1, "response": {}}',
        '{"prompt": 1, "group_index": 3}',
        json.dumps(sample(0, reward=1.0, response="good")),
    ]
    (store / "stages/rl-1/samples/step_000006.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert block(visitor, "page/rl/last")["reward"] == [0, 0.25, 0.5, 0.75, 1]


def test_half_of_a_character_in_a_completion_is_sent(store: Path, visitor: httpx.Client) -> None:
    line = json.dumps(sample(0, reward=1.0, response="half \ud83d of it"))
    (store / "stages/rl-1/samples/step_000006.jsonl").write_text(f"{line}\n")
    name = block(visitor, "page/rl/6")["chunkNames"][-1]
    assert block(visitor, name)["rest"][0]["text"] == "half \ud83d of it"


def test_the_use_of_gpus_has_curves_where_there_are_any(
    store: Path, visitor: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(block(visitor, "curves")) == 1
    install_nvidia_smi(tmp_path / "bin", monkeypatch)
    path = store / "stages/rl-1/gpu_use.jsonl"
    with sampled_gpu_use(path, ["0", "1"], attempt=1):
        wait_until(path.is_file, what="the file of samples")
        wait_until(lambda: path.read_text().endswith("\n"), what="a sample")
    section = block(visitor, "curves")[1]
    assert section["label"] == "GPUs of RL" and section["xName"] == "minute"
    names = [metric["name"] for metric in section["metrics"]]
    assert names == ["GPU 0 use, percent", "GPU 0 memory, GiB", "GPU 1 memory, GiB"], "GPU 1 tells no use"


def test_samples_that_vanish_while_they_are_read_are_no_error(
    store: Path, visitor: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that goes on from a checkpoint removes the samples of later steps."""
    samples = store / "stages/rl-1/samples"
    (samples / "step_000009.jsonl").write_text(json.dumps(sample(0, reward=1.0, response="gone")) + "\n")
    open_path = Path.open

    def remove_and_open(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "step_000009.jsonl":
            path.unlink()
        return open_path(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", remove_and_open)
    assert block(visitor, "page/rl/last")["page"]["newest"] == 5


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"cancelled": True}, "cancelled at 2026-11-28"),
        ({"cancelled": True, "saved_step": 4}, ":00:00, step 4 is saved, at step 5 of 10"),
        ({"cancelled": True, "saved_step": 4, "problem": "the disk is full"}, "the disk is full, step 4 is saved"),
        ({"cancelled": True, "saved_step": 0}, ":00:00, no step is saved"),
        ({"code": 1}, "it failed by itself after 90 s"),
        ({"oom": True, "code": 137}, "the kernel killed it because memory ran out"),
        ({"signal": 9, "code": 137}, "signal 9 killed it"),
    ],
)
def test_a_stage_that_ended_without_a_result_says_how_and_tells_no_time_left(
    store: Path, visitor: httpx.Client, record: dict[str, Any], words: str
) -> None:
    """The page of a cancelled run said for good that nine minutes were left."""
    with Ledger(store / LEDGER_FILE) as ledger, ledger.living_run("0123456789abcdef"):
        assert " left, running for" in visitor.get("/runs/mine-01234567").text
        kinds = dict.fromkeys(("cancelled", "timeout", "lease_expired", "oom"), False)
        times = {"seconds": 90.0, "started_at": "2026-11-28T11:00:00+00:00", "ended_at": "2026-11-28T12:00:00+00:00"}
        numbers = {"attempt": 1, "code": 143, "leftover_processes": 0, "restarts": 0, "signal": None}
        written = {**kinds, **times, **numbers, **record, "of_another_version": 1}
        (store / "stages/rl-1/exit-1.json").write_text(json.dumps(written))
        page = visitor.get("/runs/mine-01234567").text
        assert (
            words in page
            and "at step 5 of 10" in page
            and " left, running for" not in page
            and "last numbers" not in page
        )
        with (store / "stages/rl-1/events.jsonl").open("a") as events:
            events.write(json.dumps({"event": "started", "attempt": 2, "time": NOW}) + "\n")
        assert " left, running for" in visitor.get("/runs/mine-01234567").text, "a second attempt is under way"


def test_a_stage_that_stopped_by_itself_says_which_step_is_saved(store: Path, visitor: httpx.Client) -> None:
    with (store / "stages/rl-1/events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "stopped", "attempt": 1, "step": 5, "time": NOW}) + "\n")
    assert "stopped: step 5 is saved" in visitor.get("/runs/mine-01234567").text


def listed_states(visitor: httpx.Client, query: str = "") -> list[str]:
    return re.findall(r'<span class="chip (\w+)">', visitor.get(f"/{query}").text)


def test_the_list_shows_scores_and_curves_and_is_filtered(store: Path, visitor: httpx.Client) -> None:
    scored = [
        {"name": name, "scores": [], "mean": mean, "low": mean - 0.1, "high": mean + 0.1, "num_rows": 10}
        for name, mean in (("base", 0.25), ("rl", 0.75))
    ]
    (store / "stages/evaluate-1").mkdir()
    result = {"format": 1, "metric": "accuracy", "checkpoints": scored, "best": "rl"}
    (store / "stages/evaluate-1/result.json").write_text(json.dumps(result))
    with Ledger(store / LEDGER_FILE) as ledger:
        ledger.note_use("evaluate-1", "0123456789abcdef", run="mine-01234567", num_steps=2)
        ledger.note_use("rl-gone", "aaaaaaaaaaaaaaaa", run=f"{HOSTILE}-aaaaaaaa")
    page = visitor.get("/").text
    assert "<b>0.750</b><small>0.650 to 0.850</small>" in page and re.search(
        '<td class="num up"[^>]*>.0.500</td>', page
    )
    assert page.count('<svg class="spark"') == 2 and "<title>Reward 0.1 → 0.5</title>" in page
    assert HOSTILE not in page and page.count("&lt;script&gt;alert(1)") >= 1
    policy = visitor.get("/").headers["content-security-policy"]
    assert "form-action 'self'" in policy and "'unsafe" not in policy and policy.count("'sha256-") == 2
    assert len(listed_states(visitor)) == 3 and len(listed_states(visitor, "?q=MINE")) == 1
    assert listed_states(visitor, "?state=running") == [] == listed_states(visitor, "?q=%3Cnothing")
    assert (
        "No run matches the filter" in visitor.get("/?q=%22%3E%3Cb%3E").text
        and '"><b>' not in visitor.get("/?q=%22%3E%3Cb%3E").text
    )
    with Ledger(store / LEDGER_FILE) as ledger, ledger.living_run("fedcba9876543210"):
        assert listed_states(visitor, "?state=running") == ["running"]
        assert "rl 5/10" in visitor.get("/?state=running").text
        assert listed_states(visitor, "?state=running&q=mine") == []


def test_a_run_without_a_process_or_an_exit_record_tells_no_time_left(store: Path, visitor: httpx.Client) -> None:
    page = visitor.get("/runs/mine-01234567").text
    assert "step 5 of 10" in page and "no process of the run is left" in page and "about 50" not in page
    assert "<b>not running, no report</b>" in page
    assert listed_states(visitor) == ["stopped", "stopped"]
    (store / "runs/mine-01234567").mkdir(parents=True)
    (store / "runs/mine-01234567/report.html").touch()
    assert listed_states(visitor) == ["done", "stopped"]
    with Ledger(store / LEDGER_FILE) as ledger, ledger.living_run("0123456789abcdef"):
        assert listed_states(visitor) == ["running", "stopped"]
        assert "<b>running</b> · rl: about 50.0 s left" in visitor.get("/runs/mine-01234567").text


def test_a_selection_shows_which_checkpoint_was_chosen_and_an_evaluation_names_its_models(
    store: Path, visitor: httpx.Client
) -> None:
    models = [("step_000002", [1.0] * 8 + [0.0] * 2), ("step_000004", [1.0] * 3 + [0.0] * 7)]
    entries = [{"name": name, "step": 0, "scores": scores} for name, scores in models]
    for stage in ("select-rl-1", "evaluate-1"):
        run_dir = store / "stages" / stage
        run_dir.mkdir()
        lines = [{"step": n, "attempt": 1, "time": NOW, "score": score} for n, score in ((1, 0.8), (2, 0.3))]
        (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        result = {"format": 1, "metric": "accuracy", "checkpoints": entries, "best": "step_000002"}
        (run_dir / "result.json").write_text(json.dumps(result))
        with Ledger(store / LEDGER_FILE) as ledger:
            ledger.note_use(stage, "0123456789abcdef", run="mine-01234567", num_steps=2)
    page = visitor.get("/runs/mine-01234567").text
    assert "step_000002 is chosen of 2, accuracy 80.0 % (95 % interval 49.0 to 94.3 %)" in page
    assert "step_000002 has accuracy 80.0 %" in page and "step_000004 has accuracy 30.0 %" in page
    assert "score <b>" not in page
    record = {"models": {"step_000002": {"named": "production (mine-2)"}, "step_000004": {"named": HOSTILE}}}
    (store / "runs/mine-01234567").mkdir(parents=True, exist_ok=True)
    (store / "runs/mine-01234567/evaluation.json").write_text(json.dumps(record))
    page = visitor.get("/runs/mine-01234567").text
    assert "production (mine-2) has accuracy 80.0 %" in page and HOSTILE not in page
    assert "step_000002 is chosen of 2" in page, "a checkpoint is called by its name"


def test_the_report_is_there_when_it_is_written(store: Path, visitor: httpx.Client) -> None:
    assert visitor.get("/runs/mine-01234567/report").status_code == 404
    assert "report</a>" not in visitor.get("/runs/mine-01234567").text
    folder = store / "runs/mine-01234567"
    folder.mkdir(parents=True)
    (folder / "report.html").write_text("<p>what came of it</p>")
    assert '<a href="/runs/mine-01234567/report">' in visitor.get("/runs/mine-01234567").text
    answer = visitor.get("/runs/mine-01234567/report")
    assert answer.text == "<p>what came of it</p>" and "script-src 'none'" in answer.headers["content-security-policy"]
    policy = "default-src 'none'; script-src 'sha256-abc='"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    (folder / "report.html").write_text(head)
    answer = visitor.get("/runs/mine-01234567/report")
    assert answer.headers["content-security-policy"] == policy, "scripts run by the hashes that the report states"


def test_a_run_keeps_its_page_when_many_others_came_to_a_stage_after_it(store: Path, visitor: httpx.Client) -> None:
    """A long RL run came to its stage days ago, and is still at it."""
    with Ledger(store / LEDGER_FILE) as ledger:
        for number in range(MAX_RUNS):
            ledger.note_use("sft-1", f"{number:016x}", run=f"short-{number:08x}")
    listed = visitor.get("/").text
    assert listed.count("/runs/short-") == MAX_RUNS and "mine" not in listed
    assert "step 5 of 10" in visitor.get("/runs/mine-01234567").text
    folder = store / "runs/mine-01234567"
    folder.mkdir(parents=True)
    (folder / "report.html").write_text("<p>what came of it</p>")
    assert visitor.get("/runs/mine-01234567/report").text == "<p>what came of it</p>"


def test_a_store_that_nothing_ran_in_has_an_empty_list(tmp_path: Path) -> None:
    with served_live_pages(tmp_path / "new") as live:
        user, _, password = own_password(tmp_path / "new/prefect").partition(":")
        assert "No run of this store" in httpx.get(live.url, auth=(user, password)).text


@pytest.mark.slow
def test_the_port_is_kept_for_the_links_that_were_given_out(store: Path) -> None:
    assert find_live_pages(store) is None
    with served_live_pages(store) as first:
        assert find_live_pages(store) == first
        with served_live_pages(store) as beside:
            assert beside.port != first.port
    with served_live_pages(store) as again:
        assert again.port == beside.port
    assert find_live_pages(store) is None


def test_a_stage_says_how_far_it_is_and_what_happened_last(tmp_path: Path) -> None:
    run_dir = write_rl(tmp_path / "rl")
    stage = LiveStage(name="rl", run_dir=run_dir, num_steps=10, began_at=NOW - 100)
    shown = describe_stage(stage, now=NOW)
    assert shown.state == "step 5 of 10, about 50.0 s left, running for 1 min 40 s, last numbers 50.0 s ago"
    assert shown.done == 50.0 and ("reward", "0.5") in shown.numbers
    assert len(shown.events) == MAX_EVENTS and shown.events[0][1] == "weights_published version=v19"
    with (run_dir / "events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "failed", "attempt": 1, "time": NOW, "message": "no disk"}) + "\n")
    assert describe_stage(stage, now=NOW).state == "failed: no disk"
    with (run_dir / "events.jsonl").open("a") as events:
        said = {"event": "waits_for_gpus", "attempt": 2, "time": NOW, "message": "waits for GPU 0, held by run b"}
        events.write(json.dumps(said) + "\n")
    assert describe_stage(stage, now=NOW).state == "waits for GPU 0, held by run b"
    (run_dir / "result.json").write_text("{}")
    finished = describe_stage(stage, now=NOW)
    assert finished.state == "finished" and finished.done == 0.0


def test_lines_that_a_disk_damaged_are_no_error(tmp_path: Path) -> None:
    run_dir = write_rl(tmp_path / "rl")
    for path in run_dir.rglob("*.jsonl"):
        path.write_bytes(b'{"half": \0\0\n' + path.read_bytes())
    shown = describe_stage(LiveStage(name="rl", run_dir=run_dir, num_steps=10, began_at=NOW), now=NOW)
    assert shown.done == 50.0


def test_a_number_that_is_none_is_shown_as_it_is(tmp_path: Path) -> None:
    line = {"step": 1, "attempt": 1, "time": NOW, "loss": -0.0, "reward": 0.5, "entropy": math.nan}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    shown = describe_stage(LiveStage(name="rl", run_dir=tmp_path, num_steps=10, began_at=NOW), now=NOW)
    assert shown.numbers == (("loss", "0"), ("reward", "0.5"), ("entropy", "nan"))


def test_a_stage_that_has_written_nothing_is_under_way(tmp_path: Path) -> None:
    stage = LiveStage(name="evaluate", run_dir=tmp_path / "none", num_steps=0, began_at=NOW - 5)
    shown = describe_stage(stage, now=NOW)
    assert shown.state == "under way for 5.0 s" and shown.done == 0.0


def test_a_stage_of_another_version_is_shown_with_its_scores(tmp_path: Path) -> None:
    scored = {"name": "a", "step": 1, "scores": [1.0, 0.0]}
    (tmp_path / "result.json").write_text(json.dumps({"metric": "accuracy", "best": "a", "checkpoints": [scored]}))
    state = describe_readable(LiveStage(name="score", run_dir=tmp_path, num_steps=1, began_at=NOW), now=NOW).state
    assert "cannot be read" not in state and "accuracy 50.0 %" in state


def test_the_time_left_is_told_from_the_latest_attempt(tmp_path: Path) -> None:
    lines = [{"step": 1.0, "attempt": 1, "time": 0.0}, {"step": 2.0, "attempt": 2, "time": 1000.0}]
    assert seconds_left(lines, 10) is None
    lines.append({"step": 4.0, "attempt": 2, "time": 1010.0})
    assert seconds_left(lines, 10) == 30.0
    assert seconds_left(lines, 4) is None


@pytest.mark.slow
def test_who_watches_a_store_that_does_not_exist_is_told_so(rollouts_without_server: Rollouts) -> None:
    watching = rollouts_without_server.start("watch")
    try:
        rollouts_without_server.wait_until_said("log in as rollouts with the password ", watching)
    finally:
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 0 and "interrupted" not in rollouts_without_server.said()
    assert (
        f"{rollouts_without_server.store} did not exist: the pages show its runs"
        in rollouts_without_server.said().replace("\n", "")
    )
