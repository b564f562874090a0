"""Generated tokens per second: the embedded engine against vLLM, SGLang and transformers, on one CPU thread each.

    python benchmarks/engine_throughput.py --size 1M [--rounds 3] [--contenders ours,vllm,hf-batching] [--out FILE]

A turn is the same for all: for each concurrency that many clients send one request after another, prompts of 8 to 56
and completions of 16 to 112 tokens, sampled at temperature 1 with log-probs, ends of turn ignored. No prompt comes
twice.

    ours, vllm, sglang    servers reached over HTTP, started as the pipeline starts them; vllm and sglang are left out
                          where `make engines` has not installed them. A server is stopped (SIGSTOP) between its turns
    ours-v1               the same as ours, asked at /v1/completions, as vllm is, instead of /generate
    hf-batching           transformers' continuous batching in this process: no HTTP, no JSON
    hf-generate           transformers' generate in this process: requests wait until a batch of them is full, and all
                          of it runs until its longest completion ends; no log-probs
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import aiohttp
import torch
from inputs import PAD_ID, SIZES, write_model
from side_by_side import (
    REPOSITORY,
    Gate,
    Range,
    Turn,
    describe_machine,
    measure,
    range_of,
    render_machine,
    render_table,
    worker_command,
    worker_environment,
    write_results,
)

from rollouts.infra.ports import find_free_port
from rollouts.infra.session import LocalSession
from rollouts_core.backends.allocator import KEPT_MEMORY
from rollouts_core.config import DeploymentConfig, EngineConfig, ModelConfig
from rollouts_core.job import InputModel, ServeJob

CONCURRENCIES = (1, 16, 64)
REQUESTS_PER_CLIENT = {1: 3, 16: 3, 64: 2}
SHORTEST_PROMPT, LONGEST_PROMPT = 8, 56
SHORTEST_COMPLETION, LONGEST_COMPLETION = 16, 112
CONTEXT_LENGTH = 256
START_TIMEOUT_S, REQUEST_TIMEOUT_S = 300.0, 300.0
POLL_S = 0.02
WARMUP_STEPS = 1
TERMINATED_CODE = 143
NAMES = ("ours", "ours-v1", "vllm", "sglang", "hf-batching", "hf-generate")
ENGINES = {"ours": "embedded", "ours-v1": "embedded", "vllm": "vllm", "sglang": "sglang"}
HF_CACHE_BLOCKS, HF_BATCH_TOKENS = 256, 4096
SESSION_FIELD, USER_FIELD = 3, 11
"""Places in /proc/PID/stat behind the name: the session, and the user time, which the system time follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One request of the load."""

    prompt: list[int]
    """Token ids."""
    num_tokens: int
    """Length of the completion."""


class Engine(Protocol):
    """What takes turns."""

    def load(self, requests: Sequence[Wanted], concurrency: int) -> None:
        """Fulfil all requests, so many at a time."""

    def pause(self) -> None:
        """Take no processor time until the next load."""

    def cpu_seconds(self) -> float:
        """What its processes have computed so far."""


def main() -> None:
    options = read_options()
    if options.worker:
        run_worker(options)
        return
    names = [name for name in options.contenders.split(",") if is_installed(name)]
    machine = describe_machine(1)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_model(Path(folder) / "model", SIZES[options.size])
        shared = ["--size", options.size, "--model-dir", str(model_dir)]
        turns, warmups = measure(
            {name: worker_command(__file__, "--worker", name, *shared) for name in names},
            num_threads=1,
            log_dir=options.log_dir or Path(folder) / "logs",
            num_rounds=options.rounds,
            turn_s=0.0,
            warmup_steps=WARMUP_STEPS,
        )
    results = {
        "script": "engine_throughput",
        "size": options.size,
        "machine": machine,
        "tokens_per_s": {
            name: {number: [speed(turn, number) for turn in taken] for number in CONCURRENCIES}
            for name, taken in turns.items()
        },
        "cpu_s_per_token": {
            name: {number: [cpu_cost(turn, number) for turn in taken] for number in CONCURRENCIES}
            for name, taken in turns.items()
        },
        "ready_after_s": {name: turn.parts["ready_after_s"] for name, turn in warmups.items()},
    }
    write_results(options.out, results)
    print(render_machine(machine) + "\n\n" + render(results))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1M", help="model (default: 1M)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every contender (default: 3)")
    parser.add_argument("--contenders", default=",".join(NAMES), help="comma-separated (default: all)")
    parser.add_argument("--out", type=Path, help="file for the figures")
    parser.add_argument("--log-dir", type=Path, help="folder for what the servers print")
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--model-dir", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def is_installed(name: str) -> bool:
    """Whether a contender can run here; says so where not."""
    if name not in ("vllm", "sglang") or engine_python(name).exists():
        return True
    print(
        f"{name} is left out: it is not installed in {engine_python(name).parents[2]} (make engines)", file=sys.stderr
    )
    return False


def engine_python(name: str) -> Path:
    """The interpreter of an engine that has an environment of its own."""
    return REPOSITORY / ".engines" / name / "bin" / "python"


def speed(turn: Turn, concurrency: int) -> float:
    """Tokens per second that a turn reached at this concurrency."""
    return turn.parts[f"tokens_{concurrency}"] / turn.parts[f"seconds_{concurrency}"]


def cpu_cost(turn: Turn, concurrency: int) -> float:
    """Processor seconds of the engine's processes per token."""
    return turn.parts[f"cpu_{concurrency}"] / turn.parts[f"tokens_{concurrency}"]


