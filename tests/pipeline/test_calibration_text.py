# SPDX-License-Identifier: Apache-2.0
"""Texts of a target: what a file may hold, which graphs use them, the package's prompts by a chat template."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speccompile.bundle.choices import MAX_TOKENS, MIN_TOKENS, read_texts, sample_of
from speccompile.checkpoints.texts import TextSample
from speccompile.core import registry
from speccompile.core.jobs import GraphJob
from speccompile.errors import RecipeError
from tests.pipeline import fakes

VOCAB = 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder with a tokenizer of 32 words."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(fakes.tokenizer(VOCAB)))
    return tmp_path


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_text_file_is_one_text(folder):
    (folder / "a.txt").write_text("w1 w2 w31 " * 100)
    [text] = read_texts(folder / "a.txt", folder, VOCAB)
    assert text == (1, 2, 31) * 100


def test_lines_hold_texts_or_token_ids(folder):
    ids = [i % VOCAB for i in range(300)]
    path = lines(folder / "a.jsonl", {"prompt": "w3 w4"}, {"text": "w5", "prompt": "w6"}, {"prompt": ids, "id": 1})
    assert read_texts(path, folder, VOCAB) == ((3, 4), (5,), tuple(ids))


def test_no_more_than_the_first_tokens_are_read(folder):
    path = lines(folder / "a.jsonl", *[{"text": [1] * 30000}] * 3)
    texts = read_texts(path, folder, VOCAB)
    assert [len(text) for text in texts] == [30000, MAX_TOKENS - 30000]


@pytest.mark.parametrize(
    ("name", "content", "where", "expected"),
    [
        ("a.txt", b"w1 w2", "a.txt", f"at least {MIN_TOKENS}"),
        ("a.txt", b"\xff\xfe\x00", "a.txt", "UTF-8"),
        ("a.jsonl", b'{"prompt": "w1"}\n{"prompt"\n', "a.jsonl:2", "one JSON object"),
        ("a.jsonl", '{"prompt": "w1\u2028w2"}\n{"words": "w1"}\n'.encode(), "a.jsonl:2", "`text` or `prompt`"),
        ("a.jsonl", b'\n{"words": "w1"}\n', "a.jsonl:2", "`text` or `prompt`"),
        ("a.jsonl", b'{"messages": []}\n', "a.jsonl:1", "`messages`"),
        ("a.jsonl", b'{"messages": "w1"}\n', "a.jsonl:1", "`messages`"),
        ("a.jsonl", b'{"messages": [1, "w1"]}\n', "a.jsonl:1", "`messages`"),
        ("a.jsonl", b'{"prompt": [1, "w2"]}\n', "a.jsonl:1", "text or token ids"),
        ("a.jsonl", b'{"prompt": [1, 99]}\n', "a.jsonl:1", f"ids below {VOCAB}"),
        ("a.jsonl", b"", "a.jsonl", f"at least {MIN_TOKENS}"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(folder, name, content, where, expected):
    (folder / name).write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        read_texts(folder / name, folder, VOCAB)
    error = caught.value
    assert error.where == f"target.calibration: {folder / where}" and expected in error.expected
    assert error.got and error.todo


def test_the_token_that_is_wrong_is_named(folder):
    (folder / "a.jsonl").write_text('{"prompt": [1, -5, 3]}\n')
    with pytest.raises(RecipeError, match="got token -5;"):
        read_texts(folder / "a.jsonl", folder, VOCAB)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is read of a plan."""

    calibration: str = "auto"
    weights: str = "checkpoint"
    drafts: tuple[GraphJob, ...] = ()
    engine: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(kv_cache="auto"))


TEMPLATE = (
    "{% for m in messages %}w1 {{ m.content.split()[0] }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
)


def sample(plan: Plan, folder: Path, quantization: str = "int4", name: str = "target") -> TextSample | None:
    source: Any = SimpleNamespace(folder=folder, dims=SimpleNamespace(vocab_size=VOCAB))
    backend: Any = SimpleNamespace(calibrates=("int4",))
    return sample_of(plan, GraphJob(name, "model", quantization), source, backend)  # type: ignore[arg-type]


def test_without_a_template_the_text_is_drawn(folder):
    assert sample(Plan(), folder) == sample(Plan(), folder, "auto") == TextSample()
    assert sample(Plan("none"), folder) == TextSample(weights="rounded")


def test_the_prompts_of_the_package_are_rendered_by_the_template_and_answered(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    found = sample(Plan(), folder, "int8")
    assert found is not None and found.stop_ids == (7, 9) and "prompts" in found.source
    assert len(found.prompts) == 80 and not found.texts
    assert {(prompt[0], prompt[-1]) for prompt in found.prompts} == {(1, 2)}
    # No token that the template writes is written again by the tokenizer.
    assert min(map(len, found.prompts)) == 3


@pytest.mark.parametrize("template", ["{{ raise_exception('no roles') }}", "{% broken", ""])
def test_a_template_that_takes_no_such_messages_leaves_the_text_to_be_drawn(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    assert sample(Plan(), folder) == TextSample()


def test_a_given_file_is_the_text(folder):
    (folder / "a.txt").write_text("w1 w2 " * 200)
    found = sample(Plan(str(folder / "a.txt")), folder)
    assert found == TextSample(((1, 2) * 200,), source="given")


def test_conversations_of_a_file_are_answered_or_are_the_text(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    question, answer = {"role": "user", "content": "w3 w4"}, {"role": "assistant", "content": "w5"}
    asked = lines(folder / "a.jsonl", *[{"messages": [question]}] * 100)
    found = sample(Plan(str(asked)), folder)
    assert found is not None and found.prompts == ((1, 3, 2),) * 100 and not found.texts
    answered = lines(folder / "b.jsonl", *[{"messages": [question, answer]}] * 100)
    found = sample(Plan(str(answered)), folder)
    assert found is not None and found.texts == ((1, 3, 1, 5, 2),) * 100 and not found.prompts


def test_conversations_without_a_template_are_refused(folder):
    asked = lines(folder / "a.jsonl", *[{"messages": [{"role": "user", "content": "w3"}]}] * 100)
    with pytest.raises(RecipeError, match="no chat template") as caught:
        sample(Plan(str(asked)), folder)
    assert caught.value.where.startswith("target.calibration") and caught.value.todo


def test_no_form_of_these_is_compared_with_float32(folder):
    assert sample(Plan(), folder, "none") is None and sample(Plan(), folder, "stored") is None
    assert sample(Plan(), folder, name="draft") is None
    assert sample(Plan(weights="random"), folder) is None
    (folder / "a.txt").write_text("w1 w2 " * 200)
    assert sample(Plan(str(folder / "a.txt")), folder, "stored") is not None  # it is asked for


def test_a_target_whose_draft_shares_its_quantised_weights_is_rounded_as_the_draft_is(folder, monkeypatch):
    monkeypatch.setattr(registry, "find_class", lambda source: SimpleNamespace(shares_weights=source == "shares"))
    for quantization, source, expected in (
        ("int4", "shares", "as drafts"),
        ("none", "shares", "compensated"),
        ("int4", "own", "compensated"),
    ):
        found = sample(Plan(drafts=(GraphJob("draft", "m", quantization, source),)), folder)
        assert found is not None and found.weights == expected
