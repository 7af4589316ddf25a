"""What the tests of the preparation of ImageNet begin with."""

import pytest

from tests.data.prepare import prepare_cases as cases
from tests.data.prepare.prepare_cases import main


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    """The directory of two tar files with a few images."""
    return cases.imagenet_tars(tmp_path_factory.mktemp("tars"))


@pytest.fixture(scope="module")
def prepared(tars, tmp_path_factory):
    """The data_dir of what is written from `tars`."""
    data_dir = tmp_path_factory.mktemp("data")
    assert main(cases.command(tars, data_dir)) == 0
    return data_dir
