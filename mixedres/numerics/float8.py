"""What the two float8 formats do to the operands of products, each scaled as a whole by a power of two."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from mixedres._internal.names import FORMATS
from mixedres.numerics.exponents import E4M3, E5M2, Exponents, Format
from mixedres.numerics.products import Product
from mixedres.numerics.rows import LOST, LOW, Kind, TensorRow, enumerated, pattern_of

# Values and weights need digits, gradients range. Weight gradients are results of products, and are not cast.
OPERANDS: dict[Kind, Format] = {"activation": E4M3, "parameter": E4M3, "gradient": E5M2}
# `mixedres.autocast` scales by at most this power, up or down.
_MOST = 63


def check_formats(formats: Iterable[str]) -> tuple[str, ...]:
    """`formats` as a tuple.

    Raises:
      ValueError: for a name that is not in `FORMATS`.
    """
    given = (formats,) if isinstance(formats, str) else tuple(formats)
    for name in given:
        if name not in FORMATS:
            raise ValueError(f"formats: {name!r} is unknown; use {', '.join(FORMATS)}")
    return given


def log2_scales(exponents: Exponents, format: Format) -> tuple[int, int]:
    """The two exponents that the scale of a tensor may have, the smaller first.

    The scale is the largest power of two at which no element is above the format's largest number, 1.75 * 2**top. So
    it depends on the digits of the largest element, of which the histogram has only the exponent. Tensors with an
    infinity or a NaN are not scaled, and zeros need not be.
    """
    if exponents.top is None or exponents.infinite or exponents.nan:
        return 0, 0
    larger = format.top - exponents.top
    small, large = (max(-_MOST, min(_MOST, log2_scale)) for log2_scale in (larger - 1, larger))
    return small, large


@dataclasses.dataclass(frozen=True)
class Float8Cast:
    """What a scaled cast to float8 is expected to do to a tensor; of several examinations, the worst.

    Of the two scales that a tensor may have (`log2_scales`) the smaller is taken, which loses more. The largest
    magnitude fits by choice of the scale, so no finite tensor overflows or saturates.

    Attributes:
      format: 'float8_e4m3fn' or 'float8_e5m2'.
      lost: fraction of the mass, the sum of all magnitudes, that becomes zero.
      flushed, subnormal: fractions of the nonzero elements that become zero, and that have fewer digits.
      error: expected l2 error relative to the l2 norm; NaN if the tensor is not finite.
      verdict: 'non-finite'; 'all zero'; 'LOST': over 1 % of the mass becomes zero; 'low': over half of the nonzero
        elements have fewer digits than usual, or none; 'ok'.
    """

    format: str
    lost: float
    flushed: float
    subnormal: float
    error: float
    verdict: str

    @property
    def is_damaged(self) -> bool:
        """Whether products of the tensor should stay in bfloat16.

        The l2 error does not tell: one large element sets both the scale and the norm, and all others may be lost.
        """
        return self.verdict in ("non-finite", "LOST", "low")

    @classmethod
    def of(cls, row: TensorRow) -> Float8Cast | None:
        """The cast of a tensor; None for a weight gradient."""
        format = OPERANDS.get(row.kind)
        return None if format is None else cls.of_parts(row.parts, format)

    @classmethod
    def of_parts(cls, parts: Sequence[Exponents], format: Format) -> Float8Cast:
        """The cast of a tensor with these histograms, each with a scale of its own."""
        scaled = [(part, log2_scales(part, format)[0]) for part in parts]
        lost = max(part.lost_mass(scale, format) for part, scale in scaled)
        flushed = max(_of_nonzero(part, part.flushed(scale, format)) for part, scale in scaled)
        subnormal = max(_of_nonzero(part, part.subnormal(scale, format)) for part, scale in scaled)
        low = max(_of_nonzero(p, p.flushed(scale, format) + p.subnormal(scale, format)) for p, scale in scaled)
        if any(part.infinite or part.nan for part in parts):
            return cls(format.name, lost, flushed, subnormal, math.nan, "non-finite")
        error = max(part.relative_error(scale, format) for part, scale in scaled)
        if all(part.top is None for part in parts):
            verdict = "all zero"
        else:
            verdict = "LOST" if lost > LOST else "low" if low > LOW else "ok"
        return cls(format.name, lost, flushed, subnormal, error, verdict)

    def to_json(self) -> dict[str, Any]:
        """The cast as a dict for `Report.to_json`, which replaces numbers that are not finite."""
        return dataclasses.asdict(self)


def _of_nonzero(exponents: Exponents, fraction: float) -> float:
    nonzero = 1 - exponents.zeros
    return fraction / nonzero if nonzero > 0 else 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Float8Products:
    """The products of a function in float8, by the examined ones of their operands.

    Attributes:
      rows: the tensors of a report.
      products: of the same function.
    """

    rows: tuple[TensorRow, ...]
    products: tuple[Product, ...]

    @cached_property
    def casts(self) -> dict[tuple[Kind, str], Float8Cast]:
        """{(kind, name): cast} of all examined tensors but weight gradients."""
        return {(row.kind, row.name): cast for row in self.rows if (cast := Float8Cast.of(row)) is not None}

    @cached_property
    def operands(self) -> dict[tuple[Kind, str], tuple[str, ...]]:
        """{(kind, name): paths of the products} of the examined operands, in the order of the rows."""
        paths: dict[tuple[Kind, str], dict[str, None]] = {key: {} for key in self.casts}
        for product in self.products:
            for key in product.operands:
                if key in paths:
                    paths[key][product.path] = None
        return {key: tuple(found) for key, found in paths.items() if found}

    @cached_property
    def damaged(self) -> tuple[str, ...]:
        """The paths of the products with a damaged operand, '' for those in no named scope."""
        found = {path for key, paths in self.operands.items() if self.casts[key].is_damaged for path in paths}
        return tuple(product.path for product in self.products if product.path in found)

    @cached_property
    def keep(self) -> tuple[str, ...]:
        """The paths of the products that should stay in bfloat16, as far as they are in named scopes."""
        return tuple(filter(None, self.damaged))

    @cached_property
    def pattern(self) -> str:
        """`keep` as a regular expression for `Float8(keep_bfloat16=...)`; '' if it is empty."""
        return pattern_of(self.keep)

    def error(self, format: Format) -> float | None:
        """The largest expected error of an operand in `format`, of the products that are not kept; None if none is."""
        errors = [
            self.casts[key].error
            for key, paths in self.operands.items()
            if self.casts[key].format == format.name and set(paths) - set(self.damaged)
        ]
        return max(errors, default=None)

    @property
    def product_error(self) -> float:
        """The expected l2 error of a weight gradient relative to its norm, from the casts of one product in float8.

        The casts of the value and of the gradient are independent. Errors of several layers add up to more.
        """
        return math.hypot(*(self.error(format) or 0.0 for format in (E4M3, E5M2)))

    @property
    def advice(self) -> str:
        """What to keep in bfloat16 and why, and what the casts of the others cost."""
        if not self.operands:
            return "In float8: no product of an examined tensor was found."
        if not self.damaged:
            kept = f"In float8, all {len(self.products)} products keep 99 % of the mass of their operands."
        else:
            key, cast = next((key, self.casts[key]) for key in self.operands if self.casts[key].is_damaged)
            row = next(row for row in self.rows if (row.kind, row.name) == key)
            names = enumerated([path or "products in no jax.named_scope" for path in self.damaged])
            kept = f"In float8, keep {names} in bfloat16: of the {row}, {_reason(cast)}."
        return f"{kept} {self._cost()}".rstrip()

    def _cost(self) -> str:
        """What the casts of the products in float8 cost; '' where there are none."""
        found = [
            (error, what)
            for format, what in ((E4M3, "a value or weight"), (E5M2, "a gradient"))
            if (error := self.error(format)) and math.isfinite(error)
        ]
        if not found:
            return ""
        parts = [f"{_percent(error)} of {what}" for error, what in found]
        casts = "Casts of the others cost" if self.damaged else "Casts cost"
        product = f"each product costs its gradients about {_percent(self.product_error)}, and layers add up"
        return f"{casts} about {enumerated(parts)}, so {product}."

    def to_json(self) -> dict[str, Any]:
        """The advice and the products as a dict for `Report.to_json`."""
        return {
            "advice": self.advice,
            "keep_bfloat16": list(self.keep),
            "keep_bfloat16_pattern": self.pattern,
            "products": [
                {"path": product.path, "operands": [{"kind": kind, "name": name} for kind, name in product.operands]}
                for product in self.products
            ],
        }

    def row_to_json(self, row: TensorRow) -> dict[str, Any]:
        """{'float8': the cast and its products} of a row; None for a weight gradient."""
        key = row.kind, row.name
        cast = self.casts.get(key)
        return {"float8": cast and cast.to_json() | {"products": list(self.operands.get(key, ()))}}


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def _reason(cast: Float8Cast) -> str:
    if cast.verdict == "non-finite":
        return "some elements are infinite or NaN"
    if cast.verdict == "LOST":
        return f"{_percent(cast.lost)} of the mass becomes zero"
    return f"{100 * (cast.flushed + cast.subnormal):.0f} % of the nonzero elements keep fewer digits, or none"
