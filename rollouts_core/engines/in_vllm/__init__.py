"""What runs inside vLLM's own environment: launch.py has vLLM import it from this folder, by its name alone."""
