"""Fixtures of the tests of trackers."""

from tests.train.conftest import small_network as small_network
