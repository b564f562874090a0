"""A machine that is reached over SSH: connections, keys, tunnels, and the session that runs commands there."""
