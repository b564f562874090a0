"""Object stores: list, download and publish objects. A node can also transfer objects without credentials."""
