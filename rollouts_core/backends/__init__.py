"""Models in training: the `TrainingBackend` Protocol, and backends for PyTorch, several GPUs (FSDP2) and JAX."""
