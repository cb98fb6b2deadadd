"""Live: the same method over a real network. A server conducts clients that keep their data to themselves."""
