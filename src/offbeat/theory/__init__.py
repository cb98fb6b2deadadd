"""What can be measured of a problem, and what the papers' theorems make of it."""
