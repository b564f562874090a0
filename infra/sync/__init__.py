"""Copy directories between machines. Copied files are verified and appear all at once. A broken copy is continued."""
