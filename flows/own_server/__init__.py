"""The Prefect server of each store: started by the first command that needs a server, stopped after the last one.

A project that uses only a team's server (PREFECT_API_URL) could delete this folder.
"""
