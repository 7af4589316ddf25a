"""Mutations of JSON that stay JSON, or nearly: hostile values, missing and doubled keys, deep nesting."""

import json

from tests.fuzz import blind
from tests.fuzz.blind import chance, pick

# Values as they are written in a file; Python's reader takes NaN and Infinity, too.
STRINGS = (
    *('""', '" "', '"."', '"0"', '"-1"', '"nan"', '"%s%n{0}"', '"/dev/null"', '"../../../config.json"'),
    *('"fp16"', '"resnet50"', r'"\u0000"', r'"a\u0000b"', r'"\u001b[31mred\u001b[0m"', r'"\ud800"'),
    *(r'"\udfff\ud800"', r'"two\nlines"', r'"\r\u2028\u0085"', '"' + "x" * 100_000 + '"'),
)
LITERALS = (
    *STRINGS,
    *("null", "true", "false", "0", "-1", "1", "2", "-0.0", "1.5", "1e-999", "1e308", "1e999", "-1e999"),
    *("NaN", "Infinity", "-Infinity", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808"),
    *("18446744073709551616", "-9223372036854775809", "1" + "0" * 400, "1" + "0" * 5000),
    *("[]", "{}", "[[]]", "[null]", '["a", 1]', "[0, 0]", "[1, 2, 3, 4, 5, 6, 7, 8, 9]"),
    *('{"a": 1, "a": {}}', '{"": null}', r'{"\u0000": 1}', '[1e999, -1, "x"]', "[9223372036854775808]"),
    *("[" * depth + "]" * depth for depth in (50, 990, 100_000)),
    *('{"a":' * 100_000 + "0" + "}" * 100_000, "[" * 5000),
)
# Lines of a file of lines: other ends of lines, bytes that are no text, values.
LINES = (b"", b"\r", b"{}\r{}", b"\x0b", "\u2028".encode(), b"\0" * 50, b"\xff\xfe", *map(str.encode, LITERALS))
_PLACE = "\x01place\x01"


def mutated(rng, data, other=b""):
    """Returns a JSON document after hostile changes of one or two values; one in eight after mutations of its bytes.

    A document that cannot be parsed is mutated as bytes.
    """
    for _ in range(1 + chance(rng, 0.2)):
        try:
            data = changed(rng, json.loads(data))
        except (ValueError, RecursionError):
            return blind.mutated(rng, data, other)
    if chance(rng, 0.06):
        data = data.decode().encode(pick(rng, ("utf-16", "utf-8-sig", "utf-32")))
    return blind.mutated(rng, data, other) if chance(rng, 0.125) else data


def line(rng, data):
    """Returns a line of a file of JSON documents: a mutant, or bytes that end or break a line."""
    return mutated(rng, data) if chance(rng, 0.7) else pick(rng, LINES)


def _places(holder):
    """Yields (dictionary or list, key or index) of every value inside a document."""
    if isinstance(holder, dict | list):
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            yield from _places(holder[key])


def changed(rng, tree):
    """Returns the document with one value replaced, removed, doubled, renamed or overwritten by another value."""
    root = [tree]
    places = list(_places(root))
    holder, key = pick(rng, places)
    what = rng.choice(("literal", "remove", "double", "rename", "other"), p=(0.6, 0.1, 0.1, 0.1, 0.1))
    literal, held = pick(rng, LITERALS), json.dumps(holder[key])
    if what == "remove":
        del holder[key]
    elif what == "rename" and isinstance(holder, dict):
        holder[json.loads(pick(rng, STRINGS))] = holder.pop(key)
    else:
        if what == "double":
            literal = f"{held}, {json.dumps(key)}: {literal}" if isinstance(holder, dict) else f"{held}, {literal}"
        elif what == "other":
            source, name = pick(rng, places)
            literal = json.dumps(source[name])
        holder[key] = _PLACE
    return json.dumps(root)[1:-1].replace(json.dumps(_PLACE), literal).encode()
