# SPDX-License-Identifier: Apache-2.0
"""YAML of recipes and overrides as values: bounded in length, depth and aliases, restricted to JSON's values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from speccompile.common.json_reader import is_unicode

MAX_CHARS = 1 << 18  # the parser reads about 100 kB a second
MAX_DEPTH = 32
MAX_VALUES = 10_000  # with every alias expanded


class YamlFault(ValueError):
    """A text that is refused. `line`: of the fault, counted from 1; None where it has none."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        self.problem, self.line = problem, line
        super().__init__(problem)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as a string; here it is the number that JSON and Python see. It stops beyond MAX_DEPTH."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise YamlFault(f"values nested more than {MAX_DEPTH} deep", self.line + 1)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(text: str) -> tuple[Any, yaml.Node | None]:
    """Returns the value of a YAML document and its node tree, which has the lines; (None, None) of an empty one.

    Raises:
        YamlFault: no YAML; longer, deeper or with more values than the bounds; a value that JSON lacks.
    """
    if len(text) > MAX_CHARS:
        raise YamlFault(f"{len(text)} characters, of which at most {MAX_CHARS} are read")
    try:
        loader = _Loader(text)  # control characters are refused here
        try:
            node = loader.get_single_node()
            if node is None:
                return None, None
            _check_nodes(node)
            return loader.construct_document(node), node
        finally:
            loader.dispose()
    except yaml.YAMLError as fault:
        mark = getattr(fault, "problem_mark", None)
        problem = getattr(fault, "problem", None) or " ".join(str(fault).split())
        raise YamlFault(problem, None if mark is None else mark.line + 1) from fault
    except RecursionError as fault:
        raise YamlFault(f"values nested more than {MAX_DEPTH} deep") from fault
    except (ValueError, TypeError, KeyError, ArithmeticError) as fault:
        if isinstance(fault, YamlFault):
            raise
        raise YamlFault(f"a value that cannot be read ({fault})") from fault


def _check_nodes(root: yaml.Node) -> None:
    stack, num_values = [(root, 1)], 0
    while stack:
        node, depth = stack.pop()
        num_values += 1
        line = node.start_mark.line + 1
        if depth > MAX_DEPTH:
            raise YamlFault(f"values nested more than {MAX_DEPTH} deep", line)
        if num_values > MAX_VALUES:
            raise YamlFault(f"more than {MAX_VALUES} values, aliases written out", line)
        if isinstance(node, yaml.ScalarNode) and not is_unicode(node.value):
            raise YamlFault("text with half of a surrogate pair, which is no Unicode", line)
        stack += [(child, depth + 1) for child in _children(node)]


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value
