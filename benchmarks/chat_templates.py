"""Which conversations train with the chat templates of models on the Hugging Face hub.

    python benchmarks/chat_templates.py [--templates FOLDER] [--show] [--out chat-templates.json]

The templates are all hub templates that TRL ships, in the wheel that benchmarks/requirements.txt pins. TRL can train
with a template if it has a version of the template with generation markers, or if the template has markers itself. A
conversation then counts if that version marks the assistant's words. With the other templates, a conversation counts if
the template shows the assistant's words. Each conversation is trained with the hub's own template, without its markers.

A conversation trains if every trained turn holds the assistant's words and ends with a special token, and no token of
a user, of a tool or of the generation prompt is trained on. `--show` prints the trained text, or why it is refused.

The tokenizer is made from the templates: the model hub is not needed. Its merges join line breaks, as those of Qwen and
Llama do.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from side_by_side import render_table, write_results
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from rollouts_core.data.chat import TokenizedConversation, split_texts, tokenize_conversation, tokenize_prompt
from rollouts_core.errors import DataError
from rollouts_core.types import Message

SPECIAL = re.compile(
    r"<\|[\w:]+\|?>|<[\w:]+\|>|<｜[^｜]+｜>|</?s>|<(?:start|end)_of_\w+>|\[gMASK\]|<sop>|\[/?INST\]|</?think>|</?tool_call>"
)
MARKER = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
BEGIN, END = "<s>", "</s>"
END_OF = {
    "gptoss": "<|return|>",
    "qwen": "<|im_end|>",
    "phi3": "<|endoftext|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "glm4moe": "<|endoftext|>",
}
"""The end of sequence of models whose templates write it, or that differ from their end of turn; else `</s>`."""
ASKS = ["what is two and three", "and now four and five"]
SAYS = ["It makes five.", "It makes nine."]
THINKS = ["first plus second", "third plus fourth"]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "A number."}},
            "required": ["a"],
        },
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 77}}}


def _turns(num: int, **fields: list[str]) -> list[Message]:
    messages: list[Any] = []
    for i in range(num):
        more = {key: values[i] for key, values in fields.items()}
        messages += [{"role": "user", "content": ASKS[i]}, {"role": "assistant", "content": SAYS[i], **more}]
    return messages


CONVERSATIONS: dict[str, list[Any]] = {
    "one turn": _turns(1),
    "two turns": _turns(2),
    "thoughts": _turns(2, reasoning_content=THINKS),
    "tool": [
        {"role": "user", "content": ASKS[0]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "sum 5"},
        {"role": "assistant", "content": SAYS[0]},
    ],
}
MAIN = ("one turn", "two turns")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", type=Path, help="folder of the templates (default: that of the installed TRL)")
    parser.add_argument("--show", action="store_true", help="print what is trained on, and why others are refused")
    parser.add_argument("--out", type=Path, help="file for the figures")
    parser.add_argument("--threads", help=argparse.SUPPRESS)  # run_all.py gives it to every benchmark
    options = parser.parse_args()
    folder = options.templates or find_templates()
    outcomes = {name: try_template(folder, name, show=options.show) for name in list_templates(folder)}
    marked = {name for name in outcomes if has_markers(find_training_version(folder, name))}
    accepted = {kind: [each for each in outcomes.values() if each[kind] is not None] for kind in CONVERSATIONS}
    trained = {kind: sum(each[kind] == "trains" for each in accepted[kind]) for kind in CONVERSATIONS}
    write_results(options.out, {"script": "chat_templates", "outcomes": outcomes})
    rows = [
        [name, "yes" if name in marked else "no", *(each[kind] or "-" for kind in CONVERSATIONS)]
        for name, each in outcomes.items()
    ]
    num_of = {kind: len(each) for kind, each in accepted.items()}
    rows.append(
        [
            "trains",
            f"{len(marked)} of {len(outcomes)}",
            *(f"{trained[kind]} of {num_of[kind]}" for kind in CONVERSATIONS),
        ]
    )
    print(render_table(["template", "TRL trains", *CONVERSATIONS], rows))
    num_trained, num_accepted = (sum(each[kind] for kind in MAIN) for each in (trained, num_of))
    of_trl = [outcomes[name][kind] for name in marked for kind in MAIN if outcomes[name][kind] is not None]
    print(f"\nof one and two turns: {num_trained} of {num_accepted} train,")
    print(f"with the templates that TRL can train with: {of_trl.count('trains')} of {len(of_trl)}")


def find_templates() -> Path:
    """The folder of the templates in the installed TRL, which is not imported."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        raise SystemExit("TRL is not installed: run `make bench` once, or name a folder by --templates")
    return Path(found.origin).parent / "chat_templates"


