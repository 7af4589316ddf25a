"""What float8 costs: gradients and training beside bfloat16, and the kernels that XLA compiles for a GPU."""
