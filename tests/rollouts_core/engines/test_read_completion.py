"""What an engine's answer means where its finish reason alone does not say.

Without these tests a completion that was aborted at its last token is continued behind its end, and trained on.
"""

from __future__ import annotations

import pytest

from rollouts_core.config import SamplingConfig
from rollouts_core.engines.completion import GenerationRequest
from rollouts_core.engines.http import read_completion
from rollouts_core.types import Status

END, OWN_END = 2, 3
REQUEST = GenerationRequest(prompt_tokens=[5], sampling=SamplingConfig(max_new_tokens=4), stop_token_ids=(END,), seed=0)


@pytest.mark.parametrize(
    ("tokens", "status"),
    [
        ([], Status.ABORTED),
        ([7, 8], Status.ABORTED),
        ([7, END], Status.COMPLETED),
        ([7, 8, 9, 7], Status.TRUNCATED),
        ([7, 8, 9, END], Status.COMPLETED),
        ([7, OWN_END], Status.COMPLETED),
    ],
)
def test_an_aborted_completion_that_had_come_to_its_end_is_not_continued(tokens: list[int], status: Status) -> None:
    logprobs = [-0.5] * len(tokens)
    spans = (("v-1", 0, len(tokens)),)
    completion = read_completion(
        "engine",
        REQUEST,
        tokens=tokens,
        logprobs=logprobs,
        finish_reason="abort",
        version_spans=spans,
        ends=frozenset({OWN_END}),
    )
    assert completion.status is status
