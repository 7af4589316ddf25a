"""Mutations of JSON that stay JSON, or nearly: hostile values, missing and doubled keys, deep nesting."""

import json

from tests.fuzz import blind
from tests.fuzz.blind import chance, pick

# Values as they are written in a file; Python's reader takes NaN and Infinity, too.
LITERALS = (
    *("null", "true", "false", "0", "-1", "1", "2", "-0.0", "1.5", "1e-999", "1e308", "1e999", "-1e999"),
    *("NaN", "Infinity", "-Infinity", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808"),
    *("18446744073709551616", "-9223372036854775809", "1" + "0" * 400, "1" + "0" * 5000),
    *('""', '" "', '"0"', '"nan"', '"/"', '"../../.."', '"-1"'),
    *(r'"\u0000"', r'"a\u0000b"', r'"\u001b[31mred\u001b[0m"'),
    *(r'"\ud800"', r'"\udfff\ud800"', r'"two\nlines"', r'"\r\u2028\u0085"', '"%s%n{0}"', '"fp16"', '"resnet50"'),
    *('"' + "x" * 100_000 + '"', "[]", "{}", "[[]]", "[null]", '["a", 1]', "[0, 0]", "[1, 2, 3, 4, 5, 6, 7, 8, 9]"),
    *('{"a": 1, "a": {}}', '{"": null}', r'{"\u0000": 1}', '[1e999, -1, "x"]', "[9223372036854775808]"),
    *("[" * depth + "]" * depth for depth in (50, 990, 100_000)),
    '{"a":' * 100_000 + "0" + "}" * 100_000,
    "[" * 5000,
)
_PLACE = "\x01place\x01"


def mutated(rng, data, other=b""):
    """A JSON document after one or two hostile changes, and one time in eight after mutations of its bytes.

    What cannot be parsed is mutated as bytes.
    """
    for _ in range(1 + chance(rng, 0.2)):
        try:
            data = _changed(rng, json.loads(data))
        except (ValueError, RecursionError):
            return blind.mutated(rng, data, other)
    if chance(rng, 0.06):
        data = data.decode(errors="surrogatepass").encode(pick(rng, ("utf-16", "utf-8-sig", "utf-32")), "surrogatepass")
    return blind.mutated(rng, data, other) if chance(rng, 0.125) else data


def lines(rng, data, other=b""):
    """Lines of JSON of which some are changed, doubled, exchanged, or joined by other ends of lines."""
    found = data.splitlines()
    for _ in range(int(rng.integers(1, 4)) if found else 0):
        at = int(rng.integers(len(found)))
        what = rng.integers(6)
        if what < 3:
            found[at] = mutated(rng, found[at], found[-1])
        elif what == 3:
            found.insert(at, found[at] * int(rng.integers(2)))
        elif what == 4:
            found[at] = pick(rng, LITERALS).encode()
        else:
            found[at : at + 1] = pick(rng, other.splitlines() or [b""]), b"\0" * int(rng.integers(99)), b"\xff\xfe"
    joined = pick(rng, (b"\n", b"\n", b"\n", b"\r\n", b"\r", b"\x0b", b"", "\u2028".encode())).join(found)
    return joined + pick(rng, (b"\n", b"", b"\r"))


def literal_in(rng, tree, path, literal=None):
    """The document of `tree` with a literal, of `LITERALS` where none is given, in place of what is at `path`."""
    literal = pick(rng, LITERALS) if literal is None else literal
    if not path:
        return literal.encode()
    holder = tree
    for step in path[:-1]:
        holder = holder[step]
    kept = holder[path[-1]]
    holder[path[-1]] = _PLACE
    try:
        return json.dumps(tree).replace(json.dumps(_PLACE), literal).encode()
    finally:
        holder[path[-1]] = kept


def paths(tree, above=()):
    """The way to every value in a document, itself included; what lies deeper than 50 is left out."""
    yield above
    if len(above) > 50:
        return
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        yield from paths(value, (*above, key))


def _changed(rng, tree):
    every = list(paths(tree))
    path = pick(rng, every)
    holder = tree
    for step in path[:-1]:
        holder = holder[step]
    what = rng.integers(10)
    if what < 6 or not path:
        return literal_in(rng, tree, path)
    if what == 6:  # gone
        del holder[path[-1]]
    elif what == 7 and isinstance(holder, dict):  # twice
        text = json.dumps(holder[path[-1]])
        name = json.dumps(path[-1])
        return literal_in(rng, tree, path, f"{text}, {name}: {pick(rng, LITERALS)}")
    elif what == 8 and isinstance(holder, dict):  # under another name
        holder[json.loads(pick(rng, [text for text in LITERALS if text[0] == '"']))] = holder.pop(path[-1])
    else:  # the value of another place
        source = tree
        for step in pick(rng, every):
            source = source[step]
        return literal_in(rng, tree, path, json.dumps(source))
    return json.dumps(tree).encode()
