"""Batch normalization fused with what follows it, forward and backward, in as few passes over memory as can be."""

from mixedres.models.fused.norms import norm_add_relu, norm_relu, norm_relu_pool, norms_add_relu
from mixedres.models.fused.statistics import NormConfig, Statistics

__all__ = ["NormConfig", "Statistics", "norm_add_relu", "norm_relu", "norm_relu_pool", "norms_add_relu"]
