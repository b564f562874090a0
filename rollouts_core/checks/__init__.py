"""Checks of a run before it trains or rents a machine: settings, models, data, memory and disk."""
