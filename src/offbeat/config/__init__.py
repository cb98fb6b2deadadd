"""From words to values: options by signature, TOML, names of one's own. Standard library only; looked at first."""
