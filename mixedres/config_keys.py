"""Every key of a config: its type, default, meaning and range."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from mixedres import autocast, precision


@dataclasses.dataclass(frozen=True)
class Range:
    """The allowed values of a key: a test, and the same in words."""

    allows: Callable[[Any], bool]
    words: str


@dataclasses.dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
      path: dotted name.
      type: of the value; `object` accepts any literal. None stands for "not set" where it is the default.
      default: value in a fresh config.
      doc: what it means.
      range: the values allowed.
    """

    path: str
    type: type
    default: Any
    doc: str
    range: Range = Range(lambda x: True, "anything")


def duration_in_steps(value: Any, steps_per_epoch: float) -> int:
    """Steps of a duration: a number or '5 epochs' in epochs, '500 steps' in steps.

    Rounded to the nearest whole step, halves up, and to no less than 1 unless the duration is 0.

    Raises:
      ValueError: for anything else and for negative ones.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(|epochs?|steps?)\s*", str(value))
    if match is None:
        raise ValueError(f"duration {value!r} is not {DURATION.words}")
    steps = float(match[1]) * (1.0 if match[2].startswith("step") else steps_per_epoch)
    return max(1, math.floor(steps + 0.5)) if steps else 0


def _is_duration(x: Any) -> bool:
    try:
        duration_in_steps(x, steps_per_epoch=1)
    except ValueError:
        return False
    return True


def one_of(*values: str) -> Range:
    """One of a few words."""
    return Range(lambda x: x in values, " or ".join(values))


def each(inner: Range) -> Range:
    """A tuple whose members are all in `inner`."""
    return Range(lambda x: all(map(inner.allows, x)), f"a tuple, each of it {inner.words}")


# Numbers end up in int32 or float32, where 1e300 would be infinite.
POSITIVE = Range(lambda x: 0 < x < 2**31, "> 0 and < 2**31")
NOT_NEGATIVE = Range(lambda x: 0 <= x < 2**31, ">= 0 and < 2**31")
GROWING = Range(lambda x: math.isfinite(x) and x > 1, "> 1")
SHARE = Range(lambda x: 0 <= x < 1, "in [0, 1)")
UNIT = Range(lambda x: 0 <= x <= 1, "in [0, 1]")
REACHABLE = Range(lambda x: 0 < x <= 1, "in (0, 1]")
NAMED = Range(lambda x: x != "", "a name, and not empty")
DURATION = Range(_is_duration, "a number of epochs such as 5, '5 epochs' or '500 steps'")

KEYS = (
    Key("seed", int, 0, "of the weights, the order of the data and its augmentation", NOT_NEGATIVE),
    Key("epochs", float, None, "length of the run in passes over the training data", POSITIVE),
    Key("steps", int, None, "length of the run in steps; where set, it takes the place of epochs", POSITIVE),
    Key("batch_size", int, None, "examples per step over all devices", POSITIVE),
    Key("batch_size_per_device", int, None, "the same per device, where batch_size is not set", POSITIVE),
    Key("num_devices", int, None, "devices to use; not set: all", POSITIVE),
    Key("microbatches", int, 1, "parts of a batch whose gradients are added up before the update", POSITIVE),
    Key("eval_every", object, "1 epoch", "time between evaluations; 0: one at the end", DURATION),
    Key("checkpoint_every", object, "1 epoch", "time between checkpoints; 0: one at the end", DURATION),
    Key("keep_checkpoints", int, 3, "how many of the newest checkpoints stay", POSITIVE),
    Key("log_every", int, 10, "steps between two lines of training metrics", POSITIVE),
    Key("log_resources_every", float, 5.0, "seconds between two looks at processor and memory; 0: none", NOT_NEGATIVE),
    Key("wandb", str, None, "project of Weights & Biases that gets the metrics too; not set: none"),
    Key(
        "compilation_cache", str, "auto", "directory of compiled programs; auto: compiled/ by the workdir; none", NAMED
    ),
    Key("stop_at_top1", float, None, "end once test top-1 (0 to 1) reaches this", REACHABLE),
    Key("stop_after_skipped", int, 25, "end the run at so many skipped steps in a row (exit status 3)", POSITIVE),
    Key("label_smoothing", float, 0.0, "share of the target spread over all classes", SHARE),
    Key("ema_decay", float, 0.0, "of a moving average of the weights, used in evaluation; 0: none", SHARE),
    Key("init_from", str, None, "weights to start from: a workdir, .safetensors, .pth or transformers' folder", NAMED),
    Key("train_only", str, "", "regular expression of the parameter paths that learn, such as ^/head/; empty: all"),
    Key(
        "allreduce_dtype",
        str,
        "param",
        "dtype in which gradients are averaged over devices",
        one_of("param", "compute"),
    ),
    Key("model.name", str, "resnet50", "resnet18, 34, 50, 101, 152, 200 or cifar_resnet{6n+2}"),
    Key("model.version", str, None, "1, 1.5 or 2; not set: 1.5, and 1 for cifar_resnet"),
    Key("model.zero_init_last", bool, True, "start every block as the identity, by a zero in its last layer"),
    Key("model.kernel_init", str, "he_normal", "he_normal, he_normal_fan_out, lecun_normal, glorot_uniform"),
    Key("model.head_init", str, "normal_0.01", "the same for the head, or normal_0.01"),
    Key(
        "model.fused",
        str,
        "auto",
        "compute every batch norm with what follows it; auto: where it was measured to be faster",
        one_of("auto", "true", "false"),
    ),
    Key("batch_norm.momentum", float, 0.9, "weight of the old running average", SHARE),
    Key("batch_norm.epsilon", float, 1e-5, "added to the variance", POSITIVE),
    Key("batch_norm.frozen", bool, False, "normalise by the running averages in training too, and leave them alone"),
    Key("batch_norm.sync", bool, False, "statistics over all devices instead of per device"),
    Key("data.name", str, "synthetic", "digits, synthetic, cifar10, imagenet2012, folder or tfds:NAME"),
    Key("data.dir", str, None, "where the data lie; not set: $TFDS_DATA_DIR or ~/tensorflow_datasets"),
    Key("data.image_size", int, 224, "height and width that the network sees", POSITIVE),
    Key("data.num_classes", int, None, "of synthetic data; of other data where there shall be more outputs", POSITIVE),
    Key("data.train_examples", int, None, "length of an epoch of synthetic data", POSITIVE),
    Key("data.preprocessing", str, "torch", "crops, resizing and mean of stored pictures", one_of("official", "torch")),
    Key("data.pad", int, 0, "of data in memory: random crop from the image padded by so many pixels", NOT_NEGATIVE),
    Key("data.flip", bool, False, "random left-right flip"),
    Key("data.train_split", str, None, "of a prepared data set ('train[:90%]'), or the folder; not set: train"),
    Key("data.eval_split", str, None, "the same; not set: validation, test or val, whichever is there first"),
    Key("data.eval_share", float, 0.2, "of a folder without a part for evaluation: share held out for it", SHARE),
    Key("data.split_seed", int, 0, "which pictures these are", NOT_NEGATIVE),
    Key("data.threads", int, None, "that decode, in every process that does; not set: one a CPU core", POSITIVE),
    Key("data.workers", int, 0, "processes that decode; 0: threads of the main process do", NOT_NEGATIVE),
    Key("data.on_error", str, "raise", "a picture that cannot be read ends the run, or not", one_of("raise", "skip")),
    Key("optimizer.name", str, "sgd", "sgd, lars or adamw"),
    Key("optimizer.learning_rate", float, 0.1, "peak, at lr_batch_size examples per step", POSITIVE),
    Key("optimizer.lr_batch_size", int, 256, "the rate is scaled by batch_size / this; 0: it is not", NOT_NEGATIVE),
    Key("optimizer.momentum", float, 0.9, "of sgd and lars; beta 1 of adamw", SHARE),
    Key("optimizer.nesterov", bool, False, "Nesterov's momentum, for sgd and lars"),
    Key("optimizer.weight_decay", float, 1e-4, "coupled L2 on the float32 weights; decoupled in adamw", NOT_NEGATIVE),
    Key("optimizer.decay_mask", str, "/kernel$", "regular expression of the parameter paths that decay"),
    Key(
        "optimizer.layer_decay",
        float,
        1.0,
        "factor on the rate of every block below the head",
        REACHABLE,
    ),
    Key("optimizer.clip_norm", float, 0.0, "largest norm of the unscaled gradient; 0: no clipping", NOT_NEGATIVE),
    Key("optimizer.beta2", float, 0.999, "of adamw", SHARE),
    Key("optimizer.epsilon", float, 1e-8, "of adamw", POSITIVE),
    Key("optimizer.trust_coefficient", float, 0.001, "of lars", POSITIVE),
    Key("schedule.name", str, "cosine", "constant, cosine, piecewise or polynomial"),
    Key("schedule.warmup", object, 0, "length of the linear warm-up from 0", DURATION),
    Key("schedule.end_factor", float, 0.0, "last rate / peak, for cosine and polynomial", UNIT),
    Key("schedule.boundaries", tuple, (), "for piecewise: when the rate changes, each a duration", each(DURATION)),
    Key("schedule.factors", tuple, (), "for piecewise: share of the peak after each boundary", each(POSITIVE)),
    Key("schedule.power", float, 2.0, "for polynomial", POSITIVE),
    Key("precision.name", str, "fp32", f"the preset: {', '.join(precision.PRESETS)}"),
    Key("precision.policy", str, None, "jmp policy of the network: params=float32,compute=float16,output=float32"),
    Key("precision.norm_policy", str, None, "jmp policy of batch normalisation; not set: float32 inside"),
    Key("precision.loss_scale", object, None, "none, dynamic or a number > 0; not set: the preset's"),
    Key("precision.implementation", str, None, "casting or graph_rewrite; not set: the preset's"),
    Key("precision.matmul_precision", str, None, "default, tensorfloat32 or highest; not set: the preset's"),
    Key("precision.keep_float32", str, "", "regular expression of module paths that stay in float32, such as ^/head$"),
    Key("numerics.every", int, 0, "steps between two looks at the numerics of every layer; 0: none", NOT_NEGATIVE),
    Key("autocast.level", str, "default", f"of the graph rewrite: {', '.join(autocast.LEVELS)}"),
    Key("autocast.allow", str, "", "primitives it always computes in half, with commas: dot_general,tanh"),
    Key("autocast.infer", str, "", "primitives in half between those"),
    Key("autocast.deny", str, "", "primitives in float32, and what depends on them"),
    Key("autocast.clear", str, "", "primitives that follow their neighbours"),
    Key("autocast.unlisted", str, "", "primitives in float32, whose neighbours are not affected"),
    Key("loss_scale.initial", float, 2.0**15, "of the dynamic loss scale", POSITIVE),
    Key("loss_scale.period", int, 2000, "finite steps before it grows", POSITIVE),
    Key("loss_scale.factor", float, 2.0, "by which it grows and shrinks", GROWING),
    Key("loss_scale.min", float, 1.0, "its lower end", POSITIVE),
    Key("loss_scale.max", float, 2.0**24, "its upper end", POSITIVE),
)
