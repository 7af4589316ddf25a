"""What a user registers: networks, optimizers, schedules, augmentations, data sets, readers of weights, trackers.

Register in the file of a config, or in a file or module that --import names, which every command takes:

    from mixedres import registry

    registry.SCHEDULES["sqrt"] = lambda progress: (1 - progress) ** 0.5

Importing this module imports neither JAX nor NumPy.
"""

import importlib
import importlib.util
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from mixedres._internal.errors import ConfigError
from mixedres._internal.files import open_regular


class Registry(dict[str, Callable[..., Any]]):
    """Functions by the names that a config gives them.

    Attributes:
      key: the key of the config that takes the names; '' if no key does.
      files: {name: file that registered it}; what mixedres has is not here.
    """

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key, self.files = key, dict[str, str]()

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, function)
        self.files[name] = sys._getframe(1).f_globals.get("__file__", "")

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.files.pop(name, None)


# (**fields of `models.Network`) -> a network, such as the class of a Flax module; model.name.
NETWORKS = Registry("model.name")
# (parts, *, options) -> transformations of optax, in order; optimizer.name. The options are keys of config.optimizer.
OPTIMIZERS = Registry("optimizer.name")
# (progress) -> the rate as a fraction of its peak; schedule.name. `progress` is a scalar from 0, after the warm-up, to
# 1.
SCHEDULES = Registry("schedule.name")
# (image, rng) -> an image of the same shape and dtype, from the one after crop and flip; data.augment. Images have
# (height, width, channels), from 0 to 255. `rng` is a `np.random.Generator`.
AUGMENTATIONS = Registry("data.augment")
# (`data.Options`) -> a `data.Source`; data.name.
SOURCES = Registry("data.name")
# (path) -> ({name: array}, a note or ''), the tensors of a file in one of `checkpoints.LAYOUTS`, by the end of its name
# such as '.npz'; init_from and --from.
WEIGHTS = Registry("")
# (directory, flat config) -> an object with `write(step, kind, values)` and `close(failed)`, which receives the metrics
# of every run of this process; `kind` is 'train', 'eval', 'resources' or 'numerics'.
TRACKERS = Registry("")
_BY_KEY = {one.key: one for one in (NETWORKS, OPTIMIZERS, SCHEDULES, AUGMENTATIONS, SOURCES)}


def load(given: str) -> None:
    """Imports a module, or runs a Python file, that registers.

    Raises:
      ConfigError: if it is not there or raises an error.
    """
    try:
        if given.endswith(".py"):
            run_file(pathlib.Path(given).expanduser())
        else:
            importlib.import_module(given)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"--import={given} cannot be read: {error.strerror}; name NAME.py or a module") from None
    except ModuleNotFoundError as error:
        raise ConfigError(f"--import={given}: there is no module {error.name}; name NAME.py or a module") from None
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"--import={given}: {type(error).__name__}: {error} ({line.filename}:{line.lineno})"
        ) from None


def run_file(path: pathlib.Path) -> Any:
    """Runs a Python file and returns it as a module, which is not imported under its name."""
    open_regular(path).close()  # a pipe or a device would never end
    spec = importlib.util.spec_from_file_location("config_file", path.absolute())
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; name one such as configs/digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def needed(config: dict[str, Any]) -> tuple[str, ...]:
    """Returns 'KEY:FILE' for each key of a flat config whose value a file registered: the key `imports`."""
    files = {key: one.files.get(config[key], "") for key, one in _BY_KEY.items()}
    return tuple(f"{key}:{file}" for key, file in files.items() if file)


def check_needed(config: Mapping[str, Any], where: object) -> None:
    """Raises ConfigError if the flat config that a run recorded names what nobody has registered here.

    Nothing is imported because a run names it: the run may be a stranger's.
    """
    entries = config.get("imports")
    if not isinstance(entries, list | tuple):
        return
    for key, _, file in (str(entry).partition(":") for entry in entries):
        if key in _BY_KEY and str(config.get(key)) not in _BY_KEY[key]:
            raise ConfigError(
                f"{where} has {key}={config.get(key)}, which {file} registers; if you trust that file, add "
                f"--import={file}, or call mixedres.registry.load({file!r})"
            )
