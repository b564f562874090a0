"""Models in training: the Protocol of the loops, and its implementations for PyTorch, several GPUs and JAX."""
