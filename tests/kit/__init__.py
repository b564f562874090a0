"""Helpers that tests of several packages use.

commands        the `rollouts` command over a store, in a process of its own
runs            interrupted runs: wait for an event, kill or pause a process, read a run directory
serving         the serving process of a store, and its Prefect server
small_pipeline  the configuration and data of a pipeline that takes seconds
ssh_nodes       nodes behind a real SSH server of this machine
renting         a fake provider with an account and a ledger
nvidia_smi      a program that answers like nvidia-smi
chromium        a browser
mounts          file systems of a given size
processes       children that end with the test
threads         threads that a test left
waiting         wait until something is observed
excuses         skips that continuous integration accepts
reports         failures whose text is not valid Unicode
"""
