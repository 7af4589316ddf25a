"""Files of an exported network, for people and programs that have no mixedres."""

import importlib.metadata
import pathlib
import zipfile

from mixedres import models
from mixedres._internal.files import write_json
from mixedres._internal.formats import stamped
from mixedres._internal.types import Record
from mixedres.data import InputSpec
from mixedres.predict import Classifier

MODEL, LABELS, FACTS, LOADER, README = "model.jax", "labels.json", "model.json", "load.py", "README.md"
# jax.export reads its files with this package, and an installation of jax alone does not have it.
READER = "flatbuffers"

_LOADER = '''\
"""Runs the network beside this file; needs jax alone. python load.py IMAGES.npy: {dtype}, {shape}."""
import json, pathlib, sys
import numpy as np, jax
here = pathlib.Path(__file__).parent
sys.path.append(str(here / "{reader}.zip"))  # where it is not installed, for jax.export
from jax import export
labels = json.loads((here / "{labels}").read_text(encoding="utf-8"))
images = np.load(sys.argv[1]) if sys.argv[1:] else np.zeros((1, {height}, {width}, {channels}), np.{dtype})
{options_for_cpus}try:
    network = export.deserialize(bytearray((here / "{model}").read_bytes())).call
    network = jax.jit(network{jit_options})
    found = {{name: np.asarray(values) for name, values in network(images).items()}}
except Exception as error:
    if jax.__version_info__ >= {needs}: raise
    sys.exit(f"{model} needs jax {minor}, this is {{jax.__version__}} ({{type(error).__name__}}): pip install -U jax")
for index, row in zip(found["classes"], found["probabilities"]):  # what a terminal would obey is escaped
    name = "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in labels[index])
    print(f"{{row[index]:7.2%}}  {{name}}")
'''

# XLA computes float32 and bfloat16 faster on CPUs if it may call oneDNN; see mixedres.models.onednn.
_OPTIONS_FOR_CPUS = """\
def options_for_cpus():  # with oneDNN
    cpus, options = pathlib.Path("/proc/cpuinfo"), {options}
    if jax.default_backend() != "cpu" or jax.__version_info__ < (0, 11) or not cpus.exists(): return None
    try: jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except Exception: return None  # another XLA
    return options if "{instructions}" in cpus.read_text() else None
"""

_README = """\
# {title}: {classes} classes, computed in {precision}

Made by mixedres {mixedres} with jax {jax} on {date}, from `{source}`.

    python {loader} IMAGES.npy

needs `pip install jax` (or `jax[cuda13]`) and nothing else: weights and normalization are inside `{model}`.

| | | |
| --- | --- | --- |
| in | images | {dtype} {shape}, any number n >= 1 |
| out | `probabilities` | float32 (n, {classes}) |
| out | `classes` | int32 (n,), the most probable; `{labels}` has their names |

{square}
The file is StableHLO of `jax.export`, for {platforms}. JAX promises that newer versions read it for at least six
months; write it again with a newer mixedres after that. A jax older than {minor} may not read it. `{reader}.zip` is the
Python package of that name (Apache License 2.0), with which jax reads the file, and which an installation of jax alone
does not bring.
"""

_INPUT = """\
How to make the {height}x{width} input from an image: turn it upright, cut out the square in its center whose side is
{side}, and resize it {filter}. Values stay 0 to 255{channels_note}:

```python
import numpy as np
from PIL import Image, ImageOps

photo = ImageOps.exif_transpose(Image.open("cat.jpg")).convert("{mode}")
side = round({crop_pct:.6g} * min(photo.size))
x, y = (photo.width - side) // 2, (photo.height - side) // 2
resampling = Image.Resampling.{pillow}
image = np.asarray(photo.resize(({width}, {height}), resampling, box=(x, y, x + side, y + side)))
np.save("images.npy", image.reshape(1, {height}, {width}, {channels}))
```
"""

_OFFICIAL_INPUT = """\
How to make the {height}x{width} input from an image, as TensorFlow's official ResNet does: turn it upright, resize it
until its shorter side has {resized} pixels, and cut out the center. Pixel i of n that m become lies at i * n / m, and
values stay 0 to 255{channels_note}, without rounding:

```python
import numpy as np
from PIL import Image, ImageOps

def middle(x, axis, shorter):
    length = x.shape[axis]
    new = max({width}, int(np.float32(length) * (np.float32({resized}) / np.float32(shorter))))
    start = (new - {width}) // 2
    at = np.arange(start, start + {width}, dtype=np.float32) * (np.float32(length) / np.float32(new))
    low = at.astype(int)
    share = (at - low).astype(np.float32).reshape((-1, 1, 1) if axis == 0 else (-1, 1))
    before, after = x.take(low, axis), x.take(low + 1, axis, mode="clip")
    return before + (after - before) * share

photo = ImageOps.exif_transpose(Image.open("cat.jpg")).convert("{mode}")
pixels = np.asarray(photo, np.float32).reshape(photo.height, photo.width, {channels})
image = middle(middle(pixels, 1, min(photo.size)), 0, min(photo.size))
np.save("images.npy", image.reshape(1, {height}, {width}, {channels}))
```

Pillow decodes JPEGs a little differently (by 0.5 of 255 on average), because TensorFlow takes a faster DCT.
"""

