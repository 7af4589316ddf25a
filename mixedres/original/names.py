"""Names in mixedres of the variables of TensorFlow's official ResNets and of the ResNets of keras.applications.

'r1'            conv2d, conv2d_1, batch_normalization ... in the order of their making (official/r1/resnet)
'custom loop'   conv1, bn_conv1, res2a_branch2a, bn2a_branch2a ... (official/vision/image_classification)
'applications'  conv1_conv, conv1_bn, conv2_block1_1_conv ... (keras.applications)
"""

import re
from collections.abc import Mapping

import numpy as np

from mixedres._internal.errors import WeightsError, listed
from mixedres._internal.types import Record

_LEAVES = {
    "kernel": ("params", "kernel"),
    "bias": ("params", "bias"),
    "gamma": ("params", "scale"),
    "beta": ("params", "bias"),
    "moving_mean": ("batch_stats", "mean"),
    "moving_variance": ("batch_stats", "var"),
}
_NUMBERED = re.compile(r"(?:.*/)?(conv2d|batch_normalization|dense)(?:_(\d+))?")
_LOOP = re.compile(r"(res|bn)(\d)([a-z])_branch(?:2([abc])|1)")
_APPLICATIONS = re.compile(r"conv(\d)_block(\d+)_([0-3])_(conv|bn)")
_STEMS = {
    **{"conv1": "stem_conv", "bn_conv1": "stem_norm", "fc1000": "head"},
    **{"conv1_conv": "stem_conv", "conv1_bn": "stem_norm", "predictions": "head"},
}
_EPSILON = {"r1": 1e-5, "custom loop": 1e-5, "applications": 1.001e-5}
# Means of red, green and blue that are subtracted from the images.
_MEANS = {"applications": [123.68, 116.779, 103.939], "others": [123.68, 116.78, 103.94]}


def find_network(variables: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], str, Record]:
    """Returns the tensors in the layout 'mixedres' of the network that has these variables, a note, and its facts.

    Raises WeightsError if mixedres has no such network; the message begins with a verb, and the file is its subject.
    """
    modules: dict[str, dict[str, np.ndarray]] = {}
    for name, value in variables.items():
        module, _, leaf = name.removesuffix(":0").rpartition("/")
        modules.setdefault(module, {})[leaf] = value
    kind, paths = _paths(modules)
    paths = _with_head(modules, paths)
    _check_whole(paths)
    half = [f"{name} ({value.dtype})" for name, value in variables.items() if value.dtype.itemsize < 4]
    if half:
        raise WeightsError(
            f"holds variables that are not float32: {listed(half)}; TensorFlow's half-precision runs keep float32 ones"
        )
    if kind == "applications":
        modules = _without_biases(modules, paths)
    tensors = {}
    for module, path in paths.items():
        for leaf, value in modules[module].items():
            if leaf in _LEAVES:
                collection, own = _LEAVES[leaf]
                tensors[f"{collection}/{path}/{own}"] = value
    head = tensors.get("params/head/kernel")
    if head is not None and "params/head/bias" not in tensors:
        tensors["params/head/bias"] = np.zeros(head.shape[-1], head.dtype)
    unknown = sorted(name for name in variables if name.removesuffix(":0").rpartition("/")[0] not in paths)
    notes = [f"from TensorFlow ({kind})"]
    if kind == "applications":
        notes.append("biases of convolutions moved into running means, blue and red exchanged in the stem")
    if unknown:
        notes.append(f"left out, as they are not of the network: {listed(unknown)}")
    facts = {
        "version": _version(kind, paths),
        "options": _options(kind, paths),
        "epsilon": _EPSILON[kind],
        "input": _input(kind, tensors["params/stem_conv/kernel"]),
    }
    return tensors, "; ".join(notes), facts


