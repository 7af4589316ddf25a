"""Training and trained networks from Python: `fit`, `load` and `Run`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from mixedres import checkpoints, data, train
from mixedres import predict as networks
from mixedres._internal import registry
from mixedres._internal.cli.progress import ImageProgress
from mixedres._internal.cli.python_words import in_python, speaks_python
from mixedres._internal.errors import ConfigError, WeightsError, config_errors, one_line
from mixedres._internal.files import expanded, parse_json, read_regular, split_checkpoint
from mixedres._internal.processes import SINGLE, SingleProcess
from mixedres._internal.types import Record, Variables
from mixedres.checkpoints import workdir as names
from mixedres.config import flatten, load_config, unflatten, with_keys

__all__ = ["Run", "fit", "load"]

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image

    from mixedres import models

    Image = str | os.PathLike[str] | np.ndarray | PIL.Image.Image


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """A trained network, and what its run recorded; `load` and `fit` make one.

        run = mixedres.load("runs/folder-fp16@best")
        print(run.evaluate()["top1"], run.predict("cat.jpg")[0].name)

    Attributes:
      path: the workdir, with @best or @STEP if a checkpoint was named, or the file of weights.
      classifier: the network as a function of images.
      config: the config of the run; None for weights without a run.
      source: the data set that `fit` was given; None: the data set of the config.
    """

    path: str
    classifier: networks.Classifier
    config: ConfigDict | None = None
    source: data.Source | None = None
    _prepared: dict[int, networks.Prepared] = dataclasses.field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        about = f"{self.classifier.name} in {self.classifier.precision.name}, {len(self.class_names)} classes"
        return f"<Run {self.path}: {about}>"

    @property
    def model(self) -> models.Network:
        """Returns the Flax module, in the precision of the run."""
        return self.classifier.model

    @property
    def variables(self) -> Variables:
        """Returns {'params', 'batch_stats'} for `model.apply`, float32 numpy arrays; the moving average if any."""
        return self.classifier.variables

    @property
    def class_names(self) -> tuple[str, ...]:
        """Returns the names of the classes by output."""
        return self.classifier.class_names

    @functools.cached_property
    def metrics(self) -> list[Record]:
        """Returns the rows of metrics.jsonl, in order; [] for weights without a run."""
        rows = []
        with contextlib.suppress(OSError):
            for line in read_regular(self._workdir / names.METRICS).splitlines():
                with contextlib.suppress(ValueError):  # a line that was cut off, or that no run wrote
                    rows.append(parse_json(line))
        return [row for row in rows if isinstance(row, dict)]

    @functools.cached_property
    def summary(self) -> Record | None:
        """Returns the content of summary.json; None if the run is not finished."""
        return checkpoints.RecordedRun(self._workdir).summary()

    @speaks_python
    def predict(self, images: Image | Sequence[Image], *, top: int = 5) -> list[networks.Prediction]:
        """Classifies images, in the precision of the run, on all devices of this process.

        Args:
          images: a file, a folder (searched to the bottom) or a glob; an image of Pillow; an array of one image (h, w,
            3), (h, w, 1) or (h, w), or of several (n, h, w, c), uint8 from 0 to 255; or a sequence of these. An array
            that has the shape of the network's input is taken as it is. Others are cropped and resized as files.
          top: classes per image.

        Returns a prediction for each image, in order; an image that cannot be read has an `error`. Raises ConfigError
        if a path does not exist or a folder holds no image.
        """
        given = list(_images(images))
        if not given:
            return []
        if any(isinstance(image, str) for image in given):
            self.classifier.check_takes_files(self.path)
        predictions = []
        with ImageProgress("classifying", len(given)) as progress:
            for prediction, _ in networks.predictions(self._prepare(len(given)), given, top):
                predictions.append(prediction._replace(error=in_python(prediction.error)))
                progress.add()
        return predictions

    @speaks_python
    def evaluate(self, overrides: Mapping[str, Any] | None = None, *, source: data.Source | None = None) -> Record:
        """Evaluates the weights on the test images of the run.

        Args:
          overrides: keys of the config to set, such as {"data.dir": "photos"}. A run that `load` opened does not take
            `data.dir` from the recorded config, because that key acts on this machine.
          source: a data set in place of the config's.

        Returns 'top1' and 'top5' as fractions, the mean 'loss', and the number of images, 'examples'. Raises
        ConfigError for weights without a run, and for a mistake in the config.
        """
        if self.config is None:
            raise ConfigError(f"{self.path} is no run, so it has no test images; name the workdir of a run")
        flat = flatten(with_keys(self.config, overrides or {})) | {"init_from": self.path}
        plan = train.plan(unflatten(flat), source=source or self.source, evaluates=True)
        with cache_of(plan):
            return train.evaluate(plan)

    def _prepare(self, count: int) -> networks.Prepared:
        """Returns the network, compiled once for each size of a batch."""
        from mixedres._internal.cli.compilation import compilation_cache  # imports JAX

        size = min(count, networks.default_batch_size())
        if size not in self._prepared:
            with compilation_cache():
                self._prepared[size] = networks.prepare(self.classifier, size)
        return self._prepared[size]

    @property
    def _workdir(self) -> pathlib.Path:
        return split_checkpoint(pathlib.Path(self.path))[0]


@speaks_python
def load(
    path: str | os.PathLike[str],
    *,
    precision: str | None = None,
    class_names: Sequence[str] | None = None,
    image_size: int | None = None,
    preprocessing: str | None = None,
    version: str | None = None,
) -> Run:
    """Opens a run, or weights of other libraries.

        run = mixedres.load("runs/folder-fp16")
        weights = mixedres.load("resnet50.safetensors", precision="bf16", image_size=224)

    Args:
      path: a workdir, with @best or @STEP for another checkpoint than the newest, or whatever ``predict --from`` takes.
      precision: a preset; None: the run's precision, and fp32 for weights.
      class_names: names of the classes; None: as recorded.
      image_size: height and width of the network's input; None: as recorded.
      preprocessing: how images become squares; None: as recorded.
      version: '1' or '1.5', of a ResNet whose weights do not tell it; None: 1.5.

    Raises:
      ConfigError: if there is no such run or file, or if it cannot be read.
    """
    with config_errors("path"):
        place = expanded(str(path))
    try:
        classifier = networks.open_classifier(
            place,
            preset=precision,
            class_names=class_names,
            image_size=image_size,
            preprocessing=preprocessing,
            version=version,
        )
    except WeightsError as error:
        raise ConfigError(str(error)) from None
    recorded = checkpoints.RecordedRun(split_checkpoint(place)[0]).config()
    found = None if recorded is None else unflatten(checkpoints.portable(recorded))
    return Run(str(place), classifier, found)


@speaks_python
def fit(
    config: ConfigDict | str,
    overrides: Mapping[str, Any] | None = None,
    *,
    workdir: str | os.PathLike[str] | None = None,
    source: data.Source | None = None,
    clean: bool = False,
    on_evaluation: train.OnEvaluation | None = None,
    on_step: train.OnStep | None = None,
) -> Run:
    """Trains as ``python -m mixedres.main`` does, and returns the finished run; a run that was stopped goes on.

        run = mixedres.fit("digits:fp16", {"epochs": 3}, workdir="runs/digits")

    Args:
      config: a config, or what ``--config=`` takes: the name of a shipped config or a file, with a preset.
      overrides: keys of the config to set, such as {"data.dir": "photos", "optimizer.learning_rate": 0.1}.
      workdir: directory of the run; None: runs/NAME-PRESET.
      source: a data set of your own, an object with the attributes and methods of `mixedres.data.Source`. The config
        records the name of its class as `data.name`.
      clean: remove a run in the workdir first.
      on_evaluation: called after each evaluation; ends the run by a true result. See `mixedres.train.fit`.
      on_step: called with the numbers of each step, a few steps later. See `mixedres.train.fit`.

    Raises:
      ConfigError: for a mistake in the config, the workdir or the data; nothing has been written then.
      MixedresError: if training cannot go on; `mixedres.train.fit` lists the errors.
    """
    for given, function in {"on_evaluation": on_evaluation, "on_step": on_step}.items():
        if function is not None and not callable(function):
            what = given.removeprefix("on_")
            raise ConfigError(f"{given} is {function!r}; it must be a function of the {what}, a dictionary")
    name = config.partition(":")[0] if isinstance(config, str) else None
    chosen = with_keys(load_config(config) if isinstance(config, str) else config, overrides or {})
    stem = pathlib.Path(name or (chosen.data.name if source is None else type(source).__name__)).stem
    directory = expanded(f"runs/{stem}-{chosen.precision.name}" if workdir is None else str(workdir)).absolute()
    plan = train.plan(chosen, directory, source=source, clean=clean)
    train_plan(plan, on_evaluation=on_evaluation, on_step=on_step)
    return dataclasses.replace(load(directory), config=plan.config, source=source)


def train_plan(
    plan: train.Plan,
    group: SingleProcess = SINGLE,
    on_evaluation: train.OnEvaluation | None = None,
    on_step: train.OnStep | None = None,
) -> Record:
    """Trains, or finds the run finished without importing the trainer; as `mixedres.train.fit`."""
    if plan.finished is not None and group.count == 1:
        return plan.say_finished()
    assert plan.directory is not None
    with cache_of(plan, group):
        results = on_results(plan.directory)
        return train.fit(plan, group=group, on_results=results, on_evaluation=on_evaluation, on_step=on_step)


def cache_of(plan: train.Plan, group: SingleProcess = SINGLE) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which compiled programs are kept where the config of a plan says."""
    from mixedres._internal.cli.compilation import compilation_cache  # imports JAX

    return compilation_cache(plan.config.compilation_cache, group)


