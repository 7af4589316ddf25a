"""Options of an optimizer. Importing this does not import JAX, so that a mistake is answered at once."""

from typing import Any

from mixedres._internal.names import OPTIMIZERS
from mixedres.config.keys import KEYS

_DEFAULTS = {key.path.removeprefix("optimizer."): key.default for key in KEYS if key.path.startswith("optimizer.")}
_OF_SOME = {option for own in OPTIMIZERS.values() for option in own}


def check_optimizer(section: dict[str, Any]) -> None:
    """Raises ValueError if the section `optimizer` of a config has options that its optimizer does not take."""
    optimizer_options(section["name"], {option: value for option, value in section.items() if option in _OF_SOME})


def optimizer_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that the optimizer `name` takes beside those of all, with defaults for what is not given.

    Raises:
      ValueError: for an unknown name, numbers that do not go together, and an option that this optimizer does not
        take, unless the option has its default value.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is unknown; use one of {', '.join(OPTIMIZERS)}")
    own = OPTIMIZERS[name]
    for option, value in given.items():
        if option not in own and value != _DEFAULTS.get(option):
            takers = ", ".join(other for other, taken in OPTIMIZERS.items() if option in taken) or "no optimizer"
            raise ValueError(
                f"{option}={value} is not an option of {name}, only of {takers}; leave it out, or set it to its "
                f"default, {_DEFAULTS.get(option)}"
            )
    chosen = {option: given.get(option, _DEFAULTS[option]) for option in own}
    if not 0 <= chosen["momentum"] < 1:
        raise ValueError(f"momentum must be in [0, 1), got {chosen['momentum']}")
    if chosen.get("nesterov") and not chosen["momentum"]:
        raise ValueError("nesterov=True needs a momentum > 0, got 0")
    return chosen
