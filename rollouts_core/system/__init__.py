"""What any program needs of its process and its machine: whole files, waiting, limits of time, GPUs, HTTP."""
