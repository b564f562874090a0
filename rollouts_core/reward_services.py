"""Compute rewards by an HTTP service, a classifier (local or served), or an LLM judge.

    sample -> cache -> batch of samples -> service --rewards--> samples

If a service is unreachable, `EnvironmentUnavailableError` is raised and the samples are not graded. If a service
refuses a request, the run ends, because the settings are wrong or the service has a bug. `system/http_service.py`
retries requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio

from rollouts_core.config import ModelConfig, RewardConfig
from rollouts_core.config.reward import is_asked_in_tokens
from rollouts_core.data.chat import stop_token_ids
from rollouts_core.data.plain_text import hide_known_marks, tokenize_plainly
from rollouts_core.errors import CheckpointError, ConfigError, RewardError
from rollouts_core.model.loading import load_tokenizer
from rollouts_core.model.pickled_weights import refuse_pickled_weights
from rollouts_core.reward_models import RewardModelServer, find_label, pick_score
from rollouts_core.system.http_service import HTTPService, RefusedError
from rollouts_core.system.time_limits import uncounted
from rollouts_core.types import Message, Sample

logger = logging.getLogger(__name__)

MAX_CACHED = 100_000
COLLECT_S = 0.005
"""Seconds that a batch waits for more samples if the batch is not full."""
MARKS = "\"'*_`\\s"
SCORE = re.compile(
    rf"score[{MARKS}]*[:=][{MARKS}\[]*(\d+(?:\.\d+)?)(?:[{MARKS}\]]*(?:/|out\s+of)[{MARKS}]*(\d+)|\s*\\?(%))?",
    re.IGNORECASE,
)
"""Finds the score in a judge's answer. Markdown or JSON characters may surround the word or the number (**Score**: 7).
The maximum may follow the score (7/10)."""
MAX_SCORE = 10.0

UNLIMITED = 10**20
"""A tokenizer whose `model_max_length` is larger than this number has no length limit."""
MAX_JUDGE_TOKENS = 256
"""Token limit of a judge's answer at SGLang's native endpoint. Other endpoints have their own limits."""

AskJudge = Callable[[Message], Awaitable[float]]
ScoreFn = Callable[[Sequence[Sample]], Awaitable[Sequence[float | None]]]


class BatchedReward:
    """A reward function that scores samples in batches, and scores equal samples only once.

    Args:
        score: takes samples and returns their rewards, in order.
        batch_size: largest number of samples per call of `score`.
        has_limit: whether each call of `score` has its own time limit. If True, the wait for a call does not count for
            the time limit of grading.
    """

    def __init__(self, score: ScoreFn, *, batch_size: int, has_limit: bool = True) -> None:
        self.score = score
        self.has_limit = has_limit
        self.batch_size = batch_size
        self.num_calls = 0
        self.num_cached = 0
        self._waiting: list[tuple[Sample, asyncio.Future[float | None]]] = []
        self._cache: OrderedDict[bytes, asyncio.Future[float | None]] = OrderedDict()
        self._batches: set[asyncio.Task[None]] = set()

    async def __call__(self, sample: Sample) -> float | None:
        """The sample's reward; None if `score` could not compute a reward."""
        key = _identify(sample)
        self.num_calls += 1
        if (known := self._cache.get(key)) is not None:
            self.num_cached += 1
            self._cache.move_to_end(key)
            return await self._wait_for(known)
        future: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._cache[key] = future
        future.add_done_callback(lambda done: self._forget(key, done))
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        self._waiting.append((sample, future))
        if len(self._waiting) >= self.batch_size:
            self._start_batch()
        elif len(self._waiting) == 1:
            asyncio.get_running_loop().call_later(COLLECT_S, self._start_batch)
        return await self._wait_for(future)

    async def _wait_for(self, future: asyncio.Future[float | None]) -> float | None:
        # Each call of `score` has its own time limit, so the wait for other calls must not count towards the time limit
        # of grading.
        with uncounted() if self.has_limit else nullcontext():
            # The wait is shielded, because another sample may wait for the same reward when the grading of this sample
            # is cancelled.
            return await asyncio.shield(future)

    def _forget(self, key: bytes, done: asyncio.Future[float | None]) -> None:
        """Remove failed rewards from the cache, so that the next sample with this key is scored again."""
        if done.cancelled() or done.exception() is not None:
            self._cache.pop(key, None)

    def _start_batch(self) -> None:
        batch, self._waiting = self._waiting, []
        if batch:
            task = asyncio.get_running_loop().create_task(self._score_batch(batch))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _score_batch(self, batch: Sequence[tuple[Sample, asyncio.Future[float | None]]]) -> None:
        try:
            rewards = await self.score([sample for sample, _ in batch])
            if len(rewards) != len(batch):
                raise RewardError(f"{len(batch)} samples got {len(rewards)} rewards: return one per sample")
        except Exception as error:  # noqa: BLE001 - every exception is passed on to the samples that wait
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), reward in zip(batch, rewards, strict=True):
            if not future.done():
                future.set_result(reward)


