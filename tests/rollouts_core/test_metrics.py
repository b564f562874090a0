"""Pins that metric files are whole lines after any crash and that a repeated step counts once.

Without it a torn line would glue itself to the next one, and a resumed run would draw some steps twice.
"""

import itertools
import json
import resource
from pathlib import Path

import pytest

from rollouts_core.metrics import (
    NUM_LAST,
    EventLog,
    JSONLLogger,
    average_metrics,
    read_json_lines,
    read_last_lines,
    read_metrics,
    read_some_lines,
    read_spread_lines,
    sum_metrics,
)


def test_a_logged_line_says_step_attempt_time_and_numbers(tmp_path: Path) -> None:
    with JSONLLogger(tmp_path / "m.jsonl", attempt=2) as logger:
        logger.log({"loss": 0.5}, 10)
    [line] = read_json_lines(tmp_path / "m.jsonl")
    assert list(line) == ["step", "attempt", "time", "loss"]
    assert (line["step"], line["attempt"], line["loss"]) == (10, 2, 0.5)


def test_a_line_can_be_read_before_the_file_is_closed(tmp_path: Path) -> None:
    with JSONLLogger(tmp_path / "m.jsonl") as logger:
        logger.log({"loss": 0.5}, 1)
        assert len(read_json_lines(tmp_path / "m.jsonl")) == 1


def test_an_event_can_be_read_before_the_file_is_closed(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e.jsonl", attempt=3) as events:
        events.write("checkpoint", step=5)
        [line] = read_json_lines(tmp_path / "e.jsonl")
    assert (line["event"], line["attempt"], line["step"]) == ("checkpoint", 3, 5)


@pytest.mark.parametrize("kind", [JSONLLogger, EventLog])
def test_a_torn_last_line_is_cut_when_the_file_is_opened_again(
    tmp_path: Path, kind: type[JSONLLogger] | type[EventLog]
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    kind(path).close()
    assert path.read_bytes() == b'{"step": 1}\n'


def test_what_is_logged_after_a_torn_line_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    with JSONLLogger(tmp_path / "m.jsonl") as logger:
        logger.log({}, 2)
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [1, 2]


@pytest.mark.parametrize("num_bytes", [0, 10])
def test_a_line_that_the_disk_takes_in_part_is_an_error_and_leaves_nothing(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "e.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventLog(path) as events:
        events.write("started")
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + num_bytes, hard))  # as a full disk does it
        try:
            with pytest.raises(OSError, match="File too large"):
                events.write("checkpoint", step=5)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        events.write("failed")
    assert [line["event"] for line in read_json_lines(path)] == ["started", "failed"]


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_bytes(b'{"st')
    JSONLLogger(tmp_path / "m.jsonl").close()
    assert (tmp_path / "m.jsonl").read_bytes() == b""


def test_a_torn_last_line_is_left_out_by_readers(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}')
    assert read_json_lines(tmp_path / "m.jsonl") == [{"step": 1}]


@pytest.mark.parametrize("damage", [b"\0\0\0\n", b'{"step": 2, "lo\0\0\0\n', b"\xff\n", b"[2]\n"])
def test_a_line_that_a_disk_damaged_is_passed_over_by_readers(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'{"step": 3}\n')
    for lines in (read_json_lines(path), read_last_lines(path), read_spread_lines(path, 10), read_metrics(path)):
        assert lines == [{"step": 1}, {"step": 3}]


def test_reopening_keeps_the_lines_before(tmp_path: Path) -> None:
    for attempt in (1, 2):
        with JSONLLogger(tmp_path / "m.jsonl", attempt=attempt) as logger:
            logger.log({"loss": 1.0}, attempt)
    assert [line["attempt"] for line in read_json_lines(tmp_path / "m.jsonl")] == [1, 2]


def test_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 3}, {"step": 2, "loss": 2}, {"step": 2, "loss": 9}, {"step": 3, "loss": 1}]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["loss"] for line in read_metrics(tmp_path / "m.jsonl")] == [3, 9, 1]


