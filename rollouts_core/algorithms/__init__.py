"""The mathematics of training: advantages, losses, corrections for engine-trainer mismatch, and algorithm presets."""
