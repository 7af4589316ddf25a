"""Names and axes of a ResNet's tensors in other libraries: torchvision 0.20, timm 1.0 and transformers 5.23.

'torchvision' and 'transformers' store convolutions as (out, in, height, width) and dense kernels as (out, in), flax as
(height, width, in, out) and (in, out). In 'mixedres', the path of a leaf in flax is the name.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

import numpy as np

from mixedres._internal.errors import MismatchError, listed
from mixedres._internal.names import LAYOUTS
from mixedres._internal.tree import named_leaves
from mixedres._internal.types import Array, PyTree, Variables

_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
# PyTorch's number of batches that a batch norm has seen; PyTorch reads the number only if the momentum is None.
COUNTER = "num_batches_tracked"
_STEMS = {
    "torchvision": {"stem_conv": "conv1", "stem_norm": "bn1", "head": "fc"},
    "transformers": {
        "stem_conv": "resnet.embedder.embedder.convolution",
        "stem_norm": "resnet.embedder.embedder.normalization",
        "head": "classifier.1",
    },
}
# Names of the convolutions of blocks, with stage, block and number; transformers counts stages and numbers from 0.
_CONVOLUTIONS = {
    "torchvision": r"layer(\d{1,4})\.(\d{1,4})\.conv(\d)\.weight",
    "transformers": r"resnet\.encoder\.stages\.(\d{1,4})\.layers\.(\d{1,4})\.layer\.(\d)\.convolution\.weight",
    "mixedres": r"params/block_layer(\d{1,4})_(\d{1,4})/conv(\d)/kernel",
}
# Names of the tensors of a ResNet, with those of the head.
_OWN = {
    "torchvision": r"(conv1|bn1|fc)\.\w+|layer\d.*",
    "transformers": r"resnet\..*|classifier\.1\.\w+",
    "mixedres": r".*",
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Architecture of a ResNet, by the names and shapes of its tensors.

    Attributes:
      bottleneck: blocks have three convolutions instead of two.
      stage_sizes: number of blocks of each stage.
      num_classes: outputs of the head; 0 without a head.
      channels: channels of the input images.
    """

    bottleneck: bool
    stage_sizes: tuple[int, ...]
    num_classes: int
    channels: int


def layout_of(names: Iterable[str]) -> str | None:
    """Returns the layout in which tensors have these names, or None."""
    names = list(names)
    fits = (layout for layout, pattern in _CONVOLUTIONS.items() if any(re.fullmatch(pattern, name) for name in names))
    return next(fits, None)


def architecture(tensors: Mapping[str, np.ndarray], layout: str) -> Architecture | None:
    """Returns the architecture of these tensors; None if the stem or whole stages are missing, or it is no ResNet."""
    first = int(layout != "transformers")
    blocks: dict[int, set[int]] = {}
    convolutions = set()
    for match in filter(None, map(re.compile(_CONVOLUTIONS[layout]).fullmatch, tensors)):
        stage, block, convolution = map(int, match.groups())
        blocks.setdefault(stage, set()).add(block)
        convolutions.add(convolution)
    bias = tensors.get(_head(layout)[1])
    stem = tensors.get(_name(("params", "stem_conv", "kernel"), layout))
    if stem is None or stem.ndim != 4 or sorted(blocks) != list(range(first, first + len(blocks))):
        return None
    if bias is not None and bias.ndim != 1:
        return None
    stage_sizes = tuple(len(blocks[stage]) for stage in sorted(blocks))
    channels = stem.shape[2 if layout == "mixedres" else 1]
    return Architecture(len(convolutions) == 3, stage_sizes, 0 if bias is None else bias.shape[0], channels)


def beside(names: Iterable[str], layout: str) -> list[str]:
    """Returns the names of tensors that are no part of a ResNet of a layout, sorted."""
    return sorted(name for name in names if not re.fullmatch(_OWN[layout], name))


def with_head(tensors: Mapping[str, np.ndarray], layout: str) -> tuple[dict[str, np.ndarray], str]:
    """Returns the tensors with the names of the layout's head, and the module that was the head, or ''.

    The head is the only module beside the network's own, if it is dense: scripts for fine-tuning name it as they like,
    such as fc.1 after a dropout. A head without a bias gets zeros.
    """
    kernel, bias = _head(layout)
    modules = {name.rpartition(".")[0] for name in beside(tensors, layout)}
    module = modules.pop() if len(modules) == 1 and kernel not in tensors and layout != "mixedres" else ""
    old = (f"{module}.weight", f"{module}.bias") if module else (kernel, bias)
    weight = tensors.get(old[0])
    if weight is None or weight.ndim != 2 or not set(beside(tensors, layout)) <= set(old):
        return dict(tensors), ""
    classes = weight.shape[layout == "mixedres"]
    rest = {name: value for name, value in tensors.items() if name not in old}
    return rest | {kernel: weight, bias: tensors.get(old[1], np.zeros(classes, weight.dtype))}, module


