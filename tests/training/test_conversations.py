# SPDX-License-Identifier: Apache-2.0
"""Conversations as rows: which tokens are learned, how rows are cut, and that nothing else is in the loss."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from speccompile.core import registry
from speccompile.errors import RecipeError
from speccompile.export.chains import drawn_positions
from speccompile.recipe.training import PlainSection
from speccompile.training.conversations import ChatReader, rows_from_tokens
from speccompile.training.corpus import find_sources
from speccompile.training.losses import LossOptions, TrainedModule
from speccompile.training.stage import Stage
from speccompile.training.states import CachedStates, LiveStates, batch_from_outputs, output_names, write_states
from speccompile.training.target import Target
from speccompile.training.text import pack
from speccompile.training.windows import HELD_OUT, TRAIN, Rows, write_windows
from tests.pipeline import fakes
from tests.training.conftest import HEADS

# One word is one token: w4 a user, w5 the assistant, w6 a tool, w1 the end of a turn, w7 the end of reasoning.
TURN = "{% for m in messages %}{{ {'system': 'w3', 'user': 'w4', 'assistant': 'w5', 'tool': 'w6'}[m.role] }} "
OPEN = "{% if add_generation_prompt %}w5 {% endif %}"
PLAIN = TURN + "{{ m.content }}{% for c in m.tool_calls or [] %} {{ c.function.name }}{% endfor %} w1 w9 {% endfor %}"
THINK = (
    TURN + "{% if m.reasoning_content and loop.last %}{{ m.reasoning_content }} w7 {% endif %}{{ m.content }} w1 w9 "
    "{% endfor %}"
)
OPENS_REASONING = "{% if add_generation_prompt %}w5 reason {% endif %}"
REWRITES = "{{ messages | length }} " + PLAIN


def line(*turns, **fields):
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return {"messages": [{"role": roles[role], "content": text} for role, text in turns], **fields}


@pytest.fixture
def read(tmp_path):
    """Returns what reads conversations: (lines, template) -> documents in the order of the lines, reader."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))

    def reading(*lines, template=PLAIN + OPEN):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
        path = tmp_path / "chats.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        documents = list(find_sources([str(path)], python_sources=False).documents())
        tokenizer = Tokenizer.from_str(json.dumps(fakes.tokenizer(fakes.VOCAB)))
        return sorted(documents, key=lambda d: int(d.source.rpartition(":")[2])), ChatReader(folder, tokenizer)

    return reading


def rows_of(reading):
    [document], reader = reading
    return [(row.tokens, np.flatnonzero(row.is_answer).tolist()) for row in reader.rows(reader.samples(document))]


def test_answers_alone_are_learned_up_to_the_token_that_ends_them(read):
    talk = line(("s", "w20"), ("u", "w10 w11"), ("a", "w12 w13"), ("u", "w14"), ("a", "w15"))
    tokens = [3, 20, 1, 9, 4, 10, 11, 1, 9, 5, 12, 13, 1, 9, 4, 14, 1, 9, 5, 15, 1, 9]
    assert rows_of(read(talk)) == [(tokens, [10, 11, 12, 19, 20])]


def test_what_follows_the_last_answer_is_left_out(read):
    assert rows_of(read(line(("u", "w10"), ("a", "w12"), ("u", "w14")))) == [([4, 10, 1, 9, 5, 12, 1, 9], [5, 6])]
    assert rows_of(read(line(("u", "w10")))) == []


def test_calls_of_tools_are_learned_and_what_tools_return_is_not(read):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "w21", "arguments": "{}"}}]}
    talk = line(("u", "w10"), ("t", "w22"), ("a", "w23"), tools=[{"type": "function", "function": {"name": "w21"}}])
    talk["messages"].insert(1, call)
    tokens = [4, 10, 1, 9, 5, 21, 1, 9, 6, 22, 1, 9, 5, 23, 1, 9]
    assert rows_of(read(talk)) == [(tokens, [5, 6, 13, 14])]
    told = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}" + PLAIN + OPEN
    [(tokens, _)] = rows_of(read(line(("u", "w10"), ("a", "w12"), tools=talk["tools"]), template=told))
    assert tokens == [21, 4, 10, 1, 9, 5, 12, 1, 9]


