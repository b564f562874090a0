"""Generate completions for a list of prompts in this process, without HTTP or threads, for evaluation.

Not here: the batching itself (running.py), a server (scheduler.py, server.py).
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence

from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.running import NO_NUMBERS, Completion, GenerationRequest, Partial, RunningBatch, complete
from rollouts_core.embedded.sampling import MAX_SEED, SamplingParams
from rollouts_core.errors import EngineError, NoNumbersError


def generate_tokens(
    decoder: Decoder, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Completion]:
    """Generate one completion per prompt, `decoder.num_slots` at a time. Returns the completions in the order of the
    prompts.

    Args:
        decoder: decoder that no other batch uses.
        prompts: token ids, each shorter than the decoder's context.
        params: sampling parameters of each prompt. Entries without a seed get a random seed.

    Raises:
        ValueError: the decoder does not support a prompt or its parameters.
        NoNumbersError: the log-probs of a token are NaN or infinite.
    """
    assert len(prompts) == len(params), f"{len(prompts)} prompts, {len(params)} sampling parameters"
    waiting: deque[Partial] = deque()
    for index, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
        request = GenerationRequest(request_id=str(index), input_ids=tuple(prompt), params=prompt_params)
        check_request(request, decoder)
        waiting.append(Partial(request=request, seed=choose_seed(prompt_params)))
    batch = RunningBatch(decoder)
    completions: dict[str, Completion] = {}
    while waiting or batch.num_rows:
        admitted = [waiting.popleft() for _ in range(min(batch.num_free, len(waiting)))]
        for partial, reason in batch.step(admitted):
            if reason.kind == "error":
                raise (NoNumbersError if reason is NO_NUMBERS else EngineError)(reason.message)
            request_id = partial.request.request_id
            completions[request_id] = complete(partial, reason, weight_version="default")
    return [completions[str(index)] for index in range(len(prompts))]


def check_request(request: GenerationRequest, decoder: Decoder, *, has_text: bool = False) -> None:
    """Raise ValueError, with SGLang's message, if the decoder does not support a request."""
    num_input, limit = len(request.input_ids), decoder.context_length
    if num_input == 0:
        raise ValueError("input_ids cannot be empty.")
    vocab_size = decoder.architecture.vocab_size
    if not 0 <= min(request.input_ids) <= max(request.input_ids) < vocab_size:
        outside = next(token for token in request.input_ids if not 0 <= token < vocab_size)
        raise ValueError(f"The input_ids contain token id {outside}, valid range is [0, {vocab_size}).")
    if num_input >= limit:
        raise ValueError(f"The input ({num_input} tokens) is longer than the model's context length ({limit} tokens).")
    if (request.params.stop or request.params.stop_regex) and not has_text:
        raise ValueError("stop strings need a tokenizer.json in the model directory: use stop_token_ids instead.")
    if (count := len(request.params.logit_bias)) > vocab_size:
        raise ValueError(f"logit_bias may have at most {vocab_size} keys, got {count}.")
    if foreign := [token for token, _ in request.params.logit_bias if not 0 <= token < vocab_size]:
        raise ValueError(f"logit_bias must has keys in [0, {vocab_size - 1}], got {foreign[0]}.")  # SGLang's message
    if not 0 <= request.logprobs.num_top <= vocab_size:
        raise ValueError(f"top_logprobs_num may be at most {vocab_size}, got {request.logprobs.num_top}.")
    if foreign := [token for token in request.logprobs.token_ids if not 0 <= token < vocab_size]:
        raise ValueError(f"token_ids_logprob must have ids in [0, {vocab_size}), got {foreign[0]}.")
    num_new = request.params.max_new_tokens
    if num_new is not None and num_input + num_new > limit:
        raise ValueError(
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested "
            f"a total of {num_input + num_new} tokens: {num_input} tokens from the input messages and {num_new} "
            "tokens for the completion. Please reduce the number of tokens in the input messages or the "
            "completion to fit within the limit."
        )


def choose_seed(params: SamplingParams) -> int:
    """The seed in `params`, or a random seed if `params` has none."""
    return secrets.randbelow(MAX_SEED) if params.sampling_seed is None else params.sampling_seed
