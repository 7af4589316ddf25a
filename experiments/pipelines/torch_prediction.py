"""Prediction of the images of a folder with torchvision's or timm's ResNet-50, for `experiments.input --prediction`.

python torch_prediction.py FOLDER WEIGHTS --library=timm --dtype=bf16

Pillow decodes and torchvision's usual transforms crop in the same process; channels_last, autocast for bf16. Prints the
CPU time per image from the second batch on, and the probabilities of the first image.
"""

import argparse
import json
import pathlib
import sys
import time

import numpy as np
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("weights")
parser.add_argument("--library", choices=("timm", "torchvision"), required=True)
parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
parser.add_argument("--batch", type=int, default=8)
options = parser.parse_args()

if options.library == "timm":
    import timm

    network = timm.create_model("resnet50", pretrained=False)
else:
    network = torchvision.models.resnet50()
network.load_state_dict(load_file(options.weights))
network = network.eval().to(memory_format=torch.channels_last)
transforms = torchvision.transforms.Compose(
    [
        torchvision.transforms.Resize(256),
        torchvision.transforms.CenterCrop(224),
        torchvision.transforms.ToTensor(),
        torchvision.transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
)


def predict(paths: list[pathlib.Path]) -> np.ndarray:
    """Returns the probabilities of a batch of files."""
    images = torch.stack([transforms(Image.open(path).convert("RGB")) for path in paths])
    images = images.to(memory_format=torch.channels_last)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bf16"):
        return torch.softmax(network(images).float(), -1).numpy()


files = sorted(options.folder.rglob("*.jpg"))
batches = [files[start : start + options.batch] for start in range(0, len(files), options.batch)]
first = predict(batches[0])
wall, cpu = time.perf_counter(), time.process_time()
for batch in batches[1:]:
    predict(batch)
count = len(files) - len(batches[0])
result = {
    "cpu_ms_per_image": 1e3 * (time.process_time() - cpu) / count,
    "ms_per_image": 1e3 * (time.perf_counter() - wall) / count,
    "probabilities": first[0].tolist(),
    "versions": {"torch": torch.__version__, options.library: sys.modules[options.library].__version__},
}
print("RESULT " + json.dumps(result))
