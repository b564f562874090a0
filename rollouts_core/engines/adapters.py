"""Decide whether adapters reach the engines as adapters, and hold the published weights that the adapters belong to.

Not here: publishing (weight_sync.py), an engine's answer about itself (sglang.py, vllm.py).

    "beside"   adapters are tensors of the published version, beside the weights, which go once     the embedded engine
    ""         adapters are merged into the weights, which go each time                             all engines
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, runtime_checkable

from rollouts_core.system.concurrency import gather

logger = logging.getLogger(__name__)

AdapterForm = Literal["", "beside"]
"""How an engine takes adapters; empty if it takes merged weights alone."""


@runtime_checkable
class TakesAdapters(Protocol):
    """An engine that may take adapters as such."""

    async def adapter_form(self, rank: int) -> AdapterForm:
        """How its server takes adapters of this rank; empty if it cannot, or is away."""
        ...


async def common_form(engines: Sequence[object], rank: int) -> AdapterForm:
    """The form in which all engines take adapters of this rank; empty if one takes none, or they differ."""
    known = [engine for engine in engines if isinstance(engine, TakesAdapters)]
    forms = set(await gather([partial(engine.adapter_form, rank) for engine in known]))
    return forms.pop() if len(forms) == 1 and len(known) == len(engines) else ""


@dataclass(slots=True, kw_only=True)
class PublishedBase:
    """Where the weights lie that the published adapters belong to."""

    place: object = None
    """Equal for publications that can share them; None if they are to be published with the next adapters."""
    form: AdapterForm | None = None
    """The form of the last publication of adapters; None before the first."""

    def note_form(self, form: AdapterForm, *, num_bytes: int) -> None:
        """Write into the log how adapters go, once and after each change."""
        if form == self.form:
            return
        self.form = form
        if form:
            logger.info("adapters are sent as adapters: %.3g MB in each publication", num_bytes / 1e6)
        else:
            logger.info("adapters are merged into the weights for the engines, which take no adapters")
