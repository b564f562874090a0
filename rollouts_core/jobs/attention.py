"""Choose the attention kernel for `policy.attention = "auto"` in a training's first attempt. All attempts use this
kernel.

Not here: choosing the kernel (model/attention_choice.py).

    first attempt    job.json: auto -> choose_kernel -------------------> events.jsonl, job.json
    later attempts   job.json: auto -> the event of the first attempt --> job.json

Each attempt gets a new job.json with "auto", so later attempts read the kernel from the event.
"""

from __future__ import annotations

import json
import logging
from typing import Any, TypeVar

from rollouts_core.backends.launch import is_follower
from rollouts_core.job import RLJob, TrainingJob
from rollouts_core.metrics import EventLog, read_json_lines
from rollouts_core.model.attention_choice import Choice, choose_kernel, shared_prompts, with_kernel
from rollouts_core.model.loading import default_device
from rollouts_core.run_directory import RunDirectory, attempt_number
from rollouts_core.system.files import write_json

logger = logging.getLogger(__name__)

JobT = TypeVar("JobT", bound=TrainingJob)


def settle_attention(job: JobT, directory: RunDirectory) -> JobT:
    """The job with an attention kernel in place of "auto". The kernel is also written to job.json and events.jsonl."""
    policy = job.training.policy
    if policy.attention != "auto" or policy.backend == "jax":
        return job
    chosen = (line["kernel"] for line in read_json_lines(directory.events) if line["event"] == "attention_chosen")
    kept = next(chosen, "")
    choice = Choice(kept, "") if kept else _choose(job)
    if not is_follower():
        if not kept:
            with EventLog(directory.events, attempt=attempt_number()) as events:
                events.write("attention_chosen", kernel=choice.kernel, reason=choice.reason)
            logger.info('attention kernel "%s": %s', choice.kernel, choice.reason)
        _write_kernel(directory, choice.kernel)
    return job.model_copy(update={"training": with_kernel(job.training, choice.kernel)})


def _choose(job: TrainingJob) -> Choice:
    device_type = "cpu" if job.deployment.shares_cpu else default_device().partition(":")[0]
    shared = shared_prompts(job.training, job.rollout) if isinstance(job, RLJob) else None
    return choose_kernel(job.model.model, job.training.policy, device_type=device_type, shared=shared)


def _write_kernel(directory: RunDirectory, kernel: str) -> None:
    content: dict[str, Any] = json.loads(directory.job.read_text(encoding="utf-8"))  # Any: JSON
    content["training"].setdefault("policy", {})["attention"] = kernel
    write_json(directory.job, content)