def render(results: Mapping[str, Any]) -> str:  # Any: JSON
    """Two tables: tokens/s at each concurrency, and how many times faster, and cheaper in processor time, ours is."""
    speeds: Mapping[str, Mapping[int, list[float]]] = results["tokens_per_s"]
    costs: Mapping[str, Mapping[int, list[float]]] = results["cpu_s_per_token"]
    figures = [
        [name, f"{results['ready_after_s'][name]:.1f}", *(range_of(values).render(0) for values in by_number.values())]
        for name, by_number in speeds.items()
    ]
    others = [name for name in speeds if name != "ours" and "ours" in speeds]
    ratios = [
        [
            name,
            *(ratios_of(speeds["ours"][number], speeds[name][number]).render() for number in CONCURRENCIES),
            *(ratios_of(costs[name][number], costs["ours"][number]).render() for number in CONCURRENCIES),
        ]
        for name in others
    ]
    header = ["contender", "ready after, s", *(f"tokens/s at {number}" for number in CONCURRENCIES)]
    compared = [f"faster at {number}" for number in CONCURRENCIES]
    compared += [f"by CPU time at {number}" for number in CONCURRENCIES]
    return render_table(header, figures) + "\n\n" + render_table(["ours is, against", *compared], ratios)


def ratios_of(dividends: Sequence[float], divisors: Sequence[float]) -> Range:
    """Their ratios, round by round."""
    return range_of([dividend / divisor for dividend, divisor in zip(dividends, divisors, strict=True)])


# --- workers


def run_worker(options: argparse.Namespace) -> None:
    """Take turns as one contender: the first starts its engine, the others generate."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED_CODE))  # otherwise its server would outlive it
    torch.set_num_threads(1)
    numbers = random.Random(0)
    vocab_size = SIZES[options.size].vocab_size
    gate = Gate()
    gate.start()
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        open_contender(options.worker, options.model_dir, Path(folder)) as engine,
    ):
        engine.load([Wanted(prompt=[2, 3], num_tokens=1)], 1)
        take_turns(gate, engine, numbers, vocab_size, time.perf_counter() - began)


def open_contender(name: str, model_dir: Path, folder: Path) -> Server | Batching | Generate:
    """A contender, which ends with the `with` that it is used with."""
    if name in ENGINES:
        return Server(name, model_dir, folder)
    return Batching(model_dir) if name == "hf-batching" else Generate(model_dir)


def take_turns(gate: Gate, engine: Engine, numbers: random.Random, vocab_size: int, ready_after_s: float) -> None:
    """Put the load of every concurrency on an engine, again and again."""
    while True:
        parts: dict[str, float] = {"ready_after_s": ready_after_s}
        for concurrency in CONCURRENCIES:
            requests = make_load(numbers, vocab_size, concurrency * REQUESTS_PER_CLIENT[concurrency])
            began, cpu_began = time.perf_counter(), engine.cpu_seconds()
            engine.load(requests, concurrency)
            parts[f"seconds_{concurrency}"] = time.perf_counter() - began
            parts[f"cpu_{concurrency}"] = engine.cpu_seconds() - cpu_began
            parts[f"tokens_{concurrency}"] = sum(request.num_tokens for request in requests)
        engine.pause()
        gate.step_done(units=sum(parts[f"tokens_{number}"] for number in CONCURRENCIES), **parts)


def make_load(numbers: random.Random, vocab_size: int, count: int) -> list[Wanted]:
    """Requests with prompts and completions of many lengths."""
    return [
        Wanted(
            prompt=[numbers.randrange(2, vocab_size) for _ in range(numbers.randint(SHORTEST_PROMPT, LONGEST_PROMPT))],
            num_tokens=numbers.randint(SHORTEST_COMPLETION, LONGEST_COMPLETION),
        )
        for _ in range(count)
    ]


class Server:
    """An inference server with one thread; used with `with`, which waits until it answers."""

    def __init__(self, name: str, model_dir: Path, folder: Path) -> None:
        is_own = ENGINES[name] == "embedded"
        python = "" if is_own else str(engine_python(name))
        self._speaks_openai = name in ("vllm", "ours-v1")
        self._model = str(model_dir)
        job = ServeJob(
            model=InputModel(name="model", model=ModelConfig(path=str(model_dir)), digest=""),
            port=find_free_port(LocalSession(sys.executable)),
            context_length=CONTEXT_LENGTH,
            engine=EngineConfig(kind=ENGINES[name], python=python),
            deployment=DeploymentConfig(max_running_requests=max(CONCURRENCIES), engine_threads=1),
        )
        self._url = f"http://127.0.0.1:{job.port}"
        (folder / "job.json").write_text(job.model_dump_json())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollouts_core", "serve", str(folder / "job.json")],
            env=worker_environment(1) | (KEPT_MEMORY if is_own else {}),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        try:
            asyncio.run(self._wait_until_ready())
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def load(self, requests: Sequence[Wanted], concurrency: int) -> None:
        """Fulfil all requests, so many at a time."""
        self._signal(signal.SIGCONT)
        asyncio.run(self._load(requests, concurrency))

    def pause(self) -> None:
        """Take no processor time until the next load."""
        self._signal(signal.SIGSTOP)

    def cpu_seconds(self) -> float:
        """What all processes of the server have computed so far."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[SESSION_FIELD]) == self._process.pid:
                ticks += int(fields[USER_FIELD]) + int(fields[USER_FIELD + 1])
        return ticks / os.sysconf("SC_CLK_TCK")

    async def _load(self, requests: Sequence[Wanted], concurrency: int) -> None:
        waiting = iter(requests)
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=concurrency)
        async with aiohttp.ClientSession(self._url, timeout=timeout, connector=connector) as session:

            async def ask_one_after_another() -> None:
                for request in waiting:
                    await self._ask(session, request)

            async with asyncio.TaskGroup() as clients:
                for _ in range(concurrency):
                    clients.create_task(ask_one_after_another())

    async def _ask(self, session: aiohttp.ClientSession, request: Wanted) -> None:
        path, body = self._openai_request(request) if self._speaks_openai else self._sglang_request(request)
        async with session.post(path, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        num_tokens = (answer["usage"] if self._speaks_openai else answer["meta_info"])["completion_tokens"]
        assert num_tokens == request.num_tokens, f"{num_tokens} of {request.num_tokens} tokens"

    def _sglang_request(self, request: Wanted) -> tuple[str, dict[str, Any]]:  # Any: JSON
        sampling = {"max_new_tokens": request.num_tokens, "temperature": 1.0, "ignore_eos": True}
        return "/generate", {"input_ids": request.prompt, "sampling_params": sampling, "return_logprob": True}

    def _openai_request(self, request: Wanted) -> tuple[str, dict[str, Any]]:  # Any: JSON
        body = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.num_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        return "/v1/completions", body

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        async with aiohttp.ClientSession(self._url) as session:
            while time.monotonic() < deadline:
                assert self._process.poll() is None, f"the server ended with code {self._process.returncode}"
                try:
                    async with session.get("/health") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(POLL_S)
        raise TimeoutError(f"the server was not ready after {START_TIMEOUT_S:.0f} s")

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)


