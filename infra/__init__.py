"""Machines: nodes, sessions, detached jobs, engine servers, copies of directories, and who still wants what.

Not here: Prefect (tasks, flows) and training (rollouts_core). Secrets only pass
through, by standard input.

    settings --provision--> Node --open_session--> Session --start_or_attach--> job in its run directory
"""
