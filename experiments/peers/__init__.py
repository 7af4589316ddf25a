"""The same passes over a batch by several hands, for `experiments.versus`: ours, the Flax example's, PyTorch's."""
