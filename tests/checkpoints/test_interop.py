"""Against PyTorch and Hugging Face's transformers: the same numbers from the same weights, there and back."""

import argparse
import datetime
import inspect
import io
import json
import pathlib
import struct
import warnings
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import checkpoints, main, models, precision
from mixedres._internal.errors import WeightsError
from mixedres.config import load_config
from mixedres.export import __main__ as export_command
from tests.data import made

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e '.[interop]'")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[interop]'")
pytestmark = pytest.mark.interop

DEPTHS = {18: [2, 2, 2, 2], 34: [3, 4, 6, 3], 50: [3, 4, 6, 3], 101: [3, 4, 23, 3], 152: [3, 8, 36, 3]}


def test_adamw_has_the_defaults_of_torch():
    theirs = {name: one.default for name, one in inspect.signature(torch.optim.AdamW).parameters.items()}
    config = load_config("digits:fp16,optimizer=adamw").optimizer
    assert (config.learning_rate, config.weight_decay, config.epsilon) == (
        theirs["lr"],
        theirs["weight_decay"],
        theirs["eps"],
    )
    assert (config.momentum, config.beta2, config.lr_reference_batch) == (*theirs["betas"], 0)


def theirs(size, *, classes=10, version="1.5", seed=0):
    """A network of transformers with random weights, and statistics as training would leave them."""
    torch.manual_seed(seed)
    bottleneck = size >= 50
    config = transformers.ResNetConfig(
        depths=DEPTHS[size],
        layer_type="bottleneck" if bottleneck else "basic",
        hidden_sizes=[256, 512, 1024, 2048] if bottleneck else [64, 128, 256, 512],
        downsample_in_bottleneck=version == "1",
        num_labels=classes,
    )
    network = transformers.ResNetForImageClassification(config)
    # Two batches with a momentum of 1/2: running averages that belong to the activations, and are not those of one.
    for module in network.train().modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias, std=0.2)
            module.momentum = 0.5
    with torch.no_grad():
        for _ in range(2):
            network(torch.randn(4, 3, 64, 64))
    return network.eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder that transformers saves a network of a size in."""

    def save(size, **options):
        folder = tmp_path_factory.mktemp(f"resnet{size}")
        network = theirs(size, **options)
        network.save_pretrained(folder)
        return folder, network

    return save


def their_logits(network, images):
    with torch.no_grad():
        return network(torch.from_numpy(images).permute(0, 3, 1, 2)).logits.numpy()


def logits(preset, file, images):
    chosen = precision.get(preset)
    policy, norm_policy = chosen.network_policies
    options = {"policy": policy, "norm_policy": norm_policy, "version": file.version}
    classes = checkpoints.architecture(file.tensors, file.layout).num_classes
    model = models.create(file.name, num_classes=classes, **options)
    apply = jax.jit(lambda variables, x: chosen.rewrite(model.apply)(variables, x, train=False))
    return np.asarray(apply(file.variables(), images), np.float32)


def export(source, target, *more):
    assert export_command.main(["export", f"--from={source}", f"--to={target}", *more]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("size", DEPTHS)
def test_logits_equal_transformers(size, saved):
    folder, network = saved(size)
    file = checkpoints.read_weights(folder)
    assert file.name == f"resnet{size}" and file.version == "1.5" and file.layout == "transformers"
    for pixels in (224, 160):
        images = np.random.default_rng(size).standard_normal((2, pixels, pixels, 3), np.float32)
        expected = their_logits(network, images)
        assert expected.std() > 0.01
        np.testing.assert_allclose(logits("fp32", file, images), expected, atol=1e-4 * max(1, np.abs(expected).max()))


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_step_moves_the_running_statistics_as_pytorchs(fused, saved):
    """The last maps have four values a channel, whose unbiased variance is 4/3 of the biased one."""
    folder, network = saved(18)
    file = checkpoints.read_weights(folder)
    before = file.variables()
    images = np.random.default_rng(0).standard_normal((4, 32, 32, 3), np.float32)
    for module in network.train().modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.1
    their_logits(network, images)
    state = {name: value.numpy() for name, value in network.state_dict().items()}
    expected = checkpoints.from_tensors(state, before, "transformers")[0]["batch_stats"]
    policy = precision.get("fp32").policy
    model = models.create("resnet18", num_classes=10, policy=policy, momentum=0.9, fused=fused, precision="highest")
    step = jax.jit(lambda variables, x: model.apply(variables, x, train=True, mutable=["batch_stats"])[1])
    found = step(before, images)["batch_stats"]
    apart = jax.tree.map(lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b)), found, expected)
    moved = jax.tree.map(lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b)), before["batch_stats"], expected)
    assert max(jax.tree.leaves(apart)) < 1e-6 and min(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.slow
def test_version_1_has_its_stride_in_the_first_convolution(saved, tmp_path, capsys):
    folder, network = saved(50, version="1")
    file = checkpoints.read_weights(folder)
    assert file.version == "1"
    images = np.random.default_rng(0).standard_normal((2, 96, 96, 3), np.float32)
    expected = their_logits(network, images)
    np.testing.assert_allclose(logits("fp32", file, images), expected, atol=1e-4 * max(1, np.abs(expected).max()))
    # The version survives torchvision's layout, which has no place for it, with a warning.
    export(folder, tmp_path / "tv.safetensors")
    assert "warning: these weights are of version 1" in capsys.readouterr().out
    export(tmp_path / "tv.safetensors", tmp_path / "back", "--layout=transformers")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["downsample_in_bottleneck"]
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_transformers_loads_the_written_folder(saved, tmp_path, capsys):
    folder, network = saved(18)
    assert checkpoints.read_weights(folder).batches == 2
    export(folder, tmp_path / "tv.safetensors")
    there = checkpoints.read_weights(tmp_path / "tv.safetensors")
    assert (there.layout, there.batches) == ("torchvision", 2)
    export(tmp_path / "tv.safetensors", tmp_path / "ours", "--layout=transformers")
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    read = transformers.ResNetForImageClassification.from_pretrained
    loaded, told = read(tmp_path / "ours", output_loading_info=True)
    assert not any(told.values())
    images = np.random.default_rng(0).standard_normal((2, 64, 64, 3), np.float32)
    np.testing.assert_array_equal(their_logits(loaded.eval(), images), their_logits(network, images))


@pytest.mark.parametrize("nested", [None, "state_dict", "model"])
def test_pth_is_read_without_running_code(nested, saved, tmp_path):
    folder, network = saved(18)
    state = {f"module.{name}": value for name, value in network.state_dict().items()}
    torch.save({nested: state, "epoch": 3} if nested else state, tmp_path / "a.pth")
    file = checkpoints.read_weights(tmp_path / "a.pth")
    expected = checkpoints.read_weights(folder)
    assert file.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        np.testing.assert_array_equal(file.tensors[name], value)


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema"])
def test_moving_average_beside_the_weights_is_taken(key, saved, tmp_path):
    _, network = saved(18)
    last = network.state_dict()
    average = {f"module.{name}": 2 * value if value.is_floating_point() else value for name, value in last.items()}
    torch.save({"model": last, key: {"n_averaged": torch.tensor(3), **average}}, tmp_path / "a.pth")
    file = checkpoints.read_weights(tmp_path / "a.pth")
    assert file.note == f"taking the moving average of the weights ({key})"
    name = "resnet.embedder.embedder.convolution.weight"
    np.testing.assert_array_equal(file.tensors[name], 2 * last[name].numpy())


@pytest.mark.parametrize("content", [b"<!doctype html><html>not found</html>" * 9, b"", b"version https://git-lfs"])
def test_other_file_named_pth_is_refused(content, tmp_path):
    (tmp_path / "page.pth").write_bytes(content)
    with pytest.raises(WeightsError, match=r"is no whole file of PyTorch \(\w+\); get it again"):
        checkpoints.read_weights(tmp_path / "page.pth")


class Malicious:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("was_here"),)


def test_pickle_that_runs_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Malicious()}, tmp_path / "bad.pth")
    with pytest.raises(checkpoints.WeightsError, match="holds code beside weights, and was refused"):
        checkpoints.read_weights(tmp_path / "bad.pth")
    assert not (tmp_path / "was_here").exists()


def test_file_of_a_training_script_is_read_beside_what_it_ignores(saved, tmp_path):
    """Names of the endings of training scripts and of Lightning; what is beside the weights is not made."""
    folder, network = saved(18)
    expected = checkpoints.read_weights(folder).tensors
    beside = {"args": argparse.Namespace(lr=np.float64(0.1), out=pathlib.Path("x")), "best": np.float32(0.5)}
    beside |= {"history": np.arange(3), "when": datetime.timedelta(1), "hyper_parameters": {"seed": np.int64(3)}}
    state = {f"model.{name}": value for name, value in network.state_dict().items()}
    for name in ("best.pth.tar", "last.ckpt", "a.tar", "a.pt"):
        torch.save({"state_dict": state, **beside}, tmp_path / name)
        found = checkpoints.read_weights(tmp_path / name).tensors
        assert found.keys() == expected.keys() and all((found[key] == expected[key]).all() for key in expected)
    before = torch.serialization.get_safe_globals()
    torch.save({"state_dict": state, **beside, "code": Malicious()}, tmp_path / "bad.ckpt")
    assert "holds code beside weights" in made.message(checkpoints.read_weights, tmp_path / "bad.ckpt")
    assert torch.serialization.get_safe_globals() == before and not pathlib.Path("was_here").exists()


def test_network_that_a_checkpoint_names_is_believed_or_refused(saved, tmp_path):
    state = saved(18)[1].state_dict()
    for key in ("arch", "architecture", "model_name"):
        for name in ("resnet18", "ResNet-18", "timm/resnet18.a1_in1k", "cifar_resnet20", "resnet50_v1.5"):
            torch.save({key: name, "state_dict": state}, tmp_path / "a.pth")
            assert checkpoints.read_weights(tmp_path / "a.pth").name == "resnet18"
        for name in ("resnetblur50", "resnetaa50.a1h_in1k", "seresnet50", "wide_resnet50_2", "resnext50_32x4d"):
            torch.save({key: name, "state_dict": state}, tmp_path / "a.pth")
            line = made.message(checkpoints.read_weights, tmp_path / "a.pth")
            assert f"a.pth: {key} is {name!r}, and mixedres computes resnet18" in line


@pytest.mark.parametrize("safe", [True, False])
def test_divided_weights_are_read_and_their_index_is_checked(safe, saved, tmp_path):
    folder, network = saved(18)
    network.save_pretrained(tmp_path, max_shard_size="20MB", safe_serialization=safe)
    (index,) = tmp_path.glob("*.index.json")
    expected = checkpoints.read_weights(folder)
    for path in (tmp_path, index):
        file = checkpoints.read_weights(path)
        assert file.tensors.keys() == expected.tensors.keys() and file.input == expected.input
        assert all((file.tensors[key] == expected.tensors[key]).all() for key in expected.tensors)
        assert file.version == "1.5" and file.name == "resnet18"
    record = json.loads(index.read_text())
    name, part = next(iter(record["weight_map"].items()))
    for changed, words in (
        ({name: "../x.safetensors"}, "names '../x.safetensors', which is no file beside it"),
        ({name: index.name}, f"names '{index.name}', which is no file beside it"),
        ({name: "none.safetensors"}, "none.safetensors does not exist"),
        ({"more": part}, f"{part} lacks more, which {index.name} promises"),
    ):
        index.write_text(json.dumps({"weight_map": record["weight_map"] | changed}))
        assert words in made.message(checkpoints.read_weights, tmp_path)
    for text in ("[]", "{", '{"weight_map": []}', "{}"):
        index.write_text(text)
        assert "does not say which file has which tensor" in made.message(checkpoints.read_weights, index)


def test_files_of_several_networks_say_what_to_save(saved, tmp_path):
    state = saved(18)[1].state_dict()
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "program.pt")
    torch.save({"student": state, "teacher": state, "epoch": 3}, tmp_path / "pair.pth")
    torch.save({"model": {"net_a": state, "net_b": state}}, tmp_path / "inner.pth")
    torch.save({f"{one}.{name}": x for one in ("student", "teacher") for name, x in state.items()}, tmp_path / "a.pth")
    torch.save(
        {"loss.weight": state["classifier.1.bias"]} | {f"net.{n}": x for n, x in state.items()}, tmp_path / "b.pth"
    )
    torch.save({"0.weight": state["classifier.1.bias"], "4.0.conv1.weight": torch.zeros(2)}, tmp_path / "c.pth")
    for name, words in (
        ("program.pt", "TorchScript, which is not run; save its weights: torch.save(torch.jit.load('program.pt')"),
        ("pair.pth", "weights of student, teacher, each by itself; save one: torch.save(torch.load('pair.pth')['t"),
        ("inner.pth", "save one: torch.save(torch.load('inner.pth')['model']['net_b'], 'weights.pth')"),
        ("a.pth", "holds a ResNet below student., teacher.; save one alone, as of model.teacher.state_dict()"),
        ("b.pth", "holds a ResNet below net. beside loss.; save one alone, as of model.net.state_dict()"),
        ("c.pth", "holds layers of torch.nn.Sequential (0.weight, 4.0.conv1.weight), which have numbers and no names"),
    ):
        assert words in made.message(checkpoints.read_weights, tmp_path / name)


def with_pickle(content):
    """A file of `torch.save` with another pickle in it, and a storage of 144 floats."""
    file, changed = io.BytesIO(), io.BytesIO()
    torch.save({"layer1.0.conv1.weight": torch.zeros(4, 4, 3, 3)}, file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, content if name.endswith("data.pkl") else old.read(name))
    return changed.getvalue()


def forged(size, stride, offset=0, numel=144):
    """A pickle of a tensor of this shape in a storage of so many floats, whatever the file has."""

    def integer(value):
        return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)

    def text(value):
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + integer(numel) + b"tQ"
    shape, strides = (b"(" + b"".join(map(integer, values)) + b"t" for values in (size, stride))
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + integer(offset) + shape + strides
    return b"\x80\x02}(" + text("layer1.0.conv1.weight") + tensor + b"\x89ccollections\nOrderedDict\n)RtRu."


PICKLES = {
    "size": forged((10**6,), (1,)),
    "negative stride": forged((4,), (-1,)),
    "size without memory": forged((2**60,), (0,)),
    "huge storage": forged((4,), (1,), numel=2**50),
    "numpy": b"\x80\x02cnumpy\nndarray\n(K\x01\x85cnumpy\ndtype\nX\x01\x00\x00\x00O\x85RU\x08AAAAAAAAtR.",
    "code": b"cos\nsystem\n(S'ls'\ntR.",
    "nested tuples": b"\x80\x02" + b"(" * 10**5 + b"t" * 10**5 + b".",
    "memo": b"\x80\x02}r\xff\xff\xff\x7f.",
    "tensor without a storage": b"\x80\x02ctorch\nTensor\n(\x8a\x05\x00\x00\x00\x00\x04tR.",
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickle_that_asks_for_memory_or_code_is_refused(name, tmp_path):
    path = tmp_path / "weights.pth"
    path.write_bytes(with_pickle(forged((4, 4, 3, 3), (36, 9, 3, 1))))
    assert checkpoints.read_weights(path).tensors["layer1.0.conv1.weight"].shape == (4, 4, 3, 3)
    path.write_bytes(with_pickle(PICKLES[name]))
    made.message(checkpoints.read_weights, path)


def test_compressed_pth_is_refused(tmp_path):
    path = tmp_path / "weights.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights/data/0", bytes(10**7))
    with pytest.raises(WeightsError, match="unpacks to 10,000,000 bytes"):
        checkpoints.read_weights(path)


def test_bfloat16_weights_widen_exactly(saved, tmp_path):
    _, network = saved(18)
    torch.save(network.bfloat16().state_dict(), tmp_path / "half.pth")
    file = checkpoints.read_weights(tmp_path / "half.pth")
    name = "resnet.embedder.embedder.convolution.weight"
    assert file.tensors[name].dtype == np.float32
    np.testing.assert_array_equal(file.tensors[name], network.state_dict()[name].float().numpy())
    assert jnp.float32 == file.variables()["params"]["stem_conv"]["kernel"].dtype


@pytest.mark.slow
def test_weights_of_transformers_train_in_half_precision(saved, tmp_path, capsys):
    """The command of configs/finetune.py on a folder of pictures: the head alone, then everything."""
    folder, _ = saved(18)
    made.write_folder(tmp_path / "pictures", count=48)
    command = ["mixedres", "--config=configs/finetune.py:fp16,model=resnet18,data.image_size=32,epochs=2,batch_size=16"]
    command += [f"--config.init_from={folder}", f"--config.data.dir={tmp_path / 'pictures'}", "--config.num_devices=1"]
    frozen = ["--config.trainable=^/head/", "--config.batch_norm.frozen"]
    assert main.main([*command, *frozen, f"--workdir={tmp_path / 'head'}"]) == 0
    assert "the head is new: 3 classes instead of 10" in capsys.readouterr().out
    backbones = [checkpoints.read_weights(path).variables() for path in (folder, tmp_path / "head")]
    for backbone in backbones:
        backbone["params"].pop("head")
    for before, after in zip(*map(jax.tree.leaves, backbones), strict=True):
        assert before.tobytes() == after.tobytes()
    assert main.main([*command, f"--workdir={tmp_path / 'all'}"]) == 0
    losses = [json.loads(line) for line in (tmp_path / "all" / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(line.get("loss", 0.0)) for line in losses)
    # And away again: transformers takes what was taught.
    export(tmp_path / "all", tmp_path / "back", "--layout=transformers")
    network = transformers.ResNetForImageClassification.from_pretrained(tmp_path / "back").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "back")
    assert network.config.id2label[1] == made.CLASSES[1] and processor.size["shortest_edge"] == 32
    images = np.random.default_rng(0).standard_normal((4, 32, 32, 3)).astype(np.float32)
    expected = their_logits(network, images)
    ours = logits("fp32", checkpoints.read_weights(tmp_path / "all"), images)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
