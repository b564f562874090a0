"""Pins that every epoch visits all prompts once and that a restart goes on at exactly the next one.

Without it a resumed run would see some prompts twice and others never.
"""

import hashlib
import json
import random
from dataclasses import replace

import pytest

from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.errors import DataError
from rollouts_core.types import Prompt
from tests.rollouts_core.make import make_prompts


def draw_ids(buffer: DataBuffer, n: int) -> list[str]:
    """The ids of the next `n` prompts."""
    return [prompt.id for prompt in buffer.get_prompts(n)]


@pytest.mark.parametrize("at_a_time", [1, 3, 7, 21])
def test_each_epoch_visits_every_prompt_once(at_a_time: int) -> None:
    buffer = DataBuffer(make_prompts(7))
    drawn = [id for _ in range(21 // at_a_time) for id in draw_ids(buffer, at_a_time)]
    for epoch in range(3):
        assert sorted(drawn[7 * epoch : 7 * (epoch + 1)]) == [f"p{i}" for i in range(7)]


def test_epochs_have_different_orders() -> None:
    buffer = DataBuffer(make_prompts(20))
    orders = {tuple(draw_ids(buffer, 20)) for _ in range(5)}
    assert len(orders) == 5


def test_the_order_is_not_that_of_the_file() -> None:
    assert draw_ids(DataBuffer(make_prompts(20)), 20) != [f"p{i}" for i in range(20)]


def test_one_seed_gives_one_order_and_another_seed_another() -> None:
    first, again, other = (draw_ids(DataBuffer(make_prompts(20), seed=seed), 40) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("offset", range(23))
def test_a_restored_cursor_goes_on_at_the_next_prompt(offset: int) -> None:
    buffer, restored = DataBuffer(make_prompts(7), seed=1), DataBuffer(make_prompts(7), seed=1)
    buffer.get_prompts(offset)
    restored.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert draw_ids(restored, 30) == draw_ids(buffer, 30)
    assert restored.state_dict() == buffer.state_dict()


def test_a_cursor_can_be_set_back() -> None:
    buffer = DataBuffer(make_prompts(7))
    buffer.get_prompts(5)
    state = buffer.state_dict()
    expected = draw_ids(buffer, 10)
    buffer.load_state_dict(state)
    assert draw_ids(buffer, 10) == expected


def test_a_saved_cursor_does_not_move_with_the_buffer() -> None:
    buffer = DataBuffer(make_prompts(7))
    state = buffer.state_dict()
    buffer.get_prompts(3)
    assert (state["sample_offset"], state["num_drawn"]) == (0, 0)


@pytest.mark.parametrize(
    ("num_drawn", "epoch_id", "sample_offset"), [(0, 0, 0), (3, 0, 3), (7, 0, 7), (8, 1, 1), (20, 2, 6)]
)
def test_the_counters_say_where_the_buffer_is(num_drawn: int, epoch_id: int, sample_offset: int) -> None:
    buffer = DataBuffer(make_prompts(7))
    buffer.get_prompts(num_drawn)
    assert (buffer.num_drawn, buffer.epoch_id, buffer.sample_offset) == (num_drawn, epoch_id, sample_offset)


@pytest.mark.parametrize("change", ["added", "removed", "reordered", "answer", "message", "metadata"])
def test_a_cursor_of_other_prompts_is_refused(change: str) -> None:
    prompts = make_prompts(5)
    changed: dict[str, list[Prompt]] = {
        "added": [*prompts, Prompt(id="new", messages=())],
        "removed": prompts[:-1],
        "reordered": prompts[::-1],
        "answer": [replace(prompts[0], answer="other"), *prompts[1:]],
        "metadata": [replace(prompts[0], metadata={"tests": ["assert f(1) == 2"]}), *prompts[1:]],
        "message": [replace(prompts[0], messages=({"role": "user", "content": "other"},)), *prompts[1:]],
    }
    with pytest.raises(DataError, match="the prompts changed"):
        DataBuffer(changed[change]).load_state_dict(DataBuffer(prompts).state_dict())


def test_a_cursor_of_an_earlier_version_goes_on() -> None:
    """Its digest says nothing of the other fields of a row."""
    prompts = [replace(prompt, metadata={"target": 24}) for prompt in make_prompts(7)]
    buffer, restored = DataBuffer(prompts), DataBuffer(prompts)
    buffer.get_prompts(2)
    earlier = hashlib.sha256()
    for prompt in prompts:
        earlier.update(json.dumps([prompt.id, prompt.messages, prompt.answer]).encode())
    restored.load_state_dict({**buffer.state_dict(), "prompts_digest": earlier.hexdigest()})
    assert draw_ids(restored, 5) == draw_ids(buffer, 5)


def test_a_refused_cursor_leaves_the_buffer_where_it_was() -> None:
    buffer = DataBuffer(make_prompts(5))
    buffer.get_prompts(2)
    before = buffer.state_dict()
    with pytest.raises(DataError):
        buffer.load_state_dict(DataBuffer(make_prompts(6)).state_dict())
    assert buffer.state_dict() == before


def test_a_buffer_without_prompts_is_an_error() -> None:
    with pytest.raises(DataError, match="at least one prompt"):
        DataBuffer([])


def test_more_prompts_than_an_epoch_holds_come_from_the_next_epochs() -> None:
    buffer = DataBuffer(make_prompts(3))
    assert sorted(draw_ids(buffer, 9)) == sorted(["p0", "p1", "p2"] * 3)


def test_the_order_of_an_earlier_epoch_is_drawn_once_for_all_of_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """With half a million prompts drawing it takes half a second, and of an epoch hundreds may be under way."""
    drawn: list[list[int]] = []
    shuffle = random.Random.shuffle

    def noted(generator: random.Random, order: list[int]) -> None:
        drawn.append(order)
        shuffle(generator, order)

    monkeypatch.setattr(random.Random, "shuffle", noted)
    buffer = DataBuffer(make_prompts(5), seed=3)
    handed_out = buffer.get_prompts(12)
    assert [buffer.prompt_of(draw) for draw in (5, 6, 7, 8, 9, 10, 11)] == handed_out[5:]
    assert len(drawn) == 4
    assert [buffer.prompt_of(draw) for draw in range(5)] == handed_out[:5]
    assert len(drawn) == 5
