"""How large a report of many samples is, how long it takes to write and to open, and how smoothly its table scrolls.

    python benchmarks/report_view.py --samples 100000 --max-mb 60

Needs Chromium and playwright. The samples are made up: 40 tokens of a vocabulary of 29, as the quickstart has them, or
with `--tokens 400 --vocabulary 30000` more like those of a language model.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from rollouts_core.config import ReportConfig
from rollouts_core.report import ReportInput, TrainedStage, render_report
from rollouts_core.run_directory import RunDirectory

GROUP_SIZE = 8
GROUPS_PER_STEP = 32
PROMPT_TOKENS = 12
FRAMES = 240
WHEEL_PX, PAGE_PX = 120, 900
POLL_S = 0.02
LETTERS = "abcdefghijklmnopqrstuvwxyz"

READ_FRAMES = """async ([frames, pixels]) => {
  const box = document.querySelector("#view-samples .viewport"), gaps = [];
  let most = 0, last = performance.now();
  for (let i = 0; i < frames; i++) {
    box.scrollTop = (i * pixels) % (box.scrollHeight - box.clientHeight);
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    gaps.push(now - last);
    last = now;
    most = Math.max(most, box.querySelectorAll("tr").length);
  }
  return { gaps, most };
}"""


def write_step(directory: RunDirectory, step: int, draw: random.Random, *, tokens: int, vocabulary: int) -> None:
    """A file of samples of a step, as the RL job writes them."""
    directory.samples.mkdir(parents=True, exist_ok=True)
    with (directory.samples / f"step_{step:06d}.jsonl").open("w") as file:
        for group in range(GROUPS_PER_STEP):
            number = step * GROUPS_PER_STEP + group
            prompt = [draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]
            for index in range(GROUP_SIZE):
                file.write(json.dumps(make_sample(number, index, prompt, draw, tokens, vocabulary)) + "\n")


def make_sample(
    group: int, index: int, prompt: list[int], draw: random.Random, tokens: int, vocabulary: int
) -> dict[str, Any]:  # Any: JSON
    """A completion in the form of samples/."""
    said = [draw.randrange(vocabulary) for _ in range(tokens)]
    logprobs = [round(-draw.expovariate(8), 6) for _ in said]
    return {
        "prompt": [{"role": "user", "content": f"question {group % 2000}: {'word ' * 8}"}],
        "response": "".join(word(token) for token in said),
        "tokens": prompt + said,
        "loss_mask": [0.0] * len(prompt) + [1.0] * len(said),
        "rollout_log_probs": [0.0] * len(prompt) + logprobs,
        "reward": float(draw.random() < 0.5),
        "group_index": group,
        "index": index,
        "turn": None,
        "status": "completed",
        "finish_reason": "stop",
        "policy_versions": [[group // GROUPS_PER_STEP, len(prompt), len(prompt) + len(said)]],
        "metadata": {"prompt_id": str(group % 2000), "answer": "1"},
        "temperature": 1.0,
    }


def word(token: int) -> str:
    """The text of a token: a letter, or a word of letters."""
    return LETTERS[token % 26] if token < 26 else f" {LETTERS[token % 26]}{token}"


def make_report(folder: Path, args: argparse.Namespace) -> ReportInput:
    """A finished run with so many samples."""
    draw = random.Random(0)
    run = RunDirectory(folder / "rl")
    for step in range(1, args.samples // (GROUP_SIZE * GROUPS_PER_STEP) + 1):
        write_step(run, step, draw, tokens=args.tokens, vocabulary=args.vocabulary)
    vocabulary = {word(token).replace(" ", "\u2581"): token for token in range(args.vocabulary)}
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary}}))
    evaluation = RunDirectory(folder / "evaluate")
    evaluation.root.mkdir()
    scored = [
        {"name": name, "step": 0, "scores": scores} for name, scores in (("base", [0.0, 1.0]), ("rl", [1.0, 1.0]))
    ]
    evaluation.write_result({"metric": "accuracy", "checkpoints": scored, "best": "rl"})
    return ReportInput(
        run_name="many samples",
        mode="rl",
        stages=(),
        evaluation_dir=evaluation.root,
        trainings=(TrainedStage(name="rl", run_dir=run.root, selection_dir=None, selected=""),),
        checkpoint_path=str(checkpoint),
        settings_toml="",
        reproduce_command="",
        use_command="",
        verdict="",
        is_improvement=None,
        contents=ReportConfig(max_mb=args.max_mb),
    )


def measure(page: Page, url: str) -> Iterator[tuple[str, str]]:
    """Times of a browser with the report."""
    began = time.perf_counter()
    page.goto(f"{url}#samples")
    status = page.locator("#view-samples [role=status]")
    status.filter(has_text="samples,").wait_for(timeout=120_000)
    yield "open the table", f"{time.perf_counter() - began:.2f} s ({status.inner_text()})"
    for what, pixels in (("by the wheel", WHEEL_PX), ("a page per frame", PAGE_PX)):
        read = page.evaluate(READ_FRAMES, [FRAMES, pixels])
        gaps = sorted(read["gaps"])
        late = gaps[int(0.95 * len(gaps))]
        yield f"frames, {what}", f"median {statistics.median(gaps):.1f} ms, 95th percentile {late:.1f} ms"
        yield "rows in the document", f"at most {read['most']}"
    for label, text in (("Reward", "<1"), ("Search", "no text has this")):
        began, before = time.perf_counter(), status.inner_text()
        page.get_by_label(label, exact=True).fill(text)
        while status.inner_text() == before or "searching" in status.inner_text():
            time.sleep(POLL_S)
        yield f"filter by {label.lower()}", f"{time.perf_counter() - began:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--vocabulary", type=int, default=29)
    parser.add_argument("--max-mb", type=float, default=20.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        report = make_report(Path(name), args)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        path = Path(name) / "report.html"
        path.write_text(render_report(report), encoding="utf-8")
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        took_s, size = time.perf_counter() - began, path.stat().st_size / 1e6
        print(f"write: {took_s:.1f} s, {size:.2f} MB, {grown:.0f} MiB more memory")
        with sync_playwright() as driver:
            chromium = shutil.which("chromium")
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            for what, found in measure(browser.new_page(), path.as_uri()):
                print(f"{what}: {found}")
            browser.close()


if __name__ == "__main__":
    main()
