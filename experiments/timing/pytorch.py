"""PyTorch's passes: channels_last, automatic mixed precision (in training with a GradScaler), eager or compiled.

The networks are torchvision's ResNets v1.5, module for module under its names, and CIFAR's of the same blocks.
"""

import contextlib
import re
from typing import Any

import jax
import numpy as np

from experiments.timing.task import MOMENTUM, WEIGHT_DECAY, Contender, MissingError, Task, cross_entropy
from mixedres._internal.tree import named_leaves

try:
    import torch
    from torch import nn
except ImportError:
    torch = None

# (is a bottleneck, blocks per stage, filters) by name.
_SIZES = {
    "resnet18": (False, (2, 2, 2, 2), 64),
    "resnet34": (False, (3, 4, 6, 3), 64),
    "resnet50": (True, (3, 4, 6, 3), 64),
    "resnet101": (True, (3, 4, 23, 3), 64),
    "resnet152": (True, (3, 8, 36, 3), 64),
}
_NAMES = {
    "stem_conv": "conv1",
    "stem_norm": "bn1",
    "head": "fc",
    "conv_proj": "downsample.0",
    "norm_proj": "downsample.1",
    "kernel": "weight",
    "scale": "weight",
    "mean": "running_mean",
    "var": "running_var",
}


class PyTorch(Contender):
    """What the passes share: the network with the task's weights, with what its users are told to switch on."""

    def __init__(self, task: Task, dtype: str, *, compiled: bool):
        if torch is None:
            raise MissingError("is not installed; pip install torch")
        super().__init__(f"PyTorch, {'compiled' if compiled else 'eager'}", dtype)
        self._compile = torch.compile if compiled else lambda function: function
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        if self._device == "cpu" and jax.default_backend() == "gpu":
            raise MissingError("has no CUDA here, and ours runs on a GPU; install a build of torch for it")
        if dtype == "tf32" and self._device == "cpu":
            raise MissingError("has no TF32 on the CPU")
        torch.backends.cudnn.benchmark = True
        if compiled:  # beyond its limit of networks it would quietly not compile
            torch._dynamo.config.recompile_limit = 64
        model = network(task.model, task.num_classes)
        missing, unknown = model.load_state_dict(state_dict(task), strict=False)
        if unknown or not all(name.endswith("num_batches_tracked") for name in missing):
            raise ValueError(f"the weights do not fit: {[*unknown, *missing][:4]}")
        self._network = model.to(self._device, memory_format=torch.channels_last)

    def _place(self, task: Task) -> None:
        """Puts the normalized batch on the device."""
        images = torch.from_numpy(task.normalized.transpose(0, 3, 1, 2).copy())
        self._images = images.to(self._device, memory_format=torch.channels_last)
        self._labels = torch.from_numpy(task.labels.astype(np.int64)).to(self._device)

    def take(self, steps: int) -> float:
        """See `Contender.take`."""
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.dtype != "fp32"
        for _ in range(steps):
            found = self._once()
        if self._device == "cuda":
            torch.cuda.synchronize()
        return self._loss(found)

    def _once(self) -> Any:
        """One pass; what `_loss` takes."""
        raise NotImplementedError

    def _loss(self, found: Any) -> float:
        return found.item()

    def threads(self) -> int:
        """Those of an operation on a CPU."""
        return torch.get_num_threads()

    def peak_bytes(self) -> int | None:
        """Of the tensors at the peak of one pass, without those of other contenders on the same GPU."""
        if self._device == "cpu":
            return None
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated()
        self.take(1)
        own = sum(t.numel() * t.element_size() for t in self._tensors())
        return torch.cuda.max_memory_allocated() - others + own

    def _tensors(self) -> list[Any]:
        """Those that stay on the device between passes."""
        return [*self._network.parameters(), *self._network.buffers()]

    def _autocast(self) -> contextlib.AbstractContextManager:
        dtypes = {"bf16": "bfloat16", "fp16": "float16"}
        if self.dtype not in dtypes:
            return contextlib.nullcontext()
        return torch.autocast(self._device, getattr(torch, dtypes[self.dtype]))


class Training(PyTorch):
    """One optimizer step on the batch."""

    def __init__(self, task: Task, dtype: str, *, compiled: bool):
        super().__init__(task, dtype, compiled=compiled)
        self._place(task)
        parameters = list(self._network.train().parameters())
        decayed = [p for p in parameters if p.ndim > 1]
        others = [p for p in parameters if p.ndim <= 1]
        self._optimizer = torch.optim.SGD(
            [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others}],
            lr=task.learning_rate,
            momentum=MOMENTUM,
            nesterov=True,
        )
        self._scaler = torch.amp.GradScaler(self._device, init_scale=2.0**15, enabled=dtype == "fp16")
        self._model = self._compile(self._network)

    def _once(self) -> Any:
        self._optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            loss = nn.functional.cross_entropy(self._model(self._images), self._labels)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss

    def peak_bytes(self) -> int | None:
        """As of every pass, with the gradients made anew."""
        self._optimizer.zero_grad(set_to_none=True)
        return super().peak_bytes()

    def _tensors(self) -> list[Any]:
        momenta = [value["momentum_buffer"] for value in self._optimizer.state.values()]
        return [*super()._tensors(), *momenta, self._images, self._labels]


