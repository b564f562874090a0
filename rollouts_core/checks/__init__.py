"""What can be known before anything is trained or rented: settings, models, data, memory and disk."""
