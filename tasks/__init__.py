"""Prefect tasks, one per stage: each builds inputs, makes one call into infra or rollouts_core, returns a record."""
