"""The Prefect server of each store. It starts when a command needs it, and stops when no process uses it.

A project that uses only a team's server (PREFECT_API_URL) could delete this folder.
"""
