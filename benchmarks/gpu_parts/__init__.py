"""The parts of gpu_check.py, each a list of checks that runs in a process of its own."""