class Evaluation(PyTorch):
    """Loss and top-1 of the batch, by the running statistics."""

    def __init__(self, task: Task, dtype: str, *, compiled: bool):
        super().__init__(task, dtype, compiled=compiled)
        self._place(task)
        self._model = self._compile(self._network.eval())

    def _once(self) -> Any:
        with torch.inference_mode(), self._autocast():
            logits = self._model(self._images)
            self._correct = (logits.argmax(1) == self._labels).sum()
            return nn.functional.cross_entropy(logits, self._labels)

    def _tensors(self) -> list[Any]:
        return [*super()._tensors(), self._images, self._labels]


class Prediction(PyTorch):
    """From bytes on the host to probabilities on the host; all between the two transfers is compiled together."""

    def __init__(self, task: Task, dtype: str, *, compiled: bool):
        super().__init__(task, dtype, compiled=compiled)
        self._bytes, self._labels = task.images, task.labels
        scale = torch.tensor([task.mean, task.std], device=self._device)
        self._mean, self._std = scale.view(2, 1, -1, 1, 1)
        self._network.eval()
        self._run = self._compile(self._probabilities)

    def _once(self) -> np.ndarray:
        with torch.inference_mode(), self._autocast():
            return self._run(torch.from_numpy(self._bytes).to(self._device)).cpu().numpy()

    def _probabilities(self, images: Any) -> Any:
        """(b, h, w, c) uint8 -> (b, classes) float32."""
        images = images.permute(0, 3, 1, 2)  # which is channels_last
        logits = self._network((images.float() - self._mean) / self._std)
        return logits.float().softmax(1)

    def _loss(self, found: np.ndarray) -> float:
        return cross_entropy(found, self._labels)


PASSES = {"training": Training, "evaluation": Evaluation, "prediction": Prediction}


def network(model: str, num_classes: int) -> Any:
    """The network of a name, with torchvision's names of modules."""
    cifar = re.fullmatch(r"cifar_resnet(\d+)", model)
    if cifar:
        return _ResNet(False, ((int(cifar[1]) - 2) // 6,) * 3, 16, num_classes, small_images=True)
    if model not in _SIZES:
        raise MissingError(f"has no {model}")
    return _ResNet(*_SIZES[model], num_classes, small_images=False)


def state_dict(task: Task) -> dict[str, Any]:
    """Our weights under torchvision's names, kernels as (out, in, h, w)."""
    found = {}
    for name, value in (named_leaves(task.params) | named_leaves(task.batch_stats)).items():
        parts = [_NAMES.get(part, part) for part in name.strip("/").split("/")]
        path = re.sub(r"\bblock_layer(\d)_(\d+)", lambda m: f"layer{m[1]}.{int(m[2]) - 1}", ".".join(parts))
        array = np.asarray(value)
        axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(array.ndim, range(array.ndim))
        found[re.sub(r"\bnorm(\d)", r"bn\1", path)] = torch.from_numpy(array.transpose(axes).copy())
    return found


def versions() -> dict[str, str]:
    """{'torch': version}; empty where it is not installed."""
    return {} if torch is None else {"torch": torch.__version__}


if torch is not None:

    def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Module:
        return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)

    class _Block(nn.Module):
        def __init__(self, inputs: int, filters: int, stride: int, bottleneck: bool):
            super().__init__()
            outputs = 4 * filters if bottleneck else filters
            shapes = [(inputs, filters, 3, stride), (filters, filters, 3, 1)]
            if bottleneck:
                shapes = [(inputs, filters, 1, 1), (filters, filters, 3, stride), (filters, outputs, 1, 1)]
            for index, shape in enumerate(shapes, start=1):
                setattr(self, f"conv{index}", _conv(*shape))
                setattr(self, f"bn{index}", nn.BatchNorm2d(shape[1]))
            self.convolutions = len(shapes)
            self.relu = nn.ReLU(inplace=True)
            self.downsample = None
            if stride > 1 or inputs != outputs:
                self.downsample = nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

        def forward(self, x: Any) -> Any:
            y = x
            for index in range(1, self.convolutions + 1):
                y = getattr(self, f"bn{index}")(getattr(self, f"conv{index}")(y))
                y = self.relu(y) if index < self.convolutions else y
            y += x if self.downsample is None else self.downsample(x)
            return self.relu(y)

    class _ResNet(nn.Module):
        def __init__(self, bottleneck: bool, sizes: tuple, filters: int, num_classes: int, *, small_images: bool):
            super().__init__()
            self.conv1 = _conv(3, filters, 3) if small_images else _conv(3, filters, 7, 2)
            self.bn1 = nn.BatchNorm2d(filters)
            self.relu = nn.ReLU(inplace=True)
            self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1)
            self.stages, inputs = len(sizes), filters
            for stage, size in enumerate(sizes, start=1):
                blocks = []
                for index in range(size):
                    width = filters * 2 ** (stage - 1)
                    blocks.append(_Block(inputs, width, 2 if stage > 1 and not index else 1, bottleneck))
                    inputs = 4 * width if bottleneck else width
                setattr(self, f"layer{stage}", nn.Sequential(*blocks))
            self.fc = nn.Linear(inputs, num_classes)

        def forward(self, x: Any) -> Any:
            x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
            for stage in range(1, self.stages + 1):
                x = getattr(self, f"layer{stage}")(x)
            return self.fc(x.mean((2, 3)))
