"""Names of networks, and what they stand for. Importing this imports neither JAX nor Flax."""

import re
from collections.abc import Mapping

from mixedres._internal.registry import NETWORKS as NETWORKS

# size: (whether it has bottlenecks, blocks per stage); arXiv 1512.03385, table 1, 1603.05027 for 200, and timm for 26.
_IMAGENET_SIZES = {
    14: (True, (1, 1, 1, 1)),
    18: (False, (2, 2, 2, 2)),
    26: (True, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
    200: (True, (3, 24, 36, 3)),
}
_IMAGENET_VERSIONS: tuple[str, ...] = ("1", "1.5", "2")
_CIFAR_VERSIONS: tuple[str, ...] = ("1", "2")
PADDINGS = ("pytorch", "tensorflow")
# Options of a network that its weights do not reveal: {name: values, the default first}.
OPTIONS = {"padding": PADDINGS, "pool_padding": PADDINGS, "projection": ("shape", "stage")}
# Names of the ResNets; n is any number > 0.
NAMES = (*(f"resnet{size}" for size in _IMAGENET_SIZES), "cifar_resnet{6n+2}")


def check_options(options: Mapping[str, str]) -> None:
    """Raises ValueError unless all `options` are in `OPTIONS`, with one of their values."""
    for name, value in options.items():
        if name not in OPTIONS:
            raise ValueError(f"option {name!r} is unknown; use {', '.join(OPTIONS)}")
        if value not in OPTIONS[name]:
            raise ValueError(f"{name} {value!r} is unknown; use {' or '.join(OPTIONS[name])}")


def default_version(name: str) -> str:
    """Returns the version of a network whose config names none."""
    return "1" if name.startswith("cifar_") else "1.5"


def name_of(bottleneck: bool, stage_sizes: tuple[int, ...]) -> str | None:
    """Returns the name of the ResNet with these blocks, or None."""
    for size, network in _IMAGENET_SIZES.items():
        if network == (bottleneck, stage_sizes):
            return f"resnet{size}"
    if not bottleneck and len(stage_sizes) == 3 and len(set(stage_sizes)) == 1:
        return f"cifar_resnet{6 * stage_sizes[0] + 2}"
    return None


def resnet_shape(name: str, version: str | None) -> tuple[bool, tuple[int, ...], str, bool]:
    """Returns whether blocks are bottlenecks, blocks per stage, version, and whether images are small.

    Raises:
      ValueError: for an unknown name, size or version; the message names valid ones.
    """
    match = re.fullmatch(r"(cifar_)?resnet([0-9]{1,4})", name)
    if match is None:
        raise ValueError(f"model {name!r} is unknown; use one of {', '.join((*NAMES, *NETWORKS))}")
    size, small_images = int(match[2]), match[1] is not None
    stage_sizes: tuple[int, ...]
    if small_images:
        blocks, rest = divmod(size - 2, 6)
        if rest or blocks < 1:
            below = max(1, blocks) * 6 + 2
            raise ValueError(f"model {name!r}: the size must be 6n+2; the nearest are {below} and {below + 6}")
        bottleneck, stage_sizes = False, (blocks,) * 3
    elif size in _IMAGENET_SIZES:
        bottleneck, stage_sizes = _IMAGENET_SIZES[size]
    else:
        sizes = ", ".join(str(size) for size in _IMAGENET_SIZES)
        raise ValueError(f"model {name!r}: the size must be one of {sizes}")
    versions = _CIFAR_VERSIONS if small_images else _IMAGENET_VERSIONS
    version = str(version or default_version(name))
    if version not in versions:
        raise ValueError(f"model {name!r} has the versions {', '.join(versions)}, not {version!r}")
    return bottleneck, stage_sizes, version, small_images
