"""Validate the configuration of a run before it starts, by all checks in this package.

Not here: checks of machines and ports (infra), of the form of settings (config/).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rollouts_core.checks.adapter_form import describe_adapter_form
from rollouts_core.checks.answers import COMPARE_BY_LOSS, check_answers
from rollouts_core.checks.compared_rows import check_held_out, check_num_rows, check_other_rows, warn_of_repeated_rows
from rollouts_core.checks.cpu_formats import warn_of_slow_bfloat16
from rollouts_core.checks.demonstrations import (
    check_compared_demonstrations,
    check_demonstrations,
    dataset_of,
    place_datasets,
    read_each_demonstration,
)
from rollouts_core.checks.epochs import MANY_EPOCHS_OF_RL, MANY_EPOCHS_OF_SFT, describe_epochs
from rollouts_core.checks.function_checks import check_functions, find_functions, one_of_each_shape, shape_of
from rollouts_core.checks.learning_rates import check_learning_rates
from rollouts_core.checks.loss_checks import check_loss_fn, reads_rollout_logprobs
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
from rollouts_core.data.bad_rows import BadRows
from rollouts_core.data.chat import is_prefill
from rollouts_core.data.dataset import check_disjoint, load_prompts_from_jsonl
from rollouts_core.data.held_out import HeldOutRows, Metric, read_held_out
from rollouts_core.environments.protocol import Environment, describe_tools
from rollouts_core.errors import ConfigError, DataError, DemonstrationError
from rollouts_core.findings import Caution
from rollouts_core.mistakes import Mistakes
from rollouts_core.model.adapter_targets import check_adapters
from rollouts_core.model.loading import check_not_quantized, find_positions, load_tokenizer
from rollouts_core.rollout.generate import check_prompt_lengths
from rollouts_core.rollout.offline_rollouts import OfflineRollouts, check_rollouts
from rollouts_core.rollout.resolve import check_graded, resolve_environment
from rollouts_core.stages import TRAININGS, kind_of
from rollouts_core.stages.kind import load
from rollouts_core.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FUNCTION_SETTINGS = ("environment", "reward_fn", "rewards", "filter_fn", "filters", "buffer_filter_fn", "generate_fn")
NUM_FIRST_ROWS = 64
"""The user's functions are tested on this many rows of each file before the files are read completely."""


def validate_config(config: Config, mistakes: Mistakes | None = None, *, trains_here: bool = True) -> list[str]:
    """Check everything that can be checked before training. Returns findings and warnings, one sentence each.

    The user's functions are imported and tested on the first rows before whole files are read. Models and files for
    which an error was already collected are skipped.

    Args:
        mistakes: collects the errors. If None, they are raised.
        trains_here: whether this machine trains, so that its CPU is checked. Other machines are checked when their
            training starts.

    Raises:
        InputError: one line per error: the expected value, the value found, and a remedy.
    """
    noted = Mistakes() if mistakes is None else mistakes
    findings = _check_settings(config, noted, trains_here=trains_here)
    own_loss = config.training.rl.functions_named if config.is_graded else {}
    for setting in [*own_loss][:1]:
        with noted.at(setting):
            findings += check_loss_fn(config.training.rl)
    tokenizer = _load_tokenizer(config, noted, findings)
    by_loss = config.evaluation.metric == "loss"
    is_graded = not by_loss or config.is_graded
    if is_graded:
        find_functions(config.rollout, noted)
    if tokenizer is None:
        _check_rows_alone(config, noted)
    else:
        findings += _check_data(config, tokenizer, noted, is_graded=is_graded)
    if mistakes is None:
        noted.check()
    for name in config.trainings if not noted else ():
        findings += load(kind_of(name).warn)(config)
    return findings


def _load_tokenizer(config: Config, mistakes: Mistakes, findings: list[str]) -> PreTrainedTokenizerBase | None:
    """Load the model's tokenizer, and insert a sentence about it as the first finding.

    Returns None if `mistakes` already has an error of the model, or if the tokenizer cannot be loaded.
    """
    tokenizer: PreTrainedTokenizerBase | None = None
    if not mistakes.has("model"):
        with mistakes.at("model"):
            tokenizer = load_tokenizer(config.model)
            check_model_vocabulary(config.model, tokenizer)
            findings.insert(0, f"model {config.model.path}: tokenizer with {len(tokenizer)} tokens")
    return tokenizer


