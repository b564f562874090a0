"""Pins: a row of a product, and a row of a decoding step, is the same bit for bit with any number of rows beside it.

Without it a completion would depend on what else runs, in the last digits first and in its tokens soon after.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rollouts_core.embedded import projection
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.projection import Library, Projection, choose_library, find_row_step
from tests.rollouts_core.embedded.tiny_models import make_model, random_prompt, save_model

MAX_ROWS = 130
SHAPES = [(96, 32), (61, 64), (192, 64), (1024, 128), (128, 512), (768, 384), (256, 1536)]  # (columns, inner)
LIBRARIES: list[Library | None] = ["mkl", "onednn", None]
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "odd": {"hidden_size": 72, "intermediate_size": 200, "head_dim": 18, "vocab_size": 67},
    "wide": {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 64, "num_hidden_layers": 1},
}


def random_weights(columns: int, inner: int) -> torch.Tensor:
    return torch.randn(columns, inner, generator=torch.Generator().manual_seed(columns))


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library | None:
    chosen: Library | None = request.param
    if chosen is not None and choose_library(random_weights(8, 8)) is None:
        pytest.skip("this build of torch has no MKL, and multiplies without packing")
    return chosen


@torch.inference_mode()
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_every_number_of_rows_gives_the_same_products(columns: int, inner: int, library: Library | None) -> None:
    project = Projection(random_weights(columns, inner), None, library)
    step = find_row_step([project])
    rows_BK = torch.randn(MAX_ROWS // step * step, inner)
    whole_BN = project(rows_BK)
    counts = range(step, len(rows_BK) + 1, step)
    assert [count for count in counts if not torch.equal(project(rows_BK[:count]), whole_BN[:count])] == []


@torch.inference_mode()
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_a_linear_layer_also_of_rows_in_two_dimensions(
    has_bias: bool, library: Library | None
) -> None:
    weights_NK, bias_N = random_weights(61, 64), torch.randn(61) if has_bias else None
    rows_UTK = torch.randn(3, 7, 64)
    expected = F.linear(rows_UTK, weights_NK, bias_N)
    torch.testing.assert_close(Projection(weights_NK, bias_N, library)(rows_UTK), expected, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_changed_weights_count_once_the_packed_ones_are_forgotten(library: Library | None) -> None:
    project, rows_BK = Projection(random_weights(8, 16), None, library), torch.randn(4, 16)
    before = project(rows_BK)
    project.weight_NK.mul_(2)
    project.forget_packed()
    torch.testing.assert_close(project(rows_BK), 2 * before)


@pytest.mark.parametrize(("vendor", "expected"), [("GenuineIntel", "mkl"), ("AuthenticAMD", "onednn")])
def test_large_weights_go_to_the_library_that_is_made_for_the_processor(
    vendor: str, expected: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection, "read_vendor", lambda: vendor)
    if choose_library(random_weights(8, 8)) is None:
        pytest.skip("this build of torch has no MKL, and multiplies without packing")
    assert choose_library(random_weights(512, 512)) == expected
    assert choose_library(random_weights(511, 512)) == "mkl"
    assert choose_library(random_weights(512, 512).bfloat16()) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_step_with_any_number_of_rows_gives_each_row_the_same_logits(name: str, tmp_path: Path) -> None:
    decoder = Decoder(save_model(make_model(**MODELS[name]), tmp_path), num_slots=MAX_ROWS)
    lengths = [1 + 7 * row % 60 for row in range(MAX_ROWS)]
    decoder.prefill([random_prompt(length, seed=length) for length in lengths])
    tokens_B, positions_B = torch.arange(MAX_ROWS) % 50, torch.tensor(lengths)

    def step(count: int) -> torch.Tensor:
        return decoder.step(tokens_B[:count], positions_B[:count])

    whole_BV = step(MAX_ROWS)
    falling = range(MAX_ROWS - 1, 0, -1)  # a step may write into the slots behind its rows
    assert [count for count in falling if not torch.equal(step(count), whole_BV[:count])] == []
