"""Files of an exported network, for people and programs that have no mixedres."""

import importlib.metadata
import inspect
import pathlib
import zipfile

from mixedres import models
from mixedres._internal.files import write_json
from mixedres._internal.formats import stamped
from mixedres._internal.types import Record
from mixedres.data import geometry
from mixedres.predict import Classifier

MODEL, LABELS, FACTS, LOADER, README = "model.jax", "labels.json", "model.json", "load.py", "README.md"
# jax.export reads its files with this package, and an installation of jax alone does not have it.
READER = "flatbuffers"

_LOADER = '''\
"""Runs the network beside this file: python load.py cat.jpg dog.png ..., or python load.py IMAGES.npy.

Needs jax alone for an array of {dtype} {shape}, and Pillow for photographs. Without arguments it
classifies a black image. The exit status is 1 if a file cannot be read; the others are classified.
"""
import json, pathlib, sys
from typing import NamedTuple
if {{"-h", "--help"}} & {{*sys.argv[1:]}}: sys.exit(print(__doc__.strip()))
import numpy as np, jax
here = pathlib.Path(__file__).parent
sys.path.append(str(here / "{reader}.zip"))  # where it is not installed, for jax.export
from jax import export

{geometry}

{read_photograph}
{options_for_cpus}def printable(text):  # what a terminal would obey is escaped
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)

labels = json.loads((here / "{labels}").read_text(encoding="utf-8"))
names, images, status = [], [], 0
if not sys.argv[1:]: names, images = ["a black image"], [np.zeros(({height}, {width}, {channels}), np.{dtype})]
for path in sys.argv[1:]:
    try:
        found = np.load(path) if path.endswith(".npy") else [read_photograph(path)]
        if found[0].shape != ({height}, {width}, {channels}) or found[0].dtype != np.{dtype}:
            raise ValueError("the array is not {dtype} {shape}")
        names += [f"{{path}}, image {{index}}" for index in range(len(found))] if path.endswith(".npy") else [path]
        images.extend(found)
    except ModuleNotFoundError: sys.exit("to read photographs, type: pip install pillow")
    except Exception as error:  # Pillow raises many kinds of errors
        reason = getattr(error, "strerror", None) or str(error).partition(" <")[0] or type(error).__name__
        status = print(printable(f"{{path}}: {{reason}}"), file=sys.stderr) or 1
if not images: sys.exit(status)
images = np.stack(images)
try:
    network = export.deserialize(bytearray((here / "{model}").read_bytes())).call
    network = jax.jit(network{jit_options})
    found = {{name: np.asarray(values) for name, values in network(images).items()}}
except Exception as error:
    if jax.__version_info__ >= {needs}: raise
    print(f"{model} needs jax {minor}, this is {{jax.__version__}} ({{type(error).__name__}})", file=sys.stderr)
    if sys.version_info < (3, 12): sys.exit("install Python 3.12, which newer JAX needs, and type: pip install -U jax")
    sys.exit("type: pip install -U jax")
for name, row in zip(names, found["probabilities"]):
    print(printable(name))
    for index in np.argsort(-row, kind="stable")[:5]: print(f"  {{row[index]:7.2%}}  {{printable(labels[index])}}")
if status: sys.exit(status)
'''

# XLA computes float32 and bfloat16 faster on CPUs if it may call oneDNN, and other networks than ResNets need options
# with which it computes right; see mixedres.models.onednn.
_OPTIONS_FOR_CPUS = """\
def options_for_cpus():
    cpus, options = pathlib.Path("/proc/cpuinfo"), {options}
    if jax.default_backend() != "cpu" or jax.__version_info__ < (0, 11) or not cpus.exists(): return None
    try: jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except Exception: return None  # another XLA
    return options if "{instructions}" in cpus.read_text() else None

"""

