"""Code of the user that settings name: how it is found, which files belong to it, and how its errors are described."""
