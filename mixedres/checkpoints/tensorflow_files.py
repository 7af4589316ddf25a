"""Variables by name from checkpoints and SavedModels of TensorFlow and from files of Keras.

TensorFlow's formats are read with TensorFlow, which is imported here and for nothing else; Keras' with h5py.
"""

import os
import pathlib
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mixedres._internal.errors import WeightsError, one_line
from mixedres._internal.files import open_regular

KERAS = (".h5", ".hdf5", ".keras")
# The order in which Keras numbers the variables of a layer.
_CONV, _NORM = ("kernel", "bias"), ("gamma", "beta", "moving_mean", "moving_variance")
_GRAPHS = ("saved_model.pb", "saved_model.pbtxt")
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
# State of optimizers and counters in name-based checkpoints, and in object-based ones.
_NOT_OF_THE_NETWORK = re.compile(
    r"(^|/)(Momentum|Adam(_\d+)?|RMSProp(_\d+)?|Adagrad|LARSOptimizer|momentum|beta[12]_power|global_step|save_counter"
    r"|iter|iteration|iterations|learning_rate|decay|current_loss_scale|good_steps|loss_scale)(:0|/\.ATTRIBUTES.*)?$"
    r"|\.OPTIMIZER_SLOT|^optimizer/|^optimizer_step"
)
# The weights in a .keras file, and the bytes that those of a network have at most.
_WEIGHTS, _MOST_BYTES = "model.weights.h5", 4_000_000_000


def is_checkpoint(path: pathlib.Path) -> bool:
    """Returns whether `path` is one that `read_checkpoint` may read."""
    if path.is_dir():
        return any((path / name).is_file() for name in ("checkpoint", *_GRAPHS))
    return path.with_name(f"{path.name}.index").is_file()


def read_checkpoint(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The float variables of a checkpoint of format V2, without the state of optimizers and counters.

    Args:
      path: its prefix (model.ckpt-1234, whose files are model.ckpt-1234.index and .data-00000-of-00001), a folder whose
        file 'checkpoint' names the newest, or a SavedModel.

    Returns:
      Arrays by the names of the variables: those of a graph, 'resnet_model/conv2d/kernel', or of Keras' layers,
      'conv1/kernel'.

    Raises:
      WeightsError: where it cannot be read, has nothing else, or without TensorFlow.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # what is wrong is said below, in one line
    try:
        import tensorflow as tf
    except ImportError:
        raise WeightsError(f"{path} is a checkpoint of TensorFlow; pip install 'mixedres[tf]' to read it") from None
    is_saved_model = any((path / name).is_file() for name in _GRAPHS)
    try:
        reader = tf.train.load_checkpoint(str(path / "variables" / "variables" if is_saved_model else path))
        dtypes = reader.get_variable_to_dtype_map()
        names = _names(reader) if _OBJECT_GRAPH in dtypes else {key: key for key in dtypes}
        floats = {key: name for key, name in names.items() if dtypes[key].is_floating}
        wanted = {key: name for key, name in floats.items() if not _NOT_OF_THE_NETWORK.search(key)}
        found = {name: reader.get_tensor(key) for key, name in wanted.items()}
    except Exception as error:  # its readers fail in many ways
        is_folder = path.is_dir() and not is_saved_model  # its file 'checkpoint' may have the path of before a move
        advice = "name the files without .index, such as model.ckpt-1234" if is_folder else "copy it again"
        raise WeightsError(f"{path} is no whole checkpoint of TensorFlow ({one_line(error)}); {advice}") from None
    if not found:
        what = f"the state of an optimizer alone ({min(floats.values())} ...)" if floats else "no float variables"
        raise WeightsError(f"{path} holds {what}; name a checkpoint with the network's variables")
    return found


def _names(reader: Any) -> dict[str, str]:
    """{key: name of the variable} in an object-based checkpoint, from the graph of objects inside it."""
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(reader.get_tensor(_OBJECT_GRAPH))
    attributes = [attribute for node in graph.nodes for attribute in node.attributes]
    return {attribute.checkpoint_key: attribute.full_name or attribute.checkpoint_key for attribute in attributes}


def read_keras(file: pathlib.Path) -> dict[str, np.ndarray]:
    """The variables of a .keras, .weights.h5 or .h5 file by layer, 'conv1_conv/kernel'.

    Raises:
      WeightsError: where it cannot be read.
    """
    try:
        import h5py
    except ImportError:
        raise WeightsError(f"{file} is a file of Keras; pip install 'mixedres[train]' to read it") from None
    try:
        with open_regular(file) as whole:
            if file.suffix != ".keras":
                with h5py.File(whole) as opened:
                    return dict(_layers(opened))
            with zipfile.ZipFile(whole) as archive:
                if archive.getinfo(_WEIGHTS).file_size > _MOST_BYTES:
                    raise ValueError(f"{_WEIGHTS} has more than {_MOST_BYTES:,} bytes")
                with archive.open(_WEIGHTS) as inner, h5py.File(inner) as opened:
                    return dict(_layers(opened))
    except Exception as error:  # damaged, encrypted or of something else
        raise WeightsError(f"{file} is no whole file of Keras' ({one_line(error)}); get it again") from None


def _layers(opened: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of an HDF5 file, as Keras 3 lays it out (layers/conv2d/vars/0), and all before it."""
    import h5py

    datasets: dict[str, Any] = {}
    opened.visititems(lambda name, item: datasets.update({name: item}) if isinstance(item, h5py.Dataset) else None)
    found = {name: item for name, item in datasets.items() if item.dtype.kind == "f"}
    _check_stored(found)
    for name, item in found.items():
        *path, leaf = name.split("/")
        if path[-1:] == ["vars"] and leaf.isdigit():
            leaves = _NORM if len(item.parent) == len(_NORM) else _CONV
            leaf = leaves[int(leaf)] if int(leaf) < len(leaves) else leaf
            layer = str(item.parent.attrs.get("name", path[-2] if path[1:] else ""))
        else:
            layer, leaf = path[-1] if path else "", leaf.removesuffix(":0")
        if path[:1] != ["optimizer"] and path[:1] != ["optimizer_weights"]:
            yield f"{layer}/{leaf}", np.asarray(item)


def _check_stored(datasets: Mapping[str, Any]) -> None:
    """Raises ValueError for numbers that lie in other files, or that so few bytes cannot be."""
    size = 0
    for name, item in datasets.items():
        count = item.size * item.dtype.itemsize
        size += count
        # Deflate makes at most 1032 bytes of one; a fill value stands for any number of them.
        if item.external or item.is_virtual or count > 1032 * item.id.get_storage_size() or size > _MOST_BYTES:
            raise ValueError(f"{name} lies in other files, or is larger than the weights of a network")
