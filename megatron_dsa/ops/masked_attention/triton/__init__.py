"""Key bits and tiles of masked dense attention in Triton."""
