# SPDX-License-Identifier: Apache-2.0
"""A vocabulary for JSON, a language model over it in numpy, 30 schemas with a checker of their own, planted defects."""

import re
from typing import Any

import numpy as np

from speccompile.runtime.grammars import GrammarMatcher, Grammars
from speccompile.runtime.logits_processors import LogitsProcessor, TreeProbs
from tests.mock_lm import MockLM

EOS = 0
PIECES = [
    '{"',
    '": ',
    '": "',
    '", "',
    '"}',
    '"]',
    "true",
    "false",
    "null",
    "12",
    "the",
    "name",
    "red",
    ' "',
    "}}",
    "\n",
]
TOKENS = [b"</s>", *(bytes([byte]) for byte in range(32, 127)), *(piece.encode() for piece in PIECES)]
VOCAB = len(TOKENS)


class Pieces:
    """A tokenizer of these tokens, the longest first."""

    eos_token_id, bos_token_id, special_token_ids, tokens = EOS, None, [EOS], TOKENS
    ids = {token: at for at, token in enumerate(TOKENS) if at != EOS}  # noqa: RUF012

    def __call__(self, text: bytes | str) -> list[int]:
        left, ids = text.encode() if isinstance(text, str) else bytes(text), []
        while left:
            size = next(n for n in range(5, 0, -1) if left[:n] in self.ids)
            ids.append(self.ids[left[:size]])
            left = left[size:]
        return ids

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        return type("Encoding", (), {"ids": self(text)})()

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return b"".join(TOKENS[i] for i in ids if i != EOS or not skip_special_tokens).decode()

    def token_to_id(self, text: str) -> int | None:
        return self.ids.get(text.encode())


def make_target(seed: int = 3) -> MockLM:
    """Returns a model that likes to close what it opens, so that texts end."""
    model = MockLM(seed, vocab=VOCAB, sharpness=1.5)
    closing = [i for i, token in enumerate(TOKENS) if token[-1:] in (b'"', b"}", b"]") or i == EOS]
    model.last[:, closing] += 4.0
    model.last[:, [i for i, token in enumerate(TOKENS) if token.isdigit()]] -= 1.0
    model.last[:, [TOKENS.index(b" "), TOKENS.index(b"\n")]] -= 6.0
    return model


def make_grammars() -> Grammars:
    return Grammars(Pieces(), VOCAB, [EOS])


