"""`compare`: runs a half program beside its float32 program."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixedres import amp
from mixedres._internal import jax_compat
from mixedres._internal.cli import console
from mixedres._internal.jaxprs.module_paths import expression
from mixedres._internal.tree import HALF, at_least_float32, is_inexact
from mixedres._internal.types import Array, DType, Function, Jaxpr, PyTree
from mixedres.numerics._compare.analysis import Analysis
from mixedres.numerics._compare.constants import lost_constants, unrounded
from mixedres.numerics._compare.exact import in_float32, widened
from mixedres.numerics._compare.recorder import Outcome, PairRecorder
from mixedres.numerics._compare.report import ErrorReport, Mend
from mixedres.numerics._compiled import half_dtypes, parted
from mixedres.numerics._recording.arguments import Traced, is_array
from mixedres.numerics._recording.frames import Statistics, Tensor
from mixedres.numerics._rows import MOST_ERROR, format_power
from mixedres.numerics._scales import largest_finite

# Number of contributors that are tried in float32.
_TRIED = 3
# A change that removes more than this fraction of the error removes its cause. One that removes less than a percent is
# not told.
_ALL, _LITTLE = 0.99, 0.005
# CPU time of an operation that is unlike all others: 34 ms in a transformer of 8 blocks, with 50 of them, and 70 ms in
# the gradient of a ResNet-18, with 458, on one core of a Xeon. A comparison of less time is not announced.
_SECONDS_OF_AN_OPERATION, _SHORT = 0.05, 5
# Seconds between lines about a long comparison.
_BETWEEN = 10.0


@dataclasses.dataclass(frozen=True)
class _Half:
    """A function in half precision, with the arguments of `compare`."""

    fn: Function
    options: dict[str, Any] | None  # keyword arguments of `autocast`; None for a function that is half already
    of: str
    scale: Any  # may be traced

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def __call__(self, *args: PyTree) -> Any:
        fn = self.fn if self.options is None else amp.autocast(self.fn, **self.options)
        if self.of == "value":
            return fn(*args)
        leaves, structure = jax.tree.flatten(args[0])
        varied = {i: leaf for i, leaf in enumerate(leaves) if is_array(leaf) and is_inexact(leaf)}
        if not varied:
            raise ValueError("of='grad': the first argument has no floating-point array to differentiate")

        def loss(arrays: Mapping[int, Array]) -> Any:
            full = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
            value = fn(jax.tree.unflatten(structure, full), *args[1:])
            if not jax.tree_util.all_leaves([value]):
                raise ValueError(
                    f"of='grad' takes a function that returns a float scalar, got a {type(value).__name__}; if it "
                    "returns (loss, aux), compare lambda *args: fn(*args)[0]"
                )
            if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
                raise ValueError(f"of='grad' takes a function that returns a float scalar, got {jnp.shape(value)}")
            return value * jnp.asarray(self.scale, jnp.float32)

        # In float32 at least, as optimizers with float32 weights do: 2**16 is infinite in float16.
        wide = {i: g.astype(at_least_float32(g.dtype)) for i, g in jax.grad(loss)(varied).items()}
        grads = {i: g / jnp.asarray(self.scale, g.dtype) for i, g in wide.items()}
        return jax.tree.unflatten(structure, [grads.get(i) for i in range(len(leaves))])


def compare(
    fn: Function,
    *args: PyTree,
    dtype: DType = "fp16",
    lists: amp.ListsLike = None,
    level: str = "default",
    keep_float32: str = "",
    of: str = "value",
    scale: float = 1.0,
    names: Sequence[str] = (),
) -> ErrorReport:
    """Runs `fn(*args)` in half precision beside float32 and finds the operations at which the two part.

        print(compare(lambda x, w: jnp.tanh(x @ w), x, w))

    Every operation of the half program is evaluated three times: as computed, in float32 on the operands that the half
    program gave it (its own error), and in float32 on the operands of the float32 program (the accumulated error). A
    `while` loop or a `cond` counts as one operation; a scan has errors for each iteration. If the results are off by
    more than rounding explains, changes that may mend the error are tried, each by one more run. Constants are not
    rounded in the float32 program, unless they were half before. Random keys are the same in both programs. Callbacks
    run once in each run, on the numbers of the half program; in a `while` loop or a `cond`, for float32 too.

    Args:
      fn: a function of pytrees of arrays. It may compute in half already, by casts of its own.
      *args: its arguments; leaves that are no arrays are passed unchanged.
      dtype: float16 or bfloat16, as for `autocast`; None: `fn` as it is, without autocast and its options
        `lists`, `level` and `keep_float32`.
      of: 'value': the results of `fn`; 'grad': the gradients of `fn`, a float scalar, by the first argument.
      scale: loss scale for of='grad', any positive number; the gradients are divided by the scale.
      names: names of the arguments in the report; default: 'argument 0' and so on.

    Raises:
      TypeError: for a `fn` that is not callable or that returns anything but arrays.
      ValueError: for invalid or ignored options, a `keep_float32` that matches nothing, arguments without values
        (`jax.ShapeDtypeStruct`), and for of='grad' a `fn` without a float scalar or a first argument without floats.
    """
    options = None if dtype is None else dict(dtype=dtype, lists=lists, level=level, keep_float32=keep_float32)
    half = _Half(fn, options, of, scale)
    _check(half, args, ignored=dtype is None and (lists is not None or level != "default" or bool(keep_float32)))
    program = _traced(half, args, names)
    plain = program if dtype is None else _traced(dataclasses.replace(half, options=None), args, names)
    progress, recorder = _Progress(program.jaxpr), PairRecorder(program.platform)
    recorder.on_operation = progress.add
    ran = recorder.run(program.jaxpr, program.names, program.arrays)
    report, results = _judged(half, program, plain, tuple(recorder.unfollowed), ran)
    if not report.is_off or dtype is None:
        return report
    counted = {i: results[i][1] for i, name in enumerate(program.results) if name in report.errors}
    return dataclasses.replace(report, mends=_mends(report, half, args, counted, progress))


def _judged(
    half: _Half,
    program: Traced,
    plain: Traced,
    unfollowed: tuple[str, ...],
    ran: tuple[list[Any], list[Tensor | None], Statistics],
) -> tuple[ErrorReport, list[Any]]:
    """Returns the report without mends, and the results beside those in float32; `plain` is without autocast."""
    results, tensors, statistics = ran
    dtypes = {amp.half_dtype(half.options["dtype"])} if half.options else half_dtypes(program.jaxpr)
    dtype = dtypes.pop() if len(dtypes) == 1 else HALF[0]
    constants = lost_constants(plain.jaxpr, plain.platform)
    if plain is not program and constants.is_rounded and not plain.jaxpr.effects:
        results = _beside_float32(plain, results)
    outcomes = [Outcome.of(*pair) for pair in results]
    named = list(zip(program.results, outcomes, strict=True))
    empty = [name for name, outcome in named if not outcome.is_compared]
    measured = [one for one in zip(program.results, tensors, strict=True) if one[0] not in empty]
    analysis = Analysis(statistics, measured, dtype, [name for name, outcome in named if outcome.overflows])
    errors = dict.fromkeys(analysis.compared, 0.0)
    for name, outcome in named:
        if name in errors:  # of results with one name, the largest
            errors[name] = max(errors[name], outcome.error)
    report = ErrorReport(
        function=half.__name__,
        dtype=dtype,
        rows=analysis.rows,
        noise=analysis.noise,
        jump=analysis.jump,
        hidden=analysis.hidden,
        loops=analysis.loops,
        growing=analysis.growing,
        errors=errors,
        rewritten=plain is not program,
        nonfinite=not all(outcome.is_finite for outcome in outcomes),
        unfollowed=unfollowed,
        zeros=constants.wrong,
        doubtful=constants.doubtful,
        uncompared=tuple(empty),
        changed={name: outcome.changed for name, outcome in named if outcome.changed},
        compiled=() if unfollowed else parted(program, [half for half, _ in results], [one.error for one in outcomes]),
        is_half=bool(half_dtypes(plain.jaxpr)),
        of=half.of,
    )
    return report, results


def _traced(half: _Half, args: Sequence[PyTree], names: Sequence[str]) -> Traced:
    """Returns the program of a function, in which the roundings of its constants are operations."""
    with unrounded():
        return Traced.of(half, args, names)


def _beside_float32(plain: Traced, results: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns half results beside float32 ones with exact constants; autocast takes those that JAX rounded."""
    exact = in_float32(plain.jaxpr, plain.platform)
    compiled = jax.jit(exact, compiler_options=jax_compat.options_for_one_run(plain.platform))
    return [(half, wide) for (half, _), wide in zip(results, compiled(*map(widened, plain.arrays)), strict=True)]