def test_turns_that_a_template_writes_otherwise_later_are_rows_of_their_own(read):
    talk = line(("u", "w10"), ("a", "w12"), ("u", "w14"), ("a", "w15"))
    for at, thought in ((1, "w16"), (3, "w17")):
        talk["messages"][at]["reasoning_content"] = thought
    first = ([4, 10, 1, 9, 5, 16, 7, 12, 1, 9], [5, 6, 7, 8])
    second = ([4, 10, 1, 9, 5, 12, 1, 9, 4, 14, 1, 9, 5, 17, 7, 15, 1, 9], [13, 14, 15, 16])
    assert rows_of(read(talk, template=THINK + OPEN)) == [first, second]


def test_an_answer_without_the_reasoning_that_a_prompt_opens_begins_after_the_turn(read):
    rows = rows_of(read(line(("u", "w10"), ("a", "w12")), template=PLAIN + OPENS_REASONING))
    assert rows == [([4, 10, 1, 9, 5, 12, 1, 9], [5, 6])]


def test_a_template_that_rewrites_earlier_messages_is_refused(read):
    documents, reader = read(line(("u", "w10"), ("a", "w12")), template=REWRITES + OPEN)
    with pytest.raises(RecipeError, match=r"chats.jsonl:1: a chat template that writes the messages before message 1"):
        reader.samples(documents[0])


def test_a_tokenizer_without_a_template_is_refused(read):
    documents, reader = read(line(("u", "w10"), ("a", "w12")), template=None)
    with pytest.raises(RecipeError, match=r"training.text.files: got .*no chat template in "):
        reader.samples(documents[0])


def test_rows_are_cut_at_their_end_and_padded(read):
    documents, reader = read(
        line(("u", "w10"), ("a", "w12 w13 w14")),  # 4 10 1 9 5 12 13 14 1 9
        line(("u", "w10 w11 w12 w13 w15"), ("a", "w14")),  # no answer begins within 8 tokens
        line(("u", "w10"), ("a", "w11")),
    )
    rows = [row for document in documents for row in reader.rows(reader.samples(document))]
    held = rows_from_tokens(rows, 8, padding=2)
    assert held.tokens.tolist() == [[4, 10, 1, 9, 5, 12, 13, 14], [4, 10, 1, 9, 5, 11, 1, 9]]
    # A position is learned where the token after it is an answer's: also the last one of a row that was cut.
    assert [np.flatnonzero(row).tolist() for row in held.is_label] == [[4, 5, 6, 7], [4, 5]]
    wide = rows_from_tokens(rows, 100, padding=2)
    assert wide.tokens[2].tolist() == [4, 10, 1, 9, 5, 11, 1, 9] + [2] * 92
    assert len(wide) == 3 and wide.trimmed().tokens.shape == (3, 32)
    assert sorted(wide.learned_tokens().tolist()) == sorted([12, 13, 14, 1, 14, 1, 11, 1])


def test_texts_and_conversations_are_packed_side_by_side(read):
    talks = [line(("u", f"w{i}"), ("a", f"w{j}")) for i in range(10, 30) for j in range(10, 30)]
    texts = [{"text": f"w{i} w{j} w10"} for i in range(10, 30) for j in range(10, 30)]
    documents, reader = read(*talks, *texts)
    held = [d for d in documents if d.is_held_out]
    assert {d.conversation is None for d in held} == {True, False}
    packed = pack(documents, reader, 12, {TRAIN: 10**6, HELD_OUT: 10**6}, eos=1, seed=0)
    chats = {split: [row[:8].tolist() for row in rows.tokens if row[0] == 4] for split, rows in packed.items()}
    assert len(chats[TRAIN]) + len(chats[HELD_OUT]) == 400
    assert {row[1] for row in chats[TRAIN]} & {row[1] for row in chats[HELD_OUT]} == set()  # no prompt is on both sides
    assert all(rows.is_label[rows.tokens[:, 0] != 4].all() for rows in packed.values())
    few = pack(documents, reader, 12, {TRAIN: 100, HELD_OUT: 20}, eos=1, seed=0)
    assert 8 <= len(few[TRAIN]) <= 14 and len(few[HELD_OUT]) < len(packed[HELD_OUT])


