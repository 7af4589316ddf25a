"""Intervals of a mean difference over seeds and test images, of which each has an effect of its own."""

import dataclasses
import math

import numpy as np
import scipy.stats


@dataclasses.dataclass(frozen=True)
class Difference:
    """A mean of paired differences over seeds and test images."""

    mean: float  # over everything
    seeds: int  # how many
    images: int  # how many
    of_seeds: float  # variance of the mean of one seed
    of_images: float  # variance of `mean` that images add to that of the seeds; more seeds do not lower it

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 %, for other seeds and other images; None for one seed or one image.

        Student's t has as many degrees of freedom as the smaller of their numbers less one.
        """
        fewer = min(self.seeds, self.images)
        return self._around(self.of_seeds / self.seeds + self.of_images, fewer) if fewer > 1 else None

    @property
    def single(self) -> tuple[float, float] | None:
        """95 % of the differences of one further seed lie in here, on these images; None for one seed."""
        return self._around(self.of_seeds * (1 + 1 / self.seeds), self.seeds) if self.seeds > 1 else None

    @property
    def width(self) -> float | None:
        """Of the interval."""
        return None if self.interval is None else self.interval[1] - self.interval[0]

    def _around(self, variance: float, count: int) -> tuple[float, float]:
        half = float(scipy.stats.t.ppf(0.975, count - 1)) * math.sqrt(variance)
        return self.mean - half, self.mean + half

    def __add__(self, other: "Difference") -> "Difference":
        """Of the seeds of both, on the same images; what images add is the mean of both, by seeds."""
        mean, of_seeds = pooled((self.seeds, self.mean, self.of_seeds), (other.seeds, other.mean, other.of_seeds))
        seeds = self.seeds + other.seeds
        of_images = (self.seeds * self.of_images + other.seeds * other.of_images) / seeds
        return Difference(mean, seeds, self.images, of_seeds, of_images)


def difference(values: np.ndarray) -> Difference:
    """The mean of paired differences and its variance, which is that of crossed effects.

    Of seeds, plus of images, less what both count twice (Cameron, Gelbach and Miller, "Robust inference with multiway
    clustering", 2011), and no less than the larger of both. statsmodels has no such bound, and adds no earlier seeds.

    `values` (seeds, images), such as 1 where only the first network was right, -1 where only the second was.
    """
    values = np.asarray(values, np.float64)
    seeds, images = values.shape
    mean = float(values.mean())
    of_seeds = float(values.mean(axis=1).var(ddof=1)) if seeds > 1 else 0.0
    if min(seeds, images) < 2:
        return Difference(mean, seeds, images, of_seeds, 0.0)
    of_image, both = values.mean(axis=0).var(ddof=1) / images, values.var(ddof=1) / values.size
    return Difference(mean, seeds, images, of_seeds, max(float(of_image - min(both, of_seeds / seeds)), 0.0))


def pooled(*moments: tuple[int, float, float]) -> tuple[float, float]:
    """Mean and variance of all values of some samples, of which each gives (count, mean, variance)."""
    count = sum(n for n, _, _ in moments)
    mean = sum(n * own for n, own, _ in moments) / count
    squares = sum((n - 1) * variance + n * (own - mean) ** 2 for n, own, variance in moments)
    return mean, squares / (count - 1) if count > 1 else 0.0
