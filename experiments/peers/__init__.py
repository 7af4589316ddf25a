"""The same training step by several hands, for `experiments.versus`: ours, the Flax example's, PyTorch's."""