def test_steps_behind_the_checkpoint_that_a_later_attempt_went_on_from_do_not_count(tmp_path: Path) -> None:
    """A page that shows them says that a run is at a step which it has yet to do, or ended before."""
    for attempt, steps, attempts_of_steps in ((1, (1, 2, 3, 4), [1, 1, 1, 1]), (2, (3,), [1, 1, 2])):
        with JSONLLogger(tmp_path / "m.jsonl", attempt=attempt) as logger:
            for step in steps:
                logger.log({}, step)
        kept = read_metrics(tmp_path / "m.jsonl")
        assert [line["step"] for line in kept] == list(range(1, len(kept) + 1))
        assert [line["attempt"] for line in kept] == attempts_of_steps


def test_steps_that_go_back_are_of_another_attempt_whatever_its_number_is(tmp_path: Path) -> None:
    """On another machine attempts are numbered from 1 again."""
    with JSONLLogger(tmp_path / "m.jsonl", attempt=1) as logger:
        for step in (10, 20, 30, 40, 20):
            logger.log({}, step)
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [10, 20]


def test_a_file_that_does_not_exist_has_no_lines(tmp_path: Path) -> None:
    assert read_json_lines(tmp_path / "none.jsonl") == []


def test_of_a_long_file_lines_from_everywhere_and_all_of_a_rare_kind_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that reads all of it every few seconds takes a processor for itself, and gigabytes."""
    path, num_lines, max_lines = tmp_path / "metrics.jsonl", 2_000, 40
    lines = [{"step": step, **({"eval_loss": 1.0} if step % 100 == 70 else {})} for step in range(num_lines)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"torn')
    loads, parsed = json.loads, itertools.count()

    def counted(line: bytes) -> object:
        next(parsed)
        return loads(line)

    monkeypatch.setattr(json, "loads", counted)
    read = read_spread_lines(path, max_lines, rare="eval_loss")
    assert len(read) == next(parsed) <= 2 * max_lines + NUM_LAST + num_lines // 100
    steps = [line["step"] for line in read]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[1 - NUM_LAST :] == list(range(1_901, 2_000))
    assert max(after - before for before, after in itertools.pairwise(steps)) <= num_lines // max_lines
    assert [line["step"] for line in read if "eval_loss" in line] == list(range(70, num_lines, 100))
    assert read_spread_lines(path, num_lines) == read_json_lines(path) == lines
    assert read_spread_lines(tmp_path / "none", max_lines) == []


@pytest.mark.parametrize(("max_bytes", "num_read"), [(5, 0), (11, 1), (12, 1), (25, 2), (10_000, 50)])
def test_the_end_of_a_file_begins_with_a_whole_line(tmp_path: Path, max_bytes: int, num_read: int) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f'{{"n": {n + 10}}}\n' for n in range(50)))  # 10 bytes each
    assert [line["n"] for line in read_last_lines(path, max_bytes)] == list(range(60 - num_read, 60))
    assert read_last_lines(tmp_path / "none", max_bytes) == []


def test_missing_folders_are_made(tmp_path: Path) -> None:
    JSONLLogger(tmp_path / "a" / "b" / "m.jsonl").close()
    assert (tmp_path / "a" / "b" / "m.jsonl").is_file()


def test_metrics_of_micro_batches_are_added_up_and_maxima_are_not() -> None:
    results = [{"loss": 1.0, "ratio_max": 3.0}, {"loss": 2.0, "ratio_max": 2.0}]
    assert sum_metrics(results) == {"loss": 3.0, "ratio_max": 3.0}


def test_metrics_of_updates_are_averaged_and_maxima_are_not() -> None:
    results = [{"loss": 1.0, "ratio_max": 3.0}, {"loss": 2.0, "ratio_max": 2.0}]
    assert average_metrics(results) == {"loss": 1.5, "ratio_max": 3.0}


def test_some_lines_of_a_long_file_are_whole_ones_at_even_distances(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_some_lines(path, 10) == []
    lines = [json.dumps({"step": step, "pad": "x" * (step % 50)}) for step in range(1, 1001)]
    path.write_text("\n".join([*lines, '{"st']))
    steps = [line["step"] for line in read_some_lines(path, 10)]
    assert steps[0] == 1 and steps[-1] == 1000 and len(steps) == 11 and steps == sorted(set(steps))
    assert all(80 < after - before < 120 for before, after in itertools.pairwise(steps))
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert {line["step"] for line in read_some_lines(path, 10)} == {1, 2}
    path.write_text('{"step": 1')
    assert read_some_lines(path, 10) == []
