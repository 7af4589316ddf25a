"""JSON files of other libraries: each key with a value of each type of JSON is believed, or refused in one line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixedres.other_libraries import huggingface
from tests.other_libraries.test_huggingface import MICROSOFT

NETWORK = huggingface.network_config(True, (3, 4, 6, 3), 4, 3, "1.5", ("a", "b"))
HUB = {"input_size": [3, 160, 160], "mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.95, "label_names": ["a"]}
TIMM = {"architecture": "resnet50", "num_classes": 3, "label_names": ["a", "b", "c"], "pretrained_cfg": HUB}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=300)
@given(data=st.data(), value=JSON)
@pytest.mark.parametrize(
    ("read", "name", "whole"),
    [
        (huggingface.facts_of_timm, huggingface.CONFIG, TIMM),
        (huggingface.facts_of_transformers, huggingface.CONFIG, NETWORK),
        (huggingface.facts_of_transformers, huggingface.PROCESSOR, MICROSOFT),
    ],
)
def test_any_value_of_any_key_is_one_line(read, name, whole, data, value, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files", numbered=True)
    changed = json.loads(json.dumps(whole))
    inside = changed["pretrained_cfg"] if whole is TIMM and data.draw(st.booleans()) else changed
    inside[data.draw(st.sampled_from(sorted(inside)))] = value
    (folder / name).write_text(json.dumps(changed))
    try:
        json.dumps(read(folder / "model.safetensors"))
    except ValueError as error:
        assert str(error).isprintable()
