"""The table [evaluate]: the models and the rows of an evaluation.

Not here: the other settings (form.py, rollouts_core/config/), the lookup of a model's name (tasks/model_names.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field

from rollouts.infra.stores.object_store import is_url
from rollouts_core.config import Record


class EvaluateConfig(Record):
    """The model to score, the model to compare it with, and the rows to score on."""

    model: str = Field(min_length=1)
    """The model to score: `production` or `candidate` of the registry (small/production if the store has several lines
    of models), a registered model (small-3), a run or a checkpoint of the store (my-run-5793d50a,
    sft-<fingerprint>/checkpoints/step_000100), `base` for the configuration's base model, a folder (./folder next to
    the configuration), or a URL."""
    against: str = ""
    """A second model, scored on the same rows for a comparison. Takes the same values as `model`. Empty: no
    comparison."""
    data: str = ""
    """File or URL with the rows to score on. Empty: data.heldout."""

    def beside(self, folder: Path) -> Self:
        """These settings with absolute paths. `data`, and models that begin with a dot, are relative to `folder`."""

        def absolute(given: str) -> str:
            return given if is_url(given) or not given else str((folder / given).resolve())

        model, against = (absolute(each) if each.startswith(".") else each for each in (self.model, self.against))
        return self.model_copy(update={"model": model, "against": against, "data": absolute(self.data)})
