"""Pins where a turn begins and ends in the forms that chat templates of the hub have.

Without it a model would learn to go on behind its answers, to answer within its thoughts, or to write what its prompt
writes already.
"""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rollouts_core.config import ModelConfig
from rollouts_core.data.chat import (
    Conversation,
    TokenizedConversation,
    compute_loss_mask,
    split_texts,
    stop_token_ids,
    tokenize_conversation,
    tokenize_conversations,
    tokenize_prompt,
)
from rollouts_core.data.replies import tokenize_reply
from rollouts_core.errors import DataError
from rollouts_core.model.loading import load_tokenizer
from rollouts_core.types import Message

SPECIAL = ["<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|endoftext|>", "<|return|>", "<|call|>"]
TWO_TURNS: list[Message] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL_USE: list[Message] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "f", "content": "7"},
    {"role": "assistant", "content": "d"},
]
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
# As Phi-3's: an end of text behind the last turn.
ENDS_THE_TEXT = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
# As GLM-4's: nothing behind a turn but the next one.
ENDS_BY_HEADERS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}" + CALLS + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As gpt-oss's: a last turn, a call and an earlier turn end by different tokens.
ENDS_IN_THREE_WAYS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}" + CALLS + "{% if m.tool_calls %}<|call|>"
    "{% elif m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}" + ASKS
)
# As Nemotron's: a prompt opens thoughts by a tag and a line break, and a turn without thoughts has the tags alone.
OPENS_THOUGHTS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n"
    "{% else %}<think></think>{% endif %}{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
# As Qwen's: a last turn has thoughts, and thinking can be turned off.
WRITES_THOUGHTS_LAST = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    + ASKS[:-11]
    + "<think>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}\n</think>\n\n{% endif %}{% endif %}"
)
# As LLaVA's and Idefics': content is a list of parts.
READS_PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% for part in m.content %}{{ part['text'] }}{% endfor %}<|end|>\n"
    "{% endfor %}" + ASKS
)
READS_PARTS_OF_USERS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{{ m.content + '' }}{% else %}"
    "{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endif %}<|end|>\n{% endfor %}" + ASKS
)
# As DeepSeek-R1's distilled models: calls are written where there is no content, and any content is a turn.
WRITES_CONTENT_APART = (
    "{% for m in messages %}{% if m.content is not none %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}"
    "{% if m.tool_calls %}<|assistant|>" + CALLS + "<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte but for line breaks, several of which are one; a test gives it a chat template."""
    return make_tokenizer()


def make_tokenizer(*, trims: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of these tests; `trims` leaves spaces out of its offsets, as those of Llama 3 do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate([*alphabet, "ĊĊ", "ĊĊĊ"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ"), ("ĊĊ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if trims:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def trained_texts(tokenizer: PreTrainedTokenizerBase, messages: list[Message], **given: object) -> list[str]:
    """The trained text of each turn."""
    [outcome] = tokenize_conversations(tokenizer, [Conversation(messages, **given)], train_on="all_assistant")  # type: ignore[arg-type]
    assert isinstance(outcome, TokenizedConversation), outcome
    return [tokenizer.decode(outcome.tokens[turn.start : turn.end]) for turn in outcome.turns]


@pytest.mark.parametrize(
    ("template", "turns", "num_texts"),
    [
        (ENDS_THE_TEXT, ["b<|end|>\n", "d<|end|>\n"], 1),
        (ENDS_BY_HEADERS, ["\nb<|user|>", "\nd<|user|>"], 1),
        (ENDS_IN_THREE_WAYS, ["b<|return|>", "d<|return|>"], 2),
        (OPENS_THOUGHTS, ["</think>b<|end|>\n", "</think>d<|end|>\n"], 2),
        (READS_PARTS, ["b<|end|>\n", "d<|end|>\n"], 1),
        (READS_PARTS_OF_USERS, ["b<|end|>\n", "d<|end|>\n"], 1),
        (WRITES_CONTENT_APART, ["b<|end|>", "d<|end|>"], 1),
    ],
)
def test_every_turn_is_trained_with_its_words_and_one_end_behind_its_prompt(
    tokenizer: PreTrainedTokenizerBase, template: str, turns: list[str], num_texts: int
) -> None:
    tokenizer.chat_template = template
    assert trained_texts(tokenizer, TWO_TURNS) == turns
    texts = split_texts(tokenize_conversation(tokenizer, TWO_TURNS))
    assert len(texts) == num_texts
    numbers = iter((1, 3))
    for text in texts:
        for turn in text.turns:
            prompt = tokenize_prompt(tokenizer, TWO_TURNS[: next(numbers)])
            assert text.tokens[: len(prompt)] == prompt
            assert turn.start == len(prompt)


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (ENDS_BY_HEADERS, ['\n[f{"x": 1}]<|tool|>', "\nd<|user|>"]),
        (ENDS_IN_THREE_WAYS, ['[f{"x": 1}]<|call|>', "d<|return|>"]),
        (WRITES_CONTENT_APART, ['[f{"x": 1}]<|end|>', "d<|end|>"]),
    ],
)
def test_a_call_ends_as_the_template_ends_it_and_has_no_empty_turn(
    tokenizer: PreTrainedTokenizerBase, template: str, turns: list[str]
) -> None:
    tokenizer.chat_template = template
    assert trained_texts(tokenizer, TOOL_USE) == turns
    assert trained_texts(tokenizer, TOOL_USE[:2]) == turns[:1]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (ENDS_THE_TEXT, ["<|endoftext|>", "<|end|>"]),
        (ENDS_BY_HEADERS, ["<|endoftext|>", "<|user|>", "<|tool|>"]),
        (ENDS_IN_THREE_WAYS, ["<|endoftext|>", "<|return|>", "<|call|>"]),
    ],
)
def test_completions_end_where_turns_are_trained_to_end(
    tokenizer: PreTrainedTokenizerBase, template: str, ends: list[str]
) -> None:
    tokenizer.chat_template = template
    assert list(stop_token_ids(tokenizer)) == tokenizer.convert_tokens_to_ids(ends)


