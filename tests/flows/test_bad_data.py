"""Pins what a person meets whose rows or model do not fit: one sentence that names the file and the row.

Without it a broken row would be found after an hour.

Not here: settings and functions (test_bad_configuration.py), machines and jobs (test_bad_places.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.flows.form import load_pipeline
from rollouts_core.checkpoint import new_checkpoint
from rollouts_core.checks import validate
from rollouts_core.run_checkpoints import describe_settings
from rollouts_core.stages.planning import base_model, sft_job
from tests.flows.refusals import (
    ASSISTANT,
    GOOD_ROW,
    USER,
    Change,
    assert_refused,
    refusal,
    write_config,
    write_rows,
)


@pytest.mark.parametrize("name", ["sft", "prompts", "selection", "heldout"])
def test_a_missing_data_file_is_named(folder: Path, name: str) -> None:
    assert_refused(
        write_config(folder, **{f"data__{name}": "none.jsonl"}), f"data.{name}: ", "none.jsonl does not exist"
    )


def test_a_checkpoint_to_go_on_from_that_read_other_rows_is_named(folder: Path, tmp_path: Path) -> None:
    config = load_pipeline(write_config(folder)).config
    job = sft_job(base_model(config), config)
    settings = describe_settings(config.training.sft, {**job.inputs, "data": "other"})
    with new_checkpoint(tmp_path / "run" / "step_000010", step=10, settings=settings) as checkpoint:
        (checkpoint / "model.safetensors").write_bytes(b"weights")
    resumed = write_config(folder, training__sft__resume_from=str(tmp_path / "run"))
    assert_refused(resumed, "step_000010 was trained with other settings", 'data was "other" and is ')


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("sft.jsonl", b"", "sft.jsonl is empty: expected at least one row"),
        ("heldout.jsonl", b"", "heldout.jsonl is empty"),
        ("sft.jsonl", b"\n  \n\n", "sft.jsonl is empty"),
        ("sft.jsonl", '{"text": "é"}\n'.encode("latin-1"), "row 1: not UTF-8 ("),
        ("sft.jsonl", b'{"text": "1"}\n[' + b"[" * 100_000, "row 2: not valid JSON"),
        ("rows.xls", b"prompt,completion\n1,2\n", "rows.xls has an unknown file type"),
        ("rows.csv", b"prompt,completion\n1,2,3\n", "rows.csv, row 1: found 3 cells, but the first line has 2 columns"),
        ("rows.csv", "prompt,completion\né,2\n".encode("latin-1"), "rows.csv, row 1: not UTF-8"),
        ("rows.csv", b'prompt,completion\n"1,2\n', "rows.csv, row 1: not valid CSV"),
        ("rows.jsonl.gz", b"hello", "rows.jsonl.gz cannot be read"),
        ("rows.parquet", b"hello", "rows.parquet is not a Parquet file, or is truncated"),
        ("rows.parquet", b"PAR1 and then nothing", "rows.parquet is not a Parquet file, or is truncated"),
    ],
)
def test_a_data_file_of_another_kind_is_named(folder: Path, name: str, content: bytes, words: str) -> None:
    (folder / name).write_bytes(content)
    changes = {"data__sft": name} if name.startswith("rows") else {}
    assert_refused(write_config(folder, **changes), words)


def test_a_folder_without_a_dataset_is_named(folder: Path) -> None:
    assert_refused(
        write_config(folder, data__sft="base_model"), "base_model contains a model, not a dataset", "save_to_disk"
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([GOOD_ROW] * 6 + ["{broken", GOOD_ROW], "row 7: not valid JSON"),
        (["", "", *[GOOD_ROW] * 4, "{broken"], "row 7: not valid JSON"),
        (["", "", *[GOOD_ROW] * 4, {"question": "x"}], "row 7: expected `messages`"),
        ([GOOD_ROW, "[1]"], "row 2: expected a JSON object, found list"),
        ([GOOD_ROW, {"question": "x"}], "row 2: expected `messages`, or `prompt` and `completion`, or `text`"),
        ([GOOD_ROW, {"messages": [{"content": "x"}, ASSISTANT]}], "row 2: message 0 must have `role` and `content`"),
        ([GOOD_ROW, {"messages": [USER]}], "row 2: the conversation has no assistant turn"),
        ([GOOD_ROW, {"prompt": "1" * 200, "completion": "2"}], "row 2: nothing to train on within the first 128 of"),
    ],
)
def test_a_demonstration_that_does_not_fit_is_named_by_its_row(
    folder: Path, rows: list[Mapping[str, object] | str], words: str
) -> None:
    write_rows(folder / "sft.jsonl", rows)
    assert_refused(write_config(folder), "sft.jsonl, ", words)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "1", "answer": "1"}, {"question": "x"}], "row 2: expected `prompt` or `messages`; found question"),
        ([{"prompt": "1", "answer": "1"}, {"prompt": "1" * 40, "answer": "1"}], "row 2: the prompt 'prompts-2' has 43"),
        ([{"id": "a", "prompt": "1"}, {"id": "a", "prompt": "2"}], "row 2: id 'a' also occurs in row 1"),
        ([{"id": "a", "prompt": "1", "solution": "1"}], "prompt 'a' has no `answer`, which arithmetic needs"),
        ([{"id": None, "prompt": "1", "answer": None}], "prompt 'prompts-1' has no `answer`"),
    ],
)
def test_a_prompt_that_does_not_fit_is_named(folder: Path, rows: list[Mapping[str, object]], words: str) -> None:
    write_rows(folder / "prompts.jsonl", rows)
    assert_refused(write_config(folder), "prompts.jsonl", words)


def test_a_prompt_of_the_selection_among_the_heldout_ones_is_named(folder: Path) -> None:
    row = json.loads((folder / "selection.jsonl").read_text().splitlines()[3])
    write_rows(folder / "heldout.jsonl", [{"prompt": "1+1=?", "answer": "2"}, {**row, "id": "other"}])
    words = f"prompt 'other' of data.heldout is also prompt '{row['id']}' of data.selection"
    assert_refused(write_config(folder), words, "remove the prompt from one of the files")


def test_a_demonstration_of_the_selection_among_the_heldout_ones_is_named(folder: Path) -> None:
    write_rows(folder / "selection.jsonl", [GOOD_ROW])
    write_rows(folder / "heldout.jsonl", [{"text": "1"}, GOOD_ROW])
    config = write_config(folder, mode="sft", evaluation__metric="loss")
    assert_refused(config, "heldout.jsonl, row 2 is also row 1 of", "remove the row from one of the files")


@pytest.mark.parametrize("row", [{"messages": [USER, ASSISTANT]}, GOOD_ROW, {"text": "1+1=2"}])
@pytest.mark.parametrize("held_out", ["selection", "heldout"])
def test_sft_is_told_how_its_demonstrations_can_be_compared_on(
    folder: Path, held_out: str, row: dict[str, object]
) -> None:
    write_rows(folder / f"{held_out}.jsonl", [row])
    assert_refused(write_config(folder, mode="sft"), f"{held_out}.jsonl, row 1", 'set evaluation.metric = "loss"')


def test_rl_is_not_told_of_a_metric_that_it_has_not(folder: Path) -> None:
    write_rows(folder / "selection.jsonl", [{"messages": [USER, ASSISTANT]}])
    said = refusal(write_config(folder))
    assert "move it to `answer`" in said and "evaluation.metric" not in said


@pytest.mark.parametrize("trained", ["sft", "prompts"])
@pytest.mark.parametrize("held_out", ["selection", "heldout"])
def test_training_on_rows_that_models_are_compared_on_is_refused(folder: Path, trained: str, held_out: str) -> None:
    row = json.loads((folder / f"{held_out}.jsonl").read_text().splitlines()[3])
    demonstration = {"prompt": row["prompt"], "completion": ":2"}
    write_rows(folder / f"{trained}.jsonl", [GOOD_ROW | {"answer": "2"}, demonstration | {"answer": row["answer"]}])
    words = f"1 of 20 rows of data.{held_out} are also trained on (row 4 is row 2 of "
    assert_refused(write_config(folder), words, f"{trained}.jsonl)")


def test_a_demonstration_whose_loss_grades_is_not_trained_on(folder: Path) -> None:
    for name, row in (("sft", GOOD_ROW), ("selection", {"text": "1"}), ("heldout", GOOD_ROW)):
        write_rows(folder / f"{name}.jsonl", [row])
    config = write_config(folder, mode="sft", evaluation__metric="loss")
    assert_refused(config, "1 of 1 rows of data.heldout are also trained on (row 1 is row 1 of ", "sft.jsonl)")


def delete(*patterns: str) -> Change:
    """Delete the files of these names."""

    def change(model: Path) -> None:
        for pattern in patterns:
            for path in list(model.glob(pattern)):
                path.unlink()

    return change


def change_json(name: str, **changes: object) -> Change:
    """Set keys of a JSON file; None removes one."""

    def change(model: Path) -> None:
        settings = {**json.loads((model / name).read_text()), **changes}
        (model / name).write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))

    return change


def write_template(template: str) -> Change:
    """Give the tokenizer another chat template."""
    return lambda model: (model / "chat_template.jinja").write_text(template)


def cut_weights(model: Path) -> None:
    """Lose the end of the weights, as an interrupted copy does."""
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def pickle_weights(model: Path) -> None:
    """Keep the weights as older checkpoints do."""
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()


def clone_without_lfs(model: Path) -> None:
    """Have of the weights what `git clone` leaves where Git LFS is not installed."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n"
    (model / "model.safetensors").write_text(pointer)


