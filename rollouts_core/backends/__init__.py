"""Training backends: the interface `TrainingBackend`, and its implementations in PyTorch, FSDP2 and JAX."""
