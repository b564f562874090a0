"""Models that say what a test wrote, behind a real server: for clients of other projects."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import torch
import uvicorn
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rollouts_core.embedded.app import build_app
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.gate import Gate
from rollouts_core.embedded.scheduler import Scheduler
from rollouts_core.system.listening import bind_port
from tests.rollouts_core.data.test_dialects import template_of

START, END = "<|im_start|>", "<|im_end|>"
HEADER = "assistant\n"
"""The last token of a prompt, behind which a script begins."""
CONFIDENCE = 8.0
"""Logit of the next token of the script; of all others 0."""
TIMEOUT_S = 60.0
NAME = "my-model"
STORY = ["Once", " upon", " a", " time", " there", " was", " a model."]
CALL = ["I add.", "\n<tool_call>\n", '{"name": "add", ', '"arguments": {"a": 1, "b": 2}}', "\n</tool_call>"]
THOUGHTS = ["<think>", "\nhm", ", hm", "\n</think>", "\n\nFour"]


def write_scripted_model(directory: Path, script: Sequence[str], *, template: str = "") -> Path:
    """Save a model that says the pieces of a script, each of them once, and then ends its turn.

    Its embedding has a direction for each token, no layer adds anything, and its head maps each to the next one.
    """
    characters = [chr(number) for number in range(32, 127)] + ["\n"]
    pieces = [HEADER, *script]
    assert len({*pieces}) == len(pieces), "a token has one successor"
    tokenizer = Tokenizer(models.WordLevel({"<|unk|>": 0, **{c: i + 1 for i, c in enumerate(characters)}}, "<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    tokenizer.add_tokens(
        [AddedToken(piece, normalized=False) for piece in pieces if tokenizer.token_to_id(piece) is None]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, unk_token="<|unk|>")
    wrapped.chat_template = template or template_of("hermes")
    wrapped.save_pretrained(directory)
    size = len(wrapped)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size + size % 2,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=8,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=wrapped.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    ids = [tokenizer.token_to_id(piece) for piece in (*pieces, END)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.0)
        width = config.hidden_size
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(size, width) * width**0.5)
        for token, following in itertools.pairwise(ids):
            model.lm_head.weight[following, token] = CONFIDENCE / width**0.5
    model.save_pretrained(directory)
    return directory


@contextmanager
def served(
    directory: Path, *, name: str = "", api_key: str = "", num_slots: int = 8
) -> Iterator[tuple[str, Scheduler]]:
    """The address of a real server of a model, and what generates behind it."""
    with Scheduler(Decoder(directory, num_slots=8), model_dir=directory) as scheduler:
        app = Gate(build_app(scheduler, name=name), api_key)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
        with bind_port("127.0.0.1", 0) as listener:
            thread = Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
            thread.start()
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}", scheduler
            finally:
                server.should_exit = True
                thread.join()


def until_idle(scheduler: Scheduler) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while scheduler.num_running or scheduler.num_waiting:
        assert time.monotonic() < deadline, "a request holds its slot"
        time.sleep(0.01)
