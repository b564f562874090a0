"""`report`: content of the page at the end of a run. Nothing here changes a result.

The page is made in rollouts_core/report/.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollouts_core.config.record import PLACEMENT, Finite, Record


class ReportConfig(Record):
    """The samples inside the report. Nothing here changes a result."""

    samples: Literal["all", "held-out", "none"] = Field(default="all", json_schema_extra=PLACEMENT)
    """Samples that the report holds. all: completions of RL, held-out answers and rows of SFT. held-out: only the
    answers of the compared models. none: no prompt and no completion, for a file that is passed on."""
    max_mb: Annotated[Finite, Field(ge=0.1, le=500)] = Field(default=20.0, json_schema_extra=PLACEMENT)
    """Largest size of the report in MB. Above it the report holds a part of the samples, spread over steps and rewards.
    All samples stay in the run directory."""