def lose_a_shard(model: Path) -> None:
    """What an interrupted download leaves of a model in several files: its index, and some of them."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / "model-00002-of-00002.safetensors")
    names = dict.fromkeys(tensors, "model-00002-of-00002.safetensors")
    names[next(iter(names))] = "model-00001-of-00002.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def break_the_index(model: Path) -> None:
    lose_a_shard(model)
    (model / "model.safetensors.index.json").write_text("{")


def set_in_config(**values: object) -> Callable[[Path], None]:
    """Edits config.json by hand."""

    def edit(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def forget_tokens(model: Path) -> None:
    """A model of another tokenizer, with fewer tokens."""
    weights = load_file(model / "model.safetensors")
    kept = {name: each[:10].clone() if len(each) == 29 else each for name, each in weights.items()}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    change_json("config.json", vocab_size=10)(model)


def leave_adapters(model: Path) -> None:
    """What PEFT saves of a model: its adapters and the tokenizer."""
    (model / "config.json").rename(model / "adapter_config.json")
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shutil.rmtree, "base_model is not a folder: give the folder of a Hugging Face checkpoint"),
        (delete("tokenizer.json"), "base_model has no tokenizer (tokenizer.json or"),
        (delete("config.json"), "base_model has no configuration (config.json)"),
        (
            set_in_config(hidden_size="64"),
            "base_model/config.json cannot be used: Field 'hidden_size' expected int, got",
        ),
        (delete("model.safetensors"), "base_model has no weights (*.safetensors)"),
        (cut_weights, "model.safetensors is truncated or damaged"),
        (clone_without_lfs, "model.safetensors is a Git LFS pointer instead of the weights: download them"),
        (lose_a_shard, "base_model lacks model-00001-of-00002.safetensors of the 2 weight files listed in model.safe"),
        (break_the_index, "model.safetensors.index.json cannot be read ("),
        (pickle_weights, "are pickled (pytorch_model.bin)"),
        (leave_adapters, "base_model contains only adapters of PEFT, without the model"),
        (delete("chat_template*"), "the tokenizer has no chat template: add one"),
        (write_template("{% for %}"), "the chat template refuses the turns user"),
        (write_template("{{ raise_exception('no user') }}"), ": no user"),
        (change_json("tokenizer_config.json", eos_token=None), "has no eos_token"),
        (change_json("config.json", vocab_size=10), "do not match its config.json: lm_head.weight has shape (29,"),
        (forget_tokens, "has 29 tokens, but the model has only 10 embeddings"),
        (
            change_json("config.json", architectures=["GPT2LMHeadModel"]),
            "does not support architecture GPT2",
        ),
        (
            change_json("config.json", max_position_embeddings=40),
            "(rollout.sampling.max_new_tokens) need 63 positions, but the model at",
        ),
        (lambda model: (model / "config.json").write_text("{"), "config.json"),
    ],
)
def test_a_model_that_does_not_fit_is_named(folder: Path, change: Change, words: str) -> None:
    change(folder / "base_model")
    assert_refused(folder / "small.toml", words)


def test_pickled_weights_that_are_allowed_are_refused_only_where_somebody_cannot_read_them(folder: Path) -> None:
    pickle_weights(folder / "base_model")
    allowed = {"mode": "sft", "model__allow_pickle": True}
    assert_refused(write_config(folder, **allowed), "are pickled, which the embedded engine does not read: convert")
    for name in ("selection", "heldout"):
        write_rows(folder / f"{name}.jsonl", [GOOD_ROW | {"prompt": name}])
    config = write_config(folder, **allowed, evaluation__metric="loss")
    outcome = CliRunner().invoke(app, ["validate", str(config)])
    assert outcome.exit_code == 0, outcome.output
    jax = {"training__sft__policy": {"backend": "jax"}}
    config = write_config(folder, **allowed, evaluation__metric="loss", **jax)
    assert_refused(config, 'are pickled, which training.sft.policy.backend "jax" does not read: convert')


def test_a_model_that_has_no_room_for_what_selection_samples_is_named_before_sft(folder: Path) -> None:
    change_json("config.json", max_position_embeddings=40)(folder / "base_model")
    config = write_config(folder, mode="sft", rollout__max_prompt_tokens=32)
    assert_refused(config, "selection.jsonl: prompts of ", "need 4", "the model at", "has 40")


@pytest.mark.slow
def test_a_model_that_jax_does_not_train_is_named_before_sft(folder: Path) -> None:
    change_json("config.json", attention_dropout=0.1)(folder / "base_model")
    words = 'base_model: backend "jax" does not support attention_dropout 0.1: set policy.backend = "pytorch"'
    assert_refused(write_config(folder, training__rl__policy={"backend": "jax"}), words)
    assert_refused(write_config(folder, mode="sft", training__sft__policy={"backend": "jax"}), words)
    settings = {"mode": "sft", "evaluation__metric": "loss", "training__sft__policy": {"backend": "jax"}}
    assert_refused(write_config(folder, model__path="some_org/some_model", **settings), "reads models from folders")


def test_prompts_without_a_chat_template_are_not_told_to_be_texts(folder: Path) -> None:
    delete("chat_template*")(folder / "base_model")
    [said, counted] = refusal(write_config(folder)).splitlines()
    assert said.endswith("use rows with a `text` field") and "300 of 300 rows are invalid: 1, 2, 3, 4, 5, " in counted
    sentence = refusal(write_config(folder, mode="rl"))
    assert sentence.endswith("the tokenizer has no chat template: add one to the model's folder")


def test_adapters_for_layers_that_the_model_does_not_have_are_named_before_sft(folder: Path) -> None:
    config = write_config(folder, training__rl__policy={"lora": {"rank": 4, "target_modules": ["q_proj", "c_attn"]}})
    assert_refused(
        config, "training.rl.policy.lora.target_modules c_attn: the model has no linear layer", "it has down"
    )


@pytest.mark.parametrize("name", ["some_model", "~/some_model"])
def test_a_model_that_is_no_folder_is_named_without_asking_a_hub(folder: Path, name: str) -> None:
    assert_refused(write_config(folder, model__path=name), f"model.path: {name} is not a folder")


def test_a_model_of_the_hub_that_cannot_be_downloaded_is_named(folder: Path) -> None:
    assert_refused(
        write_config(folder, model__path="some_org/some_model"),
        "the model some_org/some_model cannot be downloaded (",
        "set model.path to a local folder, set hub.url to a mirror that is reachable",
    )


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(folder: Path) -> None:
    write_rows(folder / "prompts.jsonl", [{"prompt": "1", "answer": "1"}, "{broken", {"prompt": 3}])
    write_rows(folder / "heldout.jsonl", [{"question": "x"}])
    config = write_config(
        folder,
        model__path="./no_model",
        data__sft="missing.jsonl",
        training__sft__num_stepz=3,
        rollout__reward_fn="no_such_package:f",
        rollout__filter_fn="no_such_filter",
        evaluation__engine="mine",
        node__min_free_gb=1e9,
        run__restarts=99,
    )
    broken = (
        f"model.path: {folder}/no_model is not a folder",
        f"data.sft: {folder}/missing.jsonl does not exist",
        f"data.prompts: {folder}/prompts.jsonl, row 2: not valid JSON",
        f"data.prompts: {folder}/prompts.jsonl, row 3: `prompt` must be text",
        f"data.prompts: {folder}/prompts.jsonl: 2 of 3 rows are invalid: 2, 3",
        f"data.heldout: {folder}/heldout.jsonl, row 1: expected `prompt`",
        f"{config}: unknown key training.sft.num_stepz; did you mean num_steps?",
        "rollout.reward_fn: 'no_such_package' cannot be imported",
        "rollout.filter_fn: ",
        f"{config}: evaluation.engine: input should be",
        f"{config}: run.restarts: input should be less than or equal to 10, found 99",
    )
    said = refusal(config).removeprefix("rollouts: ").splitlines()
    assert [line.startswith(words) for line, words in zip(said, broken, strict=True)] == [True] * len(broken), said
    config = write_config(folder, data__sft="missing.jsonl", node__min_free_gb=1e9, rollout__filter_fn="no_such_filter")
    checked = (*broken[1:6], broken[8], "node: 1000000000 GB of free disk are needed")
    for command in ("validate", "run"):
        said = refusal(config, command=command).removeprefix("rollouts: ").splitlines()
        assert [line.startswith(words) for line, words in zip(said, checked, strict=True)] == [True] * len(checked)


@pytest.mark.parametrize("is_beside", [True, False], ids=["the configuration's folder", "the current folder"])
def test_a_module_beside_the_configuration_or_the_user_is_tried_before_the_rows_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_beside: bool
) -> None:
    here = folder.parent / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    name, tried = f"own_{folder.parent.name}_{'beside' if is_beside else 'here'}", folder / "tried"
    own = f"import pathlib\n\ndef f(sample):\n    pathlib.Path({str(tried)!r}).touch()\n    raise ValueError('tried')\n"
    ((folder if is_beside else here) / f"{name}.py").write_text(own)
    write_rows(folder / "sft.jsonl", [GOOD_ROW, {"no": "row"}])
    for read in ("check_demonstrations", "_load_checked_prompts"):
        monkeypatch.setattr(validate, read, after(tried, getattr(validate, read)))
    said = refusal(write_config(folder, rollout__reward_fn=f"{name}:f", rollout__environment="")).splitlines()
    assert "data.sft: " in said[0] and "tried" in said[1]  # the order of the file


def after(marker: Path, read: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which must not be called before a file is there."""

    def read_later(*arguments: Any, **options: Any) -> Any:
        assert marker.exists(), "all rows are read before the reward is tried"
        return read(*arguments, **options)

    return read_later
