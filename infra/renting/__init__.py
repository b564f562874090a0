"""Renting machines: search, creation, checks, release, and the cleanup of forgotten machines."""
