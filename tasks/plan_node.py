"""Add the GPU memory that a training needs to the query for a rented machine, so that smaller GPUs are not offered.

Not here: renting (infra/renting/provision.py), estimating the memory (rollouts_core/checks/resource_needs.py).
"""

from __future__ import annotations

import logging
from typing import TypeVar

from pydantic import BaseModel

from rollouts.infra.node import RentedNode
from rollouts.tasks.gpu_placement import has_open_placement
from rollouts_core.checks.placement_plan import with_placement
from rollouts_core.checks.resource_needs import least_memory_bytes
from rollouts_core.config import Config
from rollouts_core.model.model_size import ModelSize, find_model_size

logger = logging.getLogger(__name__)

NodeT = TypeVar("NodeT", bound=BaseModel)
GIB = 1 << 30
"""Bytes in one GiB. Providers state the memory of a GPU in GiB, although they write GB."""
SMALLEST_GPU_GB = 8.0
"""Every rented GPU has at least this memory, so a training that needs less does not change the query."""


def with_enough_memory(node: NodeT, config: Config, size: ModelSize | None = None) -> NodeT:
    """Raise `query.min_vram_gb` of a rented machine to the GPU memory that the training needs.

    Returns the changed settings, or the given settings if nothing has to change.

    Args:
        size: the size of the model; None reads the size from the model's files.
    """
    if not isinstance(node, RentedNode):
        return node
    if size is None:
        size = find_model_size(config.model)
        if size.problem:
            logger.warning("%s", size.describe_problem(config.model.path))
    if has_open_placement(config, node):  # a plan may later divide both the training and the engine over all GPUs
        ranks = tuple(range(node.query.gpu_count))
        config = with_placement(config, {"trainer_gpu_ranks": ranks, "engine_gpu_ranks": ranks})
    needed_gb = least_memory_bytes(config, size, num_machines=node.num_trainer_nodes) / GIB
    if needed_gb <= max(node.query.min_vram_gb, SMALLEST_GPU_GB):
        return node
    query = node.query.model_copy(update={"min_vram_gb": round(needed_gb, 1)})
    return node.model_copy(update={"query": query})