def _identify(sample: Sample) -> bytes:
    """A digest of all fields of the sample that the service receives. The service's answer may depend on each field."""
    sent = json.dumps([sample.prompt, sample.response, dict(sample.metadata)], sort_keys=True, default=str)
    return hashlib.sha256(sent.encode()).digest()


def create_http_reward(config: RewardConfig) -> BatchedReward:
    """A reward from an HTTP service that receives `{"samples": [...]}` and returns `{"rewards": [...]}`.

    Each sample in the request has `prompt`, `response`, `answer` and `metadata`.
    """

    service = HTTPService(config.url, config)

    async def score(samples: Sequence[Sample]) -> list[float | None]:
        body = {
            "samples": [
                {
                    "prompt": sample.prompt,
                    "response": sample.response,
                    "answer": sample.metadata.get("answer", ""),
                    "metadata": dict(sample.metadata),
                }
                for sample in samples
            ]
        }
        rewards: list[float | None] = await service.ask(body, _read_rewards)
        return rewards

    return BatchedReward(score, batch_size=config.batch_size)


def create_judge_reward(config: RewardConfig) -> BatchedReward:
    """A reward between 0 and 1 from a language model at an OpenAI-style endpoint or at SGLang's native endpoint."""
    is_native = is_asked_in_tokens(config.url)
    ask_judge = _create_native_judge(config) if is_native else _create_chat_judge(config)

    async def score(samples: Sequence[Sample]) -> list[float | None]:
        [sample] = samples
        return [await ask_judge(Message(role="user", content=render_judge_prompt(config.judge_prompt, sample)))]

    return BatchedReward(score, batch_size=1)


def _create_chat_judge(config: RewardConfig) -> AskJudge:
    """Return a judge that uses temperature 0.

    If the model refuses this temperature, like OpenAI's reasoning models, requests omit the temperature.
    """
    url = f"{config.url.rstrip('/')}/chat/completions"
    service = HTTPService(url, config)
    sampling = {"temperature": 0}

    def read(answer: Any) -> float:  # Any: JSON
        return read_score(answer["choices"][0]["message"]["content"])

    async def ask_judge(question: Message) -> float:
        plain = Message(role="user", content=hide_known_marks(question["content"]))
        body = {"model": config.model, "messages": [plain]}
        try:
            score: float = await service.ask(body | sampling, read)
        except RefusedError as error:
            if error.parameter != "temperature":
                raise
            if sampling:  # log the warning only at the first refusal
                sampling.clear()
                logger.warning("%s refuses temperature 0, so scores may vary between calls: %s", url, error)
            score = await service.ask(body, read)
        return score

    return ask_judge


def _create_native_judge(config: RewardConfig) -> AskJudge:
    """Return a judge that receives token ids: for the embedded engine and for SGLang without a tokenizer."""
    service = HTTPService(config.url, config)
    tokenizer = load_tokenizer(ModelConfig(path=config.model))
    sampling = {
        "temperature": 0.0,
        "max_new_tokens": MAX_JUDGE_TOKENS,
        "stop_token_ids": list(stop_token_ids(tokenizer)),
    }

    async def ask_judge(question: Message) -> float:
        tokens = tokenize_plainly(tokenizer, [question], add_generation_prompt=True)
        body = {"input_ids": tokens, "sampling_params": sampling}
        score: float = await service.ask(
            body, lambda answer: read_score(tokenizer.decode(answer["output_ids"], skip_special_tokens=True))
        )
        return score

    return ask_judge


def render_judge_prompt(template: str, sample: Sample) -> str:
    """The text for the judge: the template with {prompt}, {response} and {answer} replaced.

    Placeholders inside the inserted texts are not replaced.
    """
    asked = "\n\n".join(message["content"] for message in sample.messages)
    values = {"{prompt}": asked, "{response}": sample.response, "{answer}": str(sample.metadata.get("answer", ""))}
    return re.sub("|".join(map(re.escape, values)), lambda found: values[found[0]], template)


