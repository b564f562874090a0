"""Checks before anything is trained or rented: settings, models, data, memory and disk."""
