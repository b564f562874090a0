"""Serve a checkpoint by an engine in a child process, for `rollouts serve --engine` and for benchmarks.

    find or install the engine ── start ── generates one token: on_ready(url) ── Ctrl-C or SIGTERM ── end
                                     └──── ends earlier: an error with the end of the log ─────────────┘

Not here: the embedded engine of `rollouts serve` (rollouts_core/embedded/server.py), the engines' command lines
(rollouts_core/engines), benchmarks (benchmarks.py).
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from rollouts.flows.commands.terminal import console
from rollouts.infra.engines import has_generated
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.foreign_text import shown_line
from rollouts.infra.locks import lock_file, try_lock
from rollouts.infra.node import LocalNode
from rollouts.infra.providers import open_session, provision_node
from rollouts.tasks.engine_installs import with_engine
from rollouts.tasks.plan import installed_on
from rollouts_core.config import DeploymentConfig, EngineConfig, ModelConfig, parse_config
from rollouts_core.engines.child import ChildEngine, explain_end, last_lines, start_child, stop_engines
from rollouts_core.engines.launch import check_host, describe_slow_engine
from rollouts_core.errors import EngineError, EngineUnavailableError, InputError
from rollouts_core.job import InputModel, ServeJob
from rollouts_core.keys import API_KEY_VARIABLE, key_header, read_key
from rollouts_core.run_directory import RunDirectory
from rollouts_core.system.listening import bind_port

START_TIMEOUT_S = 3600.0
PROBE_TIMEOUT_S = 40.0
"""Timeout of a test request for one token. The timeout is long, because an engine compiles kernels at first."""
LOOK_S = 0.5
TELL_S = 30.0
"""Seconds between two printed lines about the start, if the output is not a terminal."""
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop the server."""
NAMED_AS_OPTIONS = {
    "which is set already: remove it": "which this command sets: remove it, or use --host and --port of this command",
    "rollout.engine.extra_args": "--engine-args",
    "engine.extra_args": "--engine-args",
    "this rollout.engine.kind": "this --engine",
    "rollout.engine.kind": "--engine",
    "rollout.engine.python": "--engine-python",
    "deployment.engine_gpu_ranks": "--gpus",
    "rollout.max_prompt_tokens or sampling.max_new_tokens": "--context-length",
    "set engine.api_key_variable to the variable with the key": f"set {API_KEY_VARIABLE}",
    "set rollout.engine.dtype = ": "add to --engine-args: --dtype ",
    "rollout.engine.dtype": "--dtype in --engine-args",
}
"""For each setting of a run that messages mention, the option of `rollouts serve` with the same meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServer:
    """The options of a server."""

    kind: str
    name: str
    """Name of the model in requests."""
    host: str
    port: int
    threads: int
    max_running_requests: int
    api_key: str
    context_length: int
    """Most tokens of a prompt and its answer (0: as many as the model and the memory allow)."""
    gpus: str
    """Indices of GPUs, separated by commas (empty: the first GPU)."""
    python: str
    install: str
    arguments: str
    """Further arguments of the engine's command line, as in a shell."""


