"""Pins `rollouts evaluate RUN --lm-eval TASK`: the real harness over our server, and its failures as sentences.

Without it a benchmark would score another model than the named one, score a model twice, or end with a traceback.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.registry import models
from rollouts_core.quickstart import write_quickstart_files
from tests.flows.refusals import write_config
from tests.kit.commands import Rollouts
from tests.rollouts_core.embedded.scripted_model import STORY, write_scripted_model
from tests.rollouts_core.make import TINY_SIZE

SUMS = [(f"{a}+{b}=", a + b) for a, b in ((12, 7), (41, 3), (8, 30), (5, 66), (72, 2), (9, 9), (31, 44), (60, 13))]
TASK = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
metadata: {{version: 1.0}}
"""
TASKS = {
    "sums_choice": 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: label\n'
    "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "sums_answer": 'output_type: generate_until\ndoc_to_target: "{{answer}}"\n'
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}\n'
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    "filter_list:\n  - {name: strict, filter: [{function: take_first}]}\n"
    '  - {name: digits, filter: [{function: regex, regex_pattern: "(\\\\d+)"}, {function: take_first}]}\n',
    "sums_text": 'output_type: loglikelihood_rolling\ndoc_to_target: "{{question}}{{answer}}"\n'
    "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n",
}
GROUP = "group: sums\ntask: [sums_choice, sums_answer]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"


def write_tasks(folder: Path) -> list[dict[str, Any]]:  # Any: JSON
    """Write tasks about sums; returns their rows."""
    folder.mkdir()
    rows = []
    for number, (question, answer) in enumerate(SUMS):
        others = [answer + 1, answer + 10, answer - 1]
        choices = [*others[: number % 4], answer, *others[number % 4 :]]
        rows.append(
            {"question": question, "choices": list(map(str, choices)), "label": number % 4, "answer": str(answer)}
        )
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{TASK.format(data=data)}{task}")
    (folder / "sums.yaml").write_text(GROUP)
    return rows


def choice_logprobs(model_dir: Path, rows: list[dict[str, Any]]) -> list[list[float]]:  # Any: JSON
    """The log-prob of each choice of each row, by transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    found = []
    for row in rows:
        start = tokenizer.encode(row["question"], add_special_tokens=False)
        scored = []
        for choice in row["choices"]:
            tokens = start + tokenizer.encode(choice, add_special_tokens=False)
            with torch.no_grad():
                logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            scored.append(sum(float(logprobs[at - 1, tokens[at]]) for at in range(len(start), len(tokens))))
        found.append(scored)
    return found


def accuracy(logprobs: list[list[float]], rows: list[dict[str, Any]]) -> float:  # Any: JSON
    return sum(row.index(max(row)) == each["label"] for row, each in zip(logprobs, rows, strict=True)) / len(rows)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_and_its_base_model_are_scored_by_the_installed_harness(
    rollouts: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "small"
    write_quickstart_files(folder, size=TINY_SIZE)
    settings = {"mode": "sft", "training__sft__num_steps": 10, "training__sft__checkpoint_every": 10}
    code, output = rollouts.run("run", str(write_config(folder, run__register_as="mine", **settings)))
    assert code == 0, output
    [run] = (rollouts.store / "runs").iterdir()
    rows = write_tasks(tmp_path / "own")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = ("evaluate", run.name, "--lm-eval", "sums,sums_text", "--include-path", str(tmp_path / "own"))
    process = rollouts.start(*command)
    code, output = process.wait(3000), rollouts.said()
    assert code == 0, output
    assert "installs lm-eval 0.4.13" in output and "the registry has the results for mine-1" in output

    [entry] = json.loads((run / "benchmarks.json").read_text())
    found = {(each["task"], each["metric"]): each for each in entry["metrics"]}
    own, base = (choice_logprobs(each, rows) for each in (run / "checkpoint", folder / "base_model"))
    for task in ("sums_choice", "sums"):  # the group averages the tasks that have its metric
        assert found[task, "acc"]["mean"] == pytest.approx(accuracy(own, rows))
        assert found[task, "acc"]["against_mean"] == pytest.approx(accuracy(base, rows))
        assert found[task, "acc"]["difference"] == pytest.approx(accuracy(own, rows) - accuracy(base, rows))
    assert found["sums_text", "byte_perplexity"]["mean"] < found["sums_text", "byte_perplexity"]["against_mean"]
    seen = []
    for path in rollouts.store.glob("benchmarks/*/output/model/samples_sums_choice_*.jsonl"):
        answers = sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: row["doc_id"])
        seen.append([[float(logprob) for logprob, _ in row["filtered_resps"]] for row in answers])
    seen.sort(key=lambda each: abs(each[0][0] - own[0][0]))  # folders are named by digests
    for each, expected in zip(seen, (own, base), strict=True):
        assert each == [pytest.approx(row, abs=1e-3) for row in expected]
    with Ledger(rollouts.store / LEDGER_FILE) as ledger:
        assert models(ledger)[0].evaluation["benchmarks"] == [entry]

    code, output = rollouts.run(*command, "--json")
    assert code == 0, output
    assert output.count("was scored before") == 2
    assert output.count('"kind": "benchmark"') == len(entry["metrics"])
    code, output = rollouts.run("report", run.name)
    assert code == 0, output
    assert "<h3>lm-eval 0.4.13: sums,sums_text</h3>" in (run / "report.html").read_text()
    code, output = rollouts.run("evaluate", run.name, "--lm-eval", "sums_choise")
    assert (code, "lm-eval does not know the task sums_choise: give a name" in output) == (2, True), output


STAND_IN = """
import json, os, sys, urllib.request
from pathlib import Path

