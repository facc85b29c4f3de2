# SPDX-License-Identifier: Apache-2.0
"""From a YAML file and `--set` overrides, bounded in size, to a validated recipe. Errors name their line and key."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from speccompile.checkpoints.folders import HUB_GGUF, hint, is_gguf
from speccompile.common.extras import todo_for_checkpoint
from speccompile.common.json_reader import expected_of_fault, is_unicode, shown
from speccompile.core import registry
from speccompile.errors import RecipeError
from speccompile.recipe.models import AUTO_TEXTS, NO_TEXTS, KeyPath, Recipe, hint_for_key, known_keys, recipe_model
from speccompile.recipe.training import TrainingSection

MODEL_KEY = "model"  # in every section, a key of this name is a folder or a hub id
_MAX_NAME_BYTES = 255  # of Linux' file systems
LORA_KEY = "lora"  # of the same kind
VOCAB_KEY = "draft_vocab_text"  # of a text file
CONFIG_KEY = "config"  # and one of this name a folder with a config.json
_MODEL = "a checkpoint folder, a GGUF file or a hub id like owner/name"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")
# Of a text in YAML.
MAX_CHARS = 1 << 18  # the parser reads about 100 kB a second
MAX_DEPTH = 32
MAX_VALUES = 10_000  # with every alias expanded
_NO_KEYS = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:binary")  # which JSON lacks


@dataclass
class RawRecipe:
    """Parsed but not validated: the values, and the origin of each key."""

    source: str
    folder: Path
    values: dict[str, Any]
    origins: dict[KeyPath, str] = field(default_factory=dict)  # "file:line" or "--set ..." by key path

    def where(self, path: KeyPath) -> str:
        """Returns the location of a key, or of its nearest existing parent, and its dotted name."""
        dotted, origin = ".".join(path), self.origin(path) or self.source
        return f"{origin} ({dotted})" if dotted else origin

    def origin(self, path: KeyPath) -> str:
        lengths = range(len(path), 0, -1)
        return next((self.origins[path[:length]] for length in lengths if path[:length] in self.origins), "")


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads, overrides, validates, and resolves relative paths.

    A relative `model` folder is searched beside the recipe file first, then in the working directory; one of an
    override in the opposite order. Anything else must be a hub id.

    Args:
        overrides: "a.b=c", c is read as YAML.

    Raises:
        RecipeError: unreadable file, unknown key (the nearest known one is named), wrong type or value.
    """
    path = Path(path)
    if path.is_dir():
        is_checkpoint = (path / "config.json").is_file()
        got = "a checkpoint's folder" if is_checkpoint else "a folder"
        todo = todo_for_checkpoint(path) if is_checkpoint else "Give the recipe's file."
        raise RecipeError(str(path), got, "a recipe, a YAML file", todo)
    if path.name == "config.json":
        todo = todo_for_checkpoint(path.parent)
        raise RecipeError(str(path), "a checkpoint's config", "a recipe, a YAML file", todo)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        is_model = path.is_file() and is_gguf(path)
        got, todo = ("a GGUF file", todo_for_checkpoint(path)) if is_model else (str(error), "Check the path.")
        raise RecipeError(str(path), got, "a readable YAML file", todo) from error
    raw = parse_recipe(text, str(path), path.resolve().parent)
    for override in overrides:
        apply_override(raw, override)
    return validate_recipe(raw)


def parse_recipe(text: str, source: str, folder: Path) -> RawRecipe:
    """Parse YAML into values with their lines. Raises RecipeError: not YAML, not a mapping, or a key written twice."""
    try:
        values, node = read_yaml(text)
    except YamlFault as fault:
        line = "" if fault.line is None else f":{fault.line}"
        raise RecipeError(f"{source}{line}", fault.problem, "valid YAML", "Correct the line.") from fault
    values = {} if node is None else values
    if not isinstance(values, dict):
        raise RecipeError(
            source, f"a {type(values).__name__}", "a mapping with the key target", "Read docs/reference/recipe.md."
        )
    return RawRecipe(source, folder, values, {keys: f"{source}:{line}" for keys, line in _key_lines(node, ())})


def _key_lines(node: yaml.Node | None, prefix: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*prefix, str(key.value))
            yield path, key.start_mark.line + 1
            yield from _key_lines(value, path)


