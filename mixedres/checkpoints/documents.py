"""Schemas of the documents of a run and of a weights file, and the check of a document before its use."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from mixedres._internal import registry
from mixedres._internal.errors import ConfigError
from mixedres._internal.formats import check_format, is_of_newer_version, without_stamp
from mixedres._internal.names import LONGEST_NAME, __version__
from mixedres._internal.types import Json, Record
from mixedres.config import complete

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Name = Annotated[str, msgspec.Meta(max_length=2**20)]


class Evaluation(TypedDict):
    """Result of an evaluation."""

    step: Count
    top1: Fraction
    top5: Fraction
    loss: float
    examples: Count


class Best(TypedDict):
    """The evaluation with the highest top-1."""

    step: Count
    top1: Fraction


class Sums(msgspec.Struct):
    """Numbers of steps, and sums of loss and top-1: over the applied steps, and over all steps."""

    applied: tuple[Count, float, float]
    all: tuple[Count, float, float]


def no_sums() -> Sums:
    """Returns the sums over no step."""
    return Sums((0, 0.0, 0.0), (0, 0.0, 0.0))


class LogState(msgspec.Struct):
    """Sums since the last line of metrics and since the last evaluation, and the mean loss before that evaluation."""

    line: Sums
    eval: Sums
    epoch_loss: float | None


class HostState(msgspec.Struct):
    """State of a run on the host, which a checkpoint holds beside the state on the devices.

    Attributes:
      evaluated: the newest evaluation; None before the first.
      best: the evaluation with the highest top-1, the earliest of equals; None before the first.
      pending_eval: step of this checkpoint if a signal cut off the evaluation of the step; else None.
      log: the sums that the next lines of metrics continue.
    """

    evaluated: Evaluation | None = None
    best: Best | None = None
    pending_eval: Count | None = None
    log: LogState = msgspec.field(default_factory=lambda: LogState(no_sums(), no_sums(), None))


class DataIdentity(TypedDict):
    """`data.json`: the data set of a run, and the input of its network."""

    class_names: list[Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]]
    train_examples: Count
    eval_examples: Count
    fingerprint: str
    input: NotRequired[dict[str, Any] | None]
    num_classes: NotRequired[Count]
    sizes: NotRequired[str]


class CheckpointRecord(TypedDict):
    """The record in a checkpoint, beside the fields of `HostState`."""

    config: dict[str, Any]
    devices: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    evaluated: Evaluation | None
    best: Best | None
    pending_eval: Count | None
    log: LogState
    data: NotRequired[dict[str, Any]]


class SavedStep(TypedDict):
    """`nonfinite.json`: a step that was not finite."""

    step: Count
    config: dict[str, Any]
    batch: dict[str, Literal["uint8", "float32", "int32", "int64", "bool", "float16", "bfloat16"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a network that its tensors do not show, as `mixedres.export` writes them; None if one is unknown.

    Attributes:
      network: name of the network, if a run or mixedres recorded it.
      num_classes: outputs of the network; None or 0: the tensors show them.
      version: '1', '1.5' or '2'.
      options: options of `mixedres.models.create` that the weights need and that are not the defaults.
      class_names: names of the classes by output.
      epsilon: epsilon of batch normalization.
      input: the network's input, as `mixedres.data.InputSpec.to_json` makes it.
    """

    network: Name | None = None
    num_classes: Count | None = None
    version: Annotated[str, msgspec.Meta(pattern=r"^(1|1\.5|2)$")] | None = None
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    class_names: tuple[Name, ...] | None = None
    epsilon: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    input: dict[str, Any] | None = None


def check(value: Json, kind: Any, where: object) -> Record:
    """Returns `value`, read at `where`, if it is a document of this kind; keys that the kind does not have are ignored.

    Raises ConfigError for a document of a newer format, and for missing parts and parts of other types.
    """
    check_format(value, where)
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeError) as error:  # no UTF-8 in a key
        raise ConfigError(f"{where} is damaged ({error}); put back a copy") from None
    checked: Record = value
    return checked


def check_identity(identity: Record) -> None:
    """Raises ValueError if the identity of a data set, see `mixedres.data.identity`, could not be read again."""
    try:
        msgspec.convert(identity, DataIdentity)
        json.dumps(identity)
    except (msgspec.ValidationError, UnicodeError, TypeError) as error:
        reason, _, place = str(error).partition(" - at ")
        raise ValueError(f"{place.strip('`$.') or 'its identity'} cannot be recorded ({reason})") from None


def read_record(value: Json, where: object) -> Record:
    """Returns the record of a checkpoint, read at `where`, with a config of today's keys; raises ConfigError."""
    record = check(value, CheckpointRecord, where)
    return record | {"config": read_flat(record["config"], where, made=record)}


def read_facts(value: Json, where: object) -> Facts:
    """Returns the facts in a document, read at `where`; raises ConfigError as `check`."""
    return msgspec.convert(check(value, Facts, where), Facts)


def host_state(record: Record) -> HostState:
    """Returns the state of the host in the record of a checkpoint, as `read_record` returns it."""
    return msgspec.convert(record, HostState)


def with_host_state(record: Record, host: HostState) -> Record:
    """Returns a record with the fields of the state of the host, in types of JSON."""
    fields: Record = msgspec.to_builtins(host)
    return record | fields


def read_flat(recorded: Mapping[str, Json], where: object, made: Record | None = None) -> Record:
    """Returns a flat config, read at `where`, with all of today's keys; `made`: the document around it, with the stamp.

    Raises ConfigError for a newer format, an unknown key, an invalid value, and names that nobody registered here.
    """
    check_format(recorded, where)
    registry.check_needed(recorded, where)
    try:
        return complete(without_stamp(dict(recorded)))
    except ConfigError as error:
        stamp = dict(recorded) if made is None else made
        if is_of_newer_version(stamp):
            raise ConfigError(
                f"{where} was made by mixedres {stamp['mixedres']!s:.40}; this is mixedres {__version__}, which cannot "
                f"read it: upgrade mixedres ({str(error).partition('; ')[0]})"
            ) from None
        raise ConfigError(f"{where}: {error}") from None