@pytest.mark.parametrize(("end", "rest"), [("<|tool|>", ""), ("<|user|>", "<|tool|>"), ("<|endoftext|>", "<|tool|>")])
def test_a_header_that_was_sampled_as_the_end_is_not_written_again(
    tokenizer: PreTrainedTokenizerBase, end: str, rest: str
) -> None:
    tokenizer.chat_template = ENDS_BY_HEADERS
    sampled = tokenizer(f"b{end}")["input_ids"]
    reply = tokenize_reply(tokenizer, [Message(role="tool", content="7")], sampled)
    assert tokenizer.decode(reply) == f"{rest}\n7<|assistant|>"


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize(
    ("said", "trained"),
    [("b", "b"), ("\nb", "b"), ("\n\nb", "b"), (" \nb", " \nb"), ("b\n\n", "b\n\n"), ("\U0001f600", "\U0001f600")],
)
def test_a_token_that_straddles_the_border_of_a_turn_is_context(said: str, trained: str, trims: bool) -> None:
    tokenizer = make_tokenizer(trims=trims)
    tokenizer.chat_template = ENDS_THE_TEXT
    messages: list[Message] = [TWO_TURNS[0], {"role": "assistant", "content": said}, *TWO_TURNS[2:]]
    assert trained_texts(tokenizer, messages) == [f"{trained}<|end|>\n", "d<|end|>\n"]
    tokens, _ = tokenize_conversation(tokenizer, messages)
    assert (
        tokens
        == tokenizer(
            f"<|user|>\na<|end|>\n<|assistant|>\n{said}<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\nd<|end|>\n<|endoftext|>"
        )["input_ids"]
    )


@pytest.mark.parametrize("reasoning", ["", "x"])
def test_thoughts_are_behind_the_prompt_that_opens_them(tokenizer: PreTrainedTokenizerBase, reasoning: str) -> None:
    tokenizer.chat_template = WRITES_THOUGHTS_LAST
    messages: list[Message] = [
        {**each, "reasoning_content": reasoning} if each["role"] == "assistant" else each for each in TWO_TURNS
    ]
    opening = "x\n</think>" if reasoning else "</think>"  # without thoughts two line breaks are one token
    assert trained_texts(tokenizer, messages) == [f"{opening}\n\nb<|end|>\n", f"{opening}\n\nd<|end|>\n"]


