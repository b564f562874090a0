"""Commands of `rollouts` with a file of their own, and their common parts (terminal.py). `cli.py` lists them all."""
