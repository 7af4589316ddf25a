"""Parts of JAX without a public name, or with different names in the supported versions."""

import contextlib
import functools
import os
import pathlib
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util
from jax._src.compilation_cache import decompress_executable as decompress_executable
from jax._src.distributed import global_state as global_state
from jax._src.interpreters.partial_eval import const_fold_rules
from jax._src.lax import lax as jax_lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # type: ignore[attr-defined]
from jax.interpreters import ad, partial_eval
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mixedres._internal.types import Array, Aval, Equation

# Primitives that do nothing but call their one body, in all versions.
SIMPLE_CALLS = frozenset(
    ["jit", "pjit", "closed_call", "core_call", "call", "eval_jaxpr", "remat2", "checkpoint", "shard_map"]
)

# What makes the body of a function under jax.jit a part of the program that calls it; since JAX 0.11 True does so late.
INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)
# Reductions that XLA for CPUs fuses with what they read. By default, it computes two kinds wrong: of a product with a
# matrix of one constant (jaxlib 0.10.2 to 0.12.0.1), and of bfloat16 maxima that share a constant (0.12.0.1).
FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
_SOUND: dict[str, Any] = {FUSIONS: ""}
_NOTHING = contextlib.nullcontext()
_ONE_AT_A_TIME = threading.RLock()
# Whether the thread is inside `kept_casts`, where jax.jit traces anew. Late, because it empties the caches of jax.jit.
_keeping: Callable[[], Any] = functools.cache(lambda: jax.make_user_context(False))
# Frames that say nothing about who wrote an operation, and those of libraries.
_PACKAGE = pathlib.Path(__file__).parent.parent
_OWN = tuple(str(_PACKAGE / folder) + os.sep for folder in ("_internal", "amp", "numerics"))
_NOBODY = (os.path.dirname(jax.__file__) + os.sep, *_OWN, "<frozen")
_INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib") + os.sep)


