"""The subcommands of `rollouts`, and parts that several of them use (terminal.py). `cli.py` lists all commands."""
