"""Batch normalisation fused with what follows it, forward and backward, in as few passes over memory as can be."""

from mixedres.fused.normalization import How, Statistics
from mixedres.fused.norms import norm_add_relu, norm_relu, norm_relu_pool, norms_add_relu

__all__ = ["How", "Statistics", "norm_add_relu", "norm_relu", "norm_relu_pool", "norms_add_relu"]
