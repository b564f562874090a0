"""Copies of directories between machines: verified, going on where they broke off, visible as a whole."""
