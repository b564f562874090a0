"""The names of the flows in Prefect.

Not here: the flows (pipeline.py, short_form_flow.py, retrain.py, evaluate.py).
"""

from __future__ import annotations

FLOW = "sft-rl"
RETRAIN_FLOW = "retrain"
EVALUATE_FLOW = "evaluate"
SHORT_FORM = "short form of sft-rl"
"""Key of the flow function for the short form. In Prefect, this function's flow is also named FLOW."""
