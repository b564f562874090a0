"""Doing what a job.json says: one module per kind of job, and what they have in common."""
