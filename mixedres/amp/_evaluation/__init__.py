"""Evaluation of a colored program: values and casts, loops and branches, custom derivatives."""
