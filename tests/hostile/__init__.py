"""An adversary's findings, each of which stays mended."""

import pytest

for name in ("files", "mistakes", "output", "places", "table", "waits"):
    pytest.register_assert_rewrite(f"tests.hostile.{name}")