def to_tensors(variables: Variables, layout: str, batches: int | None = None) -> dict[str, np.ndarray]:
    """Returns the variables of a network under the names of a layout and, but for 'mixedres', with PyTorch's axes.

    `batches`: value of PyTorch's counter of batches in every batch norm; None, or the layout 'mixedres': no counters.
    Raises ValueError for an unknown layout, and for a network that the layout does not have.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is unknown; use {' or '.join(LAYOUTS)}")
    own = layout == "mixedres"
    _check_layout(variables, layout)
    tensors = {}
    for path, leaf in _leaves(variables):
        tensors[_name(path, layout)] = np.asarray(leaf) if own else _to_torch_axes(np.asarray(leaf))
        if path[-1] == "mean" and batches is not None and not own:
            tensors[f"{_module(path[1:-1], layout)}.{COUNTER}"] = np.array(batches, np.int64)
    return tensors


def from_tensors(tensors: Mapping[str, np.ndarray], like: Variables, layout: str) -> tuple[Variables, bool]:
    """Returns the variables of a network, numpy arrays, from tensors of a layout, and whether they have a head.

    `like`: {'params', 'batch_stats'} of the network, whose leaves have shapes and dtypes. The head may be missing from
    the tensors, and a head with another number of classes is left out. Raises MismatchError for tensors that are
    missing, left over, or of another shape; ValueError for a network that the layout does not have.
    """
    _check_layout(like, layout)
    own = layout == "mixedres"
    wanted = {_name(path, layout): (path, leaf) for path, leaf in _leaves(like)}
    shapes = {name: leaf.shape if own else _to_torch_shape(leaf.shape) for name, (_, leaf) in wanted.items()}
    is_whole = "head" not in like["params"] or bool(tensors.keys() & set(_head(layout)))
    has_head = is_whole and not _has_other_classes(tensors, shapes, layout)
    if not has_head:
        for name in _head(layout):
            wanted.pop(name)
    _check(tensors, {name: shapes[name] for name in wanted}, ignored=() if has_head else _head(layout))
    variables: Variables = {}
    for name, (path, leaf) in wanted.items():
        inner = variables
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        value = tensors[name] if own else from_torch_axes(tensors[name])
        inner[path[-1]] = np.ascontiguousarray(value).astype(leaf.dtype)
    return variables, has_head


def batches_of(tensors: Mapping[str, np.ndarray]) -> int | None:
    """Returns the value of PyTorch's counters of batches; None if there are no counters or the values differ."""
    counts = {int(value.item()) for name, value in tensors.items() if name.endswith(COUNTER) and value.size == 1}
    return counts.pop() if len(counts) == 1 else None


def _check_layout(variables: Variables, layout: str) -> None:
    """Raises ValueError if the layout is another library's, and the library has no such network."""
    if layout == "mixedres":
        return
    if not {"stem_conv", "head"} <= variables["params"].keys():
        raise ValueError(f"the layout of {layout} has ResNets only, and this network is none; write --layout=mixedres")
    if "final_norm" in variables["params"]:
        raise ValueError(f"the layout of {layout} has no ResNet of version 2, only 1 and 1.5")


def _has_other_classes(tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], layout: str) -> bool:
    """Returns whether the head in `tensors` differs from the network's only in the number of classes."""
    kernel, bias = _head(layout)
    if not {kernel, bias} <= tensors.keys() & shapes.keys():
        return False
    axis = int(layout != "mixedres")  # of the features
    there, here = tensors[kernel].shape, shapes[kernel]
    return len(there) == 2 and there[axis] == here[axis] and there[1 - axis] != here[1 - axis]


def _check(tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], ignored: Iterable[str]) -> None:
    missing = sorted(shapes.keys() - tensors.keys())
    extra = sorted(name for name in tensors.keys() - shapes.keys() - set(ignored) if not name.endswith(COUNTER))
    differing = [
        f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in sorted(shapes.items())
        if name in tensors and tensors[name].shape != shape
    ]
    problems = [_counted(missing, "missing"), _counted(extra, "left over"), _counted(differing, "of another shape")]
    if any(problems):
        raise MismatchError("; ".join(filter(None, problems)))


def _counted(names: list[str], what: str) -> str:
    return f"{len(names)} {what}: {listed(names, 2)}" if names else ""


def _leaves(tree: PyTree) -> list[tuple[tuple[str, ...], Array]]:
    """Returns [(('params', 'head', 'kernel'), leaf), ...]."""
    return [(tuple(path.split("/")), leaf) for path, leaf in named_leaves(tree).items()]


def _head(layout: str) -> tuple[str, str]:
    """Returns the names of the head's kernel and bias."""
    kernel, bias = (_name(("params", "head", leaf), layout) for leaf in ("kernel", "bias"))
    return kernel, bias


def _name(path: tuple[str, ...], layout: str) -> str:
    """Returns the name in a layout of the leaf at `path`, such as 'layer1.0.conv1.weight' in 'torchvision'."""
    return "/".join(path) if layout == "mixedres" else f"{_module(path[1:-1], layout)}.{_LEAVES[path[-1]]}"


def _module(path: tuple[str, ...], layout: str) -> str:
    """Returns 'layer1.0.conv1' for ('block_layer1_1', 'conv1')."""
    if len(path) == 1:
        return _STEMS[layout][path[0]]
    stage, block = map(int, path[0].removeprefix("block_layer").split("_"))
    is_norm, number = path[1].startswith("norm"), path[1].removeprefix("norm").removeprefix("conv")
    if layout == "torchvision":
        inner = f"{'bn' if is_norm else 'conv'}{number}"
        return f"layer{stage}.{block - 1}.{f'downsample.{int(is_norm)}' if number == '_proj' else inner}"
    inner = "shortcut" if number == "_proj" else f"layer.{int(number) - 1}"
    part = "normalization" if is_norm else "convolution"
    return f"resnet.encoder.stages.{stage - 1}.layers.{block - 1}.{inner}.{part}"


def _to_torch_axes(x: np.ndarray) -> np.ndarray:
    """Transposes (h, w, in, out) to (out, in, h, w) and (in, out) to (out, in); returns vectors unchanged."""
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T)


def _to_torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[3], shape[2], shape[0], shape[1]) if len(shape) == 4 else tuple(reversed(shape))


def from_torch_axes(x: np.ndarray) -> np.ndarray:
    """Transposes (out, in, h, w) to (h, w, in, out) and (out, in) to (in, out); returns vectors unchanged."""
    return x.transpose(2, 3, 1, 0) if x.ndim == 4 else x.T