def list_templates(folder: Path) -> list[str]:
    """The hub's templates in the folder, without TRL's own versions."""
    return [path.stem for path in sorted(folder.glob("*.jinja")) if not path.stem.endswith("_training")]


def has_markers(template: Path) -> bool:
    """Whether a template marks the tokens to train on."""
    return MARKER.search(template.read_text(encoding="utf-8")) is not None


def find_training_version(folder: Path, name: str) -> Path:
    """TRL's version of a hub template; the template itself if TRL has no version."""
    version = folder / f"{name}_training.jinja"
    return version if version.exists() else folder / f"{name}.jinja"


def try_template(folder: Path, name: str, *, show: bool) -> dict[str, str | None]:
    """For each conversation whether it trains; None if the conversation does not count."""
    text = (folder / f"{name}.jinja").read_text(encoding="utf-8")
    training = find_training_version(folder, name).read_text(encoding="utf-8")
    tokenizer = make_tokenizer(name, text + training)
    tokenizer.chat_template = MARKER.sub("", text)
    outcomes: dict[str, str | None] = {}
    for kind, messages in CONVERSATIONS.items():
        tools = [TOOL] if kind == "tool" else None
        if not is_accepted(tokenizer, training, messages, tools):
            outcomes[kind] = None
            continue
        outcomes[kind], details = try_conversation(tokenizer, messages, tools)
        if show:
            print(f"{name}, {kind}: {outcomes[kind]}\n    {details}")
    return outcomes


def make_tokenizer(name: str, template: str) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer with the special tokens of a template."""
    end = next((token for prefix, token in END_OF.items() if name.startswith(prefix)), END)
    special = dict.fromkeys([BEGIN, end, *SPECIAL.findall(template)])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["\n\n", "\n\n\n", ".\n\n", *ASKS, *SAYS] * 9, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=end)


def is_accepted(tokenizer: PreTrainedTokenizerBase, training: str, messages: list[Any], tools: Any) -> bool:
    """Whether a template renders a conversation and marks the words of every turn.

    A template without markers must show the words. Templates of vision models get messages as lists of parts.
    """
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    turns = [each for each in messages if each["role"] == "assistant"]
    said = [*(each["content"] or "77" for each in turns), *(each.get("reasoning_content", "") for each in turns)]
    is_marked = MARKER.search(training) is not None
    for form in (messages, parts):
        try:
            [text], spans = render_jinja_template(
                conversations=[form],
                tools=tools,
                chat_template=training,
                return_assistant_tokens_mask=is_marked,
                **tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError, ValueError):
            continue
        shown = " ".join(text[start:end] for start, end in spans[0]) if is_marked else text
        if all(each in shown for each in said):
            return True
    return False


def try_conversation(tokenizer: PreTrainedTokenizerBase, messages: list[Any], tools: Any) -> tuple[str, str]:
    """Whether a conversation trains as a person would mark it, and the trained text or the reason."""
    try:
        tokenized = tokenize_conversation(tokenizer, messages, tools=tools)
    except DataError as error:
        return "refused", str(error)
    numbers = [i for i, each in enumerate(messages) if each["role"] == "assistant"]
    shown: list[str] = []
    faults: list[str] = []
    turns = [(text, turn) for text in split_texts(tokenized) for turn in text.turns]
    for number, (text, turn) in zip(numbers, turns, strict=True):
        said = tokenizer.decode(text.tokens[turn.start : turn.end])
        shown.append(said)
        faults += find_faults(tokenizer, messages, number, tools, text, said)
        prompt = tokenizer.decode(tokenize_prompt(tokenizer, messages[:number], tools))
        if not tokenizer.decode(text.tokens).startswith(prompt):
            faults.append(f"turn {number} is not behind its prompt")
        if len(tokenizer.decode(text.tokens[: turn.start])) < len(prompt):
            faults.append(f"turn {number} holds a part of the generation prompt")
    return (f"wrong: {faults[0]}" if faults else "trains"), " | ".join(map(repr, shown))


def find_faults(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Any],
    number: int,
    tools: Any,
    text: TokenizedConversation,
    said: str,
) -> list[str]:
    """The faults in the trained text of a turn: words that are missing, words of others, a missing end."""
    message = messages[number]
    words = [message["content"], message.get("reasoning_content", ""), "77" if message.get("tool_calls") else ""]
    faults = [f"{word!r} is not trained" for word in filter(None, words) if word not in said]
    others = [each for each in [*ASKS, "sum 5"] if each in said]
    faults += [f"{each!r} is trained" for each in others]
    last = tokenizer(said.rstrip(), add_special_tokens=False)["input_ids"][-1:]
    if not last or last[0] not in tokenizer.added_tokens_decoder:
        faults.append("no end is trained")
    return faults


if __name__ == "__main__":
    main()
