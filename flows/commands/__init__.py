"""Commands of `rollouts` that have their own files, and common parts of commands (terminal.py). `cli.py` lists them
all."""
