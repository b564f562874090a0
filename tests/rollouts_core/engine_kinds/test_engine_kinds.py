"""A kind of engine is one file and one row. Without these tests its name would be asked for all over the code again."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.node import LocalNode, Node
from rollouts.infra.session import LocalSession
from rollouts.tasks.engine_installs import plan_engine_of
from rollouts_core import engine_kinds
from rollouts_core.config import EngineConfig, RolloutConfig, SamplingConfig
from rollouts_core.engine_kinds import ENGINE_CHOICES, ENGINES, SGLANG, LaunchPart
from rollouts_core.engines import Endpoint, connect
from rollouts_core.engines.launch import render_launch
from rollouts_core.job import ServeJob
from tests.rollouts_core.engines.test_launch import job_of
from tests.rollouts_core.served_engine import engine_url

REPOSITORY = Path(__file__).parents[3]
OWN_FOLDER = Path(engine_kinds.__file__).parent.name


def render(job: ServeJob, model_dir: Path, *, dtype: str, on_gpu: bool) -> LaunchPart:
    return LaunchPart(arguments=("-m", "toy", str(model_dir), str(job.port), dtype), env={"TOY": str(on_gpu)})


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Another server that speaks SGLang's API."""
    spec = dataclasses.replace(
        SGLANG, title="Toy", package="toy_engine", render=render, transfers=("auto", "gloo"), can_continue=False
    )
    monkeypatch.setitem(ENGINES, "toy", spec)
    return "toy"


def test_a_further_kind_is_configured_like_the_others(toy: str) -> None:
    assert EngineConfig(kind=toy).spec.title == "Toy"
    assert EngineConfig.model_json_schema()["properties"]["kind"]["enum"] == [*ENGINE_CHOICES]
    with pytest.raises(ValidationError, match=r"is not supported by engines of the kind toy: use auto or gloo"):
        EngineConfig(kind=toy, weight_transfer="tensors")
    with pytest.raises(ValidationError, match=r"weight version of each token, and Toy does not"):
        RolloutConfig(environment="arithmetic", engine=EngineConfig(kind=toy), in_flight="continue")


def test_a_kind_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValidationError, match="Input should be " + ", ".join(map(repr, [*ENGINE_CHOICES][:-1]))):
        EngineConfig(kind="tensorrt")


def test_a_further_kind_is_started_and_looked_for_like_the_others(toy: str) -> None:
    command = render_launch(
        job_of({"kind": toy, "python": "/opt/toy/python", "dtype": "bfloat16"}), Path("/models/m"), on_gpu=True
    )
    assert command.argv == ("/opt/toy/python", "-m", "toy", "/models/m", "30000", "bfloat16")
    node = Node(name="here", kind="local", root="/nowhere", python=sys.executable)
    with pytest.raises(PermanentInfraError, match=r"has no toy_engine, which this rollout\.engine\.kind needs"):
        plan_engine_of(LocalSession(sys.executable), node, LocalNode(), EngineConfig(kind=toy), [])


def test_a_further_kind_is_asked_by_the_client_that_its_row_names(toy: str, quickstart_dir: Path) -> None:
    async def ask(url: str) -> int:
        endpoint = Endpoint(provider=toy, url=url, sampling=SamplingConfig(max_new_tokens=3))
        async with connect(endpoint) as engine:
            [completion] = await engine.generate(endpoint.requests([[4, 8, 9]], stop_token_ids=()))
        return len(completion.tokens)

    with engine_url(quickstart_dir / "base_model") as url:
        assert asyncio.run(ask(url)) == 3


def test_no_condition_elsewhere_asks_for_the_name_of_a_kind() -> None:
    found = []
    for folder in ("rollouts_core", "tasks", "flows", "infra"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            if path.parent.name == OWN_FOLDER:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                compared = [*ast.walk(node)] if isinstance(node, ast.Compare) else []
                if any(isinstance(each, ast.Constant) and each.value in ENGINES for each in compared):
                    found.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")  # type: ignore[attr-defined]
    assert found == [], "give the record of the kind a field"
