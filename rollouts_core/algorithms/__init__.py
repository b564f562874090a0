"""The mathematics of training: advantages, losses, corrections for mismatch, presets of other systems' algorithms."""
