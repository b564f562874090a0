"""Pins what a person meets whose settings, options or functions do not fit: one sentence, before anything starts.

Without it a misspelt key would train with a default that nobody chose, and what the person reads would be the
traceback of a library.

Not here: data and models (test_bad_data.py), machines and jobs (test_bad_places.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rollouts.flows.cli import app
from tests.flows.refusals import (
    NAN,
    assert_refused,
    refusal,
    write_config,
    write_function,
)
from tests.kit.small_pipeline import small_settings


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("modle", {}, "unknown key modle; did you mean model?"),
        ("nodes", {}, "unknown key nodes; did you mean node?"),
        ("report_to", ["wandb"], "unknown key report_to; did you mean run.report_to?"),
        ("max_usd", 3, "unknown key max_usd; did you mean node.max_usd?"),
        ("cron", "0 3 * * *", "unknown key cron; did you mean schedule.cron?"),
        (
            "zzz",
            1,
            "unknown key zzz; known are data, deployment, evaluate, evaluation, hub, mode, model, node, report, "
            "retrain, rollout, run, schedule",
        ),
        (
            "rollout__reward_fn",
            ["a:f", "b:g"],
            'rollout.reward_fn: expected one name, "package.module:function"; for several, with weights, use rewards',
        ),
        ("model__pth", "x", "unknown key model.pth; did you mean path?"),
        ("data__promts", "x", "unknown key data.promts; did you mean prompts?"),
        ("training__stf", {}, "unknown key training.stf; did you mean sft?"),
        ("training__sft__num_stepz", 3, "unknown key training.sft.num_stepz; did you mean num_steps?"),
        ("training__sft__optim__lrr", 1.0, "unknown key training.sft.optim.lrr; did you mean lr?"),
        ("training__rl__loss__clip_lo", 0.1, "unknown key training.rl.loss.clip_lo; did you mean clip_low?"),
        ("rollout__batchsize", 1, "unknown key rollout.batchsize; did you mean batch_size?"),
        ("rollout__sampling__temprature", 1, "unknown key rollout.sampling.temprature; did you mean temperature?"),
        ("evaluation__metrc", "loss", "unknown key evaluation.metrc; did you mean metric?"),
        ("deployment__engin_port", 1, "unknown key deployment.engin_port; did you mean engine_port?"),
        ("node__min_free", 1, "unknown key node.min_free; did you mean min_free_gb?"),
        ("run__nam", "x", "unknown key run.nam; did you mean name?"),
        ("model", "./base_model", "model: expected a table of settings, found './base_model'"),
        ("training", [], "training: expected a table of settings, found []"),
        ("node", 3, "node: expected a table of settings, found 3"),
        ("run", 3, "run: expected a table of settings, found 3"),
        ("training__sft__num_steps", "many", "training.sft.num_steps: input should be a valid integer"),
        ("training__sft__num_steps", 1.5, "found 1.5"),
        ("training__sft__packing", "perhaps", "training.sft.packing: input should be a valid boolean"),
        ("data__sft", 3, "data.sft: input should be a valid string, found 3"),
        ("rollout__filter_fn", 3, "rollout.filter_fn: input should be a valid string, found 3"),
        ("deployment__trainer_gpu_ranks", ["a"], "deployment.trainer_gpu_ranks.0: input should be a valid integer"),
        ("node__min_free_gb", "ten", "min_free_gb: input should be a valid number"),
        ("training__sft__num_steps", 0, "training.sft.num_steps: input should be greater than or equal to 1, found 0"),
        ("training__sft__optim__lr", -1.0, "training.sft.optim.lr: input should be greater than or equal to 0"),
        ("rollout__sampling__temperature", 11, "less than or equal to 10, found 11"),
        ("rollout__sampling__temperature", 0, "rollout.sampling.temperature above 0"),
        ("deployment__engine_port", 70000, "deployment.engine_port: input should be less than or equal to 65535"),
        (
            "rollout__engine",
            {"kind": "tgi"},
            "rollout.engine.kind: input should be 'embedded', 'sglang', 'vllm' or 'auto'",
        ),
        ("rollout__engine", {"kind": "embedded", "extra_args": ["-x"]}, "engine.extra_args is a setting for the kinds"),
        ("deployment__num_engines", 0, "deployment.num_engines: input should be greater than or equal to 1"),
        ("deployment__trainer_gpu_ranks", [-1], "deployment.trainer_gpu_ranks.0: input should be greater than"),
        ("training__sft__optim__lr", NAN, "training.sft.optim.lr: must be a finite number, found nan"),
        ("training__sft__optim__betas", [0.9, NAN], "training.sft.optim.betas.1: must be a finite number, found nan"),
        ("training__sft__optim__betas", [0.9], "training.sft.optim.betas.1 is missing"),
        ("evaluation__max_p_value", NAN, "evaluation.max_p_value: must be a finite number, found nan"),
        ("node__min_free_gb", NAN, "min_free_gb: input should be a finite number, found nan"),
        ("mode", "sft+dpo", "mode: input should be 'sft', 'rl' or 'sft+rl', found 'sft+dpo'"),
        ("training__sft__seed", -1, "training.sft.seed: input should be greater than or equal to 0, found -1"),
        ("node__kind", "runpod", "node.kind is 'runpod': expected one of local, ssh, instance, rented; to "),
        ("run__fresh", ["sfft"], "fresh.0: input should be 'sft', 'select-sft', 'rl', 'select-rl' or 'evaluate'"),
        ("run__name", "my run", "name: string should match pattern"),
        ("evaluation__metric", "loss", 'evaluation.metric cannot be "loss"'),
        ("training__sft__micro_batch_size", 3, "not a multiple of micro_batch_size 3: use micro_batch_size 2,"),
        ("training__sft__keep_best", 1, "training.sft.keep_best 1 compares checkpoints by their loss on data.sft_eval"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(folder: Path, key: str, value: object, words: str) -> None:
    assert_refused(write_config(folder, **{key: value}), "small.toml", words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("kernel", ["varlen", "flex", "flash_attention_2"])
def test_a_kernel_for_gpus_is_refused_on_a_machine_without_one(folder: Path, kernel: str) -> None:
    config = write_config(folder, training__rl__policy={"attention": kernel, "precision": "bfloat16"})
    assert_refused(config, f'training.rl.policy.attention "{kernel}" needs a GPU, but torch finds none on the machine')


def test_more_gpus_than_this_machine_has_are_refused_before_anything_is_started(folder: Path) -> None:
    config = write_config(folder, mode="sft", deployment__trainer_gpu_ranks=list(range(64)))
    assert_refused(config, "deployment names 64 GPUs", "this machine has ", "name other GPUs, leave these settings out")


def test_a_run_of_which_nobody_says_who_grades_is_refused(folder: Path) -> None:
    config = write_config(folder, rollout__environment="")
    assert_refused(
        config, "set rollout.environment to a built-in environment (arithmetic, calculator, ", "rollout.reward_fn"
    )


@pytest.mark.parametrize(("mode", "missing"), [("rl", "prompts"), ("sft", "sft"), ("sft+rl", "heldout")])
def test_a_mode_without_its_data_is_named(folder: Path, mode: str, missing: str) -> None:
    assert_refused(write_config(folder, mode=mode, **{f"data__{missing}": ""}), f'mode "{mode}" needs data.{missing}')


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", "mode = \n", "is not valid TOML: Invalid value (at line 1, column 8)"),
        ("a.toml", "mode = 'sft'\nmode = 'rl'\n", "is not valid TOML"),
        ("a.toml", "[model]\npath = 'm'\n", "data is missing"),
        ("a.toml", "1 = 2\n", "unknown key 1; known are data"),
        ("a.json", "[1]", "must contain a table of settings, found list"),
        ("a.json", "{", "is not valid JSON"),
        ("a.json", "[" * 100_000, "is not valid JSON"),
        ("a.json", '{"mode": "sft", "data": {}, "mode": "rl"}', "is not valid JSON: mode is there twice"),
        ("a.yaml", "mode: sft\n", "is YAML, which is not supported: write it as TOML or JSON"),
        ("a.jsonl", '{"text": "row"}\n', "contains rows of data: give the configuration that names it"),
        ("a.py", "raise ValueError('no\\nway')\n", "raised ValueError: no (a.py, line 1)"),
        ("a.py", "def (\n", "raised SyntaxError: invalid syntax"),
        ("a.py", "raise SystemExit(0)\n", "raised SystemExit: 0"),
        ("a.py", "import no_such_package\n", "raised ModuleNotFoundError: No module named 'no_such_package'"),
        ("a.py", "x = 1\n", "must define `config`"),
        ("a.py", "config = [1]\n", "must define `config`"),
        ("a.py", "config = {'modle': 1}\n", "unknown key modle; did you mean model?"),
        ("a.py", "config = {1: 2}\n", "unknown key 1; known are data"),
        ("a.py", "config = {'run': {None: 2}}\n", "unknown key run.None; known are"),
        (
            "a.py",
            "from rollouts_core.config import ModelConfig\nModelConfig(path='')\n",
            "ModelConfig.path: String",
        ),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(folder: Path, name: str, content: str, words: str) -> None:
    (folder / name).write_text(content)
    assert_refused(folder / name, name, words)


def test_each_of_several_mistakes_has_a_line(folder: Path) -> None:
    config = write_config(folder, training__stf={}, training__rl__num_steps=0, mode="fst")
    outcome = CliRunner().invoke(app, ["validate", str(config), "--store", str(folder / "store")])
    assert outcome.exit_code == 2
    assert outcome.stderr.splitlines() == [
        f"rollouts: {config}: mode: input should be 'sft', 'rl' or 'sft+rl', found 'fst'; did you mean sft?",
        f"{config}: training.rl.num_steps: input should be greater than or equal to 1, found 0",
        f"{config}: unknown key training.stf; did you mean sft?",
    ]


MISFITS = "SFTTrainingConfig(num_steps=0, batch_size=0)"
BROKEN_RULES = "RolloutConfig(reward_fn='f', rewards=({'name': 'f'},), max_staleness=1, over_sampling_factor=2.0)"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (MISFITS, ["SFTTrainingConfig.num_steps: I", "SFTTrainingConfig.batch_size: I"]),
        (
            BROKEN_RULES,
            ["RolloutConfig: reward_fn and rewards exclude each other", "RolloutConfig: over_sampling_factor 2 has"],
        ),
    ],
)
def test_each_mistake_of_a_record_in_python_has_a_line(folder: Path, made: str, said: list[str]) -> None:
    (folder / "a.py").write_text(f"from rollouts_core.config import *\n{made}\n")
    told = refusal(folder / "a.py").removeprefix("rollouts: ").splitlines()
    assert all(line.startswith(f"{folder}/a.py: {words}") for line, words in zip(told, said, strict=True)), told


def test_a_configuration_that_is_no_text_is_named(folder: Path) -> None:
    (folder / "a.toml").write_bytes(b"\xff\xfe")
    assert_refused(folder / "a.toml", "a.toml is not valid TOML", "can't decode")


@pytest.mark.parametrize("name", ["none.toml", "none.json", "none.py"])
def test_a_missing_configuration_is_named(folder: Path, name: str) -> None:
    assert_refused(folder / name, f"{name} does not exist: give the path")


def test_a_folder_is_no_configuration(folder: Path) -> None:
    assert_refused(folder / "base_model", "base_model is a folder: give the path")


def test_a_function_of_the_configuration_file_itself_is_refused(folder: Path) -> None:
    settings = small_settings()
    source = f"def reward(sample):\n    return 1.0\n\nconfig = {settings!r}\nconfig['rollout']['reward_fn'] = reward\n"
    (folder / "own.py").write_text(source)
    assert_refused(folder / "own.py", "rollout.reward_fn", "cannot import", 'name it "module:function"')


@pytest.mark.parametrize(
    ("setting", "content"),
    [
        ("rewards.1.name", "{'rewards': [{'name': 'last_number'}, {'name': reward}]}"),
        ("filters.0.name", "{'filters': [{'name': reward}]}"),
        ("reward_fn", "{'reward_fn': functools.partial(reward)}"),  # has no name of its own
    ],
)
def test_wherever_a_function_of_the_configuration_file_stands_it_is_refused(
    folder: Path, setting: str, content: str
) -> None:
    """It would be found missing by the first stage that grades: after SFT."""
    source = f"import functools\n\ndef reward(sample):\n    return 1.0\n\nconfig = {small_settings()!r}\n"
    (folder / "own.py").write_text(source + f"config['rollout'] |= {content}\n")
    assert_refused(folder / "own.py", f"rollout.{setting}:", "cannot import", 'name it "module:function"')


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--name", "a b"], "command line: run.name: string should match pattern"),
        (["--fresh", "sfft"], "command line: run.fresh.0: input should be 'sft', 'select-sft'"),
        (
            ["training.rl.num_steps=0"],
            "command line: training.rl.num_steps: input should be greater than or equal to 1",
        ),
    ],
)
def test_an_option_that_does_not_fit_is_named(folder: Path, arguments: list[str], words: str) -> None:
    assert words in refusal(folder / "small.toml", *arguments, command="run")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "Missing argument"),
        (["rnu"], "No such command"),
        (["run", "a.toml", "--prot", "1"], "--port"),
        (["run", "a.toml", "--port", "70000"], "65535"),
        (["quickstart", "--seed", "-1"], "--seed"),
    ],
)
def test_a_command_line_that_does_not_fit_is_explained_by_its_usage(arguments: list[str], words: str) -> None:
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 2
    assert "Usage: " in outcome.output
    assert words in outcome.output


GRADER = "from rollouts_core import Tool\nclass f:\n  def grade(self, sample): return 1.0\n"
"""An environment, to which a mistake is added."""
TOOL = "Tool(name='t', description='', parameters={'type': 'int'}, function=print)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "source", "words"),
    [
        ("reward_fn", "def f(sample): raise ValueError('no\\nway')", ":f on prompt '"),
        ("reward_fn", "def f(sample): raise ValueError('no\\nway')", "' raised ValueError: no (own_"),
        ("reward_fn", "def f(sample): raise SystemExit", "raised SystemExit"),
        ("reward_fn", "def f(sample): return float('nan')", "returned nan: return a finite number"),
        ("reward_fn", "def f(sample): pass", "returned None: expected a finite number"),
        ("reward_fn", "def f(sample): return '1'", "returned '1': return a finite number"),
        ("reward_fn", "def f(): return 1", "raised TypeError"),
        ("reward_fn", "def f(prompts, completions): return 1", ": a reward function takes one Sample; the"),
        ("reward_fn", "def f(completions, **kwargs): return [len(each) for each in completions]", "one Sample; the"),
        ("reward_fn", "def f(sample): return float(sample.answer == sample.response)", "one Sample; the"),
        ("reward_fn", "f = 3", ":f' is not a function"),
        ("reward_fn", "def ff(sample): return 1", "has no 'f'; did you mean ff?"),
        ("reward_fn", "def f(", "it raised SyntaxError"),
        ("reward_fn", "1 / 0", "it raised ZeroDivisionError: division by zero (own_"),
        ("reward_fn", "raise SystemExit(4)", "it raised SystemExit: 4"),
        ("reward_fn", "import no_such_package", "cannot be imported (No module named 'no_such_package')"),
        ("filter_fn", "def f(group): raise ValueError('no')", "filter function"),
        ("filter_fn", "def f(group): raise ValueError('no')", ".py, line 1)"),
        ("filter_fn", "def f(group): pass", "returned None: expected True or False"),
        ("reward_fn", "def f(sample):\n  while True: pass", "did not return within 1 s; it was in f, own_"),
        ("filter_fn", "def f(group):\n  while True: pass", "did not return within 1 s; it was in f, own_"),
        ("environment", "class f: pass", "is not an environment"),
        ("environment", "class f:\n  def __init__(self): open('/none/x')", ":f cannot be created: it raised FileNot"),
        ("environment", f"{GRADER}  tools = [{{'type': 'function'}}]", "a tool of the type dict: expected `tools`"),
        ("environment", f"{GRADER}  tools = print", "a tool of the type builtin_function_or_method: expected"),
        (
            "environment",
            f"{GRADER}  tools = [{TOOL}]",
            "parameters.type: expected array,",
        ),
        (
            "environment",
            f"{GRADER}  row_fields = ('answer')",
            "the string 'answer' as row_fields: expected a sequence of",
        ),
        ("environment", f"{GRADER}  def check_row(self, row): row['x']", "it was given /"),
        ("environment", f"{GRADER}  def check_row(self, row): row['x']", ":f raised KeyError: 'x' (own_"),
        ("generate_fn", "def g(group): return group", "has no 'f'"),
    ],
)
def test_an_own_function_that_does_not_fit_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, setting: str, source: str, words: str
) -> None:
    module = write_function(folder, source, monkeypatch)
    config = write_config(folder, **{f"rollout__{setting}": f"{module}:f", "rollout__reward_timeout_s": 1.0})
    assert_refused(config, setting.split("_")[0], module, words)


@pytest.mark.parametrize(
    ("setting", "name", "words"),
    [
        ("reward_fn", "exact_mach", "unknown name 'exact_mach'; did you mean exact_match?"),
        (
            "reward_fn",
            "rollouts_core.rewards",
            "'rollouts_core.rewards'; known are exact_match, last_number",
        ),
        ("reward_fn", "no_such_package:f", "named 'no_such_package'); is it beside the configuration, "),
        ("reward_fn", ":f", "':f' has no module name: give package.module:function"),
        ("filter_fn", "any_sucess", "unknown name 'any_sucess'; did you mean any_success?"),
        ("environment", "arithmetics", "unknown name 'arithmetics'; did you mean arithmetic?"),
        ("generate_fn", "mine", "unknown name 'mine'; give package.module:function"),
    ],
)
def test_a_misspelt_function_is_named(folder: Path, setting: str, name: str, words: str) -> None:
    assert_refused(write_config(folder, **{f"rollout__{setting}": name}), f"rollout.{setting}: ", words)