# As `mixedres.data.images.decoding` converts what Pillow decodes.
_PIXELS = """\
def opened(path):  # from memory, because Pillow maps some TIFFs, and turns no image that it maps
    import io
    from PIL import Image
    with open(path, "rb") as file: return Image.open(io.BytesIO(file.read()))

def pixels_of(photo):  # uint8 (height, width, {channels}), upright
    from PIL import Image, ImageOps
    photo = ImageOps.exif_transpose(photo)
    if photo.mode == "F": raise ValueError("its pixels are floating-point numbers of an unknown range")
    if photo.mode.startswith("I"): photo = Image.fromarray(np.uint8(np.clip(np.asarray(photo) / 257 + 0.5, 0, 255)))
    if photo.mode == "P": photo = photo.convert("RGBA")
    return np.asarray(photo.convert("{mode}")).reshape(photo.height, photo.width, {channels})
"""

# The same steps as `mixedres.data.images.squares.crop_and_resize`, with Pillow; the geometry is the loader's own text.
_READ_PHOTOGRAPH = """\
{pixels_of}
def resize(pixels, height, width, by_area):  # else linear interpolation
    def weights(length, size):  # (size, length)
        old, edges = np.arange(length), np.arange(size + 1) * (length / size)
        inside = np.minimum(edges[1:, None], old + 1) - np.maximum(edges[:-1, None], old)
        at = np.clip((edges[1:, None] + edges[:-1, None] - 1) / 2, 0, length - 1)
        return np.float32(np.maximum(inside * (size / length) if by_area else 1 - abs(at - old), 0))
    rows, columns = weights(len(pixels), height), weights(pixels.shape[1], width)
    return np.uint8(np.einsum("yh,hw...,xw->yx...", rows, np.float32(pixels), columns, optimize=True) + 0.5)

def read_photograph(path):  # upright, the square in the middle, {height}x{width} pixels
    photo, size = opened(path), {width}
    turned = photo.format != "TIFF" and photo.getexif().get(0x0112, 1) > 4  # Pillow turns a TIFF
    width, height = photo.size[::-1] if turned else photo.size
    box = central_crop(height, width, {crop_pct:.6g})
    shrink, is_jpeg = shrink_for(box.height, size), photo.format == "JPEG"
    if is_jpeg: photo.draft("{mode}", [length // shrink for length in photo.size])
    pixels = pixels_of(photo)
    if shrink > 1 and not is_jpeg: pixels = resize(pixels, -(-height // shrink), -(-width // shrink), by_area=True)
    part = pixels[shrunk(box, shrink)]
    by_area = {is_area} and min(part.shape[:2]) >= size
    return resize(part, size, size, by_area).reshape({height}, {width}, {channels})
"""

# As `mixedres.original.pixels` computes.
_READ_OFFICIAL = """\
{pixels_of}
def read_photograph(path):  # upright, the middle after the shorter side has become {resized} pixels
    def middle(x, axis, shorter):
        at = central_positions(x.shape[axis], shorter, {resized}, {width})
        low = at.astype(int)
        share = (at - low).astype(np.float32).reshape((-1, 1, 1) if axis == 0 else (-1, 1))
        before, after = x.take(low, axis), x.take(low + 1, axis, mode="clip")
        return before + (after - before) * share
    pixels = np.float32(pixels_of(opened(path)))
    shorter = min(pixels.shape[:2])
    return middle(middle(pixels, 1, shorter), 0, shorter)
"""

_README = """\
# {title}: {classes} classes, computed in {precision}

Made by mixedres {mixedres} with jax {jax} on {date}, from `{source}`.

    python {loader} cat.jpg dog.png
    python {loader} IMAGES.npy

needs `pip install jax` (or `jax[cuda13]`), and `pip install pillow` for photographs: weights and normalization are
inside `{model}`.

| | | |
| --- | --- | --- |
| in | images | {dtype} {shape}, any number n >= 1 |
| out | `probabilities` | float32 (n, {classes}) |
| out | `classes` | int32 (n,), the most probable; `{labels}` has their names |

{square}
The file is StableHLO of `jax.export`, for {platforms}. JAX promises that newer versions read it for at least six
months; write it again with a newer mixedres after that. A jax older than {minor} may not read it, and from 0.11 on jax
needs Python 3.12. `{reader}.zip` is the Python package of that name (Apache License 2.0), with which jax reads the
file, and which an installation of jax alone does not bring.
"""