def _with_head(modules: Mapping[str, Mapping[str, np.ndarray]], paths: dict[str, str]) -> dict[str, str]:
    """Returns `paths` with a head: the only layer beside the others, if it is dense; the name of a layer is free."""
    rest = [module for module in modules if module not in paths]
    if "head" in paths.values() or len(rest) != 1:
        return paths
    kernel = modules[rest[0]].get("kernel")
    return paths | {rest[0]: "head"} if kernel is not None and kernel.ndim == 2 else paths


def _check_whole(paths: Mapping[str, str]) -> None:
    """Raises WeightsError if a layer of the network occurs twice, or the stem is missing."""
    taken: dict[str, str] = {}
    for module, path in paths.items():
        if path in taken:
            raise WeightsError(f"holds several networks: {taken[path]} and {module} are the same layer of a ResNet")
        taken[path] = module
    if "stem_conv" not in taken:
        raise WeightsError(f"holds a part of a network: its first convolution is missing, of {listed(sorted(paths))}")


def _paths(modules: Mapping[str, Mapping[str, np.ndarray]]) -> tuple[str, dict[str, str]]:
    """Returns the kind of ResNet, and {module in TensorFlow: path here}: {'conv2d_1': 'block_layer1_1/conv_proj'}."""
    if any(re.fullmatch(r"(?:.*/)?(conv\d_block\d+_preact_bn|post_bn)", module) for module in modules):
        raise WeightsError(
            "holds a ResNet V2 of keras.applications, which is another network than version 2 here: strides are in the "
            "last block of a stage, and the stem has a bias before a max pool that pads with zeros"
        )
    named = {module: path for module in modules if (path := _named(module.rpartition("/")[2]))}
    if any(_LOOP.fullmatch(module.rpartition("/")[2]) for module in named):
        return "custom loop", named
    if any(_APPLICATIONS.fullmatch(module) for module in named):
        return "applications", named
    numbered = _numbered(modules)
    if not numbered:
        names = listed(sorted(modules)) or "nothing"
        raise WeightsError(f"holds no ResNet of TensorFlow's official models or of keras.applications; it has {names}")
    return "r1", numbered


def _named(module: str) -> str | None:
    """Returns the path of a layer that has a name of Keras; None for other layers."""
    if module in _STEMS:
        return _STEMS[module]
    if match := _LOOP.fullmatch(module):
        kind, stage, block, part = match.groups()
        number = "_proj" if part is None else "abc".index(part) + 1
        return f"block_layer{int(stage) - 1}_{ord(block) - ord('a') + 1}/{'conv' if kind == 'res' else 'norm'}{number}"
    if match := _APPLICATIONS.fullmatch(module):
        stage, block, part, kind = match.groups()
        number = "_proj" if part == "0" else part
        return f"block_layer{int(stage) - 1}_{block}/{'conv' if kind == 'conv' else 'norm'}{number}"
    return None


def _numbered(modules: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, str]:
    """Returns {module: path} of r1's variables, whose numbers are the order in which the graph makes the layers."""
    numbered: dict[str, list[tuple[int, str]]] = {"conv2d": [], "batch_normalization": [], "dense": []}
    for module in modules:
        if match := _NUMBERED.fullmatch(module):
            numbered[match[1]].append((int(match[2] or 0), module))
    convs, norms, heads = ([module for _, module in sorted(layers)] for layers in numbered.values())
    if not convs:
        return {}
    missing = [f"{module}/kernel" for module in (*convs, *heads) if "kernel" not in modules[module]]
    if missing:
        raise WeightsError(f"holds layers without kernels, the first {missing[0]}: it is a part of a checkpoint")
    shapes = [modules[module]["kernel"].shape for module in convs]
    order = _order(shapes, len(norms))
    if order is None or len(heads) > 1:
        raise WeightsError(
            f"holds {len(convs)} convolutions, {len(norms)} batch norms and {len(heads)} dense layers, which are no "
            "ResNet of TensorFlow's official models, whole and alone"
        )
    conv_paths, norm_paths = order
    return dict(zip(convs + norms + heads, [*conv_paths, *norm_paths, "head"], strict=False))


