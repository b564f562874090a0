"""Find out before any training whether a configuration can work: all checks in their order, and those of data.

Not here: the checks of a model's folder (model_checks.py), of the user's functions (function_checks.py), the form of
settings (config/), machines and ports (infra).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts_core.checkpoint import find_checkpoint, load_manifest
from rollouts_core.checks.epochs import MANY_EPOCHS_OF_RL, MANY_EPOCHS_OF_SFT, describe_epochs
from rollouts_core.checks.function_checks import check_functions, one_of_each_shape
from rollouts_core.checks.learning_rates import check_learning_rates
from rollouts_core.checks.model_checks import (
    check_generable,
    check_jax_model,
    check_longest,
    check_model_files,
    check_model_vocabulary,
    check_packing,
    check_positions,
    count_positions,
    num_embedded_tokens,
    warn_of_dropout,
)
from rollouts_core.checks.no_effect import find_settings_without_effect
from rollouts_core.comparison import LEAST_P_VALUE, least_p_value, least_wins
from rollouts_core.config import (
    Config,
    DatasetConfig,
    ModelConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
    name_of_function,
)
from rollouts_core.config.messages import first_line
from rollouts_core.data.chat import TrainOn, find_unwritten, warn_of_endless_turns, warn_of_unseen_tools
from rollouts_core.data.conversations import Row, find_answer_elsewhere, find_said_beside_content, has_empty_turn
from rollouts_core.data.dataset import (
    CHUNK_ROWS,
    check_disjoint,
    count_used_rows,
    iterate_samples,
    load_prompts_from_jsonl,
    sample_rules,
)
from rollouts_core.data.held_out import MAX_NAMED, HeldOutRows, key_of_prompt, read_held_out, watch_rows
from rollouts_core.data.rows import load_rows, open_rows, resolve_revision
from rollouts_core.environments import ENVIRONMENTS
from rollouts_core.environments.protocol import describe_tools
from rollouts_core.errors import ConfigError, DataError, DemonstrationError, RolloutsError
from rollouts_core.findings import Caution
from rollouts_core.model.adapter_targets import check_adapters
from rollouts_core.model.loading import check_not_quantized, find_positions, load_tokenizer
from rollouts_core.rewards import REWARDS, check_reward_row
from rollouts_core.rollout.generate import check_prompt_lengths
from rollouts_core.rollout.offline_rollouts import OfflineRollouts, check_rollouts
from rollouts_core.rollout.resolve import check_graded, resolve_environment
from rollouts_core.saving import check_same_settings, check_step, describe_settings
from rollouts_core.types import Prompt, Status
from rollouts_core.user_code.failures import describe_raised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_STREAMED_ROWS_CHECKED = 10_000
COMPARE_BY_LOSS = 'set evaluation.metric = "loss"'
"""What helps where the rows that checkpoints are compared on are demonstrations; in the mode sft alone."""


def validate_config(config: Config) -> list[str]:
    """Check everything that can be checked without training; returns facts and warnings, a sentence each.

    Raises:
        InputError: one sentence with what was expected, what was found and what to do.
    """
    if config.evaluation.metric == "accuracy":
        check_graded(config.rollout)
    check_resumed(config)
    check_model_files(config)
    check_not_quantized(config.model)  # before what an engine has against such a model: another one would not help
    check_generable(config)
    check_jax_model(config)
    check_packing(config)
    tokenizer = load_tokenizer(config.model)
    check_model_vocabulary(config.model, tokenizer)
    findings = [f"model {config.model.path}: tokenizer with {len(tokenizer)} tokens"]
    findings += [*find_settings_without_effect(config), *check_learning_rates(config), *warn_of_dropout(config)]
    findings += check_adapters(config)
    held_out = _read_held_out(config)
    if config.mode != "rl":
        findings += check_demonstrations(config, tokenizer, held_out)
        if config.data.sft_eval:
            findings += _check_compared_demonstrations(config.data.sft_eval, config, tokenizer)
    if config.evaluation.metric == "loss":
        for path in (config.data.selection, config.data.heldout):
            findings += _check_compared_demonstrations(path, config, tokenizer)
        check_other_rows(config.data.selection, config.data.heldout)
        return findings + check_held_out(held_out) + warn_of_repeated_rows(config)
    prompts = {"selection": config.data.selection, "heldout": config.data.heldout}
    if config.mode != "sft" and config.data.rollouts:
        folder, vocab_size = Path(config.data.rollouts), num_embedded_tokens(config.model) or len(tokenizer)
        positions = find_positions(config.model)
        max_tokens = positions.num + 1 if positions and positions.are_all else None
        findings.append(check_rollouts(folder, vocab_size=vocab_size, max_tokens=max_tokens, config=config.rollout))
        num_recorded, num_steps = len(OfflineRollouts(folder, config.rollout).files), config.training.rl.num_steps
        of_what = f"the {num_recorded} recorded steps"
        findings.append(
            describe_epochs("training.rl", num_steps, num_recorded, of_what=of_what, many=MANY_EPOCHS_OF_SFT)
        )
    elif config.mode != "sft":
        prompts["prompts"] = config.data.prompts
    loaded = {name: _load_checked_prompts(path, config, tokenizer) for name, path in prompts.items()}
    check_disjoint(loaded["selection"], loaded["heldout"], names=("data.selection", "data.heldout"))
    findings += check_held_out(held_out, loaded.get("prompts", ()), source=prompts.get("prompts", ""))
    findings += warn_of_repeated_rows(config)
    for name, rows in loaded.items():
        check_answers(rows, config, source=prompts[name])
    findings += check_functions(config, one_of_each_shape(itertools.chain(*loaded.values())), tokenizer)
    if config.mode != "sft":
        num_rows = min(len(loaded["heldout"]), config.evaluation.max_prompts)
        limit = config.evaluation.max_p_value
        check_num_rows(num_rows, limit, source="data.heldout", setting="evaluation.max_p_value")
    findings += [_count_prompts(rows, prompts[name]) for name, rows in loaded.items()]
    findings += check_prompt_epochs(config, len(loaded["prompts"])) if "prompts" in loaded else []
    findings += warn_of_endless_turns(tokenizer)
    findings += warn_of_unseen_tools(tokenizer, describe_tools(resolve_environment(config.rollout)))
    return findings + ([*warn_of_own_generation(config), *warn_of_uncorrected_age(config)] * (config.mode != "sft"))


def validate_evaluation(config: Config, models: Sequence[ModelConfig]) -> list[str]:
    """Check what can be checked of scoring models on `data.heldout`; returns what was found, a sentence each.

    Raises:
        InputError: one sentence with what was expected, what was found and what to do.
    """
    if config.evaluation.metric == "accuracy":
        check_graded(config.rollout)
    heldout = config.data.heldout
    findings: list[str] = []
    for model in models:
        scored = config.model_copy(update={"model": model, "mode": "sft"})
        check_model_files(scored)
        check_generable(scored)
        tokenizer = load_tokenizer(model)
        check_model_vocabulary(model, tokenizer)
        findings.append(f"model {model.path}: tokenizer with {len(tokenizer)} tokens")
        if config.evaluation.metric == "loss":
            findings += _check_compared_demonstrations(heldout, scored, tokenizer)
            continue
        prompts = _load_checked_prompts(heldout, scored, tokenizer)
        check_answers(prompts, scored, source=heldout)
        findings += check_functions(scored, one_of_each_shape(prompts), tokenizer)
        findings += [_count_prompts(prompts, heldout), *warn_of_endless_turns(tokenizer)]
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


def check_demonstrations(
    config: Config, tokenizer: PreTrainedTokenizerBase, held_out: Sequence[HeldOutRows] = ()
) -> list[str]:
    """Read every row that SFT would, or the first of each dataset where they are streamed; a sentence per dataset.

    Args:
        held_out: told of every row that is read.

    Raises:
        DataError: a row or a dataset that cannot be trained on.
    """
    findings: list[str] = []
    num_epoch_rows = 0.0
    sft = config.training.sft
    for dataset in config.demonstrations:
        counts = _check_demonstrations(dataset, config, tokenizer, held_out)
        findings += [counts.sentence(dataset.path), *counts.warn_of_empty_turns(dataset.path)]
        findings += counts.warn_of_unwritten(dataset.path)
        findings += check_longest(dataset.path, counts.num_longest, config.model)
        share = dataset.repeat * counts.num_rows / counts.num_checked
        kept = counts.num_checked - counts.num_dropped
        num_epoch_rows += share * (counts.num_tokens / sft.max_length if sft.packing else kept)
    if not num_epoch_rows:  # streamed data of which later rows may be shorter
        sentence = f"training.sft.max_length {sft.max_length} leaves out every demonstration that was looked at"
        return [*findings, Caution(f"{sentence}: raise it, or nothing may be left to train on")]
    num_rows = math.ceil(num_epoch_rows)  # no row holds demonstrations of two epochs
    if num_rows < sft.batch_size:
        findings.append(
            Caution(
                f"training.sft.batch_size {sft.batch_size} is more than the about {num_rows} rows of "
                f"{sft.max_length} tokens of an epoch: a step sees demonstrations several times"
            )
        )
    of_what = f"about {num_rows:,} {'packed rows' if sft.packing else 'rows'}"
    per_epoch = num_rows / sft.batch_size
    return [
        *findings,
        describe_epochs("training.sft", sft.num_steps, per_epoch, of_what=of_what, many=MANY_EPOCHS_OF_SFT),
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


def check_resumed(config: Config) -> None:
    """Raise CheckpointError for a `training.*.resume_from` of other settings of the training, or beyond its steps.

    What it read, and how it sampled, only its job compares. A URL is looked at when it has been fetched.
    """
    trainings: list[SFTTrainingConfig | RLTrainingConfig] = []
    trainings += [config.training.sft] if config.mode != "rl" else []
    trainings += [config.training.rl] if config.mode != "sft" else []
    for training in trainings:
        if not training.resume_from or "://" in training.resume_from:
            continue
        checkpoint = find_checkpoint(Path(training.resume_from))
        manifest = load_manifest(checkpoint)
        fields = type(training).model_fields
        saved, current = (
            {name: value for name, value in named.items() if name.partition(".")[0] in fields}
            for named in (manifest.settings, describe_settings(training, {}))
        )
        check_same_settings(saved, current, allowed=training.allow_changed, checkpoint=checkpoint)
        check_step(manifest.step, training.num_steps, checkpoint=checkpoint)


def check_num_rows(num_rows: int, max_p_value: float, *, source: str, setting: str) -> None:
    """Raise ConfigError when no difference could count: too few rows, or a p-value that no comparison has."""
    if max_p_value < LEAST_P_VALUE:
        raise ConfigError(
            f"{setting} {max_p_value:g} lets nothing count: no comparison has a p-value below {LEAST_P_VALUE:.2g}: "
            "raise it"
        )
    least = least_p_value(num_rows)
    if least > max_p_value:
        enough = next(more for more in itertools.count(num_rows) if least_p_value(more) <= max_p_value)
        raise ConfigError(
            f"{source} gives {num_rows} rows to compare models on: were all better, p would be {least:.2g}, and "
            f"{setting} lets at most {max_p_value:g} count: give {enough} rows or more, or raise it"
        )


def check_promotion(config: Config, *, margin: float, max_p_value: float) -> list[str]:
    """What it takes on `data.heldout` to show that a model is better by more than the margin, a sentence.

    Raises:
        ConfigError: nothing could show it.
    """
    if max_p_value >= 1:  # everything counts
        return []
    num_rows = sum(1 for _ in itertools.islice(load_rows(config.data.heldout), config.evaluation.max_prompts))
    check_num_rows(num_rows, max_p_value, source="data.heldout", setting="retrain.max_p_value")
    if config.evaluation.metric == "loss" or not grades_between_0_and_1(config.rollout):
        return []
    if margin >= 1:
        raise ConfigError(
            f"retrain.margin {margin:g} lets no model into production: rewards are between 0 and 1, so none is better "
            "by more than 1: lower it"
        )
    num_wins = least_wins(num_rows, margin=margin, max_p_value=max_p_value)
    if num_wins == 0:
        return []
    return [
        f"retrain: to show a margin of {margin:g} with p <= {max_p_value:g}, a model must get at least {num_wins} of "
        f"{num_rows} held-out prompts right that the other gets wrong, and more where it loses some"
    ]


def grades_between_0_and_1(rollout: RolloutConfig) -> bool:
    """True where the rewards are those of a shipped function or environment alone that grades from 0 to 1."""
    if rollout.rewards:
        return False
    if rollout.reward_fn != "":
        return rollout.reward_fn in REWARDS
    return rollout.environment in ENVIRONMENTS.keys() - {"verifiers"}  # whose tasksets reward as they like


def check_answers(prompts: Sequence[Prompt], config: Config, *, source: str) -> None:
    """Raise DataError for a prompt whose graders cannot compare completions with what it has, as far as is known."""
    needed: dict[str, str] = {}
    of_text: list[str] = []
    checks: list[Callable[[Mapping[str, Any]], None]] = []  # Any: JSON
    for grader in config.rollout.reward_names:
        if grader == config.rollout.environment:
            environment = resolve_environment(config.rollout)
            row_fields = getattr(environment, "row_fields", ())
            needed |= dict.fromkeys(row_fields, grader)
            of_text += [grader] if grader in ENVIRONMENTS and "answer" in row_fields else []
            checks += [environment.check_row] if hasattr(environment, "check_row") else []
        elif grader in REWARDS:
            needed["answer"] = grader
            of_text.append(grader)
            checks.append(partial(check_reward_row, grader))
    for prompt in prompts:
        where = f"{source}, row {prompt.row}: prompt {prompt.id!r}"
        for name, grader in needed.items():
            if not (prompt.answer if name == "answer" else name in prompt.metadata):
                remedy = f": give it one, or {COMPARE_BY_LOSS}" if config.mode == "sft" else ""
                elsewhere = find_answer_elsewhere(prompt.metadata) if name == "answer" else ""
                remedy = elsewhere or remedy
                raise DataError(f"{where} has no `{name}`, which {grader} compares completions with{remedy}")
        try:
            if prompt.has_json_answer and of_text:
                raise ValueError(_describe_json_answer(prompt.answer, of_text[0]))
            for check in checks:
                check({**prompt.metadata, "answer": prompt.answer})
        except ValueError as error:
            raise DataError(f"{where} cannot be graded: {first_line(error)}") from error
        except RolloutsError:  # its own sentence
            raise
        except Exception as error:
            raise ConfigError(
                f"rollout.environment: check_row of {config.rollout.environment} {describe_raised(error)}; "
                f"it was given {where}"
            ) from error


def _describe_json_answer(answer: str, grader: str) -> str:
    """Why a grader that takes an answer for one text could never reward it, and what to do, for the end of an error."""
    kind = "list" if answer.startswith("[") else "object"
    return (
        f"its `answer` is a JSON {kind}, and {grader} compares completions with one text: give it that text "
        '("37", not ["37"]), or name a grader of your own that reads JSON'
    )


def check_other_rows(first: str, second: str) -> None:
    """Raise DataError when a row is in both files."""
    number_of = {json.dumps(row, sort_keys=True, default=str): number for number, row in load_rows(first)}
    for number, row in load_rows(second):
        if (other := number_of.get(json.dumps(row, sort_keys=True, default=str))) is not None:
            raise DataError(
                f"{second}, row {number} is also row {other} of {first}: "
                "what chooses a checkpoint must not also grade it; remove it from one of them"
            )


def check_held_out(
    held_out: Sequence[HeldOutRows], prompts: Sequence[Prompt] = (), *, source: str = ""
) -> list[Caution]:
    """Look for prompts of RL among the rows that are held out; a warning where a few of these are trained on.

    Raises:
        DataError: more than a few of them are, as demonstrations that were looked at before or as prompts.
    """
    asked = [each for each in held_out if each.metric == "accuracy"]
    for each, prompt in itertools.product(asked, prompts):
        each.look_for([key_of_prompt(prompt)], source, prompt.row)
    return [sentence for each in held_out for sentence in each.check()]


def warn_of_repeated_rows(config: Config) -> list[Caution]:
    """A warning where rows that models are compared on say what others of them do.

    The p-value takes each row for another observation: the same rows four times over make of p = 0.34 one of 0.08.
    """
    number_of: dict[str, int] = {}
    repeated: list[str] = []
    for number, row in itertools.islice(load_rows(config.data.heldout), config.evaluation.max_prompts):
        said = {name: value for name, value in row.items() if name != "id"}
        first = number_of.setdefault(json.dumps(said, sort_keys=True, default=str), number)
        if first != number:
            repeated.append(f"row {number} is row {first}")
    if not repeated:
        return []
    places = ", ".join(repeated[:MAX_NAMED]) + ", ..." * (len(repeated) > MAX_NAMED)
    return [
        Caution(
            f"data.heldout: {len(repeated)} of {len(number_of) + len(repeated)} rows say the same as one before them "
            f"({places}): each counts as a row of its own, so that a difference looks surer than it is; remove them"
        )
    ]


@dataclass(frozen=True, slots=True)
class _Counts:
    """What a dataset of demonstrations holds."""

    num_rows: int
    """All rows of it that are used."""
    num_checked: int
    num_dropped: int
    num_cut: int
    num_tokens: int
    num_longest: int
    """Tokens of its longest sample, after it was cut."""
    num_trained: int
    empty_rows: list[int]
    """Numbers of the rows with a turn that is trained on and says nothing."""
    unwritten_rows: dict[str, list[int]]
    """By the key of a message, the numbers of the rows with a turn that has it, is trained on, and is written without
    it by the chat template."""

    def warn_of_unwritten(self, path: str) -> list[Caution]:
        """A warning for each thing that rows hold and the model does not see."""
        return [
            Caution(
                f"{path}: in {len(rows)} of {self.num_checked} rows (row {rows[0]} first) the assistant has `{key}`, "
                "which the chat template leaves out: the model learns to say the rest; use a template that writes it"
            )
            for key, rows in self.unwritten_rows.items()
            if rows
        ]

    def warn_of_empty_turns(self, path: str) -> list[Caution]:
        """A warning where rows teach to say nothing."""
        if not self.empty_rows:
            return []
        return [
            Caution(
                f"{path}: in {len(self.empty_rows)} of {self.num_checked} rows (row {self.empty_rows[0]} first) the "
                "assistant says nothing, which teaches the model to end its turn at once: remove them, or give them "
                "answers"
            )
        ]

    def sentence(self, path: str) -> str:
        """What was found, for a person."""
        checked = f" in the first {self.num_checked} of {self.num_rows} rows" * (self.num_checked < self.num_rows)
        cut = f", {self.num_cut} cut" * bool(self.num_cut)
        dropped = f", {self.num_dropped} left out for their length" * bool(self.num_dropped)
        kept = self.num_checked - self.num_dropped
        return f"{path}: {kept} demonstrations{checked}, {self.num_trained} trained tokens{cut}{dropped}"


def _check_demonstrations(
    dataset: DatasetConfig,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[HeldOutRows] = (),
) -> _Counts:
    commit = resolve_revision(dataset.path, dataset.revision)  # a name that is wrong is told at once
    table = open_rows(dataset.path, split=dataset.split, subset=dataset.subset, revision=commit)
    num_rows = count_used_rows(table, dataset)
    num_checked = min(num_rows, NUM_STREAMED_ROWS_CHECKED) if config.data.streaming else num_rows
    chunks = (range(i, min(i + CHUNK_ROWS, num_checked)) for i in range(0, num_checked, CHUNK_ROWS))
    rows = (row for chunk in chunks for row in table.read(chunk))
    num_kept = num_cut = num_tokens = num_longest = num_trained = 0
    empty_rows: list[int] = []
    unwritten_rows: dict[str, list[int]] = {key: [] for key in find_unwritten(tokenizer)}
    noted = _note_turns(rows, config.training.sft.train_on, empty_rows, unwritten_rows)
    watched = watch_rows(noted, dataset.path, held_out)
    for sample in iterate_samples(watched, dataset.path, tokenizer, sample_rules(config.training.sft)):
        if sample is not None:
            num_kept += 1
            num_cut += sample.status is Status.TRUNCATED
            num_tokens += len(sample.tokens)
            num_longest = max(num_longest, len(sample.tokens))
            num_trained += sum(map(bool, sample.loss_mask))
    if num_kept == 0 and num_checked == num_rows:
        raise DataError(f"{dataset.path}: all {num_rows} rows are longer than training.sft.max_length: raise it")
    return _Counts(
        num_rows,
        num_checked,
        num_checked - num_kept,
        num_cut,
        num_tokens,
        num_longest,
        num_trained,
        empty_rows,
        unwritten_rows,
    )


def _note_turns(
    rows: Iterable[tuple[int, Row]], train_on: TrainOn, empty: list[int], unwritten: Mapping[str, list[int]]
) -> Iterator[tuple[int, Row]]:
    """The same rows of demonstrations; their numbers are added to what they are an example of.

    Args:
        empty: of rows that teach to say nothing.
        unwritten: by the key of a message, of rows that teach a turn which has it.
    """
    for number, row in rows:
        with suppress(DataError):  # who makes samples of the rows says what is wrong
            if has_empty_turn(row, train_on):
                empty.append(number)
            for key in find_said_beside_content(row, train_on).intersection(unwritten) if unwritten else ():
                unwritten[key].append(number)
        yield number, row


def _check_compared_demonstrations(path: str, config: Config, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What was found in demonstrations whose loss is taken, as sentences."""
    counts = _check_demonstrations(DatasetConfig(path=path), config, tokenizer)
    return [counts.sentence(path), *check_longest(path, counts.num_longest, config.model)]