def test_conversations_without_answers_are_no_text_for_the_first_stage(read):
    documents, reader = read(*[line(("u", f"w{i}")) for i in range(9, 30)])
    with pytest.raises(RecipeError, match=r"0 tokens for train; .*one conversation with an answer.*plain.steps: 0"):
        pack(documents, reader, 12, {TRAIN: 100, HELD_OUT: 20}, eos=1, seed=0)


@pytest.mark.parametrize(
    ("talk", "got"),
    [
        ({"messages": []}, "chats.jsonl:1 (messages): []"),
        ({"messages": [{"content": "a"}]}, "chats.jsonl:1 (messages[0].role): None"),
        ({"messages": [{"role": "user", "content": 3}]}, "chats.jsonl:1 (messages[0].content): 3"),
        (line(("a", "w5")), "chats.jsonl:1 (messages): an answer alone"),
        (line(("u", "w5"), chat_template_kwargs=[]), None),
        (line(("u", "w5"), chat_template_kwargs=["a"]), "chats.jsonl:1 (chat_template_kwargs): ['a']"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "chats.jsonl:1 (messages): an image"),
    ],
)
def test_what_is_no_conversation_is_named(read, talk, got):
    if got is None:
        assert len(read(talk)[0]) == 1
        return
    with pytest.raises(RecipeError) as caught:
        read(talk)
    assert caught.value.got.endswith(got) and caught.value.where == "training.text.files"


@pytest.fixture(scope="module")
def model(target: Path) -> Target:
    return Target(target, torch.float32)


@pytest.fixture(scope="module")
def make(model):
    def made(method):
        found = registry.trained_method(method)
        config, trainer = found.TrainingConfig(**HEADS[method]), registry.trainer(method)
        torch.manual_seed(1)
        parts = model.parts(torch.arange(model.dims.vocab_size))
        return trainer.make(config, parts, None), trainer.needs(config, model.config)

    return made


NODES = 24
ANSWER = slice(8, 15)  # of the first row, positions whose distribution is learned; of the second three


def masked_batch(model, needs, device="cpu"):
    tokens = torch.randint(3, model.dims.vocab_size, (2, NODES), generator=torch.Generator().manual_seed(3))
    is_label = torch.zeros(2, NODES, dtype=torch.bool)
    is_label[0, ANSWER] = is_label[1, 4:7] = True
    return batch_from_outputs(tokens, model.run(tokens, needs), 5, device, is_label)


@pytest.mark.parametrize("method", sorted(HEADS))
def test_loss_and_gradients_do_not_depend_on_other_labels_nor_on_padding(method, make, model):
    trainable, needs = make(method)
    batch = masked_batch(model, needs)
    module = TrainedModule(trainable, LossOptions(0.7, 0.8, torch.float32), model.dims.vocab_size)
    parameters = [p for p in module.parameters() if p.requires_grad]
    changed = batch.dist_tokens.clone()
    changed[~batch.is_label] = (changed[~batch.is_label] + 1) % model.dims.vocab_size
    tokens, probs = batch.tokens.clone(), torch.where(batch.is_label[..., None], batch.dist_probs, 0.01)
    tokens[0, ANSWER.stop + 1 :] = 2
    held = model.run(tokens, needs)  # the padding changes what the target makes of padding, and of nothing else
    padded = batch_from_outputs(tokens, {**held, "dist_tokens": changed, "dist_probs": probs}, 5, "cpu", batch.is_label)
    found = []
    for one in (batch, padded):
        loss, sums = module(one)
        assert 0 < int(sums[2].sum()) <= 10 * trainable.num_positions
        found.append((loss.detach(), sums, torch.autograd.grad(loss, parameters, allow_unused=True)))
    (loss, sums, grads), (other, others, other_grads) = found
    torch.testing.assert_close(other, loss, rtol=0, atol=1e-6)
    torch.testing.assert_close(others, sums, rtol=0, atol=1e-5)
    for grad, got in zip(grads, other_grads, strict=True):
        if grad is not None:
            torch.testing.assert_close(got, grad, rtol=0, atol=2e-6)


