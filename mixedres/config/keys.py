"""Keys of a config: type, default, meaning and range of each; options of an optimizer."""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from mixedres._internal import registry
from mixedres._internal.errors import listed
from mixedres._internal.names import (
    ANY,
    FRACTION,
    GROWING,
    IMPLEMENTATIONS,
    INITIALIZERS,
    LEVELS,
    MATMUL_PRECISIONS,
    NOT_NEGATIVE,
    OPTIMIZERS,
    POSITIVE,
    PRESETS,
    REACHABLE,
    SCHEDULES,
    UNIT,
    Range,
    one_of,
)
from mixedres.data import Options
from mixedres.models import OPTIONS

# Whether a later start of the same run may change a key. FIXED: no. GROW: to a larger number. FREE: yes, because it
# changes no number of the run, or because the record of the checkpoint has the old value.
FIXED = "fixed"
GROW = "grow"
FREE = "free"
# The FREE keys that commands take from the config of a run that they read; the others act on the machine. FIXED keys do
# not, but for one that names a file.
_PORTABLE, _FILES = ("num_devices", "model.fused", "data.on_error", "max_consecutive_skips"), ("init_from",)
# Sections and keys that an evaluation of a run must share with its training; devices and batch size may differ.
_EVALUATED = (
    *("model.", "batch_norm.", "data.", "precision."),
    *("ema_decay", "trainable", "optimizer.name", "optimizer.layer_decay"),
)


@dataclasses.dataclass(frozen=True)
class Key:
    """Key of a config.

    Attributes:
      path: dotted name.
      type: type of the value; `object` accepts any literal. None means "not set" where it is the default.
      default: value in a fresh config.
      doc: meaning of the key.
      range: allowed values.
      resume: `FIXED`, `GROW` or `FREE`.
    """

    path: str
    type: type
    default: Any
    doc: str
    range: Range = ANY
    resume: str = FIXED

    @property
    def is_evaluated(self) -> bool:
        """Returns whether an evaluation must have the value of the training run."""
        return self.resume != FREE and self.path.startswith(_EVALUATED)

    @property
    def is_portable(self) -> bool:
        """Returns whether commands that read a run take the run's value; today's command line alone sets other keys."""
        return self.path in _PORTABLE or (self.resume != FREE and self.path not in _FILES)


def duration_in_steps(value: object, steps_per_epoch: float, *, round_down: bool = False) -> int:
    """Returns the steps of a duration: a number or '5 epochs' counts epochs, '500 steps' counts steps.

    The result is rounded to the nearest whole step, halves up, or down if `round_down`. It is at least 1 unless the
    duration is 0. Raises ValueError for anything else, and for negative durations.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(|epochs?|steps?)\s*", str(value))
    if match is None:
        raise ValueError(f"duration {value!r} is not {DURATION.description}")
    steps = float(match[1]) * (1.0 if match[2].startswith("step") else steps_per_epoch)
    if not math.isfinite(steps):
        raise ValueError(f"duration {value!r:.50} is not {DURATION.description}")
    return max(1, math.floor(steps if round_down else steps + 0.5)) if steps else 0


def profile_window(value: str) -> tuple[int, int]:
    """Returns (100, 5) for '100:5': trace the 5 steps after step 100; raises ValueError for anything else."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", value)
    if match is None or not int(match[2]):
        raise ValueError(f"{value!r} is not {WINDOW.description}")
    return int(match[1]), int(match[2])


def _passes(check: Callable[[Any], object]) -> Callable[[Any], bool]:
    """Returns a function that returns whether `check` returns something true of a value, and raises no error."""

    def passes(x: Any) -> bool:
        try:
            return bool(check(x))
        except (TypeError, ValueError, OverflowError, re.error):
            return False

    return passes


def each(inner: Range) -> Range:
    """Returns the range of a tuple whose members are all in `inner`."""
    return Range(_passes(lambda x: all(map(inner.allows, x))), f"a tuple, each of them {inner.description}")


def _is_loss_scale(x: Any) -> bool:
    return x in ("none", "dynamic") or (not isinstance(x, bool) and 0 < float(x) < math.inf)