def _read_held_out(config: Config) -> list[HeldOutRows]:
    """The rows that checkpoints are chosen by, or kept, and those that grade the chosen ones."""
    paths = {"data.selection": config.data.selection, "data.heldout": config.data.heldout}
    num_used = config.evaluation.max_prompts
    with _with_remedy(config):
        held_out = [
            read_held_out(name, path, config.evaluation.metric, max_rows=num_used) for name, path in paths.items()
        ]
    if config.mode != "rl" and config.data.sft_eval:  # keep_best goes by it
        held_out.append(read_held_out("data.sft_eval", config.data.sft_eval, "loss"))
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
    """How many there are, and how many without an answer, for a person."""
    num_unanswered = sum(prompt.answer == "" for prompt in prompts)
    return f"{source}: {len(prompts)} prompts" + f", {num_unanswered} without an `answer`" * bool(num_unanswered)


def _load_checked_prompts(path: str, config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    with _with_remedy(config):
        prompts = load_prompts_from_jsonl(path)
    tools = describe_tools(resolve_environment(config.rollout))
    max_tokens = config.rollout.max_prompt_tokens
    longest = check_prompt_lengths(prompts, tokenizer, max_tokens=max_tokens, source=path, tools=tools)
    kind = config.evaluation_engine.kind
    check_positions(f"{path}: prompts of {longest} tokens", longest, count_positions(config), config, engine=kind)
    return prompts
