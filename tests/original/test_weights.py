"""Checkpoints of TensorFlow and files of Keras: what is read, and what is refused in one line.

Whole networks of the official models are in test_original; here are keras.applications', and what is not as it should
be.
"""

import subprocess
import sys
import zlib

import h5py
import jax
import numpy as np
import pytest

from mixedres import checkpoints, models, precision
from mixedres.original import names, weights_files
from tests.data import made

RNG = np.random.default_rng(0)


def normal(*shape):
    return np.float32(RNG.normal(size=shape))


def norm(name, features=4):
    return {f"{name}/{leaf}": normal(features) for leaf in ("gamma", "beta", "moving_mean", "moving_variance")}


def small_r1():
    """Variables of a network of r1's names with one block in each of two stages, whose first number is not 0."""
    found = {"scope/conv2d_3/kernel": normal(3, 3, 3, 4)} | norm("scope/batch_normalization_2")
    number = 4
    for channels in (4, 8):
        for size, inputs in ((1, 4), (3, 4), (3, channels)):
            found[f"scope/conv2d_{number}/kernel"] = normal(size, size, inputs, channels)
            found |= norm(f"scope/batch_normalization_{number - 1}", channels)
            number += 1
    return found | {"scope/dense/kernel": normal(8, 10), "scope/dense/bias": normal(10)}


def test_numbers_are_the_order_of_the_graph():
    """Projection, convolutions of the block, next block; the same for norms, with that of the stem before them."""
    variables = small_r1()
    tensors, _, network = names.find_network(variables)
    assert (network["version"], network["options"]) == ("1.5", {"pool_padding": "tensorflow", "projection": "stage"})
    for ours, theirs in (
        ("params/stem_conv/kernel", "conv2d_3/kernel"),
        ("params/block_layer1_1/conv_proj/kernel", "conv2d_4/kernel"),
        ("params/block_layer1_1/conv2/kernel", "conv2d_6/kernel"),
        ("params/block_layer2_1/conv1/kernel", "conv2d_8/kernel"),
        ("params/stem_norm/scale", "batch_normalization_2/gamma"),
        ("params/block_layer1_1/norm_proj/bias", "batch_normalization_3/beta"),
        ("batch_stats/block_layer2_1/norm2/mean", "batch_normalization_8/moving_mean"),
        ("batch_stats/block_layer2_1/norm2/var", "batch_normalization_8/moving_variance"),
        ("params/head/bias", "dense/bias"),
    ):
        np.testing.assert_array_equal(tensors[ours], variables[f"scope/{theirs}"])
    assert len(tensors) == len(variables)


def test_variables_outside_the_network_are_named():
    note = names.find_network(small_r1() | {"tower/embedding": normal(3), "other/bias": normal(2)})[1]
    assert note.endswith("left out, as they are not of the network: other/bias, tower/embedding")


def test_biases_before_a_norm_are_folded_into_the_mean():
    """norm(conv(x) + bias) is the same number; and blue, green and red of the images become red, green and blue."""
    variables = {"conv1_conv/kernel": normal(7, 7, 3, 4), "conv1_conv/bias": normal(4)} | norm("conv1_bn")
    variables |= {"conv2_block1_1_conv/kernel": normal(1, 1, 4, 4), "conv2_block1_1_conv/bias": normal(4)}
    variables |= norm("conv2_block1_1_bn") | {"predictions/kernel": normal(4, 2), "predictions/bias": normal(2)}
    tensors = names.find_network(variables)[0]
    pixels = normal(5, 7, 7, 3)
    theirs = np.einsum("bijc,ijco->bo", pixels[..., ::-1], variables["conv1_conv/kernel"])
    theirs = theirs + variables["conv1_conv/bias"] - variables["conv1_bn/moving_mean"]
    ours = np.einsum("bijc,ijco->bo", pixels, tensors["params/stem_conv/kernel"])
    np.testing.assert_allclose(ours - tensors["batch_stats/stem_norm/mean"], theirs, rtol=1e-4, atol=1e-4)
    folded = variables["conv2_block1_1_bn/moving_mean"] - variables["conv2_block1_1_conv/bias"]
    np.testing.assert_array_equal(tensors["batch_stats/block_layer1_1/norm1/mean"], folded)
    np.testing.assert_array_equal(tensors["params/head/bias"], variables["predictions/bias"])
    assert not [name for name in tensors if "conv" in name and name.endswith("bias")]


def test_only_dense_layer_of_any_name_is_the_head():
    """As Keras' scripts for fine-tuning name it; two dense layers, or a norm before it, are no head."""
    base = {"conv1_conv/kernel": normal(7, 7, 3, 4), "conv2_block1_1_conv/kernel": normal(1, 1, 4, 4)}
    base |= norm("conv1_bn") | norm("conv2_block1_1_bn")
    head = {"flowers/kernel": normal(4, 2), "flowers/bias": normal(2)}
    tensors, note, _ = names.find_network(base | head)
    np.testing.assert_array_equal(tensors["params/head/kernel"], head["flowers/kernel"])
    np.testing.assert_array_equal(tensors["params/head/bias"], head["flowers/bias"])
    assert "left out" not in note
    del head["flowers/bias"]
    assert names.find_network(base | head)[0]["params/head/bias"].tolist() == [0, 0]
    for more in ({"dense/kernel": normal(2, 2)}, norm("batch_normalization")):
        tensors, note, _ = names.find_network(base | head | more)
        assert "params/head/kernel" not in tensors and "left out" in note and min(more) in note


