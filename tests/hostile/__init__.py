"""A hostile world: no file, terminal, disk or signal gets further than one line."""

import pytest

pytest.register_assert_rewrite("tests.hostile.commands")
