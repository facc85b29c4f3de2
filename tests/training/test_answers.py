# SPDX-License-Identifier: Apache-2.0
"""Prompts of conversations that the target answers, and runs on conversations in either stage."""

import json

import pytest
import torch

from speccompile.errors import RecipeError
from speccompile.recipe import load_recipe
from speccompile.recipe.training import GeneratedSection
from speccompile.recipe.training_plan import resolve_training
from speccompile.training import answers as answers_module
from speccompile.training.answers import MIN_ANSWER, choose_prompts
from speccompile.training.conversations import ChatReader
from speccompile.training.corpus import find_sources
from speccompile.training.run import Listener, train
from speccompile.training.text import TextBook, cache_folder, read_tokenizer
from speccompile.training.windows import HELD_OUT, TRAIN

pytest.importorskip("matplotlib")
pytest.importorskip("tensorboard")
pytest.importorskip("onnxruntime")


class Stopped(Exception):
    """The process ends here."""


@pytest.fixture
def load(write_recipe, chats, chat_target):
    """Returns the recipe of a run on conversations."""

    def loading(method, name, *overrides, steps=0, generated=4):
        path = write_recipe(method, name, steps=steps, generated=generated)
        sources = [f"training.text.files=[{chats}]", f"target.model={chat_target}", "training.generated.seq_len=32"]
        return load_recipe(path, [*sources, *overrides])

    return loading


def choose(chats, chat_target, *texts, **changes):
    section = GeneratedSection.model_validate({"seq_len": 40, "num_sequences": 800, **changes})
    reader = ChatReader(chat_target, read_tokenizer(chat_target)[0])
    documents = find_sources([str(chats), *map(str, texts)], python_sources=False).documents()
    return choose_prompts(documents, reader, section, 0)


def test_each_turn_of_an_assistant_is_a_prompt_at_each_temperature(chats, chat_target):
    prompts = choose(chats, chat_target)
    documents = find_sources([str(chats)], python_sources=False).documents()
    num_turns = sum(len(document.conversation.turns()) for document in documents if not document.is_held_out)
    assert len(prompts[TRAIN]) == min(800, 2 * num_turns) and 0 < len(prompts[HELD_OUT]) <= 24
    assert all(prompt.is_chat and prompt.tokens[-1] == 5 for rows in prompts.values() for prompt in rows)
    pairs = [(tuple(prompt.tokens), prompt.temperature) for prompt in prompts[TRAIN]]
    assert {heat for _, heat in pairs[:num_turns]} == {heat for _, heat in pairs[num_turns:]} == {0.0, 0.8}
    for (key, heat), (again, other) in zip(pairs[:num_turns], pairs[num_turns:], strict=False):
        assert key == again and heat != other


def test_texts_are_cut_into_the_prompts_that_conversations_leave_over(chats, text, chat_target):
    prompts = choose(chats, chat_target, text, prompt_tokens=5, num_sequences=2000)
    rest = [prompt for prompt in prompts[TRAIN] if not prompt.is_chat]
    assert len(prompts[TRAIN]) == 2000 and len(rest) > 500 and {len(prompt.tokens) for prompt in rest} == {5}
    assert {prompt.temperature for prompt in rest} == {0.0, 0.8}


def test_prompts_that_leave_no_room_are_left_out(chats, chat_target):
    prompts = choose(chats, chat_target, seq_len=24)
    sizes = [len(prompt.tokens) for prompt in prompts[TRAIN]]
    assert max(sizes) <= 24 - MIN_ANSWER < max(len(p.tokens) for p in choose(chats, chat_target)[TRAIN])
    with pytest.raises(RecipeError, match=r"no train prompt; .*at most 1 tokens.* larger generated.seq_len"):
        choose(chats, chat_target, seq_len=17)


def test_the_target_answers_and_a_stopped_run_goes_on(load, chat_target, monkeypatch):
    """Stage 2 alone: what was written before the stop is kept, and answers alone are learned."""
    recipe, written = load("mlp", "chats"), []
    add = answers_module._Journal.add

    def note(journal, index, tokens):
        add(journal, index, tokens)
        written.append((journal.path.name, index))
        if len(written) == 9:
            raise Stopped

    monkeypatch.setattr(answers_module._Journal, "add", note)
    with pytest.raises(Stopped):
        train(recipe, resolve_training(recipe), Listener())
    seen = []
    result = train(recipe, resolve_training(recipe), Listener(stage=seen.append))
    assert sorted(result["held_out"]) == ["generated"] and "text: generate train 24/24" in seen
    assert len(written) == len(set(written)) == 24 + 1 and "text: generate train 9/24" not in seen
    book = TextBook(recipe, chat_target, lambda message: None)
    rows = book.windows("generated").rows(TRAIN, range(24))
    journal = cache_folder() / "answers" / book.digest("generated") / "answers-train.jsonl"
    answers = [json.loads(line)["tokens"] for line in journal.read_text().splitlines()]
    learned = [row[1:][mask[:-1]].tolist() for row, mask in zip(rows.tokens, rows.is_label, strict=True)]
    assert sorted(learned) == sorted(answers)
    assert all(row[at] == 5 for row, at in zip(rows.tokens, rows.is_label.argmax(1), strict=True))


def test_greedy_answers_are_the_target_s_own(load, chat_target):
    from speccompile.training.target import Target
    from speccompile.training_contract import TargetNeeds

    recipe = load("mlp", "greedy", "training.generated.temperatures=[0.0]", "training.generated.num_sequences=12")
    rows = TextBook(recipe, chat_target, lambda message: None).windows("generated").rows(TRAIN, range(12))
    tokens, is_label = torch.from_numpy(rows.tokens).long(), torch.from_numpy(rows.is_label)
    best = Target(chat_target, torch.float32).run(tokens, TargetNeeds())["dist_tokens"][..., 0]
    assert (best[:, :-1] == tokens[:, 1:])[is_label[:, :-1]].all() and is_label.sum() > 12


def test_a_cut_line_of_the_answers_is_written_again(tmp_path):
    path = tmp_path / "a" / "answers.jsonl"
    journal = answers_module._Journal(path)
    for index in range(3):
        journal.add(index, [index, 5])
    path.write_text(path.read_text()[:-4])
    again = answers_module._Journal(path)
    assert again.answers == {0: [0, 5], 1: [1, 5]}
    again.add(2, [9])
    assert answers_module._Journal(path).answers == {0: [0, 5], 1: [1, 5], 2: [9]}


def test_both_stages_train_on_conversations(load):
    recipe = load("eagle3", "both", steps=4, generated=4)
    result = train(recipe, resolve_training(recipe), Listener())
    assert sorted(result["held_out"]) == ["generated", "plain"]
    assert all(row["loss"][0] > 0 for row in result["held_out"].values())
