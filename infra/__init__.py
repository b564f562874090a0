"""Machines: nodes, sessions, supervised jobs, engine servers, file sync, object stores, rentals, and the ledger.

Not here: Prefect (tasks, flows) and training (rollouts_core). Secrets reach jobs through standard input only and are
never written to disk.

    settings --provision--> Node --open_session--> Session --start_or_attach--> job in its run directory
"""
