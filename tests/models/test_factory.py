"""What `create` refuses, and what it makes of what it accepts."""

import jmp
import numpy as np
import pytest

from mixedres.models import INITIALIZERS, NAMES, create

FULL = jmp.get_policy("params=float32,compute=float32,output=float32")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ({"name": "vgg16"}, ["vgg16", *NAMES]),
        ({"name": "resnet"}, ["'resnet'", *NAMES]),
        ({"name": "resnet50 "}, ["'resnet50 '", *NAMES]),
        ({"name": "resnet51"}, ["resnet51", "18, 34, 50, 101, 152, 200"]),
        ({"name": "cifar_resnet21"}, ["cifar_resnet21", "6n+2", "20 and 26"]),
        ({"name": "cifar_resnet2"}, ["cifar_resnet2", "6n+2", "8 and 14"]),
        ({"name": "resnet50", "version": "3"}, ["resnet50", "'3'", "1, 1.5, 2"]),
        ({"name": "cifar_resnet20", "version": "1.5"}, ["cifar_resnet20", "'1.5'", "1, 2"]),
        ({"num_classes": 0}, ["num_classes", "got 0", ">= 1"]),
        ({"num_classes": -1}, ["num_classes", "got -1", ">= 1"]),
        ({"momentum": 1.0}, ["momentum", "got 1.0", "[0, 1)"]),
        ({"momentum": -0.1}, ["momentum", "got -0.1", "[0, 1)"]),
        ({"momentum": float("nan")}, ["momentum", "got nan", "[0, 1)"]),
        ({"epsilon": 0.0}, ["epsilon", "got 0.0", "> 0"]),
        ({"kernel_init": "xavier"}, ["'xavier'", *INITIALIZERS]),
        ({"head_init": "xavier"}, ["'xavier'", *INITIALIZERS]),
    ],
)
def test_unknown_names_and_options_are_refused(arguments, fragments):
    with pytest.raises(ValueError) as error:
        create(**{"name": "resnet50", "num_classes": 10, "policy": FULL, **arguments})
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    ("name", "version", "resolved", "stage_sizes", "filters"),
    [
        # arXiv 1512.03385, table 1 and section 4.2; 1603.05027 for 200.
        ("resnet18", None, "1.5", (2, 2, 2, 2), 64),
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
