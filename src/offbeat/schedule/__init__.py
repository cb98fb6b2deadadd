"""When: policies without I/O, the virtual clock that drives them, the trace that records them. No arrays here."""
