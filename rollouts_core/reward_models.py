"""Ask a reward model served by SGLang or vLLM for scores of conversations.

/v1/models -> kind of server, and its longest conversation
token ids  -> SGLang: /classify | vLLM: /pooling -> raw scores of the model's head -> score of the label
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
"""The scoring API by a server's name for itself (`owned_by`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundServer:
    api: ScoringAPI
    max_tokens: int | None
    """Longest conversation, tokens; None if the server does not report it."""


class RewardModelServer:
    """A served reward model. The first request finds out the kind of server.

    Args:
        config: a reward of the kind reward_model.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.url = config.url.rstrip("/")
        self._config = config
        self._models = HTTPService(f"{self.url}/v1/models", config)
        self._scores: HTTPService | None = None
        self._found: _FoundServer | None = None

    async def score(self, conversations: Sequence[list[int]]) -> list[list[float]]:
        """Raw outputs of the model's head for each conversation; too long conversations are cut at their beginning.

        Raises:
            EnvironmentUnavailableError: the server is unreachable, or its answer is unreadable.
            RewardError: the server refused the request, or serves no reward model.
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
                f'{", ".join(SCORING_APIS)}. For another server, write a service (kind = "http")'
            )
        max_tokens = model.get("max_model_len")
        return _FoundServer(api=api, max_tokens=int(max_tokens) - api.num_reserved if max_tokens else None)


def find_label(config: RewardConfig) -> int | None:
    """The index of the label whose score is the reward; None for a single or unknown number of labels.

    Raises:
        ConfigError: the model has several labels and the settings name no label, or the named label does not exist.
        CheckpointError: the folder's config.json cannot be read.
    """
    labels = _read_labels(Path(config.model) / "config.json")
    if config.label in labels:
        return labels.index(config.label)
    if config.label.isdecimal() and (not labels or int(config.label) < len(labels)):
        return int(config.label)
    named = f"the reward model at {config.model} has the labels {', '.join(labels)}"
    if config.label and labels:
        raise ConfigError(f"rollout.rewards: there is no label {config.label!r}: {named}")
    if config.label:
        raise ConfigError(
            f"rollout.rewards: {config.model} has no label names (id2label of config.json), so {config.label!r} cannot "
            "be found: set label to its number, from 0"
        )
    if len(labels) > 1:
        raise ConfigError(f"rollout.rewards: set label to the label whose score is the reward: {named}")
    return None


def _read_labels(file: Path) -> list[str]:
    """The names of a classifier's labels in order; empty if its config.json does not name them."""
    if not file.is_file():
        return []
    try:
        names = dict(json.loads(file.read_text(encoding="utf-8")).get("id2label") or {})
        return [str(names[number]) for number in sorted(names, key=int)]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a model configuration ({first_line(error)}): copy it again") from error


def pick_score(scores: Sequence[float], label: int | None, url: str) -> float:
    """Select the score that is the reward.

    Raises:
        RewardError: the number of scores does not fit the settings.
    """
    if label is None and len(scores) != 1:
        raise RewardError(
            f"{url} gives {len(scores)} scores, expected one: set label to the number of the score to use as reward, "
            "from 0"
        )
    if label is not None and label >= len(scores):
        raise RewardError(
            f"{url} gives {len(scores)} scores, but label is number {label}, from 0: serve the model in the folder "
            "that the settings name"
        )
    return scores[label or 0]
