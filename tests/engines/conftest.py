"""Models and servers that the tests of this folder share: one server of each kind, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engines.models import SavedModel, make, save
from tests.engines.servers import Server, serving

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """What the servers are started with."""
    return save(make(0), tmp_path_factory.mktemp("models") / "start")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """Other weights of the same shapes."""
    return save(make(1), tmp_path_factory.mktemp("models") / "trained")


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("embedded", marks=pytest.mark.slow),
        pytest.param("sglang", marks=pytest.mark.engine),
        pytest.param("vllm", marks=pytest.mark.engine),
    ],
)
def server(
    request: pytest.FixtureRequest, start: SavedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of each kind."""
    with serving(request.param, start.directory, tmp_path_factory.mktemp(request.param) / "run") as running:
        yield running
