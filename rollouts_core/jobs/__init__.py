"""The stages as processes: what job.json says, one module per kind of job, and what they leave."""
