"""The parts of `python -m experiments.gpu` that no other experiment has, each a program of its own."""
