"""The policy: loading a language model, log-probs without full logits, adapters."""
