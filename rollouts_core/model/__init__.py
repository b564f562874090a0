"""The policy model: loading a language model, log-probs without storing all logits, attention kernels, LoRA
adapters."""
