"""What a reader meets in every file of mixedres/: docstrings that begin with a verb, arguments with types."""

import ast
from functools import cache

from tests.test_layers import TREES


@cache
def functions():
    return [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_docstrings_of_functions_begin_with_a_verb():
    """In the third person: Returns, Reads, Raises."""
    docstrings = {node.name: text for node in functions() if (text := ast.get_docstring(node))}
    first = {name: text.split()[0].rstrip(".,:") for name, text in docstrings.items()}
    others = {name: word for name, word in first.items() if not word.endswith("s") or word in ("This", "As", "Those")}
    assert len(others) <= 0.02 * len(first), others
    assert not {"What", "Of", "Whether", "Those"} & set(first.values())


def test_few_arguments_are_typed_as_any():
    annotations = [
        argument.annotation for node in functions() for argument in ast.walk(node.args) if isinstance(argument, ast.arg)
    ]
    given = [annotation for annotation in annotations if annotation is not None]
    count = sum(any(isinstance(x, ast.Name) and x.id == "Any" for x in ast.walk(one)) for one in given)
    assert count <= 0.09 * len(given), f"{count} of {len(given)}"
