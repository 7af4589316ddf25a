"""Half-precision training of ResNets in JAX/Flax.

``mixedres.autocast``, ``mixedres.precision`` (presets, loss scales, the optax wrapper) and ``mixedres.numerics`` stand
alone: they need neither flax nor the trainer.
"""

__version__ = "0.1.0"
