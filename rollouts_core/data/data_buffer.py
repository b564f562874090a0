"""Draw RL prompts epoch by epoch in a seeded order, with a cursor that checkpoints save."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from typing import TypedDict

from rollouts_core.errors import DataError
from rollouts_core.types import Prompt


class DataBufferState(TypedDict):
    """The saved cursor of a `DataBuffer`."""

    epoch_id: int
    sample_offset: int
    num_drawn: int
    seed: int
    prompts_digest: str


class DataBuffer:
    """Draws prompts. Each epoch draws every prompt once, in a seeded order.

    Raises:
        DataError: there are no prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0) -> None:
        if not prompts:
            raise DataError("a DataBuffer needs at least one prompt")
        self.prompts = list(prompts)
        self.seed = seed
        self.epoch_id = 0
        """Number of finished epochs."""
        self.sample_offset = 0
        """Number of prompts drawn in this epoch."""
        self.num_drawn = 0
        """Number of prompts drawn since the start. This number is also the index of the next group."""
        self._order = self._shuffled(0)
        self._other_order: dict[int, list[int]] = {}
        """Order of the prompts in one epoch besides the current epoch, by epoch number.

        Usually this is the previous epoch, because some of its groups may be unfinished."""
        self._digest = _digest_prompts(self.prompts)

    def get_prompts(self, n: int) -> list[Prompt]:
        """Draw the next `n` prompts. Each new epoch has a new order."""
        drawn: list[Prompt] = []
        for _ in range(n):
            if self.sample_offset == len(self.prompts):
                self.epoch_id += 1
                self.sample_offset = 0
                self._order = self._shuffled(self.epoch_id)
            drawn.append(self.prompts[self._order[self.sample_offset]])
            self.sample_offset += 1
        self.num_drawn += n
        return drawn

    def prompt_of(self, draw: int) -> Prompt:
        """The prompt of draw number `draw`, counted from the start of the run. Past and future draws are possible."""
        epoch_id, place = divmod(draw, len(self.prompts))
        if epoch_id == self.epoch_id:
            return self.prompts[self._order[place]]
        if epoch_id not in self._other_order:
            self._other_order = {epoch_id: self._shuffled(epoch_id)}
        return self.prompts[self._other_order[epoch_id][place]]

    def state_dict(self) -> DataBufferState:
        """The cursor, as JSON values."""
        return DataBufferState(
            epoch_id=self.epoch_id,
            sample_offset=self.sample_offset,
            num_drawn=self.num_drawn,
            seed=self.seed,
            prompts_digest=self._digest,
        )

    def load_state_dict(self, state: DataBufferState) -> None:
        """Restore a saved cursor.

        Raises:
            DataError: the cursor was saved with other prompts or another seed.
        """
        saved = state["prompts_digest"]
        if saved != self._digest and saved != _digest_without_metadata(self.prompts):
            raise DataError(
                "the prompts changed since the checkpoint was written, so its position in the prompts is meaningless: "
                "restore the file, or start a new run"
            )
        if state["seed"] != self.seed:
            raise DataError(
                f"the checkpoint was written with seed {state['seed']}, but now the seed is {self.seed}: restore the "
                "seed, or start a new run"
            )
        self.epoch_id = state["epoch_id"]
        self.sample_offset = state["sample_offset"]
        self.num_drawn = state["num_drawn"]
        self._order = self._shuffled(self.epoch_id)

    def _shuffled(self, epoch_id: int) -> list[int]:
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}-{epoch_id}").shuffle(order)
        return order


def _digest_prompts(prompts: Sequence[Prompt]) -> str:
    """Digest of the prompts, including all fields that rewards may read."""
    total = hashlib.sha256()
    for prompt in prompts:
        content = [prompt.id, prompt.messages, prompt.answer, dict(prompt.metadata)]
        total.update(json.dumps(content, sort_keys=True, default=str).encode())
    return total.hexdigest()


def _digest_without_metadata(prompts: Sequence[Prompt]) -> str:
    """Digest of the prompts as older versions saved it, so that training can resume from their checkpoints."""
    total = hashlib.sha256()
    for prompt in prompts:
        total.update(json.dumps([prompt.id, prompt.messages, prompt.answer]).encode())
    return total.hexdigest()
