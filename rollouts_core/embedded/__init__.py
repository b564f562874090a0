"""The embedded inference engine: an in-process and HTTP engine for machines without SGLang or vLLM.

Not here: the client that drives it (it speaks SGLang's HTTP API, so SGLang's client does), and training.

    architecture.py  config.json -> which tensors the model has
    weights.py       safetensors files -> tensors by name, and their digests
    decoder.py       owns weights and KV cache: token ids -> logits
    sampling.py      logits -> tokens and logprobs
    scoring.py       logits of a prompt -> logprobs of its tokens and of others in their places
    constraints.py   which tokens may follow, by a JSON schema or an expression
    running.py       owns the rows that decode together: requests -> finished completions, step by step
    offline.py       the same, synchronously, for evaluation
    receiving.py     weights that a trainer sends, by a group of ../backends/process_group.py
    scheduler.py     owns the thread that steps: queue, pause, weight updates, aborts
    protocol.py      SGLang's JSON -> requests, completions -> SGLang's JSON
    app.py           HTTP endpoints
    exchange.py      bodies within limits, answers, errors in each API's form
    served.py        requests submitted, followed and given up, for all endpoints
    openai_api.py    OpenAI's endpoints; openai_requests.py has the fields of requests
    anthropic_api.py Anthropic's
    chatting.py      a chat -> one call, and the pieces of its answers
    chat_model.py    chat template: messages -> token ids, a turn -> answer, thoughts, calls
    text_stream.py   tokens -> text, piece by piece
    gate.py          whom they answer
    slow_clients.py  connections on which no request comes
    server.py        the server process
"""
