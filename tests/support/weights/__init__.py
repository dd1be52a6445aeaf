"""Files of weights, who writes them, and where they are read from."""
