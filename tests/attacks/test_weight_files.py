"""Requests that name something else than files of weights: each is refused within seconds, and the engine goes on.

To open a FIFO waits for its writer, /dev/zero has no end, and a sparse file claims terabytes. Without these tests one
request would stop an engine for good: it has no other thread that generates.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rollouts_core.embedded.test_process import serving
from tests.rollouts_core.embedded.tiny_models import make_model, save_model

TIMEOUT_S = 10.0
"""Of an engine that reads no file: an engine that waits for one answers nothing, not even that it lives."""
NORM = "model.norm.weight"
TERABYTES = 1 << 41

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[httpx.Client]:
    """A client of a real process: some of these attacks stop the interpreter itself."""
    with serving(model_dir) as (_, url), httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        yield client


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, chdir(path.parent):  # a socket's path must be short
        listener.bind(path.name)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def write(content: str) -> Callable[[Path], int]:
    return lambda path: path.write_text(content)


def make_tensors(num_bytes: int, *, name: str = NORM) -> Callable[[Path], None]:
    """A sparse file with one tensor."""

    def make(path: Path) -> None:
        entry = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
        header = json.dumps({name: entry}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + num_bytes)

    return make


def make_long_header(path: Path) -> None:
    """A hundred megabytes of names, which take half a minute to read, may not even be listed."""
    path.write_bytes((92 << 20).to_bytes(8, "little") + b"{")
    os.truncate(path, 8 + (92 << 20))


NO_WEIGHTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a FIFO": (make_fifo, "it is a FIFO, not a file"),
    "a directory": (Path.mkdir, "it is a directory, not a file"),
    "a socket": (make_socket, "it is a socket, not a file"),
    "a link to nothing": (link_to("nothing"), "No such file"),
    "a link to itself": (link_to("weights"), "Too many levels"),
    "a link without end": (link_to("/dev/zero"), "it is a device, not a file"),
    "a terminal's link": (link_to("/dev/full"), "it is a device, not a file"),
    "a file of /proc": (link_to("/proc/self/environ"), "it is empty"),
    "memory of /proc": (link_to("/proc/self/mem"), "it is empty"),
    "more than can be mapped": (make_tensors(TERABYTES), "Cannot allocate memory"),
    "a header of 92 MB": (make_long_header, "its header has"),
    "no tensor of this name": (make_tensors(8, name="other"), "does not contain tensor"),
    "a text": (write("no weights at all"), "its header has"),
}


@pytest.mark.parametrize("kind", NO_WEIGHTS)
def test_a_segment_that_is_no_file_of_weights_is_refused(
    engine: httpx.Client, model_dir: Path, tmp_path: Path, kind: str
) -> None:
    make, words = NO_WEIGHTS[kind]
    make(tmp_path / "weights")
    segment = {"id": kind, "path": str(tmp_path / "weights"), "names": [NORM]}
    body = {"weight_version": "1", "model_path": str(model_dir), "segments": [segment]}
    check_refused(engine, "/update_weights_from_segments", body, words)


DEEP = "[" * 100_000
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NO_MODELS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "settings from a FIFO": ("config.json", make_fifo, "it is a FIFO, not a file"),
    "settings without end": ("config.json", link_to("/dev/zero"), "it is a device, not a file"),
    "settings that nest": ("config.json", write(DEEP), "recursion"),
    "settings without heads": (
        "config.json",
        write('{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 0,'
              ' "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8}'),
        "not a complete config",
    ),
    "half a character": ("config.json", write('{"architectures": ["\\ud800"]}'), "does not support architecture"),
    "ends from a FIFO": ("generation_config.json", make_fifo, "it is a FIFO, not a file"),
    "weights from a FIFO": (SINGLE, make_fifo, "it is a FIFO, not a file"),
    "weights without end": (SINGLE, link_to("/dev/zero"), "it is a device, not a file"),
    "an index from a FIFO": (INDEX, make_fifo, "it is a FIFO, not a file"),
    "an index without end": (INDEX, link_to("/dev/zero"), "it is a device, not a file"),
    "an index that nests": (INDEX, write(DEEP), "recursion"),
    "a shard without end": (INDEX, write('{"weight_map": {"a": "/dev/zero"}}'), "it is a device, not a file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_MODELS)
def test_a_folder_with_something_else_than_files_is_refused(
    engine: httpx.Client, model_dir: Path, tmp_path: Path, kind: str
) -> None:
    name, make, words = NO_MODELS[kind]
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    (folder / SINGLE).unlink() if name in (SINGLE, INDEX) else (folder / name).unlink(missing_ok=True)
    make(folder / name)
    check_refused(engine, "/update_weights_from_disk", {"model_path": str(folder), "weight_version": "1"}, words)


def check_refused(engine: httpx.Client, path: str, body: Any, words: str) -> None:
    """The engine refuses the update in a sentence, and generates as before."""
    answer = engine.post(path, json=body)
    assert (answer.status_code, words in answer.json()["message"]) == (400, True), answer.text
    before = engine.get("/model_info").json()["weight_version"]
    generated = engine.post("/generate", json={"input_ids": [3], "sampling_params": {"max_new_tokens": 2}})
    assert (generated.status_code, before) == (200, "default"), generated.text
