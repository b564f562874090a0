"""Which machine a run asks for: what its settings say, without GPUs that could not hold the training.

Not here: renting (infra/renting/provision.py), what training takes (rollouts_core/checks/resource_needs.py).
"""

from __future__ import annotations

import logging
from typing import TypeVar

from pydantic import BaseModel

from rollouts.infra.node import RentedNode
from rollouts_core.checks.resource_needs import least_memory_bytes
from rollouts_core.config import Config
from rollouts_core.model.model_size import ModelSize, find_model_size

logger = logging.getLogger(__name__)

NodeT = TypeVar("NodeT", bound=BaseModel)
GIB = 1 << 30
"""Providers say GB of a GPU's memory, and mean this."""
SMALLEST_GPU_GB = 8.0
"""No GPU that is rented out has less; a query that needs no more is left as it is."""


def with_enough_memory(node: NodeT, config: Config, size: ModelSize | None = None) -> NodeT:
    """The node's settings; of a node to rent with as much memory for each GPU as the training takes at least.

    Args:
        size: that of the model, if it is known already.
    """
    if not isinstance(node, RentedNode):
        return node
    if size is None:
        size = find_model_size(config.model)
        if size.problem:
            logger.warning("%s", size.describe_problem(config.model.path))
    needed_gb = least_memory_bytes(config, size, num_machines=node.num_trainer_nodes) / GIB
    if needed_gb <= max(node.query.min_vram_gb, SMALLEST_GPU_GB):
        return node
    query = node.query.model_copy(update={"min_vram_gb": round(needed_gb, 1)})
    return node.model_copy(update={"query": query})
