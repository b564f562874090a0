"""General helpers for processes, files, time limits, GPUs and HTTP."""
