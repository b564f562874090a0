"""Pins that random numbers go on where they were, in every library that training uses.

Without it a resumed run would drop out other activations than the run that it continues.
"""

import json
import random

import numpy as np
import torch

from rollouts_core.backends.random_state import get_random_tensors, get_random_values, seed_everything, set_random_state


def draw() -> list[float]:
    """Some numbers of each library; two of them leave half a pair for the next draw."""
    return [torch.rand(()).item(), torch.randn(()).item(), np.random.standard_normal(), random.gauss(0, 1)]


def test_numbers_go_on_where_they_were() -> None:
    seed_everything(1)
    draw()
    tensors = {name: state.clone() for name, state in get_random_tensors().items()}
    values = json.loads(json.dumps(get_random_values()))
    expected = [draw(), draw()]
    seed_everything(2)
    draw()
    set_random_state(tensors, values)
    assert [draw(), draw()] == expected


def test_a_seed_decides_all_libraries() -> None:
    draws = []
    for seed in (7, 7, 8):
        seed_everything(seed)
        draws.append(draw())
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[0], draws[2], strict=True))


def test_a_seed_may_be_larger_than_numpy_takes() -> None:
    seed_everything(2**40 + 3)
    assert 0 <= draw()[0] < 1
