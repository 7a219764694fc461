"""One file for each array framework: where its arrays lie in memory, and how its arrays are made over given memory."""