def without(variables, part):
    return {name: value for name, value in variables.items() if part not in name}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"conv2_block1_preact_bn/gamma": normal(4)}, "ResNet V2 of keras.applications, which is another network"),
        (small_r1() | {"scope/conv2d_3/kernel": np.float16(normal(3, 3, 3, 4))}, "scope/conv2d_3/kernel (float16)"),
        ({"expanded_conv/depthwise/kernel": normal(3)}, "no ResNet of TensorFlow's official models"),
        (without(small_r1(), "conv2d_9"), "6 convolutions, 7 batch norms and 1 dense"),
        (without(small_r1(), "conv2d_5/") | {"scope/conv2d_5/bias": normal(4)}, "scope/conv2d_5/kernel"),
    ],
    ids=["V2", "float16", "another architecture", "a layer less", "a kernel less"],
)
def test_unknown_variables_are_refused(variables, words):
    assert words in made.message(names.find_network, variables)


@pytest.mark.parametrize(
    ("names", "given", "words"),
    [
        (["model.ckpt-7.data-00000-of-00001"], "", "nor a file 'checkpoint' of TensorFlow"),
        (["model.ckpt-7.data-00000-of-00001"], "model.ckpt-7", "does not exist; name a workdir"),
        (["model.ckpt-7.data-00000-of-00001"], "model.ckpt-7.data-00000-of-00001", "is named without .index, .meta or"),
        (["frozen.pb"], "frozen.pb", "no file of weights"),
        (["model.ckpt-7.meta", "model.ckpt-7.index"], "model.ckpt-7.meta", "is named without .index, .meta or .data"),
        ([], "", "nor a SavedModel"),
        (["weights.h5"], "weights.h5", "no whole file of Keras"),
        (["model.keras"], "model.keras", "no whole file of Keras"),
    ],
)
def test_incomplete_files_are_refused(names, given, words, tmp_path):
    made.write_files(tmp_path, dict.fromkeys(names, b""))
    assert words in made.message(checkpoints.read_weights, tmp_path / given)