def _check_data(
    config: Config, tokenizer: PreTrainedTokenizerBase, mistakes: Mistakes, *, is_graded: bool
) -> list[str]:
    """Test the user's functions on the first rows, then check all rows of all data files.

    Args:
        is_graded: whether completions are graded, by reward functions or an environment.
    """
    findings: list[str] = []
    tried = _try_functions(config, tokenizer, mistakes, findings) if is_graded else set()
    held_out = _read_held_out(config, mistakes)
    if config.reads("sft"):
        findings += check_demonstrations(config, tokenizer, held_out, mistakes)
        if config.data.sft_eval and not mistakes.has("data.sft_eval"):
            with mistakes.at("data.sft_eval"):
                findings += check_compared_demonstrations("sft_eval", config, tokenizer)
    if config.evaluation.metric == "loss":
        return findings + _check_compared_by_loss(config, tokenizer, held_out, mistakes)
    return findings + _check_prompts(config, tokenizer, held_out, mistakes, tried)


def _check_rows_alone(config: Config, mistakes: Mistakes) -> None:
    """Check the rows of the data files as far as possible without the model's tokenizer."""
    demonstrations = dict(place_datasets(config, mistakes)) if config.reads("sft") else {}
    names: list[RowFile] = ["sft_eval"] if config.reads("sft_eval") and config.data.sft_eval else []
    names += ["selection", "heldout"] if config.evaluation.metric == "loss" else []
    readable = [name for name in names if getattr(config.data, name) and not mistakes.has(f"data.{name}")]
    demonstrations |= {f"data.{name}": dataset_of(name, config) for name in readable}
    for place, dataset in demonstrations.items():
        with mistakes.at(place):
            read_each_demonstration(dataset)
    for name, path in _prompt_files(config, mistakes).items():
        with mistakes.at(f"data.{name}"):
            _load_checked_prompts(name, path, config, None)


def _check_settings(config: Config, mistakes: Mistakes, *, trains_here: bool) -> list[str]:
    """Check the settings and the files of the model, without reading data."""
    findings: list[str] = []
    if config.evaluation.metric == "accuracy":
        with mistakes.at("rollout"):
            check_graded(config.rollout)
    if not any(mistakes.has(f"{kind.setting}.resume_from") for kind in TRAININGS.values()):
        with mistakes.at("training"):
            check_resumed(config)
    if not mistakes.has("model"):
        with mistakes.at("model"):
            check_model_files(config)
    if not mistakes.has("model"):  # an unreadable model would give the same error in each check
        findings += _check_model(config, mistakes)
    with mistakes.at("training"):
        findings += [
            *find_settings_without_effect(config),
            *check_learning_rates(config),
            *describe_adapter_form(config),
            *(warn_of_slow_bfloat16(config) if trains_here else ()),
        ]
    with mistakes.at("rollout"):
        findings += warn_of_long_completions(config)
    return findings


def _check_model(config: Config, mistakes: Mistakes) -> list[str]:
    """Check that the run's stages support the model. The model's folder must be complete (`check_model_files`)."""
    findings: list[str] = []
    with mistakes.at("model"):
        check_not_quantized(config.model)  # first: the next check may advise another engine, but no engine helps here
        check_generable(config)
        check_updatable(config)
    with mistakes.at("model"):
        check_shared_heads(config)
    with mistakes.at("model"):
        check_jax_model(config)
    with mistakes.at("model"):
        findings += check_language_model(config)
        findings += warn_of_dropout(config)
        findings += check_adapters(config)
    with mistakes.at("training.sft.packing"):
        check_packing(config)
    return findings


def _prompt_files(config: Config, mistakes: Mistakes) -> dict[RowFile, str]:
    """The files whose prompts the run samples completions for, by the name NAME in `data.NAME`.

    Files for which `mistakes` has an error are left out. A run that only evaluates has only `data.heldout`.
    """
    if config.evaluation.metric == "loss":
        return {}
    files: dict[RowFile, str] = {"selection": config.data.selection, "heldout": config.data.heldout}
    if config.reads("prompts"):
        files["prompts"] = config.data.prompts
    return {name: path for name, path in files.items() if path and not mistakes.has(f"data.{name}")}


