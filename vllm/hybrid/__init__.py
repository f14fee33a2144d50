"""What makes the engine hybrid: kinds of layers, groups of them, and what is reported of them."""
