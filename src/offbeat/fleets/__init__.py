"""Who takes part: how fast, over which links, and when they are there."""
