"""SSH: connections, login and host keys, jump hosts, tunnels, and the session of a machine reached over SSH."""
