"""SSH: connections, keys, jump hosts, tunnels, and the session of a machine that is reached over SSH."""