def _try_functions(
    config: Config, tokenizer: PreTrainedTokenizerBase, mistakes: Mistakes, findings: list[str]
) -> set[tuple[bool, frozenset[str]]] | None:
    """Test the user's functions on the first rows of each file, and append findings.

    Returns the shapes (`shape_of`) of the tested rows, or None if a function failed or does not exist.
    """
    if any(mistakes.has(f"rollout.{setting}") for setting in FUNCTION_SETTINGS):
        return None
    first: list[Prompt] = []
    for name, path in _prompt_files(config, mistakes).items():
        with suppress(DataError, ConfigError):  # `_check_prompts` reads the whole file later, and collects these errors
            bad = BadRows(path)
            columns = config.data.columns_of(name)
            prompts = load_prompts_from_jsonl(path, max_rows=NUM_FIRST_ROWS, columns=columns, bad=bad)
            check_answers(prompts, config, source=path, bad=bad)
            first += [prompt for prompt in prompts if not bad.has(prompt.row)]
    chosen = one_of_each_shape(first)
    has_failed = True
    with mistakes.at("rollout"):
        with suppress(DataError):  # `_check_prompts` reports rows that the chat template rejects
            findings += check_functions(config, chosen, tokenizer) if chosen else []
        has_failed = False
    return None if has_failed else {shape_of(prompt) for prompt in chosen}


def _check_compared_by_loss(
    config: Config, tokenizer: PreTrainedTokenizerBase, held_out: Sequence[HeldOutRows], mistakes: Mistakes
) -> list[str]:
    findings: list[str] = []
    names: tuple[RowFile, RowFile] = ("selection", "heldout")
    for name in names:
        if not mistakes.has(f"data.{name}"):
            with mistakes.at(f"data.{name}"):
                findings += check_compared_demonstrations(name, config, tokenizer)
    if not any(mistakes.has(f"data.{name}") for name in names):
        with mistakes.at("data.heldout"):
            check_other_rows(config.data)
            findings += warn_of_repeated_rows(config)
    with mistakes.at("data"):
        findings += check_held_out(held_out)
    return findings


def _check_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[HeldOutRows],
    mistakes: Mistakes,
    tried: set[tuple[bool, frozenset[str]]] | None,
) -> list[str]:
    """Check every prompt of the prompt files.

    Args:
        tried: shapes (`shape_of`) of the rows on which the functions have been tested; None if a function failed.
    """
    findings: list[str] = []
    if config.reads("rollouts") and config.data.rollouts and not mistakes.has("data.rollouts"):
        with mistakes.at("data.rollouts"):
            findings += _check_recorded_rollouts(config, tokenizer)
    files, loaded = _prompt_files(config, mistakes), dict[RowFile, list[Prompt]]()
    for name, path in files.items():
        with mistakes.at(f"data.{name}"):
            loaded[name] = _load_checked_prompts(name, path, config, tokenizer)
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
    if config.is_graded:
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


def validate_evaluation(config: Config, models: Sequence[ModelConfig], mistakes: Mistakes | None = None) -> list[str]:
    """Check an evaluation of models on `data.heldout` before it starts. Returns findings, one sentence each.

    Args:
        models: the models to evaluate. If empty (all names were wrong), rows are checked without a tokenizer.
        mistakes: collects the errors. If None, they are raised.

    Raises:
        InputError: one line per error: the expected value, the value found, and a remedy.
    """
    noted = Mistakes() if mistakes is None else mistakes
    if config.evaluation.metric == "accuracy":
        with noted.at("rollout"):
            check_graded(config.rollout)
        find_functions(config.rollout, noted)
    findings: list[str] = [*warn_of_equal_completions(config)]
    for model in models:
        scored = config.model_copy(update={"model": model, "mode": ""})
        with noted.at("model"):
            check_model_files(scored)
            check_generable(scored)
            tokenizer = load_tokenizer(model)
            check_model_vocabulary(model, tokenizer)
            findings.append(f"model {model.path}: tokenizer with {len(tokenizer)} tokens")
            findings += _check_scored(scored, tokenizer, noted)
    if not models or noted.has("model"):
        _check_rows_alone(config.model_copy(update={"mode": ""}), noted)
    if not noted.has("data.heldout"):
        with noted.at("data.heldout"):
            findings += warn_of_repeated_rows(config)
    if mistakes is None:
        noted.check()
    return list(dict.fromkeys(findings))


