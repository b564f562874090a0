"""Get scores of conversations from a reward model that SGLang or vLLM serves.

/v1/models -> the server program, and the length limit of conversations
token ids  -> SGLang: /classify | vLLM: /pooling -> raw outputs of the model's head -> score of the chosen label
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
"""The scoring API of each server program, by the program's name in the field `owned_by` of /v1/models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundServer:
    api: ScoringAPI
    max_tokens: int | None
    """The longest conversation that the server accepts, tokens; None if the server does not report a limit."""


class RewardModelServer:
    """A served reward model. The first request asks which program serves the model.

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
        """Return the raw outputs of the model's head for each conversation.

        If a conversation is too long, tokens at its beginning are removed.

        Raises:
            EnvironmentUnavailableError: the server is unreachable, or its answer cannot be read.
            RewardError: the server refused the request, or does not serve a reward model.
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
    """Return the index of the label whose score is the reward; None if the model has one label, or labels without
    names.

    Raises:
        ConfigError: the settings name no label although the model has several, or the named label does not exist.
        CheckpointError: config.json in the model's folder cannot be read.
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
    """The names of a classifier's labels, in order. The list is empty if its config.json does not name the labels."""
    if not file.is_file():
        return []
    try:
        names = dict(json.loads(file.read_text(encoding="utf-8")).get("id2label") or {})
        return [str(names[number]) for number in sorted(names, key=int)]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a model configuration ({first_line(error)}): copy it again") from error


def pick_score(scores: Sequence[float], label: int | None, url: str) -> float:
    """Return the score of the label.

    Raises:
        RewardError: there are several scores but no label, or the label has no score.
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
