"""Find and import the user's own code that settings name, list its files, and describe its errors."""
