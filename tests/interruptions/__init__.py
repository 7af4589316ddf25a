"""Runs that are killed, stopped and out of disk again and again, and long runs: whether they leave anything behind."""
