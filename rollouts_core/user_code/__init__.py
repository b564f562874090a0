"""Code of the user that settings name: how it is found, which files it is, and what is said when it raises."""
