"""`rollouts prune` beside a run that trains: it keeps all that the run needs, and takes it when the run is over.

Without it making room ends a training of days, or nothing is ever removed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from tests.kit.commands import Rollouts
from tests.kit.runs import events_of, paused, program_of
from tests.kit.small_pipeline import small_settings, write_small_pipeline
from tests.kit.waiting import wait_until

EVERYTHING = ("prune", "--days", "0", "--max-gb", "0")


def places(store: Path) -> set[str]:
    """What lies in the store and could be removed."""
    return {
        str(path.relative_to(store))
        for pattern in ("stages/*", "runs/*/checkpoint", "inputs/*")
        for path in store.glob(pattern)
    }


@pytest.mark.matrix
@pytest.mark.slow
def test_a_run_keeps_what_it_needs_and_nothing_is_left_but_reports_when_all_are_over(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    settings = {"mode": "sft", "training__sft__num_steps": 10, "training__sft__checkpoint_every": 5}
    config = write_small_pipeline(tmp_path / "small", **settings)
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    of_first = places(rollouts.store)
    [first] = rollouts.store.glob("runs/*")

    second = config.with_name("second.toml")
    long = {**settings, "training__sft__num_steps": 200, "data__sft": f"file://{config.parent}/sft.jsonl"}
    second.write_text(tomli_w.dumps(small_settings(**long, model__path=f"{first}/checkpoint", run__name="second")))
    other = Rollouts(rollouts.store, rollouts.output.with_name("other.txt"))
    process = other.start("run", str(second))

    def training() -> Path | None:
        found = [path for path in rollouts.store.glob("stages/sft-*") if f"stages/{path.name}" not in of_first]
        return found[0] if found and events_of(found[0], "checkpoint") else None

    wait_until(lambda: training() is not None or process.poll() is not None, what="a checkpoint of the second run")
    directory = training()
    assert directory is not None, other.said()
    with paused(program_of(directory)):
        everything = places(rollouts.store)
        code, output = rollouts.run(*EVERYTHING)
        assert (code, places(rollouts.store)) == (0, everything), "nothing is removed without --yes"
        code, output = rollouts.run(*EVERYTHING, "--yes")
        assert code == 0, output
        [brought] = (rollouts.store / "inputs").iterdir()
        needed = {f"stages/{directory.name}", f"runs/{first.name}/checkpoint", f"inputs/{brought.name}"}
        assert places(rollouts.store) == needed, output
    assert process.wait(240) == 0, other.said()
    assert len(list(rollouts.store.glob("runs/second-*/checkpoint/model.safetensors"))) == 1

    code, output = rollouts.run(*EVERYTHING, "--yes")
    assert (code, places(rollouts.store)) == (0, set()), output
    assert len(list(rollouts.store.glob("runs/*/report.html"))) == 2
