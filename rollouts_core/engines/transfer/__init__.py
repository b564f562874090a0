"""Bring weights to inference engines: versions, ways of transfer, verification."""
