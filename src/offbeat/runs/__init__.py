"""What remains of a run: its account, its directory, its tables and pictures."""
