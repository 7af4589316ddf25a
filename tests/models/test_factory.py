"""What `create` makes of the names of networks."""

import numpy as np
import pytest

from mixedres.models import create
from tests.models.networks import FULL


@pytest.mark.parametrize(
    ("name", "version", "resolved", "stage_sizes", "filters"),
    [
        # arXiv 1512.03385, table 1 and section 4.2; 1603.05027 for 200.
        ("resnet18", None, "1.5", (2, 2, 2, 2), 64),
        ("resnet14", None, "1.5", (1, 1, 1, 1), 64),
        ("resnet26", None, "1.5", (2, 2, 2, 2), 64),
        ("resnet34", "2", "2", (3, 4, 6, 3), 64),
        ("resnet50", None, "1.5", (3, 4, 6, 3), 64),
        ("resnet101", "1", "1", (3, 4, 23, 3), 64),
        ("resnet152", "1.5", "1.5", (3, 8, 36, 3), 64),
        ("resnet200", "2", "2", (3, 24, 36, 3), 64),
        ("cifar_resnet20", None, "1", (3, 3, 3), 16),
        ("cifar_resnet110", "2", "2", (18, 18, 18), 16),
    ],
)
def test_names_and_versions(name, version, resolved, stage_sizes, filters):
    model = create(name, num_classes=np.int64(10), policy=FULL, version=version)
    assert model.version == resolved
    assert tuple(model.stage_sizes) == stage_sizes
    assert model.filters == filters
