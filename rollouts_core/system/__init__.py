"""Helpers for processes, files, time limits, GPUs and HTTP that do not depend on training."""
