"""Variables by name from checkpoints and SavedModels of TensorFlow and, with h5py, from files of Keras."""

import math
import pathlib
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mixedres._internal.cli.command_line import how_to_install
from mixedres._internal.errors import WeightsError, one_line
from mixedres._internal.files import open_regular
from mixedres._internal.types import Record
from mixedres.original import names

if TYPE_CHECKING:
    import h5py
    import tensorflow as tf

# Tensors, a note, and facts.
Found: TypeAlias = tuple[dict[str, np.ndarray], str, Record]
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
# The file of weights in a .keras file, and its largest size in bytes.
_WEIGHTS, _MOST_BYTES = "model.weights.h5", 4_000_000_000


def read_checkpoint(path: pathlib.Path) -> Found:
    """Returns the tensors of a network in a checkpoint of format V2, in the layout 'mixedres', a note, and facts.

    `path`: the checkpoint's prefix (model.ckpt-1234 for the files model.ckpt-1234.index and .data-00000-of-00001), a
    folder whose file 'checkpoint' names the newest checkpoint, or a SavedModel.
    """
    if path.is_dir() and not any((path / name).is_file() for name in ("checkpoint", *_GRAPHS)):
        raise WeightsError(
            f"{path} holds neither model.safetensors nor pytorch_model.bin, nor a file 'checkpoint' of TensorFlow, nor "
            "a SavedModel"
        )
    return _network(path, _variables(path))


def _network(path: pathlib.Path, variables: Mapping[str, np.ndarray]) -> Found:
    try:
        return names.find_network(variables)
    except WeightsError as error:
        raise WeightsError(f"{path} {error}") from None


def _variables(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the float variables of a checkpoint by name, without the state of optimizers and counters."""
    try:
        import tensorflow as tf
    except ImportError:
        raise WeightsError(f"{path} is a checkpoint of TensorFlow; {how_to_install('tensorflow')}") from None
    is_saved_model = any((path / name).is_file() for name in _GRAPHS)
    try:
        reader = tf.train.load_checkpoint(str(path / "variables" / "variables" if is_saved_model else path))
        dtypes = reader.get_variable_to_dtype_map()
        named = _names(reader) if _OBJECT_GRAPH in dtypes else {key: key for key in dtypes}
        floats = {key: name for key, name in named.items() if dtypes[key].is_floating}
        wanted = {key: name for key, name in floats.items() if not _NOT_OF_THE_NETWORK.search(key)}
        variables = {name: reader.get_tensor(key) for key, name in wanted.items()}
    except Exception as error:  # TensorFlow's readers raise many types of errors
        # After a move, the file 'checkpoint' of a folder may still have the old path.
        is_folder = path.is_dir() and not is_saved_model
        advice = "name the files without .index, such as model.ckpt-1234" if is_folder else "copy it again"
        raise WeightsError(f"{path} is no whole checkpoint of TensorFlow ({one_line(error)}); {advice}") from None
    if not variables:
        what = f"the state of an optimizer alone ({min(floats.values())} ...)" if floats else "no float variables"
        raise WeightsError(f"{path} holds {what}; name a checkpoint with the network's variables")
    return variables


def _names(reader: "tf.train.CheckpointReader") -> dict[str, str]:
    """Returns {key: name of the variable} of an object-based checkpoint, from the graph of objects inside it."""
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(reader.get_tensor(_OBJECT_GRAPH))
    attributes = [attribute for node in graph.nodes for attribute in node.attributes]
    return {attribute.checkpoint_key: attribute.full_name or attribute.checkpoint_key for attribute in attributes}


def read_keras(file: pathlib.Path) -> Found:
    """Returns what `read_checkpoint` does, of a .keras, .weights.h5 or .h5 file."""
    return _network(file, variables_of_keras(file))


def variables_of_keras(file: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the variables of a file by layer, such as 'conv1_conv/kernel'; raises WeightsError if it is damaged."""
    try:
        import h5py
    except ImportError:
        raise WeightsError(f"{file} is a file of Keras; {how_to_install('h5py')}") from None
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
    except Exception as error:  # damaged, encrypted or of another kind
        raise WeightsError(f"{file} is no whole file of Keras ({one_line(error)}); get it again") from None


def _layers(opened: "h5py.File") -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and values of an HDF5 file in the layout of Keras 3 (layers/conv2d/vars/0) or an older layout."""
    import h5py

    datasets: dict[str, h5py.Dataset] = {}
    opened.visititems(lambda name, item: datasets.update({name: item}) if isinstance(item, h5py.Dataset) else None)
    floats = {name: item for name, item in datasets.items() if item.dtype.kind == "f"}
    _check_stored(floats)
    for name, item in floats.items():
        *path, leaf = name.split("/")
        if path[-1:] == ["vars"] and leaf.isdigit():
            leaves = _NORM if len(item.parent) == len(_NORM) else _CONV
            leaf = leaves[int(leaf)] if int(leaf) < len(leaves) else leaf
            layer = str(item.parent.attrs.get("name", path[-2] if path[1:] else ""))
        else:
            layer, leaf = path[-1] if path else "", leaf.removesuffix(":0")
        if path[:1] != ["optimizer"] and path[:1] != ["optimizer_weights"]:
            yield f"{layer}/{leaf}", np.asarray(item)


def _check_stored(datasets: Mapping[str, "h5py.Dataset"]) -> None:
    """Raises ValueError for data sets that are in other files, or have more numbers than their bytes can hold."""
    size = 0
    for name, item in datasets.items():
        count = item.size * item.dtype.itemsize
        size += count
        # Deflate makes at most 1032 bytes of one; a fill value stands for any number of them.
        if item.external or item.is_virtual or count > 1032 * item.id.get_storage_size() or size > _MOST_BYTES:
            raise ValueError(f"{name} lies in other files, or is larger than the weights of a network")
        if item.chunks is not None:
            _check_chunks(name, item)


def _check_chunks(name: str, item: "h5py.Dataset") -> None:
    """Raises ValueError if a part of a data set unpacks to more bytes than it states, which HDF5 finds too late."""
    most = math.prod(item.chunks) * item.dtype.itemsize
    if any(part > max(1, side) for part, side in zip(item.chunks, item.shape, strict=True)):
        raise ValueError(f"{name} lies in parts that are larger than the data set")
    filters = [item.id.get_create_plist().get_filter(i)[0] for i in range(item.id.get_create_plist().get_nfilters())]
    if not set(filters) <= {1, 2, 3}:  # deflate, shuffle, a checksum
        raise ValueError(f"{name} is compressed by another filter than gzip")
    for index in range(item.id.get_num_chunks() if 1 in filters else 0):
        _, packed = item.id.read_direct_chunk(item.id.get_chunk_info(index).chunk_offset)
        if len(zlib.decompressobj().decompress(packed, most + 16)) > most + 8:
            raise ValueError(f"{name} has a part that unpacks to more than {most:,} bytes")