NAMED = Range(lambda x: x != "", "a name, and not empty")
_EPOCH, _MATMUL_PRECISION = one_of("whole", "fractional"), one_of(*MATMUL_PRECISIONS)
_OPTIMIZER = one_of(*OPTIMIZERS, or_of=registry.OPTIMIZERS)
_PADDING, _PROJECTION = one_of(*OPTIONS["padding"]), one_of(*OPTIONS["projection"])
_PATTERN = Range(_passes(re.compile), "a regular expression")
_LOSS_SCALE = Range(_passes(_is_loss_scale), "none, dynamic or a number > 0 such as 128")
WINDOW = Range(_passes(profile_window), "STEP:COUNT, whole numbers with STEP >= 0 and COUNT > 0, such as 100:5")
DURATION = Range(
    _passes(lambda x: duration_in_steps(x, 1) >= 0), "a number of epochs such as 5, '5 epochs' or '500 steps'"
)


@dataclasses.dataclass(frozen=True)
class Retired:
    """Key that a version after 0.2.0 no longer has; `instead` says what to type, an `ignored` one changed no number."""

    instead: str
    ignored: bool = False


# The only place that knows keys of earlier versions. A run that recorded a key outside this table and `KEYS` cannot be
# read, so a key that leaves goes here.
RETIRED = {
    "data.difficulty": Retired("cluttered digits left the project; leave the key out", ignored=True),
}


def _data_keys() -> Iterator[Key]:
    """Yields the keys of the data, which are the fields of `mixedres.data.Options` with a meaning."""
    for field in dataclasses.fields(Options):
        if about := field.metadata:
            resume = FREE if about["is_of_machine"] else FIXED
            yield Key(f"data.{field.name}", about["type"], field.default, about["meaning"], about["range"], resume)


