"""Object stores: what lies there, fetching and publishing it, also from a node without credentials."""
