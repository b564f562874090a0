"""Attacks on this project, each of them tried: a row of the threats that docs name, and a test that it does no harm."""
