"""Prefect tasks, one per stage. Each task builds inputs, calls infra or rollouts_core once, and returns a record."""