def _order(shapes: list[tuple[int, ...]], norms: int) -> tuple[list[str], list[str]] | None:
    """Returns the paths of r1's convolutions and norms, in the order of its graph; None if they are no such ResNet.

    The first block of every stage has a projection, made before the block's other convolutions. Version 1 normalizes
    the projection and the stem. Version 2 has a norm before every convolution of a block, and one norm at the end.
    """
    pointwise = [shape[:2] == (1, 1) for shape in shapes]
    bottleneck = pointwise[2:3] == [True]  # after the stem and a projection
    conv_paths, stage, block = ["stem_conv"], 0, 0
    while len(conv_paths) < len(shapes):
        # A bottleneck block begins with a 1x1 convolution, and its projection is another 1x1 convolution before it.
        has_projection = pointwise[len(conv_paths) + bottleneck :][:1] == [True]
        stage, block = (stage + 1, 1) if has_projection else (stage, block + 1)
        numbers = [*(["_proj"] if has_projection else []), *range(1, 4 if bottleneck else 3)]
        conv_paths += [f"block_layer{stage}_{block}/conv{number}" for number in numbers]
    of_blocks = [path.replace("/conv", "/norm") for path in conv_paths[1:]]
    first = ["stem_norm", *of_blocks]
    second = [*(path for path in of_blocks if not path.endswith("_proj")), "final_norm"]
    by_count = {len(first): first, len(second): second}
    return (conv_paths, by_count[norms]) if len(conv_paths) == len(shapes) and norms in by_count else None


def _without_biases(
    modules: Mapping[str, Mapping[str, np.ndarray]], paths: Mapping[str, str]
) -> dict[str, dict[str, np.ndarray]]:
    """Moves the biases of keras.applications' convolutions into the running means of the norms; returns the modules.

    norm(x + bias) with the mean m is norm(x) with the mean m - bias. The images of keras.applications are blue, green,
    red, so the input channels of the stem's kernel are reversed.
    """
    by_path = {path: module for module, path in paths.items()}
    new = {module: dict(modules[module]) for module in paths}
    for path, module in by_path.items():
        norm = by_path.get(path.replace("conv", "norm"))
        if path != "head" and norm != module and "bias" in modules[module]:
            if norm is None or "moving_mean" not in new[norm]:
                raise WeightsError(f"holds the bias of {module} without the batch norm that follows it")
            new[norm]["moving_mean"] = new[norm]["moving_mean"] - new[module].pop("bias")
    stem = new[by_path["stem_conv"]]
    stem["kernel"] = stem["kernel"][:, :, ::-1]
    return new


def _version(kind: str, paths: Mapping[str, str]) -> str:
    """Returns the version: keras.applications has the stride on a bottleneck's first 1x1, others on the 3x3."""
    if kind == "applications":
        return "1"
    if "final_norm" in paths.values():
        return "2"
    return "1.5"


def _options(kind: str, paths: Mapping[str, str]) -> dict[str, str]:
    """Returns the options of `mixedres.models.create` that the weights need: the official ResNets pad as TensorFlow."""
    # r1 pads its convolutions as PyTorch does. With bottlenecks, the first block of a stage has a projection anyway.
    if kind == "applications":
        return {}
    padding = {"padding": "tensorflow"} if kind == "custom loop" else {}
    is_bottleneck = "block_layer1_1/conv3" in paths.values()
    return padding | {"pool_padding": "tensorflow"} | ({} if is_bottleneck else {"projection": "stage"})


def _input(kind: str, stem: np.ndarray) -> Record:
    """Returns the input that the network was trained on."""
    if stem.shape[0] == 3:
        return {"shape": [32, 32, 3], "mean": None, "std": None, "crop_pct": 1.0, "resize": "area"}
    mean, resize = _MEANS.get(kind, _MEANS["others"]), "area" if kind == "applications" else "official"
    return {"shape": [224, 224, 3], "mean": mean, "std": [1.0] * 3, "crop_pct": 224 / 256, "resize": resize}