def _check(half: _Half, args: Sequence[PyTree], *, ignored: bool) -> None:
    """Raises TypeError or ValueError for arguments of `compare` that do not fit together, or would be ignored."""
    if not callable(half.fn):
        raise TypeError(f"compare takes a function and its arguments, got {half.fn!r}")
    if half.of not in ("value", "grad"):
        raise ValueError(f"of must be 'value' or 'grad', got {half.of!r}")
    if not (0 < half.scale < math.inf):
        raise ValueError(f"scale must be a positive number, got {half.scale!r}")
    if half.of == "grad" and not args:
        raise ValueError("of='grad' takes the gradient with respect to the first argument, got no arguments")
    if half.of == "value" and half.scale != 1.0:
        raise ValueError(f"scale={half.scale!r} is the loss scale of gradients; leave it out, or give of='grad'")
    if ignored:
        raise ValueError("lists, level and keep_float32 are options of autocast; leave them out with dtype=None")
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
        raise ValueError("compare runs the function, so it takes arrays, got a jax.ShapeDtypeStruct; try amp.explain")


class _Progress:
    """Says on stderr how long a large comparison takes, and now and then how far it is."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        """Announces the time. Most of it is XLA's compiler, which compiles equal operations once."""
        equations = list(jax_compat.equations(jaxpr))
        kinds = {(eqn.primitive, *(str(atom.aval) for atom in (*eqn.invars, *eqn.outvars))) for eqn in equations}
        self._done, self._total, self._said = 0, len(equations), time.monotonic()
        if (seconds := len(kinds) * _SECONDS_OF_AN_OPERATION) >= _SHORT:
            console.complain(f"compare: compiling {len(kinds):,} operations takes about {seconds:.0f} s of CPU time")

    def add(self) -> None:
        """Counts an operation."""
        self._done += 1
        self.say(f"{self._done:,} of at most {self._total:,} operations")

    def say(self, what: str) -> None:
        """Prints a line if the last line is some time ago."""
        if time.monotonic() - self._said >= _BETWEEN:
            self._said = time.monotonic()
            console.complain(f"compare: {what}")


