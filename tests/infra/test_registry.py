"""Pins which model an alias names after any sequence of promotions and rollbacks, by any number of processes.

Without it a rollback could bring back a model that never was in production, or two runs could promote over each other.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.ledger import Ledger
from rollouts.infra.registry import (
    NOTHING,
    Alias,
    Model,
    ProductionChangedError,
    current,
    find_model,
    forget_model,
    history,
    models,
    note_evaluation,
    promote,
    register_model,
    reject,
    rollback,
)

NUM_PROCESSES = 4
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.db") as ledger:
        yield ledger


def register(ledger: Ledger, digest: str, line: str = "small") -> Model:
    return register_model(
        ledger,
        line,
        checkpoint=f"runs/{digest}/checkpoint",
        digest=digest,
        run_id="run-a",
        stages=["sft-0123", "evaluate-4567"],
        data={"/data/sft.jsonl": digest},
        by="me",
    )


def in_production(ledger: Ledger, line: str = "small") -> str:
    model = current(ledger, line, Alias.PRODUCTION)
    return model.name if model else ""


def test_models_of_a_line_are_numbered_and_the_newest_is_the_candidate(ledger: Ledger) -> None:
    first, second, other = register(ledger, "a"), register(ledger, "b"), register(ledger, "a", line="large")
    assert [each.name for each in models(ledger)] == ["small-1", "small-2", "large-1"]
    assert current(ledger, "small", Alias.CANDIDATE) == second
    assert current(ledger, "large", Alias.CANDIDATE) == other
    assert find_model(ledger, "small-1") == find_model(ledger, str(first.id)) == first
    assert (first.stages, first.data) == (("sft-0123", "evaluate-4567"), {"/data/sft.jsonl": "a"})


def test_the_same_content_is_registered_once(ledger: Ledger) -> None:
    first = register(ledger, "a")
    reject(ledger, first, by="me", reason="worse")
    assert register(ledger, "a") == first
    assert current(ledger, "small", Alias.CANDIDATE) is None


def test_an_evaluation_is_kept(ledger: Ledger) -> None:
    model = register(ledger, "a")
    note_evaluation(ledger, model, {"mean": 0.5})
    assert find_model(ledger, "small-1").evaluation == {"mean": 0.5}


def test_an_unknown_model_is_one_sentence(ledger: Ledger) -> None:
    register(ledger, "a")
    with pytest.raises(PermanentInfraError, match="there is no model small-2: the registry has small-1"):
        find_model(ledger, "small-2")


def test_rollbacks_go_down_the_promotions_one_by_one(ledger: Ledger) -> None:
    one, two, three = (register(ledger, digest) for digest in "abc")
    for model in (one, two, two):
        promote(ledger, model, by="me", reason="better")
    assert rollback(ledger, "small", by="me", reason="worse on Mondays") == one
    promote(ledger, three, by="me", reason="better")
    assert rollback(ledger, "small", by="me", reason="again") == one
    with pytest.raises(PermanentInfraError, match="small has no earlier production model"):
        rollback(ledger, "small", by="me", reason="once more")
    assert in_production(ledger) == "small-1"
    changes = [change.model_id for change in history(ledger, "small") if change.alias is Alias.PRODUCTION]
    assert changes == [one.id, two.id, one.id, three.id, one.id]


def test_a_promotion_ends_the_candidacy_of_that_model_alone(ledger: Ledger) -> None:
    one, two = register(ledger, "a"), register(ledger, "b")
    promote(ledger, one, by="me", reason="better")
    assert current(ledger, "small", Alias.CANDIDATE) == two
    promote(ledger, two, by="me", reason="better")
    assert current(ledger, "small", Alias.CANDIDATE) is None


def test_a_promotion_over_another_model_than_the_compared_one_changes_nothing(ledger: Ledger) -> None:
    one, two, three = (register(ledger, digest) for digest in "abc")
    promote(ledger, one, by="me", reason="first", instead_of=NOTHING)
    promote(ledger, two, by="me", reason="better", instead_of=one.id)
    before = history(ledger)
    for compared_with in (one.id, NOTHING):
        with pytest.raises(ProductionChangedError):
            promote(ledger, three, by="me", reason="better", instead_of=compared_with)
    assert history(ledger) == before


def test_only_a_model_that_nothing_needs_is_forgotten(ledger: Ledger) -> None:
    one, two, three, four = (register(ledger, digest) for digest in "abcd")
    for model in (one, two):
        promote(ledger, model, by="me", reason="better")
    for needed in (one, two, four):
        with pytest.raises(PermanentInfraError, match=f"{needed.name} is needed"):
            forget_model(ledger, needed)
    forget_model(ledger, three)
    assert [each.name for each in models(ledger)] == ["small-1", "small-2", "small-4"]
    reject(ledger, four, by="me", reason="worse")
    forget_model(ledger, four)
    assert register(ledger, "e").name == "small-5"


def test_a_model_that_was_forgotten_meanwhile_is_not_promoted(ledger: Ledger) -> None:
    one, two = register(ledger, "a"), register(ledger, "b")
    promote(ledger, two, by="me", reason="better")
    forget_model(ledger, one)
    with pytest.raises(PermanentInfraError, match="small-1 was removed from the registry meanwhile"):
        promote(ledger, one, by="somebody who had found it before", reason="by hand")
    assert in_production(ledger) == "small-2"


def test_a_rollback_to_another_model_than_was_meant_changes_nothing(ledger: Ledger) -> None:
    one, two, three = (register(ledger, digest) for digest in "abc")
    for model in (one, two, three):
        promote(ledger, model, by="me", reason="better")
    with pytest.raises(ProductionChangedError, match="production of small changed meanwhile"):
        rollback(ledger, "small", by="who meant to roll back small-2", reason="bad", to=one)
    assert in_production(ledger) == "small-3"
    assert rollback(ledger, "small", by="me", reason="bad", to=two) == two


def race(path: Path, digest: str, wins: multiprocessing.Queue[str]) -> None:
    with Ledger(path) as ledger:
        model = register(ledger, digest)
        try:
            promote(ledger, model, by=digest, reason="race", instead_of=NOTHING)
        except ProductionChangedError:
            return
        wins.put(model.name)


def test_of_processes_that_promote_at_once_one_wins(tmp_path: Path) -> None:
    wins: multiprocessing.Queue[str] = FORK.Queue()
    racers = [FORK.Process(target=race, args=(tmp_path / "ledger.db", f"{n}", wins)) for n in range(NUM_PROCESSES)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    with Ledger(tmp_path / "ledger.db") as ledger:
        assert sorted(each.version for each in models(ledger)) == list(range(1, NUM_PROCESSES + 1))
        assert wins.get(timeout=10) == in_production(ledger)
        assert wins.empty()