def _check_scored(config: Config, tokenizer: PreTrainedTokenizerBase, mistakes: Mistakes) -> list[str]:
    """Check the rows on which a model is evaluated, with the model's tokenizer."""
    heldout, findings = config.data.heldout, list[str]()
    if mistakes.has("data.heldout"):
        return findings
    if config.evaluation.metric == "loss":
        with mistakes.at("data.heldout"):
            findings += check_compared_demonstrations("heldout", config, tokenizer)
        return findings
    prompts: list[Prompt] = []
    with mistakes.at("data.heldout"):
        prompts = _load_checked_prompts("heldout", heldout, config, tokenizer)
    if not prompts or mistakes.has("rollout"):
        return findings
    with mistakes.at("rollout"):
        check_conversation(tokenizer, config.rollout)
        findings += check_functions(config, one_of_each_shape(prompts), tokenizer)
        findings += warn_of_unseen_tools(tokenizer, describe_tools(resolve_environment(config.rollout)))
    findings += [_count_prompts(prompts, heldout), *_warn_of_untold_tools(prompts, heldout)]
    findings += _warn_of_unwritten(prompts, heldout, config.model, tokenizer)
    return findings + warn_of_endless_turns(tokenizer)


def warn_of_rl(config: Config) -> list[Caution]:
    """Warnings about the settings of RL. The checks read neither the model nor the data."""
    return [*warn_of_own_generation(config), *warn_of_uncorrected_age(config)]


def warn_of_own_generation(config: Config) -> list[Caution]:
    """Warn if RL generates completions with the user's `generate_fn`, which evaluations do not use."""
    if config.rollout.generate_fn == "" or config.data.rollouts:
        return []
    return [
        Caution(
            f"rollout.generate_fn {name_of_function(config.rollout.generate_fn)} generates only the completions of "
            f"RL. Checkpoints are compared on completions of the engine {config.evaluation_engine.kind}, in one turn "
            "or with rollout.environment, so scores may not show the gain from generate_fn"
        )
    ]


def warn_of_uncorrected_age(config: Config) -> list[Caution]:
    """Warn if RL trains on completions of older weights, and the loss does not correct for this."""
    ages = {name: getattr(config.rollout, name) for name in ("max_staleness", "max_partial_staleness")}
    old = [f"rollout.{name} {age}" for name, age in ages.items() if age]
    if config.training.rl.sync_every > 1:  # between publications the trainer is ahead of the engines' weights
        old.append(f"training.rl.sync_every {config.training.rl.sync_every}")
    if config.data.rollouts:
        old = ["data.rollouts"]
    rl = config.training.rl
    if not old or (reads_rollout_logprobs(rl) if rl.loss_fn else rl.corrects_for_age):
        return []
    if rl.loss_fn:
        return [
            Caution(
                f"{old[0]} trains on completions that were sampled with other weights, but training.rl.loss_fn "
                f"{name_of_function(rl.loss_fn)} does not correct for that, because it does not use "
                "batch.rollout_logprobs_BT"
            )
        ]
    return [
        Caution(
            f"{old[0]} trains on completions that were sampled with other weights, and nothing in "
            'training.rl.loss corrects for that: set ratio_base = "rollout", or mismatch.weight with its limits'
        )
    ]


def check_prompt_epochs(config: Config, num_prompts: int) -> list[str]:
    """Report the number of epochs of RL, and warn if a step would use the same prompt several times."""
    batch_size = config.rollout.batch_size
    per_epoch, of_what = num_prompts / batch_size, f"the {num_prompts:,} prompts"
    num_steps = config.training.rl.num_steps
    said = describe_epochs("training.rl", num_steps, per_epoch, of_what=of_what, many=MANY_EPOCHS_OF_RL)
    if batch_size <= num_prompts:
        return [said]
    found = f"rollout.batch_size {batch_size} exceeds the {num_prompts} prompts of {config.data.prompts}"
    return [said, Caution(f"{found}, so a step uses the same prompt several times: lower it, or add prompts")]


