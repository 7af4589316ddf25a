"""Intervals of a mean difference where neither seeds nor images can be taken as independent of each other."""

import dataclasses
import math

import numpy as np
import scipy.stats


@dataclasses.dataclass(frozen=True)
class Difference:
    """A mean of paired differences over seeds and test images that come in clusters.

    Attributes:
      mean: over everything.
      interval: 95 %, for other seeds and other clusters; None for one seed or one cluster.
      single: 95 % of the differences of one further seed lie in here, on these images; None for one seed.
    """

    mean: float
    interval: tuple[float, float] | None
    single: tuple[float, float] | None

    @property
    def width(self) -> float | None:
        """Of the interval."""
        return None if self.interval is None else self.interval[1] - self.interval[0]


def difference(values: np.ndarray, draws: int) -> Difference:
    """The mean of paired differences, with intervals.

    The variance of the mean is that of crossed effects: of seeds, plus of clusters, less what both count twice
    (Cameron, Gelbach and Miller, "Robust inference with multiway clustering", 2011), and no less than the larger of
    both. Student's t has as many degrees of freedom as the smaller of their numbers less one.

    Args:
      values: (seeds, images), such as 1 where only the first network was right, -1 where only the second was.
      draws: images of a cluster, which follow each other.

    Raises:
      ValueError: where the images are not a multiple of `draws`.
    """
    seeds, images = values.shape
    if images % draws:
        raise ValueError(f"{images} images are no whole clusters of {draws}")
    cells = np.asarray(values, np.float64).reshape(seeds, -1, draws).mean(axis=2)
    mean, clusters = float(cells.mean()), cells.shape[1]
    if min(seeds, clusters) < 2:
        return Difference(mean, None, None)
    of_seeds = cells.mean(axis=1).var(ddof=1)
    seed, cluster = of_seeds / seeds, cells.mean(axis=0).var(ddof=1) / clusters
    both = cells.var(ddof=1) / cells.size
    variance = max(seed + cluster - both, seed, cluster)
    half = float(scipy.stats.t.ppf(0.975, min(seeds, clusters) - 1)) * math.sqrt(variance)
    one = float(scipy.stats.t.ppf(0.975, seeds - 1)) * math.sqrt(of_seeds * (1 + 1 / seeds))
    return Difference(mean, (mean - half, mean + half), (mean - one, mean + one))
