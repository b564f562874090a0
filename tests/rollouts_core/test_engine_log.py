"""What an engine printed before it ended becomes a sentence; otherwise a user reads two hundred lines of its log."""

from __future__ import annotations

import pytest

from rollouts_core.engine_log import explain_engine_log


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2", "head size"),
        ("launch_server.py: error: unrecognized arguments: --no-such-thing", "one of its arguments"),
        ("ModuleNotFoundError: No module named 'sglang'", "package is missing"),
        ("RuntimeError: No CUDA GPUs are available", "found no usable GPU"),
        ("RuntimeError: FlashAttention only support fp16, bf16, and fp8_e4m3 data type", "no kernels for float32"),
        ("RuntimeError: rmsnorm(...)::<lambda()> failed to dispatch data type Float", "no kernels for float32"),
        ("ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.", '= "float16"'),
        (
            "User-specified max_model_len (9000) is greater than the derived max_model_len "
            "(max_position_embeddings=2048)",
            "longer than the model allows",
        ),
        (
            "Warning: User-specified context_length (9000) is greater than the derived context_length (2048)."
            " This may lead to incorrect model outputs or CUDA errors. Note that the derived context_length may differ "
            "from max_position_embeddings in the model's config.",
            "longer than the model allows",
        ),
        ("OSError: [Errno 98] Address already in use", "port is in use"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "ran out of memory"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        (
            "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-6)\n\nCannot access gated "
            "repo for url https://huggingface.co/a/b/resolve/main/config.json.",
            "refuses the model: accept its terms",
        ),
        ("OSError: You are trying to access a gated repo.\nMake sure to have access to it at", "refuses the model"),
        (
            "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. (Request ID: Root=1-6)\n\nRepository "
            "Not Found for url: https://huggingface.co/api/models/a/b.\nPlease make sure you specified the correct "
            "`repo_id` and `repo_type`.\nIf you are trying to access a private or gated repo, make sure you are "
            "authenticated",
            "missing at the hub, or private",
        ),
        ("OSError: foo/bar is not a local folder and is not a valid model identifier", "is missing"),
        (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 12040). Please update your GPU "
            "driver by downloading and installing a new version from the URL: "
            "http://www.nvidia.com/Download/index.aspx",
            "needs a newer CUDA",
        ),
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
            "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
            "are not ready",
        ),
        ("CUDA error: no kernel image is available for execution on the device", "this type of GPU"),
        ("RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)", "through NCCL"),
        (
            "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, "
            "unhandled system error, NCCL version 2.27.5",
            "through NCCL",
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            "initializing the engine (this flag also controls CPU memory reservation on the CPU backend, despite its "
            "name)",
            "share of the GPU memory",
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (40960), (4.38 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (1.02 GiB). Based on the available memory, "
            "the estimated maximum model length is 9552.",
            "share of the GPU memory",
        ),
        (
            "ValueError: Free memory on device cuda:0 (3.21/79.1 GiB) on startup is less than desired GPU memory "
            "utilization (0.92, 72.77 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
            "processes.",
            "other programs use memory of its GPU",
        ),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
            "mem_fraction_static=0.2",
            "share of the GPU memory",
        ),
        (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.2. Raise "
            "--mem-fraction-static above 0.412",
            "share of the GPU memory",
        ),
    ],
)
def test_known_signs_in_a_log_become_a_sentence(line: str, sentence: str) -> None:
    assert sentence in explain_engine_log(f"loading\n{line}\n")
    assert explain_engine_log("all is well") == ""


def test_what_transformers_says_of_a_stretched_context_is_no_reason() -> None:
    """It says so of Qwen3 with YaRN as its model card sets that, whatever the engine ends by."""
    said = (
        "[transformers] The explicitly set RoPE scaling factor (config.rope_parameters['factor'] = 4.0) does not match "
        "the ratio implicitly set by other parameters (implicit factor = post-yarn context length / pre-yarn context "
        "length = config.max_position_embeddings / config.rope_parameters['original_max_position_embeddings'] = 1.25)."
    )
    assert explain_engine_log(said) == ""
    assert "through NCCL" in explain_engine_log(f"{said}\nncclSystemError: System call (e.g. socket, malloc) failed\n")