def apply_override(raw: RawRecipe, override: str) -> None:
    """Sets one key of `raw`, in place, from "a.b=c".

    Raises:
        RecipeError: no "=", an empty key, c is not YAML, or a parent of the key is not a section.
    """
    where = f"--set {override}"
    dotted, equals, text = override.partition("=")
    path = tuple(dotted.strip().split("."))
    if not equals or not all(path):
        raise RecipeError(where, repr(override), "section.key=value", "For example --set engine.threads=2.")
    try:
        value, _ = read_yaml(text)
    except YamlFault as fault:
        todo = "Quote it for the shell and for YAML."
        raise RecipeError(where, f"{shown(text)}: {fault.problem}", "a YAML value", todo) from fault
    section = raw.values
    for key in path[:-1]:
        # Copied, so that a YAML alias shared by two sections changes in one only.
        child = section.get(key)
        section[key] = {} if child is None else dict(child) if isinstance(child, dict) else child
        if not isinstance(section[key], dict):
            raise RecipeError(where, f"{key}={child!r} in {raw.source}", "a section", "Name a key inside a section.")
        section = section[key]
    section[path[-1]] = value
    raw.origins = {k: v for k, v in raw.origins.items() if k[: len(path)] != path} | {path: where}


def validate_recipe(raw: RawRecipe) -> Recipe:
    """Checks every key, type and value; makes relative model folders absolute. Raises RecipeError: the first error."""
    values = {k: ({} if v is None else v) for k, v in raw.values.items()}
    section = values.get("speculator", {})
    method = section.get("method", "none") if isinstance(section, dict) else "none"
    model = recipe_model(_known_method(raw, method), *_known_backend(raw, values.get("engine")))
    if isinstance(section, dict):
        values["speculator"] = {**section, "method": method}
    try:
        # Through JSON: strict types, while YAML lists become tuples.
        recipe = model.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise _recipe_error(raw, model, error) from error
    return _with_folders(raw, recipe)


def _known_method(raw: RawRecipe, method: object) -> str:
    where = raw.where(("speculator", "method"))
    if not isinstance(method, str):
        expected = f"one of {', '.join(sorted(registry.METHODS))}"
        raise RecipeError(where, repr(method), expected, "Write a method's name.")
    registry.find_method(method, where)
    return method


def _known_backend(raw: RawRecipe, section: object) -> tuple[str, ...]:
    name = section.get("backend") if isinstance(section, dict) else None
    if not isinstance(name, str):
        return ()
    registry.find_backend(name, raw.where(("engine", "backend")))
    return (name,)


def _recipe_error(raw: RawRecipe, model: type[BaseModel], error: ValidationError) -> RecipeError:
    faults = error.errors(include_url=False)
    # A key that may have two types (an int or "auto") causes two errors with the same head: one is reported.
    known = set(known_keys(model))
    by_key: dict[KeyPath, list[Any]] = {}
    for fault in faults:
        path = tuple(str(part) for part in fault["loc"])
        key = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in known), path)
        by_key.setdefault(path if fault["type"] in ("extra_forbidden", "missing") else key, []).append(fault)
    path, group = next(iter(by_key.items()))
    if group[0]["type"] == "missing":
        # An unknown key beside it is often its misspelt form, and has a line.
        beside = (p for p, g in by_key.items() if g[0]["type"] == "extra_forbidden" and p[:-1] == path[:-1])
        path = next(beside, path)
        group = by_key[path]
    others = [".".join(p) for p in by_key if p != path]
    ending = f" Also wrong: {', '.join(others)}." if others else ""
    fault = group[0]
    if fault["type"] == "extra_forbidden":
        siblings = sorted(k[-1] for k in known if k[:-1] == path[:-1])
        todo = hint_for_key(path, known, siblings)
        section = ".".join(path[:-1]) or "a recipe"
        return RecipeError(raw.where(path), f"unknown key {path[-1]!r}", f"the keys of {section}", todo + ending)
    if fault["type"] == "missing":
        path = ("target", "model") if path == ("target",) else path  # its one key without a default
        dotted = ".".join(path)
        todo = f"Add it to the recipe, or give --set {dotted}=VALUE.{ending}"
        return RecipeError(raw.where(path), "no value", f"the key {dotted}", todo)
    expected = " or ".join(dict.fromkeys(expected_of_fault(f) for f in group))
    return RecipeError(raw.where(path), shown(fault["input"]), expected, "Correct the value." + ending)


def _with_folders(raw: RawRecipe, recipe: Recipe) -> Recipe:
    changed: dict[str, Any] = {
        name: _with_models(raw, (name,), getattr(recipe, name)) for name in ("target", "speculator")
    }
    target = changed["target"]
    if target.adapters:
        key = ("target", "adapters")
        found = {name: _find_model(raw, (*key, name), folder) for name, folder in target.adapters.items()}
        changed["target"] = target = target.model_copy(update={"adapters": found})
    if target.calibration not in (AUTO_TEXTS, NO_TEXTS):
        file = _find_path(raw, ("target", "calibration"), target.calibration)
        changed["target"] = target.model_copy(update={"calibration": file})
    if recipe.training is not None:
        changed["training"] = _with_paths(raw, recipe.training)
    return recipe.model_copy(update=changed)


