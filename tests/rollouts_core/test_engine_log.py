"""What an engine printed before it ended becomes a sentence; otherwise a user reads two hundred lines of its log."""

from __future__ import annotations

import pytest

from rollouts_core.engine_log import explain_engine_log


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2", "heads have a size"),
        ("launch_server.py: error: unrecognized arguments: --no-such-thing", "one of its arguments"),
        ("ModuleNotFoundError: No module named 'sglang'", "package is missing"),
        ("RuntimeError: No CUDA GPUs are available", "found no GPU"),
        (
            "User-specified max_model_len (9000) is greater than the derived max_model_len "
            "(max_position_embeddings=2048)",
            "longer than the model allows",
        ),
        ("OSError: [Errno 98] Address already in use", "port is in use"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "ran out of memory"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("huggingface_hub.errors.GatedRepoError: 401 Client Error.", "refuses the model"),
        ("OSError: foo/bar is not a local folder and is not a valid model identifier", "is missing"),
    ],
)
def test_known_signs_in_a_log_become_a_sentence(line: str, sentence: str) -> None:
    assert sentence in explain_engine_log(f"loading\n{line}\n")
    assert explain_engine_log("all is well") == ""
