"""Execute a job.json: one module per kind of job, and code shared by several kinds."""
