"""Find out before any training whether a configuration can work: all checks in their order.

Not here: the checks of a model's folder (model_checks.py), of demonstrations (demonstrations.py), of prompts
(answers.py), of what models are compared on (compared_rows.py), of functions (function_checks.py), of checkpoints to go
on from (resumed.py), the form of settings (config/), machines and ports (infra).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rollouts_core.checks.answers import COMPARE_BY_LOSS, check_answers
from rollouts_core.checks.compared_rows import check_held_out, check_num_rows, check_other_rows, warn_of_repeated_rows
from rollouts_core.checks.cpu_formats import warn_of_slow_bfloat16
from rollouts_core.checks.demonstrations import check_compared_demonstrations, check_demonstrations
from rollouts_core.checks.epochs import MANY_EPOCHS_OF_RL, MANY_EPOCHS_OF_SFT, describe_epochs
from rollouts_core.checks.function_checks import check_functions, find_functions, one_of_each_shape, shape_of
from rollouts_core.checks.learning_rates import check_learning_rates
from rollouts_core.checks.mistakes import Mistakes
from rollouts_core.checks.model_checks import (
    check_generable,
    check_jax_model,
    check_language_model,
    check_model_files,
    check_model_vocabulary,
    check_packing,
    check_positions,
    check_shared_heads,
    check_updatable,
    count_positions,
    num_embedded_tokens,
    warn_of_dropout,
    warn_of_long_completions,
)
from rollouts_core.checks.no_effect import find_settings_without_effect, warn_of_equal_completions
from rollouts_core.checks.resumed import check_resumed
from rollouts_core.checks.templates import (
    UnreadFields,
    UnwrittenRoles,
    check_conversation,
    warn_of_endless_turns,
    warn_of_unseen_tools,
)
from rollouts_core.config import Config, ModelConfig, name_of_function
from rollouts_core.config.data import RowFile
from rollouts_core.data.chat import is_prefill
from rollouts_core.data.dataset import check_disjoint, load_prompts_from_jsonl
from rollouts_core.data.held_out import HeldOutRows, read_held_out
from rollouts_core.environments.protocol import describe_tools
from rollouts_core.errors import DataError, DemonstrationError
from rollouts_core.findings import Caution
from rollouts_core.model.adapter_targets import check_adapters
from rollouts_core.model.loading import check_not_quantized, find_positions, load_tokenizer
from rollouts_core.rollout.generate import check_prompt_lengths
from rollouts_core.rollout.offline_rollouts import OfflineRollouts, check_rollouts
from rollouts_core.rollout.resolve import check_graded, resolve_environment
from rollouts_core.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_FIRST_ROWS = 64
"""Rows of each file on which functions are tried before the files are read."""


def validate_config(config: Config, *, trains_here: bool = True) -> list[str]:
    """Check everything that can be checked without training; returns facts and warnings, a sentence each.

    Functions of the user are imported and tried on the first rows before whole files are read.

    Args:
        trains_here: this machine will train, so its CPU is checked; other machines warn when the training starts.

    Raises:
        InputError: a line for each mistake, with what was expected, what was found and what to do.
    """
    mistakes = Mistakes()
    findings = _check_settings(config, mistakes, trains_here=trains_here)
    tokenizer: PreTrainedTokenizerBase | None = None
    with mistakes.at("model"):
        check_model_files(config)
        tokenizer = load_tokenizer(config.model)
        check_model_vocabulary(config.model, tokenizer)
        findings.insert(0, f"model {config.model.path}: tokenizer with {len(tokenizer)} tokens")
    if tokenizer is None:
        with mistakes.at("rollout"):
            find_functions(config.rollout)
        mistakes.check()
    assert tokenizer is not None, "its error was noted"
    by_loss = config.evaluation.metric == "loss"
    tried = set() if by_loss and config.mode == "sft" else _try_functions(config, tokenizer, mistakes, findings)
    held_out = _read_held_out(config, mistakes)
    if config.mode != "rl":
        findings += check_demonstrations(config, tokenizer, held_out, mistakes)
        if config.data.sft_eval:
            with mistakes.at("data.sft_eval"):
                findings += check_compared_demonstrations("sft_eval", config, tokenizer)
    if by_loss:
        findings += _check_compared_by_loss(config, tokenizer, held_out, mistakes)
    else:
        findings += _check_prompts(config, tokenizer, held_out, mistakes, tried)
    mistakes.check()
    if config.mode != "sft":
        findings += [*warn_of_own_generation(config), *warn_of_uncorrected_age(config)]
    return findings


def _check_settings(config: Config, mistakes: Mistakes, *, trains_here: bool) -> list[str]:
    """What the settings and the model's files say, without a row being read."""
    findings: list[str] = []
    if config.evaluation.metric == "accuracy":
        with mistakes.at("rollout"):
            check_graded(config.rollout)
    with mistakes.at("training"):
        check_resumed(config)
    with mistakes.at("model"):  # a model that cannot be read has one mistake, not one of every check
        check_model_files(config)
        check_not_quantized(config.model)  # before an engine refuses such a model: another engine would not help
        check_generable(config)
        check_updatable(config)
        check_shared_heads(config)
        check_jax_model(config)
        findings += check_language_model(config)
        findings += warn_of_dropout(config)
        findings += check_adapters(config)
    with mistakes.at("training.sft.packing"):
        check_packing(config)
    with mistakes.at("training"):
        findings += [
            *find_settings_without_effect(config),
            *check_learning_rates(config),
            *(warn_of_slow_bfloat16(config) if trains_here else ()),
        ]
    with mistakes.at("rollout"):
        findings += warn_of_long_completions(config)
    return findings


