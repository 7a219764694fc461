"""Array frameworks: where their arrays lie in memory, how arrays are made over given memory, and torch's operators."""
