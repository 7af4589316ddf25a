"""The official crop against TensorFlow's own, of which 20,000 draws a size were taken with tensorflow-cpu 2.21."""

import numpy as np
import pytest

from mixedres.data.images import preprocessing

# (height, width): means of area / area of the image, width / height, height, top and left edge / side of the image.
TENSORFLOW = {
    (375, 500): (0.3862, 1.0439, 0.6798, 0.1597, 0.2328),
    (500, 333): (0.3396, 1.0380, 0.4582, 0.2702, 0.1503),
    (256, 256): (0.4234, 1.0398, 0.6194, 0.1888, 0.1792),
    (100, 700): (0.1273, 1.0897, 0.9062, 0.0420, 0.4294),
}
DRAWS = 20_000


@pytest.mark.parametrize("size", TENSORFLOW, ids=str)
def test_the_official_crop_is_drawn_as_tensorflow_draws_it(size):
    height, width = size
    rng = np.random.default_rng(0)
    y, x, h, w = np.transpose([preprocessing.distorted_crop(rng, height, width) for _ in range(DRAWS)])
    drawn = [h * w / (height * width), w / h, h / height, y / height, x / width]
    for ours, theirs in zip(drawn, TENSORFLOW[size], strict=True):
        # Both means have a standard error; four of their difference are passed once in 16,000 times.
        assert abs(ours.mean() - theirs) < 4 * ours.std() * np.sqrt(2 / DRAWS)