def _prompt_files(config: Config) -> dict[RowFile, str]:
    """The files of prompts that are sampled for, by their settings."""
    if config.evaluation.metric == "loss":
        return {}
    files: dict[RowFile, str] = {"selection": config.data.selection, "heldout": config.data.heldout}
    return {**files, "prompts": config.data.prompts} if config.mode != "sft" and config.data.prompts else files


def _try_functions(
    config: Config, tokenizer: PreTrainedTokenizerBase, mistakes: Mistakes, findings: list[str]
) -> set[tuple[bool, frozenset[str]]] | None:
    """Import and try the functions on the first rows; returns the shapes of these, None if a function failed."""
    first: list[Prompt] = []
    for name, path in _prompt_files(config).items():
        with suppress(DataError):  # the whole file is read later, and its mistakes are noted then
            prompts = load_prompts_from_jsonl(path, max_rows=NUM_FIRST_ROWS, columns=config.data.columns_of(name))
            check_answers(prompts, config, source=path)
            first += prompts
    has_failed = True
    with mistakes.at("rollout"):
        find_functions(config.rollout)
        chosen = one_of_each_shape(first)
        with suppress(DataError):  # a chat template that refuses rows is told with the file that has them
            findings += check_functions(config, chosen, tokenizer) if chosen else []
        has_failed = False
    return None if has_failed else {shape_of(prompt) for prompt in one_of_each_shape(first)}


def _check_compared_by_loss(
    config: Config, tokenizer: PreTrainedTokenizerBase, held_out: Sequence[HeldOutRows], mistakes: Mistakes
) -> list[str]:
    findings: list[str] = []
    names: tuple[RowFile, RowFile] = ("selection", "heldout")
    for name in names:
        with mistakes.at(f"data.{name}"):
            findings += check_compared_demonstrations(name, config, tokenizer)
    with mistakes.at("data.heldout"):
        check_other_rows(config.data)
    with mistakes.at("data"):
        findings += check_held_out(held_out)
    with mistakes.at("data.heldout"):
        findings += warn_of_repeated_rows(config)
    return findings


def _check_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[HeldOutRows],
    mistakes: Mistakes,
    tried: set[tuple[bool, frozenset[str]]] | None,
) -> list[str]:
    """Read every prompt.

    Args:
        tried: shapes of rows that functions were tried on already; None if they failed.
    """
    findings: list[str] = []
    if config.mode != "sft" and config.data.rollouts:
        with mistakes.at("data.rollouts"):
            findings += _check_recorded_rollouts(config, tokenizer)
    files, loaded = _prompt_files(config), dict[RowFile, list[Prompt]]()
    for name, path in files.items():
        with mistakes.at(f"data.{name}"):
            loaded[name] = _load_checked_prompts(name, path, config, tokenizer)
        with mistakes.at(f"data.{name}"):
            check_answers(loaded.get(name, []), config, source=path)
    with mistakes.at("rollout"):
        check_conversation(tokenizer, config.rollout)
    if {"selection", "heldout"} <= loaded.keys():
        with mistakes.at("data.heldout"):
            check_disjoint(loaded["selection"], loaded["heldout"], names=("data.selection", "data.heldout"))
    with mistakes.at("data"):
        findings += check_held_out(held_out, loaded.get("prompts", ()), source=files.get("prompts", ""))
    if not mistakes and tried is not None:
        others = [each for each in one_of_each_shape(itertools.chain(*loaded.values())) if shape_of(each) not in tried]
        with mistakes.at("rollout"):
            findings += check_functions(config, others, tokenizer) if others else []
    if mistakes:
        return findings
    findings += warn_of_repeated_rows(config)
    if config.mode != "sft":
        num_rows = min(len(loaded["heldout"]), config.evaluation.max_prompts)
        limit = config.evaluation.max_p_value
        with mistakes.at("evaluation.max_p_value"):
            check_num_rows(num_rows, limit, source="data.heldout", setting="evaluation.max_p_value")
    findings += [_count_prompts(rows, files[name]) for name, rows in loaded.items()]
    for name, rows in loaded.items():
        findings += _warn_of_untold_tools(rows, files[name])
        findings += _warn_of_unwritten(rows, files[name], config.model, tokenizer)
    findings += check_prompt_epochs(config, len(loaded["prompts"])) if "prompts" in loaded else []
    findings += warn_of_endless_turns(tokenizer)
    return findings + warn_of_unseen_tools(tokenizer, describe_tools(resolve_environment(config.rollout)))


