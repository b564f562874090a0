"""Create the files of `rollouts init`: the text of the TOML configuration, and converted data files.

Not here: the questions (init_questions.py), formats of rows (rollouts_core/data/foreign_rows.py).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal, get_args

from rollouts_core.config.messages import closest_choice
from rollouts_core.config.rollout import RolloutConfig
from rollouts_core.config.sft import SFTTrainingConfig
from rollouts_core.data.conversations import COMPLETION_KEYS, Row, describe_keys, read_demonstration
from rollouts_core.data.dataset import build_prompt
from rollouts_core.data.foreign_rows import RowShape, find_json_columns, find_shape, with_json
from rollouts_core.data.overlap import key_of_turns, said_by_user
from rollouts_core.data.rows import load_rows
from rollouts_core.environments import ALL_ENVIRONMENTS
from rollouts_core.errors import DataError, InputError
from rollouts_core.rewards import ALL_REWARDS
from rollouts_core.system.files import write_atomically

Goal = Literal["imitate", "reward", "both"]
DataName = Literal["sft", "prompts", "selection", "heldout"]
MODES: Mapping[Goal, str] = {"imitate": "sft", "reward": "rl", "both": "sft+rl"}
CSV_SUFFIXES = (".csv", ".tsv")
MAX_COUNTED = 100_000
"""Maximum number of rows to read for an estimate of the number of training steps."""
MAX_HELD_OUT = 200
"""Maximum number of rows to split off for data.selection, and for data.heldout."""
HELD_OUT_SHARE = 10
"""One row per this many rows is split off for data.selection, and as many rows are split off for data.heldout."""
EPOCHS, MIN_STEPS = 3, 20
CHARS_PER_TOKEN = 4
"""Estimate of the characters per token, used because no tokenizer is loaded here."""
MAX_POSITIONS = 4096
"""Assumed context length in tokens of a model whose config.json is not on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The user's answers to the questions of `rollouts init`."""

    path: Path
    """Path of the configuration to write."""
    model: str
    goal: Goal
    files: Mapping[DataName, str]
    """The given data files, relative to the current folder. `sft` may be a dataset of the hub."""
    reward: str = ""
    """An environment, a reward, or `package.module:function`."""
    machine: str = "this"
    """this, rented, or user@host."""
    python: str = ""
    """Python interpreter on a machine that is reached by SSH."""
    gpu: str = ""
    max_usd: float = 0.0

    @property
    def trained(self) -> tuple[DataName, ...]:
        """The names of the training data in [data] that the goal needs."""
        names: dict[Goal, tuple[DataName, ...]] = {
            "imitate": ("sft",),
            "reward": ("prompts",),
            "both": ("sft", "prompts"),
        }
        return names[self.goal]

    @property
    def missing(self) -> list[DataName]:
        """The names of the data in [data] for which no file was given."""
        return [name for name in (*self.trained, "selection", "heldout") if not self.files.get(name)]

    def is_for_rewards(self, name: DataName) -> bool:
        """True if the rows of a file must be prompts for RL, False if they must be demonstrations."""
        return name != "sft" and self.goal != "imitate"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A data file and the format of its rows, as found in the first row."""

    path: str
    shape: RowShape | None
    """Format of the rows. None for a dataset of the hub or a URL, which is not downloaded here."""
    columns: Mapping[str, str]
    """Types of CSV columns that contain JSON, by column."""
    is_read: bool
    """Whether training can read the rows without conversion."""

    def describe(self) -> str:
        """Describe the format of the rows in a sentence."""
        if self.shape is None:
            return f"{self.path}: not a local file, so its rows are not checked"
        typed = f", with columns of JSON ({', '.join(self.columns)})" if self.columns else ""
        return f"{self.path}: {self.shape.name}{typed}, {'read as they are' if self.is_read else 'to be converted'}"


def inspect_file(path: str, *, for_rewards: bool, needs_answer: bool) -> DataFile:
    """Determine the format of a data file from its first row.

    Raises:
        InputError: the file cannot be read, or its rows have an unknown format or the format of another purpose.
    """
    if "://" in path or (not Path(path).exists() and not for_rewards and path.count("/") == 1):
        return DataFile(path=path, shape=None, columns={}, is_read=True)
    row = next(iter(load_rows(path)))[1]
    columns = find_json_columns(row) if path.endswith(CSV_SUFFIXES) else {}
    shape = find_shape(with_json(row, columns), for_rewards=for_rewards)
    if shape is None:
        raise DataError(
            f"{path}: the format of the rows is unknown; expected the fields `messages`, `text`, or `prompt` "
            "and `completion` or `answer`; "
            f"found {describe_keys(row)}"
        )
    if not (shape.is_prompt if for_rewards else shape.is_demonstration):
        wanted = "prompts for rewards" if for_rewards else "demonstrations to imitate"
        raise DataError(f"{path}: expected {wanted}, found {shape.name}: name another file, or choose another goal")
    has_prompt = "prompt" in row or "messages" in row
    is_read = shape.convert is None or (for_rewards and shape.has_answer and not needs_answer and has_prompt)
    return DataFile(path=path, shape=shape, columns=columns, is_read=is_read)


def inspect_files(answers: Answers) -> dict[DataName, DataFile]:
    """Determine the format of each given data file from its first row."""
    needs_answer = ":" not in answers.reward
    return {
        name: inspect_file(path, for_rewards=answers.is_for_rewards(name), needs_answer=needs_answer)
        for name, path in answers.files.items()
        if path
    }


def check_reward(name: str) -> str:
    """Check that a reward, an environment or a function has this name, and return the name.

    Raises:
        InputError: the name is unknown.
    """
    known = list(dict.fromkeys([*ALL_ENVIRONMENTS, *ALL_REWARDS]))
    if name in known or ":" in name:
        return name
    raise InputError(
        f"unknown reward {name!r}{closest_choice(name, known)}; expected one of {', '.join(known)}, or a function of "
        "yours as package.module:function"
    )


def data_folder(config: Path) -> Path:
    """The folder for the converted data files of a configuration."""
    return config.parent / f"{config.stem}-data"


def needs_writing(answers: Answers, files: Mapping[DataName, DataFile]) -> list[str]:
    """A phrase for each data file that must be converted or split off before a run can read it, with the reason."""
    reasons = [f"{each.path} has {each.shape.name}" for each in files.values() if each.shape and not each.is_read]
    missing = [name for name in answers.missing if name in ("selection", "heldout")]
    return reasons + [f"data.{name} has no file, and can be split off from the training data" for name in missing]


def write_rows(answers: Answers, files: Mapping[DataName, DataFile]) -> dict[DataName, str]:
    """Convert and split the rows of all data files, write them into `data_folder`, and return the new paths.

    Raises:
        InputError: a row cannot be converted, or there are too few rows to split.
    """
    rows = {name: list(_converted(each, name, answers)) for name, each in files.items()}
    source: DataName = "sft" if answers.goal == "imitate" else "prompts"
    missing = [name for name in answers.missing if name in ("selection", "heldout")]
    if missing:
        taken = {_key_of(row) for name in ("sft", "prompts") if name != source for row in rows.get(name, ())}
        rows[source], split = _split(rows[source], missing, taken, source=files[source].path)
        rows |= split
    written = {}
    for name, each in rows.items():
        path = data_folder(answers.path) / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in each)
        write_atomically(path, "".join(lines))
        written[name] = str(path)
    return written


def _converted(file: DataFile, name: DataName, answers: Answers) -> Iterator[Row]:
    """Yield the rows of a file in the format that training reads."""
    if file.shape is None:
        raise InputError(f"{file.path} is not a local file, so it cannot be converted or split: download it")
    for number, row in load_rows(file.path):
        read = with_json(row, file.columns)
        try:
            shape = find_shape(read, for_rewards=answers.is_for_rewards(name))
            if shape is None:
                raise DataError(f"its format is unknown; found {describe_keys(row)}")
            yield read if shape.convert is None else shape.convert(read)
        except DataError as error:
            raise DataError(f"{file.path}, row {number}: {error}") from error


def _split(
    rows: Sequence[Row], names: Sequence[DataName], taken: set[str], *, source: str
) -> tuple[list[Row], dict[DataName, list[Row]]]:
    """Split rows into training rows and held-out rows for each name.

    If several rows have a held-out prompt, one row is held out and the other rows are dropped.
    """
    by_key: dict[str, list[Row]] = {}
    for row in rows:
        by_key.setdefault(_key_of(row), []).append(row)
    keys = [key for key in by_key if key not in taken]
    random.Random(0).shuffle(keys)
    size = min(MAX_HELD_OUT, max(1, len(keys) // HELD_OUT_SHARE))
    if len(keys) <= size * len(names):
        raise InputError(
            f"{source} has {len(keys)} rows with different prompts, too few to split off {' and '.join(names)}: give "
            "files for them"
        )
    split: dict[DataName, list[Row]] = {}
    for number, name in enumerate(names):
        split[name] = [by_key.pop(key)[0] for key in keys[number * size : (number + 1) * size]]
    return list(chain.from_iterable(by_key.values())), split


def _key_of(row: Row) -> str:
    """A key that is equal for rows with the same messages of the user."""
    is_demonstration = any(row.get(name) is not None for name in ("messages", "text", *COMPLETION_KEYS))
    read = read_demonstration(row) if is_demonstration else build_prompt(row, 0, default_id="0")
    return read if isinstance(read, str) else key_of_turns(said_by_user(read.messages))


def render_configuration(
    answers: Answers, paths: Mapping[DataName, str], columns: Mapping[DataName, Mapping[str, str]]
) -> str:
    """The text of the TOML configuration.

    Args:
        paths: the data files by setting, relative to the current folder.
        columns: types of CSV columns that contain JSON, by setting.
    """
    folder = answers.path.parent
    commands = {
        f"rollouts validate {answers.path.name}": "check everything without training",
        f"rollouts run {answers.path.name}": "run the pipeline",
        "rollouts explain training": "show help and default of each setting",
    }
    parts = [
        [
            f"# {answers.path.stem}: {_purpose(answers)}",
            "#",
            *(f"#     {command:<{len(answers.path.name) + 20}}{purpose}" for command, purpose in commands.items()),
        ],
        [f"mode = {_text(MODES[answers.goal])}"],
        ["[model]", f"path = {_text(_beside(answers.model, folder))} # a folder beside this file, or a hub id"],
        ["[data]", *(_data_line(name, paths[name], columns.get(name, {}), folder) for name in paths)],
        *_training(answers, paths),
        *(_rollout(answers, paths) if answers.goal != "imitate" else []),
        ["[evaluation]", _metric(answers)],
        _node(answers),
        ["[run]", f"name = {_text(answers.path.stem)}", 'report_to = [] # ["tensorboard"], ["trackio"] or ["wandb"]'],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _purpose(answers: Answers) -> str:
    learned = {"imitate": "imitates demonstrations", "reward": "learns from rewards"}
    return learned.get(answers.goal, "imitates demonstrations, then learns from rewards")


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _beside(path: str, folder: Path) -> str:
    """Convert a path from relative to the current folder to relative to `folder`. Hub ids and URLs stay unchanged."""
    if "://" in path or not Path(path).exists():
        return path
    whole, base = Path(path).resolve(), folder.resolve()
    return f"./{whole.relative_to(base)}" if whole.is_relative_to(base) else str(whole)


ABOUT_DATA: Mapping[DataName, str] = {
    "sft": "demonstrations to imitate",
    "prompts": "prompts for RL",
    "selection": "rows to choose the best checkpoint with",
    "heldout": "rows for the final scores; never used for training or selection",
}


def _data_line(name: DataName, path: str, columns: Mapping[str, str], folder: Path) -> str:
    value = _text(_beside(path, folder))
    if columns:
        typed = ", ".join(f"{column} = {_text(kind)}" for column, kind in columns.items())
        value = f"{{ path = {value}, columns = {{ {typed} }} }}"
    return f"{name} = {value} # {ABOUT_DATA[name]}"


def _training(answers: Answers, paths: Mapping[DataName, str]) -> Iterator[list[str]]:
    if "sft" in answers.trained:
        length = min(SFTTrainingConfig().max_length, _positions(answers.model))
        num_rows, num_chars = _count(paths["sft"])
        size = SFTTrainingConfig().batch_size
        packed = math.ceil(num_chars / CHARS_PER_TOKEN / length)
        steps = max(MIN_STEPS, math.ceil(EPOCHS * packed / size)) if num_rows else SFTTrainingConfig().num_steps
        passes = f"about {EPOCHS} passes over {num_rows:,} rows, packed into {packed:,}" if num_rows else "packed rows"
        yield [
            "[training.sft]",
            f"num_steps = {steps} # {passes}, {size} in a step",
            f"checkpoint_every = {max(1, steps // 4)}",
            f"max_length = {length} # tokens of a row",
            f"optim = {{ lr = {SFTTrainingConfig().optim.lr:g} }} # for all weights of a large model; adapters: 2e-4",
            *_policy(answers),
        ]
    if "prompts" in answers.trained:
        yield [
            "[training.rl]",
            "num_steps = 100",
            "checkpoint_every = 20",
            'algorithm = "verl-grpo" # rollouts explain training.rl.algorithm lists the others',
            "optim = { lr = 1e-6 } # for all weights of a large model; adapters: 2e-5",
            *_policy(answers),
        ]


def _policy(answers: Answers) -> list[str]:
    if answers.machine == "this":
        return [
            '# policy = { precision = "bfloat16", lora = { rank = 16 } } # on a GPU; adapters instead of all weights'
        ]
    return ['policy = { precision = "bfloat16" } # adapters instead of all weights: lora = { rank = 16 }']


def _positions(model: str) -> int:
    """The context length of a local model in tokens (MAX_POSITIONS if it is unknown)."""
    try:
        about = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        found = {**about, **about.get("text_config", {})}.get("max_position_embeddings")
    except (OSError, ValueError, TypeError, AttributeError):
        return MAX_POSITIONS
    return found if isinstance(found, int) and found > 1 else MAX_POSITIONS


def _rollout(answers: Answers, paths: Mapping[DataName, str]) -> Iterator[list[str]]:
    positions = _positions(answers.model)
    size = min(RolloutConfig().batch_size, _count(paths["prompts"])[0] or RolloutConfig().batch_size)
    completion = min(RolloutConfig().sampling.max_new_tokens, positions // 2)
    prompt = min(RolloutConfig().max_prompt_tokens, positions - completion - 1)
    is_environment = answers.reward in ALL_ENVIRONMENTS
    setting = "environment" if is_environment else "reward_fn"
    lines = ["[rollout]", f"{setting} = {_text(answers.reward)}", f"batch_size = {size} # prompts in a step"]
    lines.append("n_samples_per_prompt = 8 # completions per prompt; their rewards are compared")
    yield [*lines, f"max_prompt_tokens = {prompt}"]
    yield ["[rollout.sampling]", f"max_new_tokens = {completion} # of a completion"]
    engine = "embedded" if answers.machine == "this" else "auto"
    yield ["[rollout.engine]", f'kind = "{engine}" # auto: SGLang on a GPU, installed if it is missing']


def _metric(answers: Answers) -> str:
    if answers.goal == "imitate":
        return 'metric = "loss" # selection and heldout are demonstrations'
    return 'metric = "accuracy" # selection and heldout are prompts, graded as in training'


def _node(answers: Answers) -> list[str]:
    if answers.machine == "this":
        return ["[node]", 'kind = "local" # this machine; ssh and rented: docs/ssh_nodes.md, docs/machines.md']
    if answers.machine == "rented":
        return [
            "[node]",
            'kind = "rented" # keys of providers: docs/machines.md',
            f"query = {{ gpu_types = [{_text(answers.gpu)}] }} # rollouts gpus shows offers",
            f"max_usd = {answers.max_usd:g} # the run releases the machine before it costs more",
        ]
    return [
        "[node]",
        'kind = "ssh"',
        f"host = {_text(answers.machine)}",
        f"python = {_text(answers.python)} # on that machine, with torch installed",
    ]


def _count(path: str) -> tuple[int, int]:
    """The number of rows of a local file (at most MAX_COUNTED), and the total length of their texts in characters.

    Returns 0 and 0 for a file that is not on this machine.
    """
    lengths = [_text_length(row) for _, row in islice(load_rows(path), MAX_COUNTED)] if Path(path).exists() else []
    return len(lengths), sum(lengths)


def _text_length(value: object) -> int:
    """The number of characters of all texts in a JSON value."""
    if isinstance(value, Mapping):
        return sum(map(_text_length, value.values()))
    return sum(map(_text_length, value)) if isinstance(value, list) else len(str(value))


def check_choice(value: str, choices: Sequence[str], *, option: str) -> str:
    """Return the value if it is one of the choices.

    Raises:
        InputError: the value is not one of the choices.
    """
    if value in choices:
        return value
    raise InputError(
        f"{option}: expected one of {', '.join(choices)}, found {value!r}{closest_choice(value, list(choices))}"
    )


GOALS: tuple[Goal, ...] = get_args(Goal)