def make_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT, WORD = {"type": "string", "maxLength": 8}, {"type": "string", "pattern": "^[a-z]{1,6}$"}
LEVEL = {"type": "integer", "minimum": 0, "maximum": 20}
COLOUR, FLAG = {"enum": ["red", "green", "blue"]}, {"type": "boolean"}
POINT = make_object(x=LEVEL, y=LEVEL)
SCHEMAS: list[dict[str, Any]] = [
    make_object(name=TEXT),
    make_object(name=WORD, age=LEVEL),
    make_object(ok=FLAG),
    make_object(colour=COLOUR),
    make_object(none={"type": "null"}),
    make_object(point=POINT),
    make_object(a=make_object(b=make_object(c=FLAG))),
    make_object(items={"type": "array", "items": LEVEL, "maxItems": 4}),
    make_object(items={"type": "array", "items": WORD, "minItems": 2, "maxItems": 3}),
    make_object(points={"type": "array", "items": POINT, "maxItems": 2}),
    make_object(rows={"type": "array", "items": {"type": "array", "items": FLAG, "maxItems": 2}, "maxItems": 2}),
    make_object(value={"anyOf": [LEVEL, WORD]}),
    make_object(value={"anyOf": [FLAG, {"type": "null"}]}),
    make_object(shape={"anyOf": [make_object(radius=LEVEL), make_object(width=LEVEL, height=LEVEL)]}),
    make_object(kind={"const": "circle"}, size=LEVEL),
    make_object(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    make_object(day={"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]$"}),
    make_object(id={"type": "string", "minLength": 4, "maxLength": 4}),
    make_object(score={"type": "number", "minimum": 0, "maximum": 1}),
    make_object(level={"enum": [1, 2, 3]}),
    make_object(mixed={"enum": ["a", 7, None, True]}),
    {"type": "array", "items": COLOUR, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"anyOf": [LEVEL, FLAG]}, "maxItems": 3},
    {"enum": ["yes", "no", "maybe"]},
    LEVEL,
    FLAG,
    {"anyOf": [POINT, {"type": "null"}]},
    {**make_object(name=WORD, note=TEXT), "required": ["name"]},
    {"$defs": {"p": POINT}, **make_object(start={"$ref": "#/$defs/p"}, end={"$ref": "#/$defs/p"})},
    make_object(
        user=make_object(name=WORD, tags={"type": "array", "items": WORD, "maxItems": 2}), active=FLAG, level=LEVEL
    ),
]
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None) -> bool:
    """Returns whether a value is of a schema, as far as the schemas above go."""
    root = schema if root is None else root
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(is_valid(value, one, root) for one in schema["anyOf"])
    if "enum" in schema:
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in schema["enum"])
    if "const" in schema:
        return value == schema["const"]
    kind = schema["type"]
    if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    if kind == "object":
        known = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(known) and all(
            is_valid(part, known[name], root) for name, part in value.items()
        )
    if kind == "array":
        fits = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return fits and all(is_valid(part, schema["items"], root) for part in value)
    if kind == "string":
        fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return fits and re.search(schema.get("pattern", ""), value) is not None
    return kind in ("boolean", "null") or schema.get("minimum", value) <= value <= schema.get("maximum", value)


def tokens_of(mask: np.ndarray) -> set[str]:
    """Returns the texts of allowed tokens."""
    return {TOKENS[i].decode() for i in np.flatnonzero(mask)}


def watch_scored(verifier: Any, monkeypatch: Any) -> None:
    """Asserts of every scored draft that its grammar allows it; of a drawn chain the last one may be refused."""
    score = verifier.score

    def watched(tree: Any, batch: Any) -> Any:
        is_drawn = tree.is_chain and batch.is_drawn(tree)
        for slot, sequence in enumerate(batch.sequences):
            for node in range(1, int(tree.num_nodes[slot]) - is_drawn):
                path, above = list[int](), int(tree.parents[slot, node])
                while above > 0:
                    path.insert(0, int(tree.tokens[slot, above]))
                    above = int(tree.parents[slot, above])
                mask = sequence.grammar.draft_mask(path)
                assert mask is not None and mask[tree.tokens[slot, node]], (path, tree.tokens[slot, node])
        return score(tree, batch)

    monkeypatch.setattr(verifier, "score", watched)


def _mask_after_top_p(self, logits, path, right=LogitsProcessor.probs):
    free = LogitsProcessor(self.params, self._num_prompt, len(logits))
    free._seen, free._counts = self._seen, self._counts
    mask = self._grammar.allowed(path)
    if mask is None:
        return np.zeros_like(logits)
    probs = right(free, logits, path) * mask
    return probs / probs.sum() if probs.sum() else np.float32(mask / mask.sum())


def _not_advanced(self, path, right=GrammarMatcher.allowed):
    return right(self, [])


def _free_after_the_last_draft(self, node, right=TreeProbs.__getitem__):
    if node in self._parents or node == 0:
        return right(self, node)
    grammar, self._logits_processor._grammar = self._logits_processor._grammar, None
    try:
        return right(self, node)
    finally:
        self._logits_processor._grammar = grammar


# Planted defects: the class, its attribute, and what is put there.
MASK_AFTER_TOP_P = (LogitsProcessor, "probs", _mask_after_top_p)
STALE_MATCHER = (GrammarMatcher, "allowed", _not_advanced)
FREE_BONUS_TOKEN = (TreeProbs, "__getitem__", _free_after_the_last_draft)
