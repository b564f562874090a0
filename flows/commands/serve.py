"""`rollouts serve` and `rollouts chat`: use a checkpoint of a run, or any other Hugging Face checkpoint.

Not here: the embedded engine (rollouts_core/embedded), SGLang and vLLM (serve_engine.py), the chat in the terminal
(chat.py), the other commands (cli.py).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from rollouts.flows.commands.models import only_line, open_registry
from rollouts.flows.commands.terminal import (
    DEFAULT_STORE,
    AsJson,
    EngineArgs,
    EngineGpus,
    EnginePython,
    console,
    emit,
    served_at,
)
from rollouts.flows.store import STORE_VARIABLE, from_home
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.ports import check_loopback
from rollouts.infra.registry import Alias, current, models
from rollouts_core.engine_kinds import ENGINES
from rollouts_core.errors import InputError
from rollouts_core.system.open_files import raise_file_limit

MODEL_HELP = "A run, a registered model, a line of models (its production model), or a folder with a checkpoint."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Store = Annotated[
    Path, typer.Option(envvar=STORE_VARIABLE, callback=from_home, help="Folder with the runs and registered models.")
]


def serve(
    model: Model,
    engine: Annotated[str, typer.Option(metavar="KIND", help="embedded, sglang or vllm.")] = "embedded",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port (0: any free port).")] = 30000,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    max_running_requests: Annotated[int, typer.Option(min=1, help="Most completions that are generated at once.")] = 64,
    context_length: Annotated[
        int, typer.Option(min=0, help="Most tokens of a prompt and its answer (0: what the model and memory allow).")
    ] = 0,
    gpus: EngineGpus = "",
    engine_python: EnginePython = "",
    engine_install: Annotated[
        str, typer.Option(metavar="HOW", help="Way to install a missing sglang or vllm: auto, uv, pip or never.")
    ] = "",
    engine_args: EngineArgs = "",
    api_key: Annotated[
        str,
        typer.Option(
            envvar="ROLLOUTS_API_KEY",
            help="Key that every request must contain; required if other machines can reach --host.",
            show_default=False,
        ),
    ] = "",
    store: Store = DEFAULT_STORE,
    as_json: AsJson = False,
) -> None:
    """Serve a checkpoint over the APIs of OpenAI and Anthropic, with the embedded engine, SGLang or vLLM.

    Prints the server's address and example requests. Ctrl-C stops the server. Runs do not need this command, because
    they start their own engines.
    """
    raise_file_limit()
    if not host:
        raise InputError("--host is empty: give an address, such as 127.0.0.1")
    own_options = {
        "--gpus": gpus,
        "--engine-python": engine_python,
        "--engine-install": engine_install,
        "--engine-args": engine_args,
    }
    is_embedded = check_engine(engine, threads=threads, own_options=own_options)
    model_dir = find_checkpoint(model, store)
    from rollouts_core.embedded.gate import is_loopback
    from rollouts_core.embedded.server import serve as serve_model

    if is_loopback(host):
        check_loopback()

    def announce(url: str) -> None:
        if as_json:
            emit([served_at(url)])
        console.print(f"serving {model_dir} at {url} (Ctrl-C stops it)", markup=False)
        console.print(render_examples(url, model, model_dir, has_key=bool(api_key)), markup=False)

    if is_embedded:
        serve_model(
            model_dir,
            name=model,
            host=host,
            port=port,
            num_threads=threads,
            max_running_requests=max_running_requests,
            context_length=context_length or None,
            api_key=api_key,
            on_ready=announce,
        )
        return
    from rollouts.flows.commands.serve_engine import EngineServer, serve_by_engine

    options = EngineServer(
        kind=engine,
        name=model,
        host=host,
        port=port,
        threads=threads,
        max_running_requests=max_running_requests,
        api_key=api_key,
        context_length=context_length,
        gpus=gpus,
        python=engine_python,
        install=engine_install,
        arguments=engine_args,
    )
    serve_by_engine(model_dir, options, store, on_ready=announce)


def check_engine(kind: str, *, threads: int, own_options: Mapping[str, str]) -> bool:
    """Check the engine and its options. Returns True for the embedded engine, False for SGLang and vLLM.

    Args:
        own_options: values of the options that only SGLang and vLLM have, by option.

    Raises:
        InputError: the engine does not exist, or it does not have one of the given options.
    """
    if kind not in ENGINES:
        raise InputError(f"--engine {kind}: expected {', '.join(ENGINES)}")
    if ENGINES[kind].is_own:
        for option in [name for name, value in own_options.items() if value]:
            raise InputError(f"{option} is not an option of the embedded engine: remove it, or choose another --engine")
        return True
    from rollouts_core.engines.launch import has_gpu

    if threads > 1 and has_gpu():
        raise InputError(f"--threads is not an option of {kind} on a GPU: remove it")
    if own_options["--gpus"] and not has_gpu():
        raise InputError("--gpus needs a GPU, and torch finds none on this machine: remove it")
    return False


def chat(
    model: Model,
    other: Annotated[str, typer.Argument(metavar="[OTHER]", help="A second model, which gets the same messages.")] = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most probable token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Total probability of the tokens to sample from.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=0, help="Most tokens of an answer (0: as many as fit).")] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.", show_default=False)] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    store: Store = DEFAULT_STORE,
    as_json: AsJson = False,
) -> None:
    """Chat with one model, or with two at once. Each line of input is a message.

    The input is a terminal or a pipe. Answers go to standard output, all other text goes to standard error. /help shows
    the commands. Ctrl-C stops an answer, Ctrl-D ends the chat.
    """
    folders = {given: find_checkpoint(given, store) for given in (model, *([other] if other else []))}
    for given, folder in folders.items():
        if not (folder / "tokenizer.json").is_file():
            raise InputError(f"{given} has no tokenizer.json, which a chat needs: add it to {folder}")
    from rollouts.flows.commands.chat import Settings, talk  # loads torch

    settings = Settings(system=system, temperature=temperature, top_p=top_p, max_tokens=max_tokens or None, seed=seed)
    talk(folders, settings, threads=threads, as_json=as_json)


def find_checkpoint(given: str, store: Path) -> Path:
    """The folder of a checkpoint.

    Args:
        given: a folder, a registered model, a line of models, or a run. If several runs have the name, the latest one
            is used.

    Raises:
        InputError: `given` is not a folder with a checkpoint, a finished run or a registered model.
    """
    if not given:
        raise InputError("MODEL is empty: give a run, a registered model, or the folder of a Hugging Face checkpoint")
    folder = Path(given)
    for found in (folder, folder / "checkpoint"):
        if (found / "config.json").is_file():
            return found
    if folder.is_dir():
        raise InputError(f"{given} has no config.json: give the folder of a Hugging Face checkpoint")
    runs = store / "runs"
    if (runs / given / "checkpoint").is_dir():
        return runs / given / "checkpoint"
    if registered := _registered(given, store):
        return registered
    named = [each for each in runs.glob("*/checkpoint") if each.parent.name.rpartition("-")[0] == given]
    if named:
        return max(named, key=lambda each: each.stat().st_mtime)  # the latest run, as in `rollouts samples`
    raise InputError(
        f"{given} is not a folder, nor a finished run or a registered model of the store {store}: give the folder of a "
        "Hugging Face checkpoint, or a name from `rollouts status` or `rollouts models`"
    )


def _registered(given: str, store: Path) -> Path | None:
    """The checkpoint of a registered model, or of the production model of a line."""
    try:
        with open_registry(store) as ledger:
            named = [each for each in models(ledger) if each.name == given]
            model = named[0] if named else current(ledger, only_line(ledger, given), Alias.PRODUCTION)
    except (PermanentInfraError, InputError):
        return None
    return store / model.checkpoint if model else None


def render_examples(url: str, name: str, model_dir: Path, *, has_key: bool) -> str:
    """Example requests for the server. The requests name the environment variable of the key, but not the key."""
    if not (model_dir / "tokenizer.json").exists():
        return f"try: {render_curl(url, '/generate', NUMBERS, has_key=has_key)}"
    shown = json.dumps(name, ensure_ascii=False)  # for JSON and Python: a folder's name may have quotes
    body = f'{{"model": {shown}, "messages": [{{"role": "user", "content": "Hello"}}]}}'
    key = 'os.environ["ROLLOUTS_API_KEY"]' if has_key else '"none"'
    python = [
        *(["import os"] if has_key else []),
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1", api_key={key})',
        'messages = [{"role": "user", "content": "Hello"}]',
        f"print(client.chat.completions.create(model={shown}, messages=messages).choices[0].message.content)",
    ]
    curl = render_curl(url, "/v1/chat/completions", body, has_key=has_key)
    return "\n".join([f"try: {curl}", "from Python, after pip install openai:", *(f"    {line}" for line in python)])


NUMBERS = '{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 16}}'
"""Body of an example request to a model without a tokenizer."""


def render_curl(url: str, path: str, body: str, *, has_key: bool) -> str:
    """A curl command that sends a request to the server."""
    key = ' -H "Authorization: Bearer $ROLLOUTS_API_KEY"' if has_key else ""
    return f"curl {url}{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