_SAVED_MODEL = """
## TensorFlow

`saved_model/` runs with TensorFlow 2.20 and newer, on the same platforms:

```python
network = tf.saved_model.load("saved_model")
network.signatures["serving_default"](images=images)   # {dtype} {shape}
network.signatures["image_bytes"](image_bytes=encoded) # (n,) JPEG or PNG files, cropped and resized in the graph
```

Both return `probabilities` and `classes`. The second ignores EXIF orientation.
"""


def write_files(
    folder: pathlib.Path, artifact: bytes, classifier: Classifier, facts: Record, *, saved_model: bool
) -> None:
    """Makes `folder` with the artifact of `jax.export` and the files beside it.

    Args:
      folder: must not exist.
      artifact: the serialized artifact.
      classifier: the exported network.
      facts: content of `FACTS`: 'network', 'version', 'classes', 'precision', 'source', 'date', 'platforms',
        'versions'.
      saved_model: describe a SavedModel in the README.

    Raises:
      OSError: if a file cannot be written.
    """
    folder.mkdir(parents=True)
    (folder / MODEL).write_bytes(artifact)
    _write_reader(folder / f"{READER}.zip")
    write_json(folder / LABELS, list(classifier.class_names))
    write_json(folder / FACTS, stamped(facts))
    words = _words(classifier.spec, facts)
    (folder / LOADER).write_text(_LOADER.format(**words))
    image = (_OFFICIAL_INPUT if classifier.spec.resize == "official" else _INPUT).format(**words)
    text = (_README + (_SAVED_MODEL if saved_model else "")).format(**words | {"square": image})
    (folder / README).write_bytes(text.encode(errors="backslashreplace"))  # not every path is UTF-8


def _write_reader(path: pathlib.Path) -> None:
    """Writes the installed package `READER` with its metadata into a zip file that Python can import from."""
    files = importlib.metadata.files(READER) or []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(file for file in files if file.suffix == ".py" or file.name in ("METADATA", "LICENSE")):
            archive.write(str(file.locate()), str(file))


def _words(spec: InputSpec, facts: Record) -> Record:
    """Returns the values of the fields in the texts above."""
    height, width, channels = spec.shape
    instructions = {"bf16": "avx512_bf16", "fp32": "avx2"}.get(facts["precision"])
    options = ""
    if instructions:
        options = _OPTIONS_FOR_CPUS.format(options=models.onednn.COMPILER_OPTIONS, instructions=instructions)
    return facts | {
        "title": facts["network"] + (f", version {facts['version']}" if facts["version"] else ""),
        "model": MODEL,
        "labels": LABELS,
        "loader": LOADER,
        "reader": READER,
        "dtype": spec.image_dtype.name,
        "shape": f"(n, {height}, {width}, {channels})",
        "height": height,
        "width": width,
        "channels": channels,
        "channels_note": ", of red, green and blue" if channels == 3 else ", of brightness",
        "mode": "RGB" if channels == 3 else "L",
        "crop_pct": spec.crop_pct,
        "side": "the shorter side" if spec.crop_pct == 1 else f"{spec.crop_pct:.6g} of the shorter side",
        "filter": "averaging over areas where it shrinks" if spec.resize == "area" else "linearly",
        "resized": round(width / spec.crop_pct),
        # Pillow antialiases with all of its filters.
        "pillow": f"BOX if side > {width} else Image.Resampling.BILINEAR" if spec.resize == "area" else "BILINEAR",
        "platforms": " and ".join(facts["platforms"]),
        "mixedres": facts["versions"]["mixedres"],
        "jax": facts["versions"]["jax"],
        "options_for_cpus": options,
        "jit_options": ", compiler_options=options_for_cpus()" if options else "",
        "needs": tuple(map(int, facts["versions"]["jax"].split(".")[:2])),
        "minor": ".".join(facts["versions"]["jax"].split(".")[:2]),
    }
