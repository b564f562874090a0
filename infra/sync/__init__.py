"""Copy directories between machines. Copies are verified, are continued after a broken connection, and appear all at
once."""
