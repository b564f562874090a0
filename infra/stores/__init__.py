"""Object stores: list, download and publish objects, also directly from a node without credentials."""
