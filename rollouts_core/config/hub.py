"""`hub`: from where models and public datasets are downloaded.

The settings in `model.py` and `data.py` name the models and datasets. `rollouts_core/data/hub_download.py` downloads
both.
"""

from __future__ import annotations

from pydantic import Field

from rollouts_core.config.record import PLACEMENT, RUNS_PROGRAM, SENDS_SECRET, Record


class HubConfig(Record):
    """The Hugging Face hub, or a mirror of it."""

    url: str = Field("", pattern=r"^(https?://[^/@?#]+(/[^@?#]*)?)?$", json_schema_extra=PLACEMENT | RUNS_PROGRAM)
    """Address of a mirror. With a mirror, a pipeline downloads the model before it starts. Empty: the address in the
    environment variable HF_ENDPOINT, or huggingface.co."""
    token_variable: str = Field("", json_schema_extra=PLACEMENT | SENDS_SECRET | {"sent_to": "url"})
    """Environment variable with the token for gated models and datasets. Empty: HF_TOKEN, or the token of `hf auth
    login`."""
