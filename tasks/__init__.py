"""Prefect tasks, one per stage. Each builds inputs, makes one call into infra or rollouts_core, and returns a record."""