@pytest.mark.parametrize("method", sorted(HEADS))
def test_the_labels_that_are_learned_are_in_the_loss(method, make, model):
    trainable, needs = make(method)
    batch = masked_batch(model, needs)
    module = TrainedModule(trainable, LossOptions(1.0, 0.8, torch.float32), model.dims.vocab_size)
    other = torch.where(batch.is_label[..., None], (batch.dist_tokens + 1) % model.dims.vocab_size, batch.dist_tokens)
    losses = [module(one)[0].item() for one in (batch, replace(batch, dist_tokens=other))]
    assert abs(losses[0] - losses[1]) > 1e-4


def test_starts_are_drawn_where_something_is_learned():
    tokens, wanted = torch.zeros(3, 50), torch.zeros(3, 50, dtype=torch.bool)
    wanted[0, 10:20] = wanted[1, :3] = True
    found = drawn_positions(tokens, 50, 8, 0, wanted)
    assert set(found[0].tolist()) < set(range(10, 20))
    assert {0, 1, 2} < set(found[1].tolist()) and len(set(found[1].tolist())) == 8
    assert found[2].tolist() == drawn_positions(tokens, 50, 8, 0)[2].tolist()


def test_outputs_on_disk_are_cut_to_the_batch(model, tmp_path, read):
    documents, reader = read(*[line(("u", f"w{i}"), ("a", f"w{j}")) for i in range(9, 31) for j in range(9, 31)])
    windows = write_windows(tmp_path / "w", pack(documents, reader, 64, {TRAIN: 900, HELD_OUT: 90}, eos=1, seed=0))
    needs = registry.trainer("glide").needs(None, {})
    write_states(tmp_path / "s", model, windows, needs, lambda done, total: None)
    rows = windows.rows(TRAIN, [3, 1])
    held, live = CachedStates(tmp_path / "s", output_names(needs)), LiveStates(model, needs)
    short = rows.trimmed().tokens
    assert rows.tokens.shape == (2, 64) and short.shape == (2, 32)
    one, other = (states.read(TRAIN, [3, 1], short) for states in (held, live))
    assert one["k_cache"].shape == other["k_cache"].shape and one["k_cache"].shape[2] == 32
    torch.testing.assert_close(one["dist_probs"], other["dist_probs"], rtol=2**-8, atol=1e-6)


def test_batches_hold_windows_of_like_length_and_an_epoch_all_of_them(tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 60, 400)
    is_label = np.arange(64) < lengths[:, None]
    rows = Rows(np.zeros((400, 64), np.int32), is_label)
    windows = write_windows(tmp_path / "w", {TRAIN: rows, HELD_OUT: rows.taken(slice(2))})
    assert windows.lengths(TRAIN).tolist() == lengths.tolist()
    section = PlainSection.model_validate({"batch_size": 5, "seq_len": 64})
    stage = Stage("plain", section, windows, None, seed=0)
    batches = [stage.rows(step) for step in range(80)]
    assert sorted(row for batch in batches for row in batch) == list(range(400))
    padded = sum(5 * lengths[batch].max() for batch in batches)
    assert padded < 1.25 * lengths.sum()
    assert stage.rows(7) == batches[7] and stage.rows(80) != batches[0]


def test_windows_of_one_length_keep_their_drawn_order(tmp_path):
    rows = Rows(np.zeros((30, 8), np.int32), np.ones((30, 8), np.bool_))
    windows = write_windows(tmp_path / "w", {TRAIN: rows, HELD_OUT: rows})
    stage = Stage("plain", PlainSection.model_validate({"batch_size": 4}), windows, None, seed=3)
    drawn = np.random.default_rng((3, 0)).permutation(30)
    assert [row for step in range(7) for row in stage.rows(step)] == drawn[:28].tolist()