given = dict(zip(sys.argv[2::1], sys.argv[3::1]))
task, model = given["--tasks"], json.loads(given["--model_args"])
print("asks for", task, flush=True)
if task == "crash":
    sys.exit("a cause\\nof the crash")
body = {"model": model["model"], "prompt": "Hello", "max_tokens": 2}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(model["base_url"], json.dumps(body).encode(), headers)
assert json.loads(urllib.request.urlopen(request).read())["choices"][0]["text"]
folder = Path(given["--output_path"]) / "model"
folder.mkdir(parents=True)
results = {"results": {task: {"acc,none": 0.5, "acc_stderr,none": 0.1}}, "n-samples": {task: {}}}
(folder / "results_now.json").write_text(json.dumps(results))
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """The interpreter of an environment with a harness that asks the server once."""
    package = tmp_path / "packages/lm_eval"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(STAND_IN)
    about = tmp_path / "packages/lm_eval-0.0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lm_eval\nVersion: 0.0.1\n")
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/packages" exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    return str(interpreter)


@pytest.mark.slow
def test_a_folder_is_scored_once_and_a_failed_harness_is_quoted(
    rollouts_without_server: Rollouts, stand_in: str, tmp_path: Path
) -> None:
    rollouts, model = rollouts_without_server, write_scripted_model(tmp_path / "story", STORY)
    command = ("evaluate", str(model), "--harness-python", stand_in, "--lm-eval")
    code, output = rollouts.run(*command, "sums")
    assert code == 0, output
    assert "is not the model of a run, so it is scored alone" in output
    assert "50.0 % " not in output and "0.5 (0.304 to 0.696)" in output
    code, output = rollouts.run(*command, "sums", "--against", str(model))
    assert (code, output.count("was scored before")) == (0, 2), output
    code, output = rollouts.run(*command, "sums", "--fresh")
    assert (code, "was scored before" in output) == (0, False), output
    code, output = rollouts.run(*command, "crash")
    assert code == 1, output
    assert "lm-eval failed with exit code 1. The last lines of" in output
    assert output.rstrip().endswith("asks for crash\na cause\nof the crash")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["small.toml", "--limit", "3"], "--limit is an option of benchmarks: add --lm-eval TASK"),
        (["{file}", "--lm-eval", "sums"], "and {file} is a file: give a run"),
        (["story", "base", "--lm-eval", "sums"], "MODEL cannot be used with --lm-eval"),
        (["story", "--lm-eval", "sums", "--data", "rows.jsonl"], "--data cannot be used with --lm-eval"),
        (["nowhere", "--lm-eval", "sums"], "nowhere is not a folder, nor a finished run"),
        (["{bare}", "--lm-eval", "sums"], "has no tokenizer.json, which lm-eval needs"),
        (["{bare}", "--lm-eval", "sums", "--engine", "sglnag"], "--engine sglnag: expected embedded"),
        (["{bare}", "--lm-eval", "sums", "--gpus", "0"], "--gpus is not an option of the embedded engine"),
        (["{bare}", "--lm-eval", "sums", "--include-path", "gone"], "--include-path gone is not a folder"),
        (["{bare}", "--lm-eval", "sums", "--lm-eval-args", "'"], "is not a valid shell command line"),
        (["{bare}", "--lm-eval", "sums", "--lm-eval-args", "--tasks=a"], "has --tasks=a, which this command sets"),
        (["{whole}", "--lm-eval", "sums", "--harness-wheels", "{bare}"], "has no *.whl: give the folder of the wheels"),
        (["{whole}", "--lm-eval", "sums", "--harness-python", "{file}"], "does not have lm_eval"),
        (["{whole}", "--lm-eval", "sums", "--against", "base"], "--against base needs a model of a run"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    for name, files in (("bare", ["config.json"]), ("whole", ["config.json", "tokenizer.json"])):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("{}")
    (tmp_path / "file.toml").touch()
    places = {name: str(tmp_path / name) for name in ("bare", "whole")} | {"file": str(tmp_path / "file.toml")}
    given = [each.format(**places) for each in arguments]
    outcome = CliRunner().invoke(app, ["evaluate", *given, "--store", str(tmp_path / "store")])
    assert outcome.exit_code == 2, outcome.output
    assert said.format(**places) in outcome.stderr
    assert len([line for line in outcome.stderr.splitlines() if line.startswith("rollouts: ")]) == 1
