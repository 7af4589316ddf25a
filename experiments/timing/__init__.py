"""What `experiments.benchmark` is made of: programs that take turns, other libraries, what loss scaling costs."""