class InProcess:
    """A contender without a server: it computes in this process and waits at the gate."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left."""

    def pause(self) -> None:
        """Nothing runs between two loads."""

    def cpu_seconds(self) -> float:
        """Of this process, with the little that the load costs."""
        return time.process_time()


class Batching(InProcess):
    """transformers' continuous batching."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        super().__init__(model_dir)
        self._batcher = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=True, eos_token_id=-1, pad_token_id=PAD_ID, max_new_tokens=16),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=HF_CACHE_BLOCKS, max_batch_tokens=HF_BATCH_TOKENS, return_logprobs=True
            ),
        )
        self._batcher.start()

    def __exit__(self, *_: object) -> None:
        self._batcher.stop(block=True)  # its thread would keep the process from ending

    def load(self, requests: Sequence[Wanted], concurrency: int) -> None:
        """Fulfil all requests, so many at a time."""
        waiting, num_running = list(requests), 0
        while waiting or num_running:
            while waiting and num_running < concurrency:
                request = waiting.pop()
                self._batcher.add_request(request.prompt, max_new_tokens=request.num_tokens, eos_token_id=-1)
                num_running += 1
            outcome = self._batcher.get_result(timeout=1.0)
            assert self._batcher.is_running(), "the batching thread ended"
            if outcome is not None and outcome.is_finished():
                num_running -= 1


class Generate(InProcess):
    """transformers' generate, on full batches with padding to the left."""

    @torch.inference_mode()
    def load(self, requests: Sequence[Wanted], concurrency: int) -> None:
        """Fulfil all requests, so many at a time."""
        self._model.generation_config.eos_token_id = None
        for start in range(0, len(requests), concurrency):
            batch = requests[start : start + concurrency]
            width = max(len(request.prompt) for request in batch)
            padding = [width - len(request.prompt) for request in batch]
            rows = [[PAD_ID] * missing + request.prompt for missing, request in zip(padding, batch, strict=True)]
            self._model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor([[0] * missing + [1] * (width - missing) for missing in padding]),
                max_new_tokens=max(request.num_tokens for request in batch),
                do_sample=True,
                top_k=0,
                pad_token_id=PAD_ID,
            )


if __name__ == "__main__":
    main()
