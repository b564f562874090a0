"""Code for vLLM's own environment. vLLM imports the modules by name: launch.py puts this folder on its path."""
