"""`report`: the content of the page that is made at the end of a run.

`rollouts_core/report/` makes the page.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollouts_core.config.record import PLACEMENT, Finite, Record


class ReportConfig(Record):
    """The samples that the report contains. These settings do not change a result."""

    samples: Literal["all", "held-out", "none"] = Field(default="all", json_schema_extra=PLACEMENT)
    """Samples that the report contains. all: completions of RL, answers on held-out rows, and rows of SFT. held-out:
    only the answers of the compared models on held-out rows. none: no prompts and no completions, for a report that is
    given to others."""
    max_mb: Annotated[Finite, Field(ge=0.1, le=500)] = Field(default=20.0, json_schema_extra=PLACEMENT)
    """Largest size of the report in MB. If all samples would make it larger, the report contains only some of them,
    spread over steps and rewards. The run directory always contains all samples."""