def create_classifier_reward(config: RewardConfig) -> BatchedReward:
    """A reward from a Hugging Face sequence classifier with one label: the classifier's raw output for prompt and
    response.

    Raises:
        ConfigError: the model's folder does not exist, or the model has several labels.
        CheckpointError: the model cannot be loaded, or has pickled weights.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with _loading(config):
        refuse_pickled_weights(Path(config.model), instead="convert them to safetensors")
        model = AutoModelForSequenceClassification.from_pretrained(
            config.model, use_safetensors=True, trust_remote_code=False
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(config.model, trust_remote_code=False)
    if model.config.num_labels != 1:
        raise ConfigError(
            f"the reward model at {config.model} has {model.config.num_labels} labels: use a model with one label"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # multimodal models, such as Gemma 3, have two settings objects
    for settings in (model.config, model.config.get_text_config()):
        settings.pad_token_id = tokenizer.pad_token_id
    # If a conversation is too long, its beginning is removed, because the completion to grade is at its end.
    tokenizer.truncation_side = "left"
    max_tokens = min(tokenizer.model_max_length, count_positions(model) or tokenizer.model_max_length)
    is_limited = max_tokens < UNLIMITED
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    one_at_a_time = anyio.CapacityLimiter(1)  # two forward passes at once would compete for the same cores

    @torch.inference_mode()
    def score_now(samples: Sequence[Sample]) -> list[float | None]:
        encoded = [encode_for_classifier(tokenizer, each, max_tokens if is_limited else None) for each in samples]
        rows = tokenizer.pad({"input_ids": encoded}, padding=True, return_tensors="pt")
        rewards: list[float | None] = model(**rows.to(model.device)).logits[:, 0].float().tolist()
        return rewards

    async def score(samples: Sequence[Sample]) -> list[float | None]:
        return await anyio.to_thread.run_sync(score_now, samples, limiter=one_at_a_time)

    return BatchedReward(score, batch_size=config.batch_size, has_limit=False)


@contextmanager
def _loading(config: RewardConfig) -> Iterator[None]:
    """Turn errors from loading a classifier into CheckpointErrors that name the classifier's folder."""
    if not Path(config.model).is_dir():
        raise ConfigError(f"rollout.rewards: model {config.model!r} is not a folder: give the folder of a classifier")
    from rollouts_core.model.loading import BAD_SETTINGS, UNLOADABLE, describe_unloadable  # needs torch

    try:
        yield
    except (*UNLOADABLE, *BAD_SETTINGS) as error:
        reason = describe_unloadable(error)
        raise CheckpointError(f"the reward model at {config.model} cannot be loaded: {reason}") from error


def create_reward_model_reward(config: RewardConfig) -> BatchedReward:
    """A reward from a sequence classifier that SGLang or vLLM serves: the classifier's raw output for prompt and
    response.

    The server receives token ids from the tokenizer in the folder `config.model`.

    Raises:
        ConfigError: the model's folder does not exist, or `label` is missing or unknown.
        CheckpointError: the tokenizer in the folder cannot be loaded.
    """
    from transformers import AutoTokenizer

    with _loading(config):
        tokenizer = AutoTokenizer.from_pretrained(config.model, trust_remote_code=False)
    label = find_label(config)
    server = RewardModelServer(config)
    one_at_a_time = anyio.CapacityLimiter(1)  # tokenizers are not thread-safe

    def tokenize(samples: Sequence[Sample]) -> list[list[int]]:
        return [encode_for_classifier(tokenizer, sample) for sample in samples]

    async def score(samples: Sequence[Sample]) -> list[float | None]:
        rows = await anyio.to_thread.run_sync(tokenize, samples, limiter=one_at_a_time)
        return [pick_score(scores, label, server.url) for scores in await server.score(rows)]

    return BatchedReward(score, batch_size=config.batch_size)


def count_positions(model: Any) -> int | None:  # Any: transformers' models
    """The longest input of a model, tokens; None if the length is unlimited (T5, BLOOM) or unknown.

    RoBERTa and related models number positions from the padding index on, so their first positions cannot be used.
    """
    num_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if num_positions is None or num_positions <= 0:
        return None
    skipped = [
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    return int(num_positions) - max(skipped, default=0)


def encode_for_classifier(
    tokenizer: Any, sample: Sample, max_tokens: int | None = None
) -> list[int]:  # Any: transformers' tokenizers
    """Token ids of prompt and response.

    The texts are rendered with the tokenizer's chat template, or as plain text if the tokenizer has no template.

    Args:
        max_tokens: keep only this many tokens at the end, where the completion is; None keeps all tokens.
    """
    messages = [*sample.messages, Message(role="assistant", content=sample.response)]
    if tokenizer.chat_template is not None:
        tokens = tokenize_plainly(tokenizer, messages, add_generation_prompt=False)
        return tokens if max_tokens is None else tokens[-max_tokens:]
    text = "\n".join(message["content"] for message in messages)
    is_limited = max_tokens is not None
    encoded: list[int] = tokenizer(
        text, truncation=is_limited, max_length=max_tokens, add_special_tokens=True, split_special_tokens=True
    )["input_ids"]
    return encoded


def _read_rewards(answer: Any) -> list[float | None]:  # Any: JSON
    return [_as_reward(value) for value in answer["rewards"]]


def _as_reward(value: Any) -> float | None:  # Any: JSON
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{value!r} is not a reward (a number or null)")


def read_score(text: str) -> float:
    """The last score in a judge's answer, scaled to between 0 and 1.

    Raises:
        ValueError: the answer has no score, or the score is out of range.
    """
    found = SCORE.findall(text)
    number, whole, percent = found[-1] if found else ("nan", "", "")
    if not 0 <= float(number) <= MAX_SCORE or percent or (whole and float(whole) != MAX_SCORE):
        raise ValueError(f"no score from 0 to {MAX_SCORE:g} in {text[:100]!r}")
    return float(number) / MAX_SCORE


REWARD_SERVICES: dict[str, Callable[[RewardConfig], BatchedReward]] = {
    "http": create_http_reward,
    "classifier": create_classifier_reward,
    "reward_model": create_reward_model_reward,
    "judge": create_judge_reward,
}
"""For each kind of reward that is not a plain function, the function that creates the reward."""
