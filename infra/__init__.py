"""Machines: nodes, sessions, supervised jobs, engine servers, file sync, object stores, rentals, and the ledger.

    settings --provision--> Node --open_session--> Session --start_or_attach--> job in its run directory

Secrets reach jobs only through standard input and are never written to disk. Not here: Prefect (tasks, flows) and
training (rollouts_core).
"""
