"""Code for vLLM's own environment: launch.py lets vLLM import it from this folder by its module name alone."""
