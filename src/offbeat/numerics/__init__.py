"""What: flat vectors, local steps, waves of clients, server optimisers. No time here."""