def _with_models(raw: RawRecipe, path: KeyPath, section: Any) -> Any:
    found: dict[str, Any] = {}
    finders = {MODEL_KEY: _find_model, LORA_KEY: _find_model, CONFIG_KEY: _find_config, VOCAB_KEY: _find_path}
    for key, find in finders.items():
        value = getattr(section, key, None)
        if isinstance(value, str):
            found[key] = find(raw, (*path, key), value)
    for name in type(section).model_fields:
        listed = getattr(section, name)
        if isinstance(listed, tuple) and listed and isinstance(listed[0], BaseModel):
            found[name] = tuple(_with_models(raw, (*path, name), item) for item in listed)
    return section.model_copy(update=found)


def _with_paths(raw: RawRecipe, section: TrainingSection) -> TrainingSection:
    key = ("training", "output")
    found: dict[str, Any] = {"output": str(_candidate_paths(raw, key, section.output)[0].resolve())}
    if section.start is not None:
        found["start"] = _find_path(raw, ("training", "start"), section.start)
    files = tuple(_find_path(raw, ("training", "text", "files"), file) for file in section.text.files)
    return section.model_copy(update={**found, "text": section.text.model_copy(update={"files": files})})


def _find_path(raw: RawRecipe, key: KeyPath, path: str) -> str:
    for candidate in _candidate_paths(raw, key, path):
        if os.path.exists(candidate):
            return str(candidate.resolve())
    raise RecipeError(raw.where(key), f"{shown(path)}, which does not exist", "a file or folder", "Correct the path.")


def _candidate_paths(raw: RawRecipe, path: KeyPath, text: str) -> list[Path]:
    try:
        given = Path(text).expanduser()
    except RuntimeError as fault:
        raise RecipeError(raw.where(path), shown(text), "a path of a user that exists", "Correct the path.") from fault
    if "\0" in text or any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in given.parts):
        expected = f"a path of names of at most {_MAX_NAME_BYTES} bytes"
        raise RecipeError(raw.where(path), shown(text), expected, "Correct the path.")
    folders = [raw.folder, Path.cwd()]
    if raw.origin(path).startswith("--set"):
        folders.reverse()
    return [given] if given.is_absolute() else [folder / given for folder in dict.fromkeys(folders)]


def _find_model(raw: RawRecipe, path: KeyPath, model: str) -> str:
    candidates = _candidate_paths(raw, path, model)
    for candidate in candidates:
        if os.path.isdir(candidate):
            return str(candidate.resolve())
        if os.path.exists(candidate) and is_gguf(candidate):
            return os.path.abspath(candidate)  # a link's own name says which part of a model it is
        if os.path.exists(candidate):
            raise RecipeError(raw.where(path), f"{shown(model)}, a file", _MODEL, hint(str(candidate)))
    is_file = is_gguf(Path(model)) and not HUB_GGUF.fullmatch(model)
    if is_file or not (_HUB_ID.fullmatch(model) or HUB_GGUF.fullmatch(model)):
        tried = "" if os.path.isabs(os.path.expanduser(model)) else f" at {' or '.join(map(str, candidates))}"
        got = f"{shown(model)}, which does not exist{tried}"
        raise RecipeError(raw.where(path), got, _MODEL, hint(model))
    return model


def _find_config(raw: RawRecipe, path: KeyPath, config: str) -> str:
    for candidate in _candidate_paths(raw, path, config):
        if os.path.isfile(candidate / "config.json"):
            return str(candidate.resolve())
    got = f"{shown(config)}, which has no config.json"
    raise RecipeError(raw.where(path), got, "a folder with a config.json", "Correct the path.")


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
        if isinstance(node, yaml.MappingNode):
            _check_keys(key for key, _ in node.value)
        stack += [(child, depth + 1) for child in _children(node)]


def _check_keys(keys: Iterable[yaml.Node]) -> None:
    # Before they are constructed, which merges the keys of other mappings (<<).
    found: set[str] = set()
    for key in filter(lambda key: isinstance(key, yaml.ScalarNode), keys):
        line = key.start_mark.line + 1
        if key.tag in _NO_KEYS:
            raise YamlFault(f"the key {shown(key.value)}, which is no text", line)
        if key.value in found:
            raise YamlFault(f"the key {shown(key.value)} written twice", line)
        found.add(key.value)


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value
