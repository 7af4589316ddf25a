"""The format number of every file that mixedres writes, and the version that wrote the file."""

import re

from mixedres._internal.errors import ConfigError
from mixedres._internal.names import __version__
from mixedres._internal.types import Json, Record

# Raise this number when an older version could not read a new file; then teach `mixedres.checkpoints.documents`, or
# for a key of a config `mixedres.config.keys.RETIRED`, what changed. Format 1 is that of 0.2.0, the first version whose
# files later versions read.
FORMAT = 3
_KEYS = ("format", "mixedres")


def stamped(record: Record) -> Record:
    """Returns a record with the number of the format and the version of mixedres."""
    return {"format": FORMAT, "mixedres": __version__} | record


def without_stamp(record: Record) -> Record:
    """Returns a record without what `stamped` added."""
    return {key: value for key, value in record.items() if key not in _KEYS}


def check_format(record: Json, where: object) -> None:
    """Raises ConfigError if a newer version of mixedres wrote `record`, which was read at `where`."""
    number = record.get("format") if isinstance(record, dict) else None
    if isinstance(number, int) and number > FORMAT:
        version = str(record.get("mixedres"))
        raise ConfigError(
            f"{where} was made by mixedres {version:.40} in format {number}; this is mixedres {__version__}, which "
            f"reads formats up to {FORMAT}: upgrade mixedres"
        )


def is_of_newer_version(record: Record) -> bool:
    """Returns whether the stamp of a record names a newer version than this one, which may know other keys."""
    there, here = (re.findall(r"\d{1,9}", str(version))[:3] for version in (record.get("mixedres"), __version__))
    return list(map(int, there)) > list(map(int, here))
