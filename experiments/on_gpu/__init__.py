"""The parts of `python -m experiments.gpu` that no other command has, and its page."""
