"""Computes a colored program: its values and casts, its loops and branches, its custom derivatives."""
