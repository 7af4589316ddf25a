"""Version, names and ranges for command lines: --help then waits neither for JAX nor for a missing package."""

import dataclasses
import math
from collections.abc import Callable, Container
from typing import Any, NamedTuple

# pyproject.toml and CITATION.cff repeat the version.
__version__ = "0.3.0"


class Preset(NamedTuple):
    """A named precision."""

    compute_dtype: str  # of the products; parameters and logits are float32
    loss_scale: str | float  # 'none', 'dynamic' or a number
    implementation: str  # 'casting' (the layers cast) or 'graph_rewrite' (`mixedres.amp.autocast`)
    matmul_precision: str  # of float32 products: 'highest', 'tensorfloat32' (10-bit mantissa) or 'default'


PRESETS = {
    "fp32": Preset("float32", "none", "casting", "highest"),
    "tf32": Preset("float32", "none", "casting", "tensorfloat32"),
    "bf16": Preset("bfloat16", "none", "casting", "default"),
    "fp16": Preset("float16", "dynamic", "casting", "default"),
    # 128 is the default of TensorFlow's official ResNet for float16.
    "fp16_static": Preset("float16", 128.0, "casting", "default"),
    "fp16_rewrite": Preset("float16", "dynamic", "graph_rewrite", "default"),
    "bf16_rewrite": Preset("bfloat16", "none", "graph_rewrite", "default"),
}
_MEANT = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def unknown_preset(name: object) -> str:
    """Returns the message about a name that is no preset: "precision 'float16' is unknown; did you mean fp16? ..."."""
    lower = str(name).lower()
    meant = _MEANT.get(lower, lower)
    hint = f"did you mean {meant}? " if meant in PRESETS else ""
    return f"precision {name!r} is unknown; {hint}use one of {', '.join(PRESETS)}"


# Levels of `autocast`: all lists; only products in half; operations of the infer list in float32.
LEVELS = ("default", "allow_only", "infer_as_deny")
# Layouts of `mixedres.checkpoints`: names of a network's tensors.
LAYOUTS = ("mixedres", "torchvision", "transformers")
# Augmentations of training images in `mixedres.data`.
AUGMENTATIONS = ("none", "trivial")
# Implementations of a precision, and precisions of float32 products, as of `Preset`.
IMPLEMENTATIONS = ("casting", "graph_rewrite")
MATMUL_PRECISIONS = ("default", "tensorfloat32", "highest")
# Initializers in `mixedres.models`.
INITIALIZERS = ("he_normal", "he_normal_fan_out", "lecun_normal", "normal_0.01", "glorot_uniform")
# Optimizers in `mixedres.train`, with the options that each takes beside those of all.
OPTIMIZERS = {
    "sgd": ("momentum", "nesterov", "rate_in_momentum"),
    "lars": ("momentum", "nesterov", "trust_coefficient"),
    "adamw": ("momentum", "beta2", "epsilon"),
    "muon": ("momentum", "nesterov", "beta2", "epsilon"),
}
# Learning-rate schedules in `mixedres.train`.
SCHEDULES = ("constant", "cosine", "piecewise", "polynomial")
# Longest name of a class, in characters.
LONGEST_NAME = 1000
# Largest height and width of a network's input, in pixels: more is a mistake or an attack.
MOST_SIDE = 8192
# The flags of one of many processes.
PROCESS_FLAGS = "--coordinator=HOST:PORT --num_processes=N --process_id=I"


@dataclasses.dataclass(frozen=True)
class Range:
    """Allowed values of a key: a test, a description, and the values themselves if they are a few words."""

    allows: Callable[[Any], bool]
    description: str
    values: tuple[str, ...] = ()


def one_of(*values: str, or_of: Container[str] = ()) -> Range:
    """Returns the range of a few words, and of names that users register in `or_of`."""
    registered = ", or a registered one (--import=FILE)" if or_of != () else ""
    return Range(lambda x: x in values or x in or_of, " or ".join(values) + registered, values)


ANY = Range(lambda x: True, "anything")
# Numbers end up in int32 or float32, where 1e300 would be infinite.
SIDE = Range(lambda x: 0 < x <= MOST_SIDE, f"> 0 and <= {MOST_SIDE}")
POSITIVE = Range(lambda x: 0 < x < 2**31, "> 0 and < 2**31")
NOT_NEGATIVE = Range(lambda x: 0 <= x < 2**31, ">= 0 and < 2**31")
GROWING = Range(lambda x: math.isfinite(x) and x > 1, "> 1")
FRACTION = Range(lambda x: 0 <= x < 1, "in [0, 1)")
UNIT = Range(lambda x: 0 <= x <= 1, "in [0, 1]")
REACHABLE = Range(lambda x: 0 < x <= 1, "in (0, 1]")
