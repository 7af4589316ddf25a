"""The parts of `experiments.float8`."""
