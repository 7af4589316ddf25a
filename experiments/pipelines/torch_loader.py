"""A PyTorch DataLoader with Pillow: what ImageFolder, RandomResizedCrop, RandomHorizontalFlip and PILToTensor do.

Runs where torch and Pillow are installed; torchvision itself is not needed.
"""

from __future__ import annotations

import math
import random

import measure
import numpy as np
import torch
from PIL import Image


class ImageFiles(torch.utils.data.Dataset):
    """Files and their classes."""

    def __init__(self, folder):
        self.files = sorted(folder.glob("train/*/*.jpg"))
        classes = sorted({file.parent.name for file in self.files})
        self.labels = [classes.index(file.parent.name) for file in self.files]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        with open(self.files[index], "rb") as file:
            image = Image.open(file).convert("RGB")
        x, y, width, height = crop(*image.size)
        image = image.crop((x, y, x + width, y + height))
        image = image.resize((measure.SIZE, measure.SIZE), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image, copy=True))
        return pixels.permute(2, 0, 1).contiguous(), self.labels[index]


def crop(width, height):
    """A random resized crop: x, y, width, height."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    return 0, 0, width, height


def main() -> None:
    """Measures one start with --threads worker processes."""
    options = measure.arguments()

    def start():
        loader = torch.utils.data.DataLoader(
            ImageFiles(options.folder),
            measure.BATCH,
            shuffle=True,
            drop_last=True,
            num_workers=options.threads,
            persistent_workers=True,
        )
        while True:
            yield from loader

    measure.report(start, options.batches)


if __name__ == "__main__":
    main()
