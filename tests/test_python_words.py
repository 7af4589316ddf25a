"""Errors of the functions in Python name keys and arguments, not flags of the commands."""

import pytest

import mixedres
from mixedres._internal.cli.python_words import in_python
from mixedres._internal.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("set one, such as --config.epochs=90", 'set one, such as {"epochs": 90}'),
        (
            "go on with --config.data.dir=photos --config.optimizer.nesterov=false, or remove that run with --clean",
            'go on with {"data.dir": "photos", "optimizer.nesterov": False}, or remove that run with clean=True',
        ),
        ("such as --config.schedule.boundaries=30,60.", 'such as {"schedule.boundaries": (30, 60)}.'),
        ("--workdir=/a/b is in use; name another --workdir", 'workdir="/a/b" is in use; name another workdir'),
        ("a smaller --config.batch_size, --config.microbatches=2", 'a smaller "batch_size", {"microbatches": 2}'),
        ("--config=imagenet:fp16,recipe=lars: no", 'recipe="imagenet:fp16,recipe=lars": no'),
        ("add --config.data.dir='my photos'.", 'add {"data.dir": "my photos"}.'),
        ("add '--config.precision.keep_float32=^/head$'", 'add {"precision.keep_float32": "^/head$"}'),
        ("add --config.data.train_split=. to take", 'add {"data.train_split": "."} to take'),
        ("set --config.precision.loss_scale=none; or not", 'set {"precision.loss_scale": None}; or not'),
        ("try --precision=fp32, or --model_version=1", 'try precision="fp32", or version="1"'),
        (
            "name another --workdir; or type python -m mixedres.replay a/b [--precision=PRESET]; or --precision=bf16",
            'name another workdir; or type python -m mixedres.replay a/b [--precision=PRESET]; or precision="bf16"',
        ),
        ("mixedres train --help=all lists 3 --presets", "mixedres train --help=all lists 3 --presets"),
    ],
)
def test_flags_become_keys_and_arguments(text, expected):
    assert in_python(text) == expected


def test_errors_of_fit_and_load_have_no_flags(tmp_path):
    calls = [
        lambda: mixedres.fit("folder:fp16", workdir=tmp_path / "a"),
        lambda: mixedres.fit("digits:fp17", workdir=tmp_path / "a"),
        lambda: mixedres.fit("digits:fp16", {"epochs": 1, "batch_size": 3000}, workdir=tmp_path / "a"),
        lambda: mixedres.load(tmp_path / "none"),
        lambda: mixedres.load(tmp_path),
    ]
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert "--" not in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
