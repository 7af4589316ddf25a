"""Functions as they are traced where `jax.lax.platform_dependent` has no choice."""

from functools import wraps
from unittest import mock

import jax


def on(platform, fn):
    """Returns `fn` with the branches for a platform alone; None: with the default branches."""

    def choose(*args, default, **forms):
        return forms.get(platform, default)(*args)

    @wraps(fn)
    def chosen(*args):
        with mock.patch.object(jax.lax, "platform_dependent", choose):
            return fn(*args)

    return chosen
