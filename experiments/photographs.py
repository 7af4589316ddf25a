"""Trains on a few hundred photographs: ours beside torchvision's ResNet-18 and the network of Keras' tutorial.

python -m experiments.photographs --seeds=5
python -m experiments.photographs --contenders=ours --set=data.crop_area=0.25 --set=data.image_size=32,epochs=60

The collection is made from photographs that packages carry: scikit-image, scikit-learn, and Debian's mate-backgrounds.
Each photograph is a class of 20 crops (--crops) at random places, of random sizes and angles; a fifth is for testing.
All contenders read the same files, at 64 pixels, in batches of 32, for 30 epochs.

- ours: configs/folder.py, ResNet-18 in float32. Each --set=KEY=VALUE,KEY=VALUE is another contender, ours with these
  keys.
- torchvision: ResNet-18 with the optimizer, schedule, smoothing, crops and flips of configs/folder.py, and its own
  initialization (`pip install torch torchvision`).
- keras: the network and the optimizer of the tutorial "Image classification" of TensorFlow (`pip install keras`).

Prints the mean of the last test top-1 over seeds, and the difference to torchvision with its 95 % interval (Welch).
Writes experiments/results/photographs.json (NAME from --name).
"""

import importlib.util
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.stats
from PIL import Image

from experiments.lib import runs
from mixedres._internal import environment
from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError
from mixedres.config import load_config
from mixedres.data import get_preprocessing

SIDE, BATCH, EPOCHS = 64, 32, 30
SKIMAGE = (
    "astronaut", "brick", "camera", "cell", "chelsea", "clock_motion", "coffee", "coins", "grass", "gravel", "horse",
    "ihc", "moon", "motorcycle_left", "page", "text", "hubble_deep_field", "microaneurysms", "retina", "rocket",
)  # fmt: skip
BACKGROUNDS = pathlib.Path("/usr/share/backgrounds/mate")


def pictures() -> dict[str, Image.Image]:
    """Returns the photographs by name."""
    import skimage
    import sklearn.datasets

    data = pathlib.Path(skimage.__file__).parent / "data"
    paths = {path.stem: path for path in data.glob("*.[jp][pn]g") if path.stem in SKIMAGE}
    paths |= {path.stem: path for path in sorted(BACKGROUNDS.glob("*/*.jpg")) if not path.stem.startswith("Elephants_")}
    found = {name: Image.open(paths[name]).convert("RGB") for name in sorted(paths)}
    return found | {
        name: Image.fromarray(sklearn.datasets.load_sample_image(f"{name}.jpg")) for name in ("china", "flower")
    }


def collect(root: pathlib.Path, crops: int = 20) -> int:
    """Writes the collection into `root`, as train/NAME/*.jpg and val/NAME/*.jpg; returns the number of classes."""
    found = pictures()
    for place, (name, picture) in enumerate(found.items()):
        rng = np.random.default_rng(place)
        for number in range(crops):
            side = int(min(picture.size) * rng.uniform(0.15, 0.4))
            x, y = (int(rng.integers(0, length - side)) for length in picture.size)
            crop = picture.crop((x, y, x + side, y + side)).rotate(rng.uniform(-20, 20))
            folder = root / ("val" if number < crops // 5 else "train") / name
            folder.mkdir(parents=True, exist_ok=True)
            crop.resize((min(side, 192),) * 2, Image.Resampling.LANCZOS).save(folder / f"{number:03}.jpg", quality=90)
    return len(found)


def ours(root: pathlib.Path, seed: int, *more: str) -> float:
    """Returns the test top-1 of configs/folder.py."""
    arguments = [f"--config.data.dir={root}", f"--config.data.image_size={SIDE}", f"--config.batch_size={BATCH}"]
    arguments += [f"--config.epochs={EPOCHS}", f"--config.seed={seed}", "--config.eval_every=0", *more]
    with tempfile.TemporaryDirectory() as workdir:
        summary = runs.run(["--config=configs/folder.py:fp32", *arguments], pathlib.Path(workdir))
    return summary["eval"]["top1"]


def torchvision(root: pathlib.Path, seed: int) -> float:
    """Returns the test top-1 of torchvision's ResNet-18 with the recipe of configs/folder.py."""
    import torch
    from torchvision import datasets, models
    from torchvision.transforms import v2

    torch.manual_seed(seed)
    config, spec = load_config("folder:fp32"), get_preprocessing("torch").input_spec(SIDE)
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize(spec.mean, spec.std)]
    train = v2.Compose([v2.RandomResizedCrop(SIDE), v2.RandomHorizontalFlip(), *to_tensor])
    test = v2.Compose([v2.Resize(round(SIDE / spec.crop_pct)), v2.CenterCrop(SIDE), *to_tensor])
    train_set, test_set = datasets.ImageFolder(root / "train", train), datasets.ImageFolder(root / "val", test)
    loader = torch.utils.data.DataLoader(train_set, BATCH, shuffle=True, drop_last=True)
    model = models.resnet18(num_classes=len(train_set.classes))
    kernels = [p for p in model.parameters() if p.ndim > 1]
    others = [{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    recipe = config.optimizer
    groups = [{"params": kernels, "weight_decay": recipe.weight_decay}, *others]
    peak = recipe.learning_rate * BATCH / recipe.lr_reference_batch
    optimizer = torch.optim.SGD(groups, peak, momentum=recipe.momentum, nesterov=recipe.nesterov)
    total, warmup = EPOCHS * len(loader), config.schedule.warmup * len(loader)

    def rate(step: int) -> float:
        return step / warmup if step < warmup else 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (total - warmup))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    model.train()
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        batches = torch.utils.data.DataLoader(test_set, BATCH)
        right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in batches)
    return right / len(test_set)


