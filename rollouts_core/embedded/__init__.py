"""The embedded inference engine: an in-process and HTTP engine for machines without SGLang or vLLM.

Not here: training, and the engine's client, which is SGLang's client because the engine speaks SGLang's HTTP API.

    architecture.py  config.json -> the shape of the model
    weights.py       safetensors files -> tensors by name, and their digests
    decoder.py       owns weights and KV cache: token ids -> logits
    sampling.py      logits -> tokens and logprobs
    scoring.py       logits of a prompt -> logprobs of its tokens and of other tokens at the same positions
    constraints.py   which tokens may follow, by a JSON schema or an expression
    running.py       owns the rows that decode together: requests -> finished completions, step by step
    offline.py       requests -> finished completions, synchronously, for evaluation
    receiving.py     weights that a trainer sends, by a group of ../backends/process_group.py
    scheduler.py     owns the generation thread: queue, pause, weight updates, aborts
    protocol.py      SGLang's JSON -> requests, completions -> SGLang's JSON
    app.py           HTTP endpoints
    exchange.py      limits of bodies, answers, errors in each API's form
    served.py        submits, follows and aborts requests, for all endpoints
    openai_api.py    OpenAI's endpoints; openai_requests.py has the fields of requests
    anthropic_api.py Anthropic's endpoints
    chatting.py      a chat -> one call, and the pieces of its answers
    chat_model.py    chat template: messages -> token ids, a turn -> answer, thoughts, calls
    text_stream.py   tokens -> text, piece by piece
    gate.py          the check of API keys
    slow_clients.py  closes connections whose request does not become complete
    server.py        the server process
"""