def _read_held_out(config: Config, mistakes: Mistakes) -> list[HeldOutRows]:
    """Read the rows on which checkpoints are compared, to find them in the training data later.

    Files with errors are skipped here. The errors are collected when each whole file is checked.
    """
    held_out: list[HeldOutRows] = []
    metrics: dict[RowFile, Metric] = {"selection": config.evaluation.metric, "heldout": config.evaluation.metric}
    if config.reads("sft_eval") and config.data.sft_eval:  # keep_best compares checkpoints by the loss on these rows
        metrics["sft_eval"] = "loss"
    for name, metric in metrics.items():
        max_rows = None if name == "sft_eval" else config.evaluation.max_prompts
        path, columns = getattr(config.data, name), config.data.columns_of(name)
        if not mistakes.has(f"data.{name}"):
            with suppress(DataError):
                held_out.append(read_held_out(f"data.{name}", path, metric, max_rows=max_rows, columns=columns))
    return held_out


@contextmanager
def _with_remedy(config: Config) -> Iterator[None]:
    """Add a remedy to a DemonstrationError (a row of prompts is a demonstration) if the run has only SFT.

    A run with only SFT can compare checkpoints by their loss on demonstrations.
    """
    try:
        yield
    except DemonstrationError as error:
        if config.is_graded:
            raise
        raise DemonstrationError(
            f"{error}; to compare checkpoints by their loss on such rows instead, {COMPARE_BY_LOSS}"
        ) from error


def _count_prompts(prompts: Sequence[Prompt], source: str) -> str:
    """A sentence with the number of prompts, of prompts without an answer, and of prompts that end with the beginning
    of an assistant's message."""
    num_unanswered = sum(prompt.answer == "" for prompt in prompts)
    num_begun = sum(is_prefill(prompt.messages) for prompt in prompts)
    unanswered = f", {num_unanswered} without an `answer`" * bool(num_unanswered)
    begun = f", {num_begun} end with the beginning of an assistant turn, which the policy continues" * bool(num_begun)
    return f"{source}: {len(prompts)} prompts{unanswered}{begun}"


def _warn_of_untold_tools(prompts: Sequence[Prompt], source: str) -> list[Caution]:
    """Warn if prompts have the field `tools`, which is ignored in prompts and used only in demonstrations."""
    rows = [prompt.row for prompt in prompts if prompt.metadata.get("tools")]
    if not rows:
        return []
    return [
        Caution(
            f"{source}: {len(rows)} of {len(prompts)} prompts (row {rows[0]} first) have `tools`, which the policy "
            "does not see, because only rollout.environment defines tools: define them there, or describe them in "
            "the messages"
        )
    ]


def _warn_of_unwritten(
    prompts: Sequence[Prompt], source: str, model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Caution]:
    """Warn if the policy does not see messages or fields of prompts."""
    unwritten, unread = UnwrittenRoles(tokenizer), UnreadFields(model.chat_template_kwargs)
    for prompt in prompts:
        unwritten.note(prompt.row, prompt.messages)
        unread.note(prompt.row, prompt.metadata, prompt.messages)
    return unwritten.warn(source, len(prompts)) + unread.warn(source, len(prompts))


def _load_checked_prompts(
    name: RowFile, path: str, config: Config, tokenizer: PreTrainedTokenizerBase | None
) -> list[Prompt]:
    """Read the prompts of a file, and check that they can be completed and graded.

    Args:
        name: the name NAME of the setting `data.NAME`.
        tokenizer: the model's tokenizer; None skips the check of the prompts' lengths.

    Raises:
        DataError: a row is not a prompt, is too long, or cannot be graded.
    """
    bad, longest, environment = BadRows(path), 0, _find_environment(config)
    with _with_remedy(config):
        prompts = load_prompts_from_jsonl(path, columns=config.data.columns_of(name), bad=bad)
        if environment is not None:
            if tokenizer is not None:
                tools, limit = describe_tools(environment), config.rollout.max_prompt_tokens
                longest = check_prompt_lengths(prompts, tokenizer, max_tokens=limit, source=path, tools=tools, bad=bad)
            check_answers(prompts, config, source=path, bad=bad)
        bad.check()
    if tokenizer is not None:
        prompts_of = f"{path}: prompts of {longest} tokens"
        check_positions(prompts_of, longest, count_positions(config), config, engine=config.evaluation_engine)
    return prompts


def _find_environment(config: Config) -> Environment | None:
    """The environment of the rollout settings. None if it cannot be created; `find_functions` reports this error."""
    try:
        return resolve_environment(config.rollout)
    except ConfigError:
        return None