def _check_recorded_rollouts(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    folder, vocab_size = Path(config.data.rollouts), num_embedded_tokens(config.model) or len(tokenizer)
    positions = find_positions(config.model)
    max_tokens = positions.num + 1 if positions and positions.are_all else None
    said = check_rollouts(folder, vocab_size=vocab_size, max_tokens=max_tokens, config=config.rollout)
    num_recorded, num_steps = len(OfflineRollouts(folder, config.rollout).files), config.training.rl.num_steps
    of_what = f"the {num_recorded} recorded steps"
    return [said, describe_epochs("training.rl", num_steps, num_recorded, of_what=of_what, many=MANY_EPOCHS_OF_SFT)]


def validate_evaluation(config: Config, models: Sequence[ModelConfig]) -> list[str]:
    """Check what can be checked of scoring models on `data.heldout`; returns what was found, a sentence each.

    Raises:
        InputError: one sentence with what was expected, what was found and what to do.
    """
    if config.evaluation.metric == "accuracy":
        check_graded(config.rollout)
    heldout = config.data.heldout
    findings: list[str] = [*warn_of_equal_completions(config)]
    for model in models:
        scored = config.model_copy(update={"model": model, "mode": "sft"})
        check_model_files(scored)
        check_generable(scored)
        tokenizer = load_tokenizer(model)
        check_model_vocabulary(model, tokenizer)
        findings.append(f"model {model.path}: tokenizer with {len(tokenizer)} tokens")
        if config.evaluation.metric == "loss":
            findings += check_compared_demonstrations("heldout", scored, tokenizer)
            continue
        prompts = _load_checked_prompts("heldout", heldout, scored, tokenizer)
        check_conversation(tokenizer, scored.rollout)
        check_answers(prompts, scored, source=heldout)
        findings += check_functions(scored, one_of_each_shape(prompts), tokenizer)
        findings += [_count_prompts(prompts, heldout), *_warn_of_untold_tools(prompts, heldout)]
        findings += _warn_of_unwritten(prompts, heldout, model, tokenizer)
        findings += warn_of_endless_turns(tokenizer)
        findings += warn_of_unseen_tools(tokenizer, describe_tools(resolve_environment(scored.rollout)))
    return list(dict.fromkeys([*findings, *warn_of_repeated_rows(config)]))


def warn_of_own_generation(config: Config) -> list[Caution]:
    """A warning where RL learns from completions made otherwise than those that checkpoints are compared by."""
    if config.rollout.generate_fn == "" or config.data.rollouts:
        return []
    return [
        Caution(
            f"rollout.generate_fn {name_of_function(config.rollout.generate_fn)} makes the completions of RL alone: "
            f"checkpoints are compared by what {config.evaluation_engine.kind} completes by itself, in one turn or "
            "with rollout.environment, so scores may not show what such completions gain"
        )
    ]


def warn_of_uncorrected_age(config: Config) -> list[Caution]:
    """A warning where completions of other weights are trained on as if the current ones had sampled them."""
    ages = {name: getattr(config.rollout, name) for name in ("max_staleness", "max_partial_staleness")}
    old = [f"rollout.{name} {age}" for name, age in ages.items() if age]
    if config.training.rl.sync_every > 1:  # by these steps the trainer is ahead of what it published
        old.append(f"training.rl.sync_every {config.training.rl.sync_every}")
    if config.data.rollouts:
        old = ["data.rollouts"]
    if not old or config.training.rl.corrects_for_age:
        return []
    return [
        Caution(
            f"{old[0]} trains on completions of other weights than the current ones, and nothing in "
            'training.rl.loss corrects for that: set ratio_base = "rollout", or mismatch.weight with its limits'
        )
    ]


def check_prompt_epochs(config: Config, num_prompts: int) -> list[str]:
    """How often RL sees its prompts, and a warning where a step sees some several times."""
    batch_size = config.rollout.batch_size
    per_epoch, of_what = num_prompts / batch_size, f"the {num_prompts:,} prompts"
    num_steps = config.training.rl.num_steps
    said = describe_epochs("training.rl", num_steps, per_epoch, of_what=of_what, many=MANY_EPOCHS_OF_RL)
    if batch_size <= num_prompts:
        return [said]
    found = f"rollout.batch_size {batch_size} is more than the {num_prompts} prompts of {config.data.prompts}"
    return [said, Caution(f"{found}: a step sees the same prompt several times")]


def _read_held_out(config: Config, mistakes: Mistakes) -> list[HeldOutRows]:
    """The rows that checkpoints are chosen by, or kept, and those that grade the chosen ones."""
    metric, num_used, held_out = config.evaluation.metric, config.evaluation.max_prompts, list[HeldOutRows]()
    names: tuple[RowFile, RowFile] = ("selection", "heldout")
    for name in names:
        columns = config.data.columns_of(name)
        with mistakes.at(f"data.{name}"), _with_remedy(config):
            path = getattr(config.data, name)
            held_out.append(read_held_out(f"data.{name}", path, metric, max_rows=num_used, columns=columns))
    if config.mode != "rl" and (path := config.data.sft_eval):  # keep_best goes by it
        with mistakes.at("data.sft_eval"):
            columns = config.data.columns_of("sft_eval")
            held_out.append(read_held_out("data.sft_eval", path, "loss", columns=columns))
    return held_out


@contextmanager
def _with_remedy(config: Config) -> Iterator[None]:
    """Say of demonstrations among prompts that SFT alone can also be judged by its loss on them."""
    try:
        yield
    except DemonstrationError as error:
        if config.mode != "sft":
            raise
        raise DemonstrationError(f"{error}; or, to compare by the loss on such rows, {COMPARE_BY_LOSS}") from error


def _count_prompts(prompts: Sequence[Prompt], source: str) -> str:
    """How many prompts there are, without an answer, and with the beginning of one, for a person."""
    num_unanswered = sum(prompt.answer == "" for prompt in prompts)
    num_begun = sum(is_prefill(prompt.messages) for prompt in prompts)
    unanswered = f", {num_unanswered} without an `answer`" * bool(num_unanswered)
    begun = f", {num_begun} end with words of the assistant, which the policy goes on with" * bool(num_begun)
    return f"{source}: {len(prompts)} prompts{unanswered}{begun}"


def _warn_of_untold_tools(prompts: Sequence[Prompt], source: str) -> list[Caution]:
    """A warning where prompts have `tools`, as demonstrations may."""
    rows = [prompt.row for prompt in prompts if prompt.metadata.get("tools")]
    if not rows:
        return []
    return [
        Caution(
            f"{source}: {len(rows)} of {len(prompts)} prompts (row {rows[0]} first) have `tools`, of which the policy "
            "is not told: it is told of those of rollout.environment alone; give them there, or write them into the "
            "messages"
        )
    ]


def _warn_of_unwritten(
    prompts: Sequence[Prompt], source: str, model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Caution]:
    """A warning where something in prompts never reaches the policy."""
    unwritten, unread = UnwrittenRoles(tokenizer), UnreadFields(model.chat_template_kwargs)
    for prompt in prompts:
        unwritten.note(prompt.row, prompt.messages)
        unread.note(prompt.row, prompt.metadata, prompt.messages)
    return unwritten.warn(source, len(prompts)) + unread.warn(source, len(prompts))


def _load_checked_prompts(name: RowFile, path: str, config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    with _with_remedy(config):
        prompts = load_prompts_from_jsonl(path, columns=config.data.columns_of(name))
    tools = describe_tools(resolve_environment(config.rollout))
    max_tokens = config.rollout.max_prompt_tokens
    longest = check_prompt_lengths(prompts, tokenizer, max_tokens=max_tokens, source=path, tools=tools)
    kind = config.evaluation_engine.kind
    check_positions(f"{path}: prompts of {longest} tokens", longest, count_positions(config), config, engine=kind)
    return prompts
