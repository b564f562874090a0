"""Rented machines, from the search for one until its provider has it no more."""
