"""A trained network for other programs: as a file that runs with JAX alone, or as weights of another library."""
