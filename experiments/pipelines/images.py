"""Images of the size and the bytes of ImageNet's, made of the photographs of scikit-image and scikit-learn."""

import pathlib

import cv2
import numpy as np
import simplejpeg


def make_images(folder: pathlib.Path, count: int) -> float:
    """Writes `count` images as train/CLASS/*.jpg and a few as val/CLASS/*.jpg; returns their mean size in kB."""
    import skimage.data
    import sklearn.datasets

    photographs = {
        "astronaut": skimage.data.astronaut(),
        "cat": skimage.data.chelsea(),
        "coffee": skimage.data.coffee(),
        "rocket": skimage.data.rocket(),
        "galaxies": skimage.data.hubble_deep_field(),
        "tissue": skimage.data.immunohistochemistry(),
        "china": sklearn.datasets.load_sample_image("china.jpg"),
        "flower": sklearn.datasets.load_sample_image("flower.jpg"),
    }
    rng = np.random.default_rng(0)
    sizes = []
    for index in range(count + len(photographs)):
        name, photograph = list(photographs.items())[index % len(photographs)]
        data = _image(photograph, rng)
        path = folder / ("train" if index < count else "val") / name / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        sizes.append(len(data))
    return float(np.mean(sizes)) / 1e3


def _image(photograph: np.ndarray, rng: np.random.Generator) -> bytes:
    """A random part of a photograph at 500x375, with a sensor's noise, so that it takes as many bytes as ImageNet's."""
    height, width = photograph.shape[:2]
    scale = rng.uniform(0.75, 1.0) * min(height / 375, width / 500)
    h, w = int(375 * scale), int(500 * scale)
    y, x = rng.integers(height - h + 1), rng.integers(width - w + 1)
    image = cv2.resize(photograph[y : y + h, x : x + w], (500, 375), interpolation=cv2.INTER_CUBIC)
    noisy = np.clip(image + rng.normal(0, 6, image.shape), 0, 255).astype(np.uint8)
    return simplejpeg.encode_jpeg(noisy, quality=int(rng.integers(92, 98)), colorsubsampling="420")