@pytest.mark.parametrize("space", ["", "{{ '\\n' }}"])
def test_a_turn_that_its_prompt_contradicts_is_refused_with_what_to_set(
    tokenizer: PreTrainedTokenizerBase, space: str
) -> None:
    """Prompts without thoughts may have other space between the tags than turns have."""
    template = WRITES_THOUGHTS_LAST.replace("is false %}\n", "is false %}" + space)
    tokenizer.chat_template = "{% set enable_thinking = false %}" + template
    assert trained_texts(tokenizer, TWO_TURNS) == ["b<|end|>\n", "d<|end|>\n"]
    thinks: list[Message] = [TWO_TURNS[0], {"role": "assistant", "content": "b", "reasoning_content": "x"}]
    with pytest.raises(DataError, match=r"set model\.chat_template_kwargs so that both agree"):
        tokenize_conversation(tokenizer, thinks)


@pytest.mark.parametrize("template", [ENDS_THE_TEXT, ENDS_BY_HEADERS, ENDS_IN_THREE_WAYS, READS_PARTS, OPENS_THOUGHTS])
def test_a_turn_that_the_prompt_has_begun_goes_on(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    tokenizer.chat_template = template
    begun: list[Message] = [TWO_TURNS[0], {"role": "assistant", "content": "It is"}]
    whole: list[Message] = [TWO_TURNS[0], {"role": "assistant", "content": "It is 7."}]
    [turn] = trained_texts(tokenizer, whole, num_given=1, prefill="It is")
    assert turn.startswith(" 7.")
    for letter in "aend":  # also in the headers and ends of turns
        answer: list[Message] = [TWO_TURNS[0], {"role": "assistant", "content": f"{letter}7"}]
        [turn] = trained_texts(tokenizer, answer, num_given=1, prefill=letter)
        assert turn.startswith("7")
        prompt = tokenize_prompt(tokenizer, [TWO_TURNS[0], {"role": "assistant", "content": letter}])
        assert tokenize_conversation(tokenizer, answer).tokens[: len(prompt)] == prompt
        assert tokenizer.decode(prompt).endswith(letter)
    prompt = tokenize_prompt(tokenizer, begun)
    assert tokenizer.decode(prompt).endswith("It is")
    assert tokenize_conversation(tokenizer, whole).tokens[: len(prompt)] == prompt


@pytest.mark.parametrize(("value", "turn"), [(False, "b<|end|>\n"), (True, "</think>b<|end|>\n")])
def test_values_for_the_template_reach_prompts_training_and_checkpoints(
    base_model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
    value: bool,
    turn: str,
) -> None:
    folder = tmp_path_factory.mktemp("model")
    tokenizer.chat_template = OPENS_THOUGHTS
    tokenizer.save_pretrained(folder)
    model = ModelConfig(
        path=str(folder), chat_template_kwargs={"enable_thinking": value, "note": 'say "é"', "list": [1, None]}
    )
    loaded = load_tokenizer(model)
    assert trained_texts(loaded, TWO_TURNS[:2]) == [turn]
    loaded.save_pretrained(folder / "checkpoint")
    again = load_tokenizer(model.at(folder / "checkpoint"))
    assert again.chat_template == loaded.chat_template
    plain = load_tokenizer(ModelConfig(path=str(folder / "checkpoint")))
    assert tokenize_prompt(plain, TWO_TURNS[:1]) == tokenize_prompt(loaded, TWO_TURNS[:1])
    other = load_tokenizer(
        ModelConfig(path=str(folder / "checkpoint"), chat_template_kwargs={"enable_thinking": not value})
    )
    assert tokenize_prompt(other, TWO_TURNS[:1]) != tokenize_prompt(loaded, TWO_TURNS[:1])


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "no name"])
def test_a_value_that_no_template_takes_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be set for a chat template"):
        ModelConfig(path="m", chat_template_kwargs={name: 1})


def test_the_mask_of_several_texts_holds_each_turn_once(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = ENDS_IN_THREE_WAYS
    tokens, turns = tokenize_conversation(tokenizer, TWO_TURNS)
    mask = compute_loss_mask(turns, len(tokens), "all_assistant")
    assert (
        tokenizer.decode([t for t, is_trained in zip(tokens, mask, strict=True) if is_trained])
        == "b<|return|>d<|return|>"
    )