def opened(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns (jaxpr, consts) of a closed or an open jaxpr; since JAX 0.11 both are one class."""
    if hasattr(jaxpr, "consts"):
        return jaxpr.jaxpr, tuple(jaxpr.consts)
    return jaxpr, ()


def is_recorded(arrays: Iterable[Any]) -> bool:
    """Returns whether what is computed from `arrays` is only recorded: not computed, differentiated or batched."""
    # NumPy arrays are constants.
    return all(type(x) is partial_eval.DynamicJaxprTracer or not isinstance(x, jax.Array) for x in arrays)


def signature(eqn: Equation) -> tuple[Any, ...] | None:
    """Returns what equal equations share: primitive, parameters, types of the operands; None if it cannot be hashed."""
    found = (eqn.primitive, tuple(eqn.params.items()), tuple(atom.aval for atom in eqn.invars))
    try:
        hash(found)
    except TypeError:  # a parameter may be anything
        return None
    return found


def body(eqn: Equation) -> Any:
    """Returns the jaxpr of a call that has one; primitives name it differently."""
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def closed(jaxpr: Any) -> Any:
    """Returns a jaxpr that `jax.extend.core.jaxpr_as_fun` takes."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def struct(array: Any, dtype: Any) -> Any:
    """Returns the type of `array` in another dtype, varying over the same mesh axes, for `jax.make_jaxpr`."""
    return jax.typeof(array).update(dtype=np.dtype(dtype), weak_type=False)


def zero_cotangent(aval: Aval) -> Any:
    """Returns a zero cotangent for a pullback of `jax.vjp`; before JAX 0.11 the zero must be an array."""
    # Since JAX 0.12, a rule under vmap must not get an array for an unbatched result.
    if jax.__version_info__ >= (0, 11):
        return ad.Zero(aval)
    return np.zeros(aval.shape, aval.dtype if jnp.issubdtype(aval.dtype, jnp.inexact) else jax.dtypes.float0)


def interpret(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    equation: Callable[[int, Equation, list[Any]], Sequence[Any]],  # (index, equation, operands) -> results
    literal: Callable[[Any], Any] = lambda atom: atom.val,
    *,
    binds: bool = True,  # whether `equation` binds primitives: they get the source line, name stack and context
    frees: bool = False,  # forget each value after the last equation that reads it
) -> list[Any]:
    """Interprets a jaxpr, closed or open, by calling `equation`; returns the values of its outputs."""
    inner, _ = opened(jaxpr)
    last = _last_readers(inner) if frees else {}
    env = dict(zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for index, eqn in enumerate(inner.eqns):
        with as_written(eqn) if binds else _NOTHING:
            results = equation(index, eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
        for atom in last.get(index, ()):
            del env[atom]
    return [read(atom) for atom in inner.outvars]


def _last_readers(jaxpr: Any) -> dict[int, list[Any]]:
    """Returns {index of an equation: the variables that no equation or output after it reads}."""
    index_of: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        operands = (atom for atom in eqn.invars if not isinstance(atom, Literal))
        index_of |= dict.fromkeys([*operands, *eqn.outvars], index)
    for atom in jaxpr.outvars:
        if not isinstance(atom, Literal):
            index_of.pop(atom, None)
    found: dict[int, list[Any]] = {}
    for atom, index in index_of.items():
        found.setdefault(index, []).append(atom)
    return found


def shard_map_like(eqn: Equation, function: Callable[..., Any], out_specs: Any = None) -> Callable[..., Any]:
    """Returns `function` under the shard_map of `eqn`; `out_specs`: specs of its results, by default those of `eqn`."""
    params = eqn.params
    return jax.shard_map(
        function,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]) if out_specs is None else out_specs,
        axis_names=set(manual_axes(eqn)),
        check_vma=params["check_vma"],
    )


def manual_axes(eqn: Equation) -> tuple[str, ...]:
    """Returns the mesh axes of a shard_map; JAX 0.11 renamed the parameter."""
    return tuple(eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes")))


def scan_arity(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of constants and the number of carries of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def without_consts(jaxpr: Any) -> tuple[Jaxpr, tuple[Any, ...]]:
    """Returns an open jaxpr that takes its constants as first arguments, and the constants."""
    inner, consts = opened(jaxpr)
    constvars = list(inner.constvars)
    if not constvars:
        return inner, ()
    info: Any = inner.debug_info
    if info is not None:
        info = info._replace(arg_names=("",) * len(constvars) + tuple(info.arg_names or ()))
    invars = [*constvars, *inner.invars]
    return Jaxpr([], invars, inner.outvars, inner.eqns, inner.effects, info), consts


def bind(eqn: Equation, *operands: Any, **changed: Any) -> list[Any]:
    """Evaluates an equation, with `changed` parameters, on `operands`; returns a list also if there is one result."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


@contextlib.contextmanager
def as_written(eqn: Equation, inside: Equation | None = None) -> Iterator[None]:
    """Gives all operations in the block the source line, name stack and context of `eqn`, for errors and profiles.

    `inside`: the equation in whose block a function is traced that has this block; its scopes are not repeated.
    """
    own = eqn.source_info.name_stack
    outer = inside.source_info.name_stack.stack if inside else ()
    parted = (i for i, (a, b) in enumerate(zip(own.stack, outer, strict=False)) if a != b)
    first = next(parted, min(len(own.stack), len(outer)))
    stack = source_info_util.current_name_stack() + own[first:]
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def mesh_of(array: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context whose mesh has the axis types of an array, for an operation on the array alone."""
    # The operands of a reshard in `jax.sharding.auto_axes` have another mesh than the equation.
    mesh = jax.typeof(array).sharding.mesh
    same = mesh.empty or mesh == jax.sharding.get_abstract_mesh()
    return contextlib.nullcontext() if same else jax.sharding.use_abstract_mesh(mesh)


def replicated(fn: Callable[..., Any], *args: Any) -> Any:
    """Returns `fn(*args)` with replicated results; `args` are pytrees of arrays, which may have explicit sharding."""
    placed = [x for x in jax.tree.leaves(args) if not jax.typeof(x).sharding.mesh.empty]
    if not placed:
        return fn(*args)
    mesh, here = jax.typeof(placed[0]).sharding.mesh, jax.sharding.get_abstract_mesh()
    with mesh_of(placed[0]):
        # Otherwise every reshape, stack and sum in `fn` would have to state a sharding.
        if AxisType.Explicit in mesh.axis_types:
            return jax.sharding.auto_axes(fn, out_sharding=PartitionSpec())(*args)
        result = fn(*args)
    if here.empty or mesh == here:
        return result
    # Inside `auto_axes`, whose equations are evaluated one by one, the arrays have another mesh than the context.
    return jax.sharding.reshard(result, NamedSharding(here, PartitionSpec()))


@contextlib.contextmanager
def kept_casts(is_kept: Callable[[Any, Any], bool]) -> Iterator[None]:
    """Keeps casts of constants as operations of the programs that the thread traces, if `is_kept(constant, dtype)`."""
    with _ONE_AT_A_TIME, _keeping()(True):
        convert, fold = jax_lax._convert_element_type, const_fold_rules[cast := jax_lax.convert_element_type_p]

        def kept_fold(numbers: Any, params: Any, avals: Any) -> Any:
            is_operation = _keeping().value and is_kept(numbers[0], params["new_dtype"])
            return None if is_operation else fold(numbers, params, avals)

        def kept_convert(x: Any, new_dtype: Any = None, weak_type: Any = False, *args: Any, **options: Any) -> Any:
            if not (_keeping().value and is_kept(x, new_dtype)):
                return convert(x, new_dtype, weak_type, *args, **options)
            exact, dtype = np.asarray(x, np.float32), np.dtype(new_dtype)
            return cast.bind(exact, new_dtype=dtype, weak_type=weak_type, sharding=None)

        const_fold_rules[cast], jax_lax._convert_element_type = kept_fold, kept_convert  # type: ignore[assignment]
        try:
            yield
        finally:
            const_fold_rules[cast], jax_lax._convert_element_type = fold, convert


def source_line(eqn: Equation) -> str:
    """Returns the first of `source_lines`; '' if JAX knows none."""
    return next(iter(source_lines(eqn)), "")


def source_lines(eqn: Equation) -> list[str]:
    """Returns 'file:line (function)' of the code that wrote an equation; of packages only if all of it is in some."""
    return [_place(frame) for *_, frame in authors(eqn.source_info.traceback)]


@functools.lru_cache(4096)  # the layers of a network are written in one line
def authors(traceback: Any) -> list[Any]:
    """Returns (code, offset of the instruction, frame) of the lines of `source_lines`, innermost first."""
    frames = list(zip(*traceback.raw_frames(), strict=True)) if traceback is not None else []
    outside_jax = [frame for frame in frames if not frame[0].co_filename.startswith(_NOBODY)]
    own = [frame for frame in outside_jax if not any(part in frame[0].co_filename for part in _INSTALLED)]
    return [(*frame, source_info_util.raw_frame_to_frame(*frame)) for frame in own or outside_jax]


def _place(frame: Any) -> str:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cell = " ".join(shell.compile.format_code_name(frame.file_name) or ()) if shell else ""
    return f"{cell or frame.file_name}:{frame.start_line} ({frame.function_name})"


def name_stack(eqn: Equation) -> str:
    """Returns the named scopes around `eqn`, such as 'ResNet/block_0/conv'."""
    return str(eqn.source_info.name_stack)


def named_scopes(eqn: Equation) -> tuple[str, ...]:
    """Returns the named scopes without derivatives and the names that JAX adds: ('ResNet', 'block_0', 'conv')."""
    segments: list[list[str]] = [[]]
    for part in eqn.source_info.name_stack.stack:
        if isinstance(part, source_info_util.Scope):
            segments[-1] += part.name.split("/")
        else:
            segments.append([])
    return tuple(joined_scopes(segments))


def joined_scopes(segments: Iterable[Iterable[str]]) -> list[str]:
    """Returns the scopes of a name stack, whose `segments` end with each 'jvp' or 'transpose', without JAX's own."""
    names: list[str] = []
    for segment in segments:
        found = [name for name in segment if name not in ("", "rematted_computation")]
        # Backward passes of jax.checkpoint and custom_jvp begin again: 'transpose(jvp(a))/jvp(a)/b'.
        names = found if found[: len(names)] == names else names + found
    return names


def bodies(eqn: Equation) -> list[Any]:
    """Returns the jaxprs in the parameters of an equation."""
    return list(_jaxprs(tuple(eqn.params.values())))


def equations(jaxpr: Any, platform: str | None = None, *, every_platform: bool = False) -> Iterator[Equation]:
    """Yields the equations of a jaxpr and of its bodies; a `lax.platform_dependent` has its `platform_branch` alone."""
    for eqn in opened(jaxpr)[0].eqns:
        yield eqn
        branch = None if every_platform else platform_branch(eqn, platform)
        for inner in bodies(eqn) if branch is None else [branch]:
            yield from equations(inner, platform, every_platform=every_platform)


def platform_branch(eqn: Equation, platform: str | None) -> Any:
    """Returns the branch of a `lax.platform_dependent` for a platform such as 'cpu'; None for other equations."""
    branches = _platform_branches(eqn)
    return branches.get(platform, branches.get(None))


def platforms(jaxpr: Any) -> tuple[str, ...]:
    """Returns the names of the platforms for which a `lax.platform_dependent` in a jaxpr has a branch, sorted."""
    names = {name for eqn in equations(jaxpr, every_platform=True) for name in _platform_branches(eqn)}
    return tuple(sorted(name for name in names if name is not None))


def _platform_branches(eqn: Equation) -> dict[str | None, Any]:
    """Returns {platform: branch, None: default branch} of a `lax.platform_dependent`; {} for other equations."""
    platforms = eqn.params.get("branches_platforms")
    if not platforms:
        return {}
    pairs = zip(platforms, eqn.params["branches"], strict=True)
    return {name: branch for names, branch in pairs for name in names or (None,)}


def _jaxprs(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Jaxpr | ClosedJaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _jaxprs(tuple(value))


def varying_axes(x: Array) -> frozenset[str]:
    """Returns the mesh axes of a surrounding shard_map over which `x` differs."""
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(kind.varying if kind is not None else getattr(aval, "vma", ()))


def vary_over(names: Iterable[str], x: Array) -> Any:
    """Returns `x` as an array that varies along these mesh axes too; its gradient is summed over the added axes."""
    missing = tuple(frozenset(names) - varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(*arrays: Array) -> list[Any]:
    """Returns the arrays as arrays that all vary along the axes along which any of them varies."""
    names = frozenset().union(*map(varying_axes, arrays))
    return [vary_over(names, x) for x in arrays]


def sound_options(platform: str) -> dict[str, Any]:
    """Returns the options without which a program may be compiled wrong on this platform."""
    return _SOUND if platform == "cpu" and knows_options(*_SOUND.items()) else {}


def options_for_one_run(platform: str | None = None) -> dict[str, Any]:
    """Returns the options for a program that runs once; without `platform`, for the default device."""
    platform = platform or jax.default_backend()
    # On a CPU most of the time would be spent on optimizing the code of the program.
    return sound_options(platform) | ({"xla_backend_optimization_level": 0} if platform == "cpu" else {})


@functools.cache
def knows_options(*options: tuple[str, Any]) -> bool:
    """Returns whether the installed XLA has the options."""
    try:
        jax.jit(lambda: 0, compiler_options=dict(options)).lower().compile()
    except RuntimeError:  # No such compile option
        return False
    return True


def portable_stablehlo(module: bytes, version: str) -> bytes:
    """Converts a serialized program of `jax.export` to a portable artifact of an older StableHLO, such as '1.0.0'."""
    from jax.interpreters import mlir
    from jaxlib.mlir.dialects import stablehlo

    with mlir.make_ir_context() as context:
        return stablehlo.serialize_portable_artifact(stablehlo.deserialize_portable_artifact(context, module), version)
