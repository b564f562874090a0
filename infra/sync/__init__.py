"""Copy directories between machines. Copied files are verified and appear all at once. The next copy continues a broken
copy."""
