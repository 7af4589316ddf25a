"""The environment of the tests."""

import os

import jax


def test_compiled_programs_are_kept_between_sessions():
    directory = jax.config.jax_compilation_cache_dir
    assert directory == os.environ["JAX_COMPILATION_CACHE_DIR"] and os.path.isdir(directory)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
