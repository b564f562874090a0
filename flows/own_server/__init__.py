"""The Prefect server of each store: started when a command needs it, ended when nothing uses it.

Everything here works around a property of Prefect's server or of a machine with one user. A project that only uses a
team's server could delete this folder.
"""
