"""A finished run on disk, with rollouts of every shape: for tests of the report in a browser."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from rollouts_core.config import ReportConfig
from rollouts_core.data.shown_rows import ShownRow
from rollouts_core.report import ReportInput
from rollouts_core.run_directory import RunDirectory
from rollouts_core.types import Message, Sample, Status, VersionSpan

WORDS = ("<|user|>", "<|assistant|>", "<|end|>", "one", " two", " three", "\n", "<b>", "</script>")
ATTACK = '</script><script>window.attacked = 1</script><img src="x" onerror="window.attacked = 1">'
THOUGHT = f"<think>first {ATTACK}</think>the answer"
PREFIX = [0, 3, 4, 2, 1]


def write_tokenizer(directory: Path) -> None:
    """A tokenizer.json whose words are whole tokens, and one that holds two bytes of a character in two tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {word.replace(" ", "\u0120").replace("\n", "\u010a"): i for i, word in enumerate(WORDS)}
    halves = {"\u00c3": len(WORDS), "\u00a9": len(WORDS) + 1}  # bytes c3 a9: é
    added = [{"id": i, "content": word, "special": True} for i, word in enumerate(WORDS[:3])]
    tokenizer = {
        "model": {"type": "BPE", "vocab": vocabulary | halves},
        "added_tokens": added,
        "decoder": {"type": "ByteLevel"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def rollout(step: int, group: int, index: int, *, prompt: str, size: int = 4) -> Sample:
    """A completion that says words; its reward is 1 for even places."""
    said = [3 + (index + i) % 3 for i in range(3 + step % 3)]
    tokens = [*PREFIX, *said, 2]
    return Sample(
        prompt=(Message(role="user", content=prompt),),
        response="".join(WORDS[token] for token in said),
        tokens=tokens,
        loss_mask=[0.0] * len(PREFIX) + [1.0] * (len(said) + 1),
        rollout_log_probs=[0.0] * len(PREFIX) + [-0.01 * (3**i) for i in range(len(said))] + [-0.5],
        reward=float(index % 2 == 0),
        group_index=group,
        index=index,
        status=Status.TRUNCATED if index == size - 1 else Status.COMPLETED,
        policy_versions=(VersionSpan(step - 1, len(PREFIX), len(tokens)),),
        metadata={"prompt_id": prompt, "answer": "one", "reward_terms": {"format": 0.5, "exact": float(index % 2)}},
    )


def conversation(group: int, index: int) -> Sample:
    """A completion of several turns: a thought, a call of a tool, its result; also markup."""
    sample = rollout(1, group, index, prompt=f"tool question {ATTACK}")
    turns: list[Message] = [
        *sample.messages,
        Message(
            role="assistant",
            content=THOUGHT,
            tool_calls=[{"function": {"name": f"search{ATTACK}", "arguments": {"q": ATTACK}}}],
        ),
        Message(role="tool", content=f"found {ATTACK}", name="search"),
        Message(role="assistant", content="<think>never closed"),
    ]
    return replace(sample, metadata={**sample.metadata, "conversation": turns, "error": ATTACK}, response=ATTACK)


def half_character(group: int, index: int) -> Sample:
    sample = rollout(1, group, index, prompt="accents")
    tokens = [*PREFIX, len(WORDS), len(WORDS) + 1, 2]
    mask = [0.0] * len(PREFIX) + [1.0] * 3
    return replace(sample, tokens=tokens, loss_mask=mask, rollout_log_probs=None, policy_versions=(), response="é")


def write_rollouts(report: ReportInput, *, num_steps: int = 6, num_groups: int = 5) -> ReportInput:
    """The report with samples of RL, credit, held-out answers with tokens, rows of SFT, and a tokenizer."""
    sft, rl = (RunDirectory(training.run_dir) for training in report.trainings)
    for step in range(1, num_steps + 1):
        first = step * num_groups
        samples = [
            rollout(step, first + group, i, prompt=f"what is {group}?") for group in range(num_groups) for i in range(4)
        ]
        if step == 1:
            samples += [conversation(900, i) for i in range(4)] + [half_character(901, i) for i in range(4)]
        rl.write_samples(f"step_{step:06d}", samples, temperature=1.0)
        rl.credit.mkdir(exist_ok=True)
        lines = [
            {"advantage": 1.0 if sample.reward else -1.0, "logprobs": [-0.02] * len(sample.tokens)}
            for sample in samples
        ]
        (rl.credit / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for place, name in enumerate(("base", "sft", "rl")):
        answers = [rollout(1, i, (i + place) % 2, prompt=f"held {i}") for i in range(40)]
        answers[1] = replace(conversation(1, place % 2), policy_versions=())
        RunDirectory(report.evaluation_dir).write_samples(name, answers, temperature=1.0)
    rows = [
        ShownRow(
            source=f"rows{ATTACK}.jsonl", row=i, outcome="trained", tokens=(0, 3, 2, 1, 4, 5, 2), num_tokens=7,
            loss_mask=(0, 0, 0, 0, 1, 1, 1), num_trained=3,
        )
        for i in range(1, 30)
    ]  # fmt: skip
    rows.append(ShownRow(source="rows.jsonl", row=30, outcome="dropped", reason=f"90 tokens are too many {ATTACK}"))
    described = {"num_rows": 30, "num_dropped": 1, "max_length": 64, "length_counts": [0, 29] + [0] * 38}
    described |= {"trained_share": 3 / 7, "rows": [asdict(row) for row in rows]}
    sft.rows.write_text(json.dumps(described))
    checkpoint = report.evaluation_dir.parent / "checkpoint"
    write_tokenizer(checkpoint)
    return replace(report, checkpoint_path=str(checkpoint), contents=ReportConfig(), written_at=1.8e9)
