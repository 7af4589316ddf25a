"""Half-precision training of ResNets in JAX/Flax.

The parts that other programs import stand alone: ``mixedres.precision`` (presets, loss scales, the optax
wrapper) needs neither flax nor the trainer.
"""

__version__ = "0.1.0"