def _mends(
    report: ErrorReport, half: _Half, args: Sequence[PyTree], exact: Mapping[int, Any], progress: _Progress
) -> tuple[Mend, ...]:
    """Returns the changes that help, as `ErrorReport.mends`: float32, bfloat16 and another loss scale are tried."""
    assert half.options is not None
    kept = half.options["keep_float32"]
    tried: dict[str, dict[str, Any]] = {}
    takes: dict[str, str] = {}
    for one in report.contributors[:_TRIED]:
        if one.row.path and one.row.primitive and one.share > 0.02:
            pattern = "|".join(filter(None, (kept, expression(one.row.path))))
            tried[f"keep_float32={pattern!r}"] = {"keep_float32": pattern}
    if report.dtype == np.float16:
        tried["dtype='bfloat16'"] = {"dtype": jnp.bfloat16}
    errors = {}
    for change, options in tried.items():
        progress.say(f"trying {change}")
        changed = dataclasses.replace(half, options=half.options | options)
        with contextlib.suppress(ValueError):  # the path has no operation that autocast could keep
            errors[change] = _largest_error(_compiled(changed, args)(), exact)
            takes[change] = _takes(half, changed, args) if "keep_float32" in options else ""
    if report.dtype == np.float16 and half.of == "grad":
        progress.say("trying loss scales")
        exponent, error = _best_scale(half, args, exact)
        errors[f"scale={format_power(exponent)}"] = error
    mends = [Mend(change, x, _removed(x, report), takes.get(change, "")) for change, x in errors.items()]
    told = [one for one in mends if one.removes > _LITTLE or (math.isinf(report.error) and math.isfinite(one.error))]
    # If another scale removes all of the error, the scale is the cause.
    causes = [one for one in told if one.change.startswith("scale=") and one.removes > _ALL]
    return tuple(sorted(told, key=lambda one: (one not in causes, not one.removes, one.error)))


def _removed(error: float, report: ErrorReport) -> float:
    """Returns the fraction of the error of a report that a change removes; 0.0 where the results remain wrong."""
    if error >= 1:
        return 0.0
    if math.isinf(report.error):
        return float(error <= MOST_ERROR[report.of])
    return 1 - error / report.error if report.error else 0.0


def _best_scale(half: _Half, args: Sequence[PyTree], exact: Mapping[int, Any]) -> tuple[int, float]:
    """Returns the exponent of half the largest loss scale with finite gradients, and the error there."""

    def scaled(scale: Array, *args: PyTree) -> Any:
        return dataclasses.replace(half, scale=scale)(*args)

    run = _compiled(scaled, (np.float32(half.scale), *args))

    @functools.cache
    def error_at(exponent: int) -> float:
        return _largest_error(run(np.float32(2.0**exponent)), exact)

    exponent = largest_finite(lambda exponent: math.isfinite(error_at(exponent))) - 1
    return exponent, error_at(exponent)


def _takes(half: _Half, changed: _Half, args: Sequence[PyTree]) -> str:
    """Returns how many half products a `keep_float32` makes float32, if several: '10 of 16 products'."""
    options = [one.options or {} for one in (half, changed)]
    reports = [amp.explain(half.fn, **one)(*args) for one in options]
    before, after = (sum(x.category == "allow" and x.dtype == one.dtype for x in one.decisions) for one in reports)
    fewer = "; a jax.named_scope of your own takes fewer" if r"/eqx\." in options[1]["keep_float32"] else ""
    return f"{before - after} of {before} products{fewer}" if before - after > 1 else ""


def _compiled(fn: Function, args: Sequence[PyTree]) -> Callable[..., list[Any]]:
    """Returns a function that runs `fn(*args)`, compiled once; its arguments replace the first arrays of `args`."""
    program = Traced.of(fn, args, ())
    run = jax.jit(jax.extend.core.jaxpr_as_fun(program.jaxpr))
    options = {"xla_allow_excess_precision": False, **jax_compat.options_for_one_run(program.platform)}
    compiled = run.lower(*program.arrays).compile(options)
    return lambda *first: list(compiled(*first, *program.arrays[len(first) :]))


def _largest_error(found: Sequence[Any], exact: Mapping[int, Any]) -> float:
    """Returns the largest relative l2 error of the results in `exact`, by their places."""
    return max((Outcome.of(found[i], array).error for i, array in exact.items()), default=0.0)
