"""What half precision would do to a network, and what to do about it."""
