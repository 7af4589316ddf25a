"""A trained network as one file that runs with JAX alone."""