def keras(root: pathlib.Path, seed: int) -> float:
    """Returns the test top-1 of the tutorial's network, with its augmentation and dropout."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras as library
    from keras import layers

    library.utils.set_random_seed(seed)
    (images, labels), test = _arrays(root / "train"), _arrays(root / "val")
    augmentation = [layers.RandomFlip("horizontal"), layers.RandomRotation(0.1), layers.RandomZoom(0.1)]
    blocks = [[layers.Conv2D(n, 3, padding="same", activation="relu"), layers.MaxPooling2D()] for n in (16, 32, 64)]
    network = [layers.Input((SIDE, SIDE, 3)), *augmentation, layers.Rescaling(1 / 255)]
    network += [layer for block in blocks for layer in block]
    network += [layers.Dropout(0.2), layers.Flatten(), layers.Dense(128, activation="relu")]
    model = library.Sequential([*network, layers.Dense(len(set(labels)))])
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    found = model.fit(images, labels, batch_size=BATCH, epochs=EPOCHS, validation_data=test, verbose=0)
    return found.history["val_accuracy"][-1]


def _arrays(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    names = sorted(path.name for path in folder.iterdir())
    files = [(path, names.index(path.parent.name)) for path in sorted(folder.glob("*/*.jpg"))]
    images = [np.asarray(Image.open(path).resize((SIDE, SIDE), Image.Resampling.BILINEAR)) for path, _ in files]
    return np.stack(images), np.int32([label for _, label in files])


CONTENDERS: dict[str, Callable[..., float]] = {"ours": ours, "torchvision": torchvision, "keras": keras}


def row(name: str, top1: list[float], seconds: float, reference: list[float] | None) -> dict[str, Any]:
    """Returns a row: mean, deviation, and the difference to the reference in points with its interval."""
    points = [100 * value for value in top1]
    found: dict[str, Any] = {"name": name, "top1": points, "mean": statistics.fmean(points), "seconds": seconds}
    found["sd"] = statistics.stdev(points) if len(points) > 1 else 0.0
    if reference and len(points) > 1 and len(reference) > 1:
        test = scipy.stats.ttest_ind(points, [100 * value for value in reference], equal_var=False)
        found["difference"] = found["mean"] - 100 * statistics.fmean(reference)
        found["interval"] = tuple(map(float, test.confidence_interval()))
    return found


def cells(one: dict[str, Any]) -> list[str]:
    """Returns the cells of a row of the table."""
    low, high = one.get("interval", (0.0, 0.0))
    change = f"{one['difference']:+.1f} ({low:+.1f} to {high:+.1f})" if "interval" in one else ""
    return [one["name"], f"{one['mean']:.1f} ± {one['sd']:.1f} %", change, f"{one['seconds']:.0f}"]


def main(argv: list[str]) -> int:
    """Makes the collection, trains, prints and writes; returns the exit status."""
    parser = runs.parser("photographs", __doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each contender (default 5)")
    parser.add_argument(
        "--contenders", default=",".join(CONTENDERS), help="with commas between them, or none; default: all"
    )
    parser.add_argument("--crops", type=int, default=20, help="of each photograph (default 20)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="train ours with these keys; may be repeated",
    )
    parser.add_argument("--name", default="photographs", help="of the file of results")
    options = parser.parse_args(argv)
    cases: list[tuple[str, Callable[..., float], tuple[str, ...]]] = []
    try:
        chosen = [] if options.contenders == "none" else runs.names("contenders", options.contenders)
        if unknown := sorted(set(chosen) - CONTENDERS.keys()):
            raise ConfigError(f"--contenders={unknown[0]} is none; name some of {', '.join(CONTENDERS)}")
        runs.check_positive(options, "seeds", "crops")
    except ConfigError as error:
        console.complain(f"photographs: {error}")
        return 2
    if missing := [name for name in chosen if name != "ours" and importlib.util.find_spec(name) is None]:
        console.complain(f"photographs: {missing[0]} is missing; --help says what to install, or leave it out")
        return 2
    cases += [(name, CONTENDERS[name], ()) for name in chosen]
    cases += [
        (f"ours {keys}", CONTENDERS["ours"], tuple(f"--config.{k}" for k in keys.split(","))) for keys in options.set
    ]
    found: dict[str, tuple[list[float], float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        classes = collect(pathlib.Path(folder), options.crops)
        for name, train, more in cases:
            started, top1 = time.perf_counter(), []
            for seed in range(options.seeds):
                top1.append(train(pathlib.Path(folder), seed, *more))
                console.say(f"{name}, seed {seed}: {top1[-1]:.2%}")
            found[name] = top1, (time.perf_counter() - started) / options.seeds
    reference = found["torchvision"][0] if "torchvision" in found else None
    rows = [row(name, *one, None if one[0] is reference else reference) for name, one in found.items()]
    about = {"classes": classes, "images": classes * options.crops, "side": SIDE, "epochs": EPOCHS}
    path = runs.write(options.name, about | {"versions": environment.versions(), "rows": rows})
    head = ["contender", "top-1", "difference to torchvision, points", "s a run"]
    console.show(*runs.markdown(head, map(cells, rows)), str(path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
