"""Options of an optimizer. Importing this does not import JAX, so that a mistake is answered at once."""

import inspect
from typing import Any

from mixedres._internal import registry
from mixedres._internal.errors import listed
from mixedres._internal.names import OPTIMIZERS
from mixedres.config.keys import KEYS

_DEFAULTS = {key.path.removeprefix("optimizer."): key.default for key in KEYS if key.path.startswith("optimizer.")}
_OF_SOME = {option for own in OPTIMIZERS.values() for option in own}


def check_optimizer(section: dict[str, Any]) -> None:
    """Raises ValueError if the section `optimizer` of a config has options that its optimizer does not take."""
    optimizer_options(section["name"], {option: value for option, value in section.items() if option in _OF_SOME})


def optimizer_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that the optimizer `name` takes beside those of all, with defaults for what is not given.

    Raises ValueError for an unknown name, numbers that do not go together, and an option that this optimizer does not
    take, unless the option has its default value.
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
