"""Show the first rows of each data file as the model sees them: as trained demonstrations, or as prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, get_args

from rollouts_core.config import Config
from rollouts_core.config.data import RowFile
from rollouts_core.data.chat import tokenize_prompt
from rollouts_core.data.conversations import Row
from rollouts_core.data.dataset import build_prompt, open_datasets, sample_rules
from rollouts_core.data.rows import load_rows, resolve_revision
from rollouts_core.data.shown_rows import ShownRow, mark_trained, show_demonstrations
from rollouts_core.environments.protocol import describe_tools
from rollouts_core.errors import DataError
from rollouts_core.model.loading import load_tokenizer
from rollouts_core.rollout.resolve import resolve_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def show_rows(config: Config, num_rows: int) -> Iterator[ShownRow]:
    """Yield the first rows of each data file of a configuration, as the model sees them.

    A row with an error, such as a too long prompt, is shown with this error.

    Raises:
        InputError: a tokenizer or a file cannot be read.
    """
    tokenizer = load_tokenizer(config.model)
    rules = sample_rules(config.training.sft)
    by_loss = config.evaluation.metric == "loss"
    for dataset in config.demonstrations if config.reads("sft") else ():
        commit = resolve_revision(dataset.path, dataset.revision)
        [table] = open_datasets([dataset.model_copy(update={"revision": commit})])
        rows = table.read(range(min(num_rows, len(table))))
        yield from show_demonstrations(rows, dataset.path, tokenizer, rules)
    for name in get_args(RowFile):
        path = getattr(config.data, name)
        if not path or not (config.reads(name) or name in ("selection", "heldout")):
            continue
        rows = list(itertools.islice(load_rows(path, columns=config.data.columns_of(name)), num_rows))
        if name == "sft_eval" or (by_loss and name != "prompts"):
            yield from show_demonstrations(rows, path, tokenizer, rules)
        else:
            yield from _show_prompts(rows, path, config, tokenizer)


def _show_prompts(
    rows: Iterable[tuple[int, Row]], source: str, config: Config, tokenizer: PreTrainedTokenizerBase
) -> Iterator[ShownRow]:
    tools = describe_tools(resolve_environment(config.rollout))
    for number, row in rows:
        try:
            prompt = build_prompt(row, number, default_id="")
            tokens = tokenize_prompt(tokenizer, prompt.messages, tools)
        except DataError as error:
            yield ShownRow(source=source, row=number, outcome="error", reason=str(error))
            continue
        limit = config.rollout.max_prompt_tokens
        is_long = len(tokens) > limit
        yield ShownRow(
            source=source,
            row=number,
            outcome="error" if is_long else "prompt",
            reason=f"{len(tokens)} tokens exceed rollout.max_prompt_tokens {limit}" if is_long else "",
            text=mark_trained(tokens, [0.0] * len(tokens), tokenizer),
            num_tokens=len(tokens),
            tokens=tuple(tokens),
            loss_mask=(0,) * len(tokens),
            answer=prompt.answer,
        )
