"""What is optimized: advantages, losses, corrections for mismatch, and the algorithms of other systems by name."""
