"""The embedded inference engine: an in-process and HTTP engine for machines without SGLang or vLLM.

Not here: training, and the engine's client, which is SGLang's client because the engine speaks SGLang's HTTP API.

    architecture.py  config.json -> the shape of the model
    weights.py       safetensors files -> tensors by name, and their digests
    decoder.py       owns weights and KV cache: token ids -> logits
    sampling.py      logits -> tokens and their log-probs
    scoring.py       logits of a prompt -> log-probs of its tokens, and of other tokens at the same positions
    constraints.py   the permitted next tokens under a JSON schema or a regular expression
    running.py       owns the batch of running requests: requests -> finished completions, step by step
    offline.py       requests -> finished completions, synchronously, for evaluation
    receiving.py     receives weights from a trainer through a torch process group (../backends/process_group.py)
    scheduler.py     owns the generation thread: queue, pause, weight updates, aborts
    protocol.py      SGLang's JSON -> requests, completions -> SGLang's JSON
    app.py           HTTP endpoints
    exchange.py      size limits of request bodies; answers and errors in the form of each API
    served.py        submits, follows and aborts requests for all endpoints
    openai_api.py    OpenAI's endpoints; openai_requests.py has the fields of their requests
    anthropic_api.py Anthropic's endpoints
    chatting.py      chat -> one call of /generate, and the parts of its answers as they arrive
    chat_model.py    chat template: messages -> token ids; text of a turn -> answer, thoughts, tool calls
    text_stream.py   tokens of a growing completion -> text that never changes once it is sent
    gate.py          checks API keys
    slow_clients.py  closes connections that do not finish sending their request in time
    server.py        the server process
"""
