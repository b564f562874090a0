"""Benchmark programs of other projects that score a served model: each program has one file in this folder.

To add a harness, copy lm_eval.py, write its requirements, and add a row to `HARNESSES`. This folder must not import
torch. Not here: installing a harness (tasks/harness_installs.py), starting it (flows/commands/benchmarks.py), the
comparison of two models' results (benchmarks.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from rollouts_core.harnesses.lm_eval import LM_EVAL
from rollouts_core.harnesses.spec import Harness

HARNESSES: Mapping[str, Harness] = {"--lm-eval": LM_EVAL}
"""The option of `rollouts evaluate` -> the harness."""

__all__ = ["HARNESSES", "LM_EVAL", "Harness"]
