"""Half-precision training of ResNets in JAX/Flax, and precision tools for any JAX program.

`mixedres.amp`, `mixedres.precision` (presets, loss scales, the optax wrapper) and `mixedres.numerics` need neither flax
nor the trainer. Importing this package imports nothing heavy: each name is imported when it is first used.
"""

from typing import TYPE_CHECKING

# The rooms around the core register what they add to it. A room that is deleted leaves this line as well.
from mixedres import original as original
from mixedres import other_libraries as other_libraries
from mixedres import photographs as photographs
from mixedres import trackers as trackers
from mixedres._internal.lazy import importer
from mixedres._internal.names import __version__ as __version__

if TYPE_CHECKING:
    from mixedres import amp, config, data, models, numerics, precision, train
    from mixedres._internal import registry
    from mixedres._internal.errors import ConfigError, MixedresError
    from mixedres.amp import autocast, explain
    from mixedres.run import Run, fit, load

__all__ = [
    "ConfigError",
    "MixedresError",
    "Run",
    "amp",
    "autocast",
    "config",
    "data",
    "explain",
    "fit",
    "load",
    "models",
    "numerics",
    "precision",
    "registry",
    "train",
]

__getattr__ = importer(__name__)