def serve_by_engine(model_dir: Path, options: EngineServer, store: Path, *, on_ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM, then end all processes of the engine.

    Args:
        store: folder for the engine's installation and for the log, `served/<kind>-<port>/log.txt`.
        on_ready: called with the server's URL after the engine has generated its first token.

    Raises:
        InputError, PermanentInfraError: an option, the model or the engine's installation cannot be used.
        EngineError: the engine ended unexpectedly.
    """
    with suppress(KeyboardInterrupt), started_engine(model_dir, options, store) as child:
        on_ready(url_of(child))
        child.process.wait()
        raise explain_end(child)


@contextmanager
def started_engine(
    model_dir: Path, options: EngineServer, store: Path, log_folder: Path | None = None
) -> Iterator[ChildEngine]:
    """Start an engine, and stop it at the end of the block. The block begins when the engine has generated a token.

    The signals of `ENDS` raise KeyboardInterrupt in the block.

    Args:
        log_folder: folder for the log; None uses `served/<kind>-<port>` of the store.

    Raises: see `serve_by_engine`.
    """
    with _settings_named_as_options():
        if not (model_dir / "tokenizer_config.json").is_file():
            raise InputError(f"{model_dir} has no tokenizer, which {options.kind} needs: add it, or remove --engine")
        if options.api_key:
            os.environ[API_KEY_VARIABLE] = options.api_key  # the engine inherits it
            read_key(API_KEY_VARIABLE, "--api-key")
        with bind_port(options.host, options.port) as listener:
            port = listener.getsockname()[1]
        job = _render_job(model_dir, options, port)
        check_host(job, options.api_key)
        with _interrupted_by_signals():
            if not job.engine.spec.is_own:
                job = _with_installed_engine(job, store)
            if warning := describe_slow_engine(job.engine, model_dir):
                _say(options.kind, warning)
            folder = log_folder or store / "served" / f"{options.kind}-{port}"
            for each in (folder, store / "served"):
                each.mkdir(parents=True, exist_ok=True)
            log = folder / "log.txt"
            with _reserved(store, port), _started(job, RunDirectory(folder / "engine"), log) as child:
                _say(options.kind, f"{job.engine.spec.title} starts; its log is {log}")
                _wait_until_ready(child, options.api_key)
                yield child


def _render_job(model_dir: Path, options: EngineServer, port: int) -> ServeJob:
    settings = {
        "kind": options.kind,
        "python": str(Path(options.python).absolute()) if options.python else "",
        "install": options.install or "auto",
        "extra_args": _split(options.arguments),
        "api_key_variable": API_KEY_VARIABLE if options.api_key else "",
    }
    placement = {
        "engine_gpu_ranks": options.gpus.split(",") if options.gpus else (),
        "engine_threads": options.threads,
        "max_running_requests": options.max_running_requests,
    }
    return ServeJob(
        model=InputModel(name=options.name, model=ModelConfig(path=str(model_dir.absolute())), digest=""),
        served_name=options.name,
        host=options.host,
        port=port,
        parent_pid=os.getpid(),
        context_length=options.context_length,
        engine=parse_config(EngineConfig, settings, source=f"--engine {options.kind}"),
        deployment=parse_config(DeploymentConfig, placement, source=f"--gpus {options.gpus}"),
    )


def _split(arguments: str) -> list[str]:
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise InputError(f"--engine-args is not a valid shell command line ({error}): close the quotes") from error


def _with_installed_engine(job: ServeJob, store: Path) -> ServeJob:
    """Return the job with the path of the engine's interpreter. A missing engine is installed in the store first."""
    settings = LocalNode()
    node = provision_node(settings, store)
    with open_session(node) as session:
        node = with_engine(
            session,
            node,
            settings,
            job.engine,
            gpu_ranks=job.deployment.engine_gpu_ranks,
            say=lambda sentence: _say(job.engine.kind, sentence.removeprefix("rollout.engine: ")),
        )
    return job.model_copy(update={"engine": installed_on(node, job.engine)})


@contextmanager
def _reserved(store: Path, port: int) -> Iterator[None]:
    """Reserve the port for the block. An engine listens only after it has loaded the model. Without a reservation, a
    second command would find the port free until then, and would remove the first engine's files.

    Raises:
        InputError: another command of the store serves at the port.
    """
    with lock_file(store / "served" / f"port-{port}.lock") as lock:
        if not try_lock(lock, fcntl.LOCK_EX):
            raise InputError(
                f"another `rollouts serve` of the store {store} starts an engine at port {port}: stop that command or "
                "choose another port"
            )
        yield


@contextmanager
def _started(job: ServeJob, directory: RunDirectory, log: Path) -> Iterator[ChildEngine]:
    """Start the job's engine, and stop it at the end of the block."""
    log.unlink(missing_ok=True)
    child = start_child(job, directory, log)
    try:
        yield child
    finally:
        for number in ENDS:  # a second Ctrl-C must not interrupt the cleanup
            signal.signal(number, signal.SIG_IGN)
        stop_engines([child])


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at a signal of `ENDS`. Under nohup, SIGHUP stays ignored."""

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    previous = {number: signal.signal(number, stop) for number in ENDS if number != signal.SIGHUP or not is_kept}
    try:
        yield
    finally:
        for number, action in previous.items():
            signal.signal(number, action)


def _wait_until_ready(child: ChildEngine, api_key: str) -> None:
    """Wait until the engine has generated a token. During the wait, show the last line of the engine's log."""
    job, began = child.job, time.monotonic()
    url = url_of(child, is_local=True)
    told_at = began
    with (
        httpx.Client(trust_env=False, headers=key_header(api_key)) as client,
        console.status(f"{job.engine.spec.title} starts") as status,
    ):
        while not has_generated(client, job.engine.spec.probe, url, timeout_s=PROBE_TIMEOUT_S):
            if child.process.poll() is not None:
                raise explain_end(child)
            now = time.monotonic()
            last_line = shown_line("".join(last_lines(child, 1)))[:100] or "no output yet"
            said = f"{now - began:.0f} s: {last_line}"
            if now - began > START_TIMEOUT_S:
                raise EngineUnavailableError(f"{job.engine.spec.title} did not answer after {said}\nSee {child.log}.")
            status.update(said.replace("[", r"\["))
            if not console.is_terminal and now - told_at > TELL_S:
                told_at = now
                _say(job.engine.kind, said)
            time.sleep(LOOK_S)


def url_of(child: ChildEngine, *, is_local: bool = False) -> str:
    """The server's URL. `is_local` replaces the address of all interfaces by the loopback address."""
    host = child.job.host
    place = "127.0.0.1" if is_local and host == "0.0.0.0" else "::1" if is_local and host == "::" else host
    return f"http://{f'[{place}]' if ':' in place else place}:{child.job.port}"


def _say(kind: str, sentence: str) -> None:
    console.print(f"{kind:<15}{_in_options(sentence)}", markup=False)


def _in_options(message: str) -> str:
    for setting, option in NAMED_AS_OPTIONS.items():
        message = message.replace(setting, option)
    return message


@contextmanager
def _settings_named_as_options() -> Iterator[None]:
    """In exceptions of the block, replace settings of runs by the options of `rollouts serve`."""
    try:
        yield
    except (InputError, EngineError, PermanentInfraError) as error:
        error.args = (_in_options(str(error)), *error.args[1:])
        raise