free, grow = functools.partial(Key, resume=FREE), functools.partial(Key, resume=GROW)
KEYS = (
    Key("seed", int, 0, "random seed of initial weights, data order and augmentation", NOT_NEGATIVE),
    grow("epochs", float, None, "length of the run in passes over the training data", POSITIVE),
    grow("steps", int, None, "length of the run in steps; replaces epochs where it is set", POSITIVE),
    Key("batch_size", int, None, "images per step over all devices", POSITIVE),
    free("batch_size_per_device", int, None, "images per step and device, without batch_size", POSITIVE),
    free("num_devices", int, None, "devices to use; not set: all", POSITIVE),
    Key("microbatches", int, 1, "parts of a batch whose gradients are averaged before the update", POSITIVE),
    free("eval_every", object, "1 epoch", "time between evaluations; 0: one at the end", DURATION),
    free("checkpoint_every", object, "1 epoch", "time between checkpoints; 0: one at the end", DURATION),
    free("keep_checkpoints", int, 3, "number of newest checkpoints to keep", POSITIVE),
    free("imports", tuple, (), "KEY:FILE for each key whose value a file registered; recorded by a run"),
    free("log_every", int, 10, "steps between two lines of training metrics", POSITIVE),
    free("log_resources_every", float, 5.0, "seconds between samples of CPU and memory use; 0: none", NOT_NEGATIVE),
    free("wandb", str, None, "project at Weights & Biases that receives the metrics too; not set: none"),
    free("profile", str, None, "100:5: trace the 5 steps after step 100 for xprof and Perfetto; not set: none", WINDOW),
    free("compilation_cache", str, "auto", "directory of compiled programs, none, or auto (of this user)", NAMED),
    free("stop_at_top1", float, None, "end the run once test top-1 (0 to 1) reaches this", REACHABLE),
    free("patience", object, 0, "end the run after this time without a better test top-1; 0: never", DURATION),
    free("max_consecutive_skips", int, 25, "skipped steps in a row that end the run (exit status 3)", POSITIVE),
    Key("label_smoothing", float, 0.0, "fraction of the target spread over all classes", FRACTION),
    Key("mixup", float, 0.0, "alpha of mixup, which trains on weighted means of two images; 0: none", NOT_NEGATIVE),
    Key("ema_decay", float, 0.0, "decay of the weights' moving average used in evaluation; 0: none", FRACTION),
    Key("init_from", str, None, "initial weights: a workdir, file, folder or TensorFlow checkpoint", NAMED),
    Key("trainable", str, "", "regular expression of the parameters to train, such as ^/head/; empty: all", _PATTERN),
    Key("allreduce_dtype", str, "param", "dtype in which devices average gradients", one_of("param", "compute")),
    Key(
        "model.name",
        str,
        "resnet50",
        "resnet18 to 200, cifar_resnet{6n+2}, a registered network, or auto: as init_from",
    ),
    Key("model.version", str, None, "1, 1.5 or 2; not set: 1.5, and 1 for cifar_resnet"),
    Key("model.padding", str, "pytorch", "of strided 3x3 convolutions: (1, 1) or (0, 1)", _PADDING),
    Key("model.pool_padding", str, "pytorch", "of the stem's max pool, as model.padding", _PADDING),
    Key("model.projection", str, "shape", "shortcuts project where the shape changes, or once a stage", _PROJECTION),
    Key("model.zero_init_last", bool, True, "initialize the last scale of every block to 0, so it starts as identity"),
    Key("model.kernel_init", str, "he_normal", "initializer of the convolutions", one_of(*INITIALIZERS)),
    Key("model.head_init", str, "normal_0.01", "initializer of the head", one_of(*INITIALIZERS)),
    free("model.fused", str, "auto", "fuse batch norms; auto: where faster", one_of("auto", "true", "false")),
    Key("batch_norm.momentum", float, 0.9, "weight of the old running average", FRACTION),
    Key("batch_norm.epsilon", float, 1e-5, "added to the variance", POSITIVE),
    Key("batch_norm.unbiased", bool, True, "unbiased running variance, as in PyTorch and TensorFlow"),
    Key("batch_norm.frozen", bool, False, "normalize by the running averages in training too, without updating them"),
    Key("batch_norm.sync", bool, False, "batch statistics over all devices instead of per device"),
    Key("data.name", str, "synthetic", "digits, synthetic, cifar10, idx, imagenet2012, folder, tfds:NAME"),
    *_data_keys(),
    Key("optimizer.name", str, "sgd", "the optimizer; another than the config's brings its own defaults", _OPTIMIZER),
    Key("optimizer.learning_rate", float, 0.1, "peak rate, for lr_reference_batch images per step", POSITIVE),
    Key("optimizer.lr_reference_batch", int, 256, "multiply the rate by batch_size / this; 0: do not", NOT_NEGATIVE),
    Key("optimizer.momentum", float, 0.9, "momentum of sgd, lars and muon; beta 1 of adamw", FRACTION),
    Key("optimizer.nesterov", bool, False, "Nesterov momentum, for sgd, lars and muon"),
    Key("optimizer.rate_in_momentum", bool, False, "sgd: multiply by the rate before the momentum, as Keras does"),
    Key("optimizer.weight_decay", float, 1e-4, "L2 on the float32 weights; decoupled in adamw and muon", NOT_NEGATIVE),
    Key("optimizer.decay_mask", str, "/kernel$", "regular expression of the parameter paths that decay", _PATTERN),
    Key("optimizer.layer_decay", float, 1.0, "factor on the rate for every block below the head", REACHABLE),
    Key("optimizer.clip_norm", float, 0.0, "largest norm of the unscaled gradient; 0: no clipping", NOT_NEGATIVE),
    Key("optimizer.beta2", float, 0.999, "beta 2 of adamw, and of muon for parameters that are no kernels", FRACTION),
    Key("optimizer.epsilon", float, 1e-8, "epsilon of adamw and muon", POSITIVE),
    Key("optimizer.trust_coefficient", float, 0.001, "trust coefficient of lars", POSITIVE),
    Key("schedule.name", str, "cosine", "how the rate falls", one_of(*SCHEDULES, or_of=registry.SCHEDULES)),
    Key("schedule.warmup", object, 0, "length of the linear warm-up from 0", DURATION),
    Key("schedule.end_factor", float, 0.0, "last rate / peak, for cosine and polynomial", UNIT),
    Key("schedule.epoch", str, "whole", "steps of an epoch: rounded down (whole) or exact (fractional)", _EPOCH),
    Key("schedule.boundaries", tuple, (), "when the rate changes, for piecewise; each a duration", each(DURATION)),
    Key("schedule.factors", tuple, (), "rate / peak after each boundary, for piecewise", each(POSITIVE)),
    Key("schedule.power", float, 2.0, "exponent, for polynomial", POSITIVE),
    Key("precision.name", str, "fp32", f"the preset: {', '.join(PRESETS)}"),
    Key("precision.policy", str, None, "jmp policy of the network: params=float32,compute=float16,output=float32"),
    Key("precision.norm_policy", str, None, "jmp policy of batch normalization; not set: float32 inside"),
    Key("precision.loss_scale", object, None, "none, dynamic or a number > 0; not set: the preset's", _LOSS_SCALE),
    Key("precision.implementation", str, None, "what casts; not set: the preset's", one_of(*IMPLEMENTATIONS)),
    Key("precision.matmul_precision", str, None, "of float32 products; not set: the preset's", _MATMUL_PRECISION),
    Key("precision.keep_float32", str, "", "regular expression of modules in float32, such as ^/head$", _PATTERN),
    free("numerics.every", int, 0, "steps between two examinations of every layer's numerics; 0: none", NOT_NEGATIVE),
    Key("autocast.level", str, "default", "level of the graph rewrite", one_of(*LEVELS)),
    Key("autocast.allow", str, "", "primitives always computed in half, with commas: dot_general,tanh"),
    Key("autocast.infer", str, "", "primitives in half between allowed primitives"),
    Key("autocast.deny", str, "", "primitives in float32, like the operations after them"),
    Key("autocast.clear", str, "", "primitives that follow their neighbors"),
    Key("autocast.unlisted", str, "", "primitives in float32 that do not affect their neighbors"),
    Key("loss_scale.initial", float, 2.0**15, "initial dynamic loss scale", POSITIVE),
    Key("loss_scale.period", int, 2000, "finite steps before the scale grows", POSITIVE),
    Key("loss_scale.factor", float, 2.0, "factor by which the scale grows and shrinks", GROWING),
    Key("loss_scale.min", float, 1.0, "smallest scale", POSITIVE),
    Key("loss_scale.max", float, 2.0**24, "largest scale", POSITIVE),
)
_DEFAULTS = {key.path.removeprefix("optimizer."): key.default for key in KEYS if key.path.startswith("optimizer.")}
_OF_SOME = {option for own in OPTIMIZERS.values() for option in own}
# What an optimizer has that a user names beside a config, where it differs from a fresh config: adamw the defaults of
# torch.optim.AdamW, muon those of its author's program, lars those of TensorFlow's r1 for small batches.
_DEFAULTS_OF = {
    "adamw": {"learning_rate": 1e-3, "lr_reference_batch": 0, "weight_decay": 0.01},
    "muon": {"learning_rate": 0.02, "lr_reference_batch": 0, "weight_decay": 0.0, "momentum": 0.95, "nesterov": True},
    "lars": {"learning_rate": 5.0, "lr_reference_batch": 0, "weight_decay": 2e-4},
}


