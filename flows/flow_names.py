"""The names of the flows in Prefect.

Not here: the flows (pipeline.py, retrain.py, evaluate.py).
"""

from __future__ import annotations

FLOW = "sft-rl"
RETRAIN_FLOW = "retrain"
EVALUATE_FLOW = "evaluate"
