"""Copies of directories between machines: verified, resumed after a broken connection, and swapped in as a whole."""