def optimizer_defaults(name: str) -> dict[str, Any]:
    """Returns the keys of config.optimizer that belong to an optimizer, with its defaults."""
    own = {"learning_rate", "lr_reference_batch", "weight_decay", *_OF_SOME}
    return {option: _DEFAULTS_OF.get(name, {}).get(option, _DEFAULTS[option]) for option in sorted(own)}


def check_optimizer(section: dict[str, Any]) -> None:
    """Raises ValueError if the section `optimizer` of a config has options that its optimizer does not take."""
    optimizer_options(section["name"], {option: value for option, value in section.items() if option in _OF_SOME})


def optimizer_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that the optimizer `name` takes beside those of all, with defaults for what is not given.

    Raises:
      ValueError: for an unknown name, numbers that do not go together, and an option that this optimizer does not take.
    """
    own = _options_of(name)
    for option, value in given.items():
        if option not in own and value != _DEFAULTS.get(option):
            takers = ", ".join(other for other, taken in OPTIMIZERS.items() if option in taken) or "no optimizer"
            raise ValueError(
                f"{option}={value} is not an option of {name}, only of {takers}; leave it out, or set it to its "
                f"default, {_DEFAULTS.get(option)}"
            )
    chosen = {option: given.get(option, _DEFAULTS[option]) for option in own}
    if not 0 <= chosen.get("momentum", 0) < 1:
        raise ValueError(f"momentum must be in [0, 1), got {chosen['momentum']}")
    if chosen.get("nesterov") and not chosen.get("momentum"):
        raise ValueError("nesterov=True needs a momentum > 0, got 0")
    return chosen


def _options_of(name: str) -> tuple[str, ...]:
    """Returns the options of an optimizer: of a registered one the keyword-only arguments of its function."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if name not in registry.OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is unknown; use one of {', '.join((*OPTIMIZERS, *registry.OPTIMIZERS))}")
    parameters = inspect.signature(registry.OPTIMIZERS[name]).parameters.values()
    own = tuple(one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty)
    if unknown := [option for option in own if option not in _DEFAULTS]:
        raise ValueError(
            f"optimizer {name!r} takes {listed(unknown, 3)}, no key of config.optimizer; give the argument a default"
        )
    return own
