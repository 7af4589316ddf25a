"""Modules that stay in float32 inside a network of half precision."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import jmp


def policy_of(module: Any) -> jmp.Policy:
    """The policy of a flax module that is being called: its own, in no less than float32 where it is kept.

    A module is kept where the regular expression `module.keep_float32` is found in its path, such as /stem_conv,
    /block_layer1_1/conv1 and /head. The empty one keeps none.
    """
    return policy_at(module.path, module.policy, module.keep_float32)


def policy_at(path: Sequence[str], policy: jmp.Policy, keep_float32: str) -> jmp.Policy:
    """`policy` as the module at `path` has it, ('block_layer1_1', 'conv1')."""
    if not keep_float32 or re.search(keep_float32, "/" + "/".join(path)) is None:
        return policy
    compute, output = (jnp.promote_types(d, jnp.float32) for d in (policy.compute_dtype, policy.output_dtype))
    return jmp.Policy(policy.param_dtype, compute, output)


def module_paths(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths of all modules with these parameters, as `keep_float32` sees them."""

    def inside(modules: Mapping[str, Any], path: str) -> Iterator[str]:
        for name, members in modules.items():
            if isinstance(members, Mapping):
                yield f"{path}/{name}"
                yield from inside(members, f"{path}/{name}")

    return tuple(inside(params, ""))
