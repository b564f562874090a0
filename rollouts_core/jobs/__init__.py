"""Execute the job of a stage, which job.json describes. One module per kind of job, and code that kinds share."""
