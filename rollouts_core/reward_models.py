"""Ask a reward model that SGLang or vLLM serves for the scores of conversations.

Not here: how conversations become token ids (reward_services.py), how a server is asked again (system/http_service.py).

    /v1/models -> SGLang or vLLM, and how long a conversation may be
    token ids  -> SGLang: /classify | vLLM: /pooling -> scores, as the model's head gives them -> that of the label
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollouts_core.config import RewardConfig
from rollouts_core.config.messages import first_line
from rollouts_core.engine_kinds import ENGINES, ScoringAPI
from rollouts_core.errors import CheckpointError, ConfigError, RewardError
from rollouts_core.system.http_service import HTTPService

SCORING_APIS = {name: engine.scoring for name, engine in ENGINES.items() if engine.scoring}
"""By what servers say of their models (`owned_by`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundServer:
    api: ScoringAPI
    max_tokens: int | None
    """Of a conversation; None where the server does not say."""


class RewardModelServer:
    """A served reward model; which kind of server it is, is found out by the first request.

    Args:
        config: of the kind reward_model.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.url = config.url.rstrip("/")
        self._config = config
        self._models = HTTPService(f"{self.url}/v1/models", config)
        self._scores: HTTPService | None = None
        self._found: _FoundServer | None = None

    async def score(self, conversations: Sequence[list[int]]) -> list[list[float]]:
        """The scores of each conversation, raw outputs of the model's head; of one that is too long its end is read.

        Raises:
            EnvironmentUnavailableError: the server stays away, or answers what cannot be read.
            RewardError: it refused, or serves no reward model.
        """
        found = self._found = self._found or await self._find_out()
        service = self._scores = self._scores or HTTPService(f"{self.url}{found.api.path}", self._config)
        rows = [ids[-found.max_tokens :] if found.max_tokens else ids for ids in conversations]
        try:
            scores: list[list[float]] = await service.ask(found.api.render(rows), found.api.read)
        except RewardError as error:
            raise RewardError(
                f"{error}; expected a reward model, served by SGLang with --is-embedding or by vLLM with "
                "--runner pooling"
            ) from error
        return scores

    async def _find_out(self) -> _FoundServer:
        model = await self._models.ask(None, lambda answer: dict(answer["data"][0]))
        api = SCORING_APIS.get(str(model.get("owned_by")))
        if api is None:
            raise RewardError(
                f"{self._models.url} names {model.get('owned_by')!r} as the server: expected one of "
                f'{", ".join(SCORING_APIS)}; for another, write a service (kind = "http")'
            )
        max_tokens = model.get("max_model_len")
        return _FoundServer(api=api, max_tokens=int(max_tokens) - api.num_reserved if max_tokens else None)


def find_label(config: RewardConfig) -> int | None:
    """The number of the label that is the reward; None where there is one, or the folder does not say how many.

    Raises:
        ConfigError: one must be named, or the one that is named does not exist.
        CheckpointError: the folder's config.json cannot be read.
    """
    labels = _read_labels(Path(config.model) / "config.json")
    if config.label in labels:
        return labels.index(config.label)
    if config.label.isdecimal() and (not labels or int(config.label) < len(labels)):
        return int(config.label)
    named = f"those of the reward model at {config.model} are {', '.join(labels)}"
    if config.label and labels:
        raise ConfigError(f"rollout.rewards: there is no label {config.label!r}: {named}")
    if config.label:
        raise ConfigError(
            f"rollout.rewards: {config.model} names no labels (id2label of config.json), so {config.label!r} cannot be "
            "found: give its number, from 0"
        )
    if len(labels) > 1:
        raise ConfigError(f"rollout.rewards: set label to the one whose score is the reward: {named}")
    return None


def _read_labels(file: Path) -> list[str]:
    """The names of a classifier's labels in their order; empty where its config.json does not name them."""
    if not file.is_file():
        return []
    try:
        names = dict(json.loads(file.read_text(encoding="utf-8")).get("id2label") or {})
        return [str(names[number]) for number in sorted(names, key=int)]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is no configuration of a model ({first_line(error)}): copy it again") from error


def pick_score(scores: Sequence[float], label: int | None, url: str) -> float:
    """The score that is the reward.

    Raises:
        RewardError: the model gives other scores than the settings say.
    """
    if label is None and len(scores) != 1:
        raise RewardError(
            f"{url} gives {len(scores)} scores, expected one: set label to the number of that which is the reward, "
            "from 0"
        )
    if label is not None and label >= len(scores):
        raise RewardError(
            f"{url} gives {len(scores)} scores, and label means number {label}, from 0: serve the model whose folder "
            "the settings name"
        )
    return scores[label or 0]
