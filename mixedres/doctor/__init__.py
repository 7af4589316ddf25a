"""Examination of what half precision does to a network, with recommended settings."""
