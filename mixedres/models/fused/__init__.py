"""Batch normalization fused with the ops that follow it in a ResNet, to save passes over memory."""

from mixedres.models.fused.norms import norm_add_relu, norm_relu, norm_relu_pool, norms_add_relu
from mixedres.models.fused.statistics import NormConfig, Statistics

__all__ = ["NormConfig", "Statistics", "norm_add_relu", "norm_relu", "norm_relu_pool", "norms_add_relu"]