_INPUT = """\
How `read_photograph` in `{loader}` makes the {height}x{width} input from an image: it turns the image upright, cuts out
the square in its center whose side is {side}, and resizes the square, {filter}. Values stay
0 to 255{channels_note}. On 31 images (JPEG, PNG, CMYK, EXIF) the pixels were those of `mixedres predict`, but for 0.04
of 255 on average with averaging over areas, 0.14 with linear interpolation, and at most 2.
"""

_OFFICIAL_INPUT = """\
How `read_photograph` in `{loader}` makes the {height}x{width} input from an image, as TensorFlow's official ResNet
does: it turns the image upright, resizes it until its shorter side has {resized} pixels, and cuts out the center. Pixel
i of n that m become lies at i * n / m, and values stay 0 to 255{channels_note}, without rounding. Pillow decodes
JPEGs a little differently (by 0.5 of 255 on average), because TensorFlow takes a faster DCT.
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
    """Makes `folder` with the artifact of `jax.export` and the files beside it."""
    folder.mkdir(parents=True)
    (folder / MODEL).write_bytes(artifact)
    _write_reader(folder / f"{READER}.zip")
    write_json(folder / LABELS, list(classifier.class_names))
    write_json(folder / FACTS, stamped(facts))
    words = _words(classifier, facts)
    is_official = classifier.spec.resize == "official"
    words["pixels_of"] = _PIXELS.format(**words)
    read = (_READ_OFFICIAL if is_official else _READ_PHOTOGRAPH).format(**words)
    source = inspect.getsource(geometry).partition("import numpy as np\n")[2].strip()
    (folder / LOADER).write_text(_LOADER.format(**words | {"read_photograph": read, "geometry": source}))
    image = (_OFFICIAL_INPUT if is_official else _INPUT).format(**words)
    text = (_README + (_SAVED_MODEL if saved_model else "")).format(**words | {"square": image})
    (folder / README).write_bytes(text.encode(errors="backslashreplace"))  # not every path is UTF-8


def _write_reader(path: pathlib.Path) -> None:
    """Writes the installed package `READER` with its metadata into a zip file that Python can import from."""
    files = importlib.metadata.files(READER) or []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(file for file in files if file.suffix == ".py" or file.name in ("METADATA", "LICENSE")):
            archive.write(str(file.locate()), str(file))


def _words(classifier: Classifier, facts: Record) -> Record:
    """Returns the values of the fields in the texts above."""
    spec = classifier.spec
    height, width, channels = spec.shape
    instructions: str | None = {"bf16": "avx512_bf16", "fp32": "avx2"}.get(facts["precision"])
    compiled_with = models.onednn.COMPILER_OPTIONS
    if not isinstance(classifier.model, models.ResNet):
        instructions, compiled_with = "", models.compiler_options(classifier.model, "cpu")
    options = ""
    if instructions is not None:
        options = _OPTIONS_FOR_CPUS.format(options=compiled_with, instructions=instructions)
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
        "filter": "averaging over areas where it shrinks" if spec.resize == "area" else "with linear interpolation",
        "resized": round(width / spec.crop_pct),
        "is_area": spec.resize == "area",
        "platforms": " and ".join(facts["platforms"]),
        "mixedres": facts["versions"]["mixedres"],
        "jax": facts["versions"]["jax"],
        "options_for_cpus": options,
        "jit_options": ", compiler_options=options_for_cpus()" if options else "",
        "needs": tuple(map(int, facts["versions"]["jax"].split(".")[:2])),
        "minor": ".".join(facts["versions"]["jax"].split(".")[:2]),
    }