@pytest.mark.parametrize(
    ("name", "given"), [("model.ckpt-1.index", "model.ckpt-1"), ("checkpoint", ""), ("saved_model.pb", "")]
)
def test_missing_tensorflow_names_the_extra(name, given, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    (tmp_path / name).touch()
    with pytest.raises(checkpoints.WeightsError, match=r"type in .*: pip install -e '\.\[tf\]'$"):
        checkpoints.read_weights(tmp_path / given)


def test_layouts_of_keras_files(tmp_path):
    """Numbers below vars with the layer's name beside them, as Keras 3 writes; names with and without :0 before it."""
    kernel, gamma, momentum = normal(1, 1, 2, 3), normal(3), normal(3)
    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        file["layers/conv2d/vars/0"] = kernel
        file["layers/conv2d/vars"].attrs["name"] = "conv1_conv"
        for index in range(4):
            file[f"layers/batch_normalization/vars/{index}"] = gamma + index
        file["layers/batch_normalization/vars"].attrs["name"] = "conv1_bn"
        file["optimizer/vars/0"] = momentum
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["model_weights/conv1_conv/conv1_conv/kernel:0"] = kernel
        file["model_weights/conv1_bn/conv1_bn/gamma"] = gamma
        file["optimizer_weights/SGD/momentum:0"] = momentum
    new, old = (weights_files.variables_of_keras(tmp_path / name) for name in ("a.weights.h5", "b.h5"))
    assert sorted(old) == ["conv1_bn/gamma", "conv1_conv/kernel"]
    leaves = ("beta", "gamma", "moving_mean", "moving_variance")
    assert sorted(new) == [*(f"conv1_bn/{leaf}" for leaf in leaves), "conv1_conv/kernel"]
    for found in (new, old):
        np.testing.assert_array_equal(found["conv1_conv/kernel"], kernel)
        np.testing.assert_array_equal(found["conv1_bn/gamma"], gamma)
    np.testing.assert_array_equal(new["conv1_bn/moving_variance"], gamma + 3)


APPLICATIONS = """
import sys
import keras, numpy as np
network = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10, classifier_activation=None)
rng = np.random.default_rng(0)
for v in network.weights:
    if v.name in ("bias", "beta", "moving_mean"):
        v.assign(rng.normal(0, 0.1, v.shape))
    elif v.name in ("gamma", "moving_variance"):
        v.assign(rng.uniform(0.8, 1.2, v.shape))
images = rng.normal(0, 60, (4, 64, 64, 3)).astype("float32")
np.savez(sys.argv[1] + "/found.npz", images=images, logits=network(images[..., ::-1], training=False))
network.save_weights(sys.argv[1] + "/a.weights.h5")
network.save(sys.argv[1] + "/b.keras")
keras.applications.ResNet101(weights=None, include_top=False).save_weights(sys.argv[1] + "/notop.weights.h5")
keras.applications.ResNet50V2(weights=None).save_weights(sys.argv[1] + "/v2.weights.h5")
"""


@pytest.mark.slow
def test_weights_of_keras_applications_predict_the_same(tmp_path, monkeypatch):
    pytest.importorskip("keras", reason="needs Keras: pip install -e '.[examples]'")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    command = [sys.executable, "-c", APPLICATIONS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = np.load(tmp_path / "found.npz")
    for name in ("a.weights.h5", "b.keras"):
        file = checkpoints.read_weights(tmp_path / name)
        assert (file.name, file.version, file.options, file.epsilon) == ("resnet50", "1", {}, 1.001e-5)
        options = {"version": file.version, "epsilon": file.epsilon, "policy": precision.get("fp32").policy}
        model = models.create("resnet50", num_classes=10, precision="highest", **options)
        apply = jax.jit(lambda variables, x, model=model: model.apply(variables, x, train=False))
        logits = apply(file.variables(), theirs["images"])
        assert np.linalg.norm(logits - theirs["logits"]) < 2e-4 * np.linalg.norm(theirs["logits"])
    backbone = checkpoints.read_weights(tmp_path / "notop.weights.h5")
    assert backbone.describe() == "resnet101 without a head, layout mixedres"
    with pytest.raises(checkpoints.WeightsError, match=r"ResNet V2 of keras\.applications, which"):
        checkpoints.read_weights(tmp_path / "v2.weights.h5")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Folder with checkpoints of TensorFlow that are no network of ours, or not whole."""
    tf = pytest.importorskip("tensorflow", reason="needs the extra tf")
    folder = tmp_path_factory.mktemp("tensorflow")

    def save(name, variables):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            held = [tf.compat.v1.get_variable(key, initializer=value) for key, value in variables.items()]
            session.run(tf.compat.v1.global_variables_initializer())
            tf.compat.v1.train.Saver(held).save(session, str(folder / name / "model.ckpt"))

    save("whole", small_r1() | {"global_step": np.int64(3), "scope/conv2d_3/kernel/Momentum": normal(3, 3, 3, 4)})
    save("slots", {f"{key}/Momentum": value for key, value in small_r1().items()})
    save("half", {key: value.astype(np.float16) for key, value in small_r1().items()})
    save("dense", {"dense/kernel": normal(3, 4), "dense/bias": normal(4)})
    save("cut", small_r1())
    files = {"gone/checkpoint": b'model_checkpoint_path: "model.ckpt-2"\n', "frozen/saved_model.pb": b""}
    for path in (folder / "whole").glob("model.ckpt.*"):
        files["saved/variables/" + path.name.replace("model.ckpt", "variables")] = path.read_bytes()
    made.write_files(folder, files | {"saved/saved_model.pb": b""})
    data = folder / "cut" / "model.ckpt.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:100])
    return folder


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("slots", "the state of an optimizer alone"),
        ("half", "variables that are not float32"),
        ("dense", "no ResNet of TensorFlow's official models"),
        ("cut", "no whole checkpoint of TensorFlow"),
        ("gone", "no whole checkpoint of TensorFlow"),
        ("frozen", "no whole checkpoint of TensorFlow"),
    ],
)
def test_damaged_checkpoints_of_tensorflow_are_refused(name, words, written):
    assert words in made.message(checkpoints.read_weights, written / name)


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "whole/model.ckpt", "saved"])
def test_tensorflow_checkpoint_is_read_without_optimizer_variables(name, written):
    file = checkpoints.read_weights(written / name)
    assert file.note == "from TensorFlow (r1)" and len(file.tensors) == len(small_r1())


def test_hdf5_part_that_unpacks_to_more_is_refused(tmp_path, monkeypatch):
    """A part that states 16 numbers and holds 4,000; and one by another filter."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        item = file.create_dataset("conv1_conv/kernel", (16,), np.float32, chunks=(16,), compression="gzip")
        item[...] = np.ones(16)
    assert weights_files.variables_of_keras(path)["conv1_conv/kernel"].sum() == 16
    with h5py.File(path, "a") as file:
        file["conv1_conv/kernel"].id.write_direct_chunk((0,), zlib.compress(bytes(16_000)))
    assert "has a part that unpacks to more than 64 bytes" in made.message(weights_files.read_keras, path)
    with h5py.File(path, "w") as file:
        file.create_dataset("conv1_conv/kernel", data=np.ones(16, np.float32), chunks=(16,), compression="lzf")
    assert "is compressed by another filter than gzip" in made.message(weights_files.read_keras, path)
    with h5py.File(path, "w") as file:
        item = file.create_dataset("conv1_conv/kernel", (4,), np.float32, chunks=(16,), maxshape=(None,))
        item[...] = np.ones(4)
    assert "lies in parts that are larger than the data set" in made.message(weights_files.read_keras, path)
