"""One experiment: its config, the objects that it names, and run, resume and replay."""