def on_results(directory: pathlib.Path) -> train.OnResults:
    """Returns what `mixedres.train.fit` and `evaluate` call with the results: all functions of `registry.RESULTS`."""

    def tell(experiment: train.Experiment, results: data.ImageResults) -> str:
        words = []
        for name, made in registry.RESULTS.items():
            try:
                words.append(made(directory, experiment, results))
            except Exception as error:  # the run is saved by now, and stays so
                words.append(f"warning: no {name} ({one_line(error)})")
        return "; ".join(filter(None, words))

    return tell


def _images(given: Image | Iterable[Image]) -> Iterable[str | np.ndarray]:
    """Yields the paths of files and the single images that an argument of `Run.predict` names."""
    # An iterator may fill one array again for each image, as a camera does: its arrays are copied.
    import numpy as np
    import PIL.Image
    import PIL.ImageOps

    if isinstance(given, PIL.Image.Image):
        yield np.asarray(PIL.ImageOps.exif_transpose(given).convert("RGB"))
    elif hasattr(given, "__array__"):
        array = np.asarray(given)
        yield from array if array.ndim == 4 else (array,)
    elif isinstance(given, str | os.PathLike):
        yield from networks.find_images(str(given))
    else:
        again = iter(given) is given
        for one in given:
            yield from _images(np.array(one) if again and isinstance(one, np.ndarray) else one)
