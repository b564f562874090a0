"""One thin Prefect task per stage: build inputs, one call into infra or rollouts_core, return a small record."""
