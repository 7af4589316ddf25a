"""Registries of the core: networks, optimizers, data sets, readers of weights and others by their names.

Register in the file of a config, or in a file or module that --import names, which every command takes:

    from mixedres import registry

    registry.SCHEDULES["sqrt"] = lambda progress: (1 - progress) ** 0.5
"""

import contextlib
import importlib
import importlib.util
import pathlib
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mixedres._internal import names
from mixedres._internal.errors import ConfigError, DataError
from mixedres._internal.files import expanded, open_regular

# What is running because of --import or --config: what was given, to which later commands refer.
_given: list[str] = []


class Registry(dict[str, Callable[..., Any]]):
    """Functions by the names that a config gives them; `files` has the files that registered them here."""

    def __init__(self, key: str, built_in: str) -> None:
        """Takes the key, and a regular expression of the names that mixedres has itself."""
        super().__init__()
        self.key, self.files, self._built_in = key, dict[str, str](), re.compile(built_in)

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        """Registers a function; raises TypeError if it is none, ValueError if mixedres has the name itself."""
        if not callable(function):
            raise TypeError(f"{name!r} must be a function, got {function!r}")
        if self._built_in.fullmatch(name):
            raise ValueError(f"mixedres has {name!r} itself; register another name")
        super().__setitem__(name, function)
        self.files[name] = _given[-1] if _given else sys._getframe(1).f_globals.get("__file__", "")

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.files.pop(name, None)

    def update(self, *given: Any, **named: Any) -> None:
        """Registers several functions."""
        for name, function in dict(*given, **named).items():
            self[name] = function

    def found(self, name: str, file: str) -> Callable[..., Any]:
        """Returns a function in a process that another one started, after running the file that registered it there."""
        if name not in self and file:
            load(file)
        if name not in self:
            where = f"{file or 'a notebook'} does not register {name!r} in a decoding process"
            raise DataError(f"{where}; put it into a file that does, or set data.workers=0")
        return self[name]

    def add_built_in(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Adds what mixedres has itself."""
        assert all(map(self._built_in.fullmatch, functions)), f"{[*functions]}: {self._built_in.pattern} lacks a name"
        super().update(functions)


# (**fields of `models.Network`) -> a network, such as the class of a Flax module; model.name.
NETWORKS = Registry("model.name", r"(cifar_)?resnet\d*|auto")
# (parts, *, options) -> transformations of optax, in order; optimizer.name. `parts` is `train.optimizers.Parts`. The
# options are keys of config.optimizer; an argument with a default is no option.
OPTIMIZERS = Registry("optimizer.name", "|".join(names.OPTIMIZERS))
# (progress) -> the rate as a fraction of its peak; schedule.name. `progress` is a scalar from 0, after the warm-up, to
# 1.
SCHEDULES = Registry("schedule.name", "|".join(names.SCHEDULES))
# (image, rng) -> an image of the same shape and dtype, from the one after crop and flip; data.augment. Images have
# (height, width, channels), from 0 to 255. `rng` is a `np.random.Generator`.
AUGMENTATIONS = Registry("data.augment", "|".join(names.AUGMENTATIONS))
# (`data.Options`) -> a `data.Source`, or a `data.Dataset` of encoded images; data.name. After a name that ends in ':',
# such as 'tfds:', comes the name of a data set: the second argument.
SOURCES = Registry("data.name", "digits|synthetic|cifar10|idx|imagenet2012|folder|tfds:.*")
# (`data.Dataset`, `data.Options`) -> a note on the images of a folder before a run, or ''; raises ValueError to refuse.
LOOKS = Registry("", "photographs")
# () -> a `data.Preprocessing`, which draws crops of stored images; data.preprocessing.
PREPROCESSINGS = Registry("data.preprocessing", "official|official_fast|torch")
# () -> a `data.Resize`, which makes squares of crops; `resize` of a preprocessing.
RESIZES = Registry("", "area|linear|official")
# (path) -> ({name: array}, a note or '', {field of `checkpoints.Facts`: value}), the tensors of a file in one of
# `checkpoints.LAYOUTS`, by the end of its name such as '.npz'; '' is for folders and names of several files. For
# init_from and --from.
WEIGHTS = Registry("", r"\.(safetensors|pth|pt|bin|tar|ckpt|keras|h5|hdf5)|")
# (file of weights) -> {field of `checkpoints.Facts`: value} and perhaps a 'note', from files beside it; by layout.
FACTS = Registry("", "torchvision|transformers")
# (path) -> a `predict.Output`, by the end of the path; predict --out.
OUTPUTS = Registry("", r"\.(html|csv)")
# (directory of the run, `train.Experiment`, `data.ImageResults`) -> words for the last lines, or '', at the end of a
# run or an evaluation of one process.
RESULTS = Registry("", "errors")
# (directory, flat config, step at which this start begins) -> an object with `write(step, kind, values)` and
# `close(failed)`, which receives the metrics of every run of this process; `kind` is 'train', 'eval', 'resources' or
# 'numerics'. None: the run has no such tracker.
TRACKERS = Registry("", "tensorboard|wandb")
_BY_KEY = {one.key: one for one in (NETWORKS, OPTIMIZERS, SCHEDULES, AUGMENTATIONS, SOURCES, PREPROCESSINGS)}


def load(given: str) -> None:
    """Imports a module, or runs a Python file, that registers.

    Raises:
      ConfigError: if it is not there or raises an error.
    """
    try:
        if given.endswith(".py"):
            _check_readable(given)
            run_file(expanded(given))
            return
        with _running(given):
            if importlib.import_module(given).__file__ is None:
                raise ModuleNotFoundError(name=given)  # a folder
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(f"--import={given}: there is no module {error.name}; name NAME.py or a module") from None
    except SystemExit:
        raise ConfigError(f"--import={given} ends the program; it must only register") from None
    except SyntaxError as error:
        raise ConfigError(f"--import={given}: {error.filename}, line {error.lineno}: {error.msg}") from None
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if line.filename.startswith("<frozen") else f" ({line.filename}:{line.lineno})"
        raise ConfigError(f"--import={given}: {type(error).__name__}: {error}{place}") from None


def _check_readable(given: str) -> None:
    try:
        open_regular(expanded(given)).close()
    except OSError as error:
        raise ConfigError(f"--import={given} cannot be read: {error.strerror}; name NAME.py or a module") from None


def run_file(path: pathlib.Path) -> Any:
    """Runs a Python file and returns it as a module; dataclasses look it up by a name of its own."""
    path = path.absolute()
    open_regular(path).close()  # a pipe or a device would never end
    spec = importlib.util.spec_from_file_location(f"mixedres_file_{abs(hash(path))}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; name one such as configs/digits.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    with _running(str(path)):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _running(given: str) -> Iterator[None]:
    _given.append(given)
    try:
        yield
    finally:
        _given.pop()


def needed(config: dict[str, Any]) -> tuple[str, ...]:
    """Returns 'KEY:FILE' for each key of a flat config whose value a file registered: the key `imports`."""
    files = {key: one.files.get(config[key], "") for key, one in _BY_KEY.items()}
    return tuple(f"{key}:{file}" for key, file in files.items() if file)


def check_needed(config: Mapping[str, Any], where: object) -> None:
    """Raises ConfigError if the flat config that a run recorded names what nobody has registered here."""
    entries = config.get("imports")
    if not isinstance(entries, list | tuple):
        return
    for key, _, file in (str(entry).partition(":") for entry in entries):
        if key in _BY_KEY and str(config.get(key)) not in _BY_KEY[key]:
            raise ConfigError(
                f"{where} has {key}={config.get(key)}, which {file} registers; if you trust that file, add "
                f"{shlex.quote(f'--import={file}')}, or call mixedres.registry.load({file!r})"
            )
