# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's assistant: every draft is transformers' own, also after rejections, and the text is the target's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speccompile.bundle.stage_cache import StageCache
from speccompile.checkpoints.checkpoint import read_dims
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.core.tree import TokenTree
from speccompile.doctor.doctor import check_speculator
from speccompile.errors import CheckpointError, RecipeError
from speccompile.graph_kinds.heads import DraftForm, FormOptions
from speccompile.pipeline import build
from speccompile.speculators.gemma4_assistant.checkpoint import FORMATS, AssistantSource
from tests import store
from tests.certificate.shifting import check_that_a_shift_shows
from tests.pipeline import fakes
from tests.speculators.gemma_lab import (
    KINDS,
    VOCAB,
    give_embeddings,
    make_assistant,
    make_target,
    own_drafts,
    target_step,
)

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import speccompile  # noqa: E402
from speccompile import SamplingParams  # noqa: E402

pytestmark = pytest.mark.export

NUM_DRAFTS, NUM_TOKENS = 3, 24
MAX_RELATIVE_DIFFERENCE = 1e-4
PROMPTS = [np.random.default_rng(seed).integers(3, VOCAB, n).tolist() for seed, n in enumerate((9, 2, 6))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder with `target` and `assistant`, and transformers' models."""
    folder = tmp_path_factory.mktemp("gemma")
    target, assistant = make_target(folder / "target"), make_assistant(folder / "assistant")
    give_embeddings(target, assistant, folder / "assistant")
    (folder / "target/tokenizer.json").write_text(json.dumps(fakes.tokenizer(VOCAB)))
    return folder, target, assistant


def source(folder: Path, assistant: str = "assistant", **options: Any) -> AssistantSource:
    job = GraphJob("target", str(folder / "target"))
    context = SourceContext("checkpoint", 64, 8, read_dims(folder / "target"), job)
    return AssistantSource(GraphJob("heads", str(folder / assistant), options=FormOptions(**options)), context)


def eager(
    source: AssistantSource, target: Any, tokens: list[int], num: int, rows_of: dict[str, Any] | None = None
) -> Any:
    """Runs the module that is traced; returns drafts, confidences and distributions at temperature 1."""
    from speccompile.export.tree_drafters import drafter_from_form
    from speccompile.speculators.gemma4_assistant import model as own

    made = own.make_assistant("here", source.config, source.read_weights())
    expander = own.AssistantExpander(made, target.model.embed_tokens.weight.detach())
    module = own.ReadingChain(drafter_from_form(expander, DraftForm(num)), KINDS)
    hidden, rows = target_step(target, tokens[:-1])
    held = []
    for kind in KINDS:  # beyond the rows that were read stands what must have no effect
        held += [torch.nn.functional.pad(x, (0, 0, 0, 5), value=9.0) for x in (rows_of or rows)[kind]]
    ones, zeros = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        return module(
            hidden, zeros, torch.tensor([[tokens[-1]]]), torch.zeros(1, num), ones, zeros, ones,
            torch.tensor([len(tokens) - 1]), held,
        )  # fmt: skip


def difference(dists: Any, logits: list[Any], num: int) -> float:
    """The largest difference of distributions of the first drafts, which all read the same tokens."""
    return max(float((dists[i][0] - logits[i].softmax(-1)).abs().max()) for i in range(num))


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("length", [3, 15])
def test_logits_are_transformers(pair, is_ordered, length, tmp_path):
    """Of a text within the window and beyond, with the LM head over all tokens and with centroids."""
    folder, target, assistant = pair
    if is_ordered:
        assistant = make_assistant(tmp_path / "assistant", True)
        (tmp_path / "target").symlink_to(folder / "target")
        folder = tmp_path
    tokens = np.random.default_rng(length).integers(3, VOCAB, length).tolist()
    _, logits = own_drafts(target, assistant, tokens, 1)
    dists = eager(source(folder), target, tokens, 1)[2:]
    assert difference(dists, logits, 1) < MAX_RELATIVE_DIFFERENCE


def test_logits_of_a_unified_model_are_transformers(tmp_path):
    target = make_target(tmp_path / "target", "gemma4_unified")
    assistant = make_assistant(tmp_path / "assistant", family="gemma4_unified")
    tokens = np.random.default_rng(15).integers(3, VOCAB, 15).tolist()
    _, logits = own_drafts(target, assistant, tokens, 1)
    made = source(tmp_path)
    made.check()
    assert difference(eager(made, target, tokens, 1)[2:], logits, 1) < MAX_RELATIVE_DIFFERENCE


def test_mistakes_are_noticed(pair, monkeypatch):
    from speccompile.speculators.gemma4_assistant import model as own

    folder, target, assistant = pair
    tokens = np.random.default_rng(5).integers(3, VOCAB, 15).tolist()
    _, logits = own_drafts(target, assistant, tokens, 1)
    hidden, rows = target_step(target, tokens[:-1])

    def fault(**given: Any) -> float:
        return difference(eager(source(folder), target, tokens, 1, **given)[2:], logits, 1)

    assert fault() < MAX_RELATIVE_DIFFERENCE
    assert fault(rows_of={k: (key.flip(2), value) for k, (key, value) in rows.items()}) > 10 * MAX_RELATIVE_DIFFERENCE
    plain = own.cross_attention
    wrong: dict[str, Any] = {
        "a shorter window": lambda q, k, v, limits, scale, window: plain(q, k, v, limits, scale, window and window - 1),
        "a row too many": lambda q, k, v, limits, scale, window: plain(q, k, v, limits + 1, scale, window),
    }
    for attend in wrong.values():
        with monkeypatch.context() as patch:
            patch.setattr(own, "cross_attention", attend)
            assert fault() > 10 * MAX_RELATIVE_DIFFERENCE
    before = target.model.norm.forward
    with monkeypatch.context() as patch:
        patch.setattr(target.model.norm, "forward", lambda x: x)
        assert fault() > 10 * MAX_RELATIVE_DIFFERENCE
    assert target.model.norm.forward == before and hidden.shape[1] == 1


def test_the_position_is_the_roots(pair, monkeypatch):
    """The second draft of a chain stands where the first one does."""
    from speccompile.export import tree_drafters

    folder, target, assistant = pair
    tokens = np.random.default_rng(6).integers(3, VOCAB, 12).tolist()
    drafts, logits = own_drafts(target, assistant, tokens, 2)

    def second_draft(shift: int) -> float:
        own, calls = torch.nn.Module.__call__, []

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if type(module).__name__ == "Gemma4TextRotaryEmbedding":
                calls.append(module)
                args = (args[0], args[1] + (shift if len(calls) > len(KINDS) else 0), *args[2:])
            return own(module, *args, **kwargs)

        def greedy(logits: Any, *_: Any) -> Any:
            probs = logits[:, 0].softmax(-1)
            return logits[:, 0].argmax(-1), probs.amax(-1), probs

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.Module, "__call__", call)
            patch.setattr(tree_drafters, "sample_token", greedy)
            made, _, *dists = eager(source(folder), target, tokens, 2)
        assert shift or made[0].tolist() == drafts
        return difference(dists, logits, 2)

    assert second_draft(0) < MAX_RELATIVE_DIFFERENCE
    assert second_draft(1) > 10 * MAX_RELATIVE_DIFFERENCE


def built(folder: Path, shape: str) -> Iterator[Any]:
    """Yields the engine of the pair, built from a recipe."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"target: {{model: target}}\nspeculator: {{method: gemma4_assistant, model: assistant, {shape}}}\n"
        "engine: {max_batch_size: 2, max_seq_len: 48, max_draft_nodes: 8, threads: 1}\n"
    )
    with store.cheap_stages():
        bundle = build(fakes.make_plan(recipe), folder / shape.split(":")[0], cache=StageCache(folder / "cache"))
    with pytest.MonkeyPatch.context() as patch:
        # On a target as small as this plain decoding is often faster: no clock decides whether to draft.
        patch.setattr("speccompile.runtime.spec_engine.controller_of", lambda proposer: None)
        patch.setattr("speccompile.drafting.budget.Budget.weighs_time", False)
        yield speccompile.load(bundle.path)


@pytest.fixture(scope="module")
def engine(pair: tuple[Path, Any, Any]) -> Any:
    yield from built(pair[0], f"num_draft_tokens: {NUM_DRAFTS}")


@pytest.fixture(scope="module")
def tree_engine(pair: tuple[Path, Any, Any]) -> Any:
    yield from built(pair[0], "tree: {widths: [2, 1]}")


def test_greedy_text_and_every_draft_are_transformers(pair, engine, monkeypatch):
    from speccompile.speculators.gemma4_assistant.config import AssistantProposer

    _, target, assistant = pair
    made: list[tuple[list[int], list[int]]] = []
    propose = AssistantProposer.propose

    def noted(self: Any, batch: Any) -> TokenTree:
        tree = propose(self, batch)
        for slot, sequence in enumerate(batch.sequences):
            num = int(tree.num_nodes[slot]) - 1
            made.append((list(sequence.tokens), tree.tokens[slot, 1 : 1 + num].tolist()))
        return tree

    monkeypatch.setattr(AssistantProposer, "propose", noted)
    params = SamplingParams(max_new_tokens=NUM_TOKENS)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        text = target.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]
        expected.append(text.tolist())
    for batch_size in (1, 2):
        results = engine.generate(PROMPTS, params, batch_size=batch_size)
        assert [r.tokens for r in results] == expected
        plain = engine.generate(PROMPTS, params, batch_size=batch_size, speculative=False)
        assert [r.tokens for r in plain] == expected
    num_drafted = sum(len(drafts) for _, drafts in made)
    num_accepted = sum(r.stats["num_accepted"] for r in results)
    assert 0 < num_accepted < num_drafted
    for tokens, drafts in made[:: max(1, len(made) // 20)]:
        assert drafts == own_drafts(target, assistant, tokens, NUM_DRAFTS)[0][: len(drafts)]


def test_trees_have_the_likeliest_tokens_of_transformers(pair, tree_engine, monkeypatch):
    from speccompile.speculators.gemma4_assistant.config import AssistantProposer

    _, target, assistant = pair
    made: list[tuple[list[int], list[int], list[int]]] = []
    propose = AssistantProposer.propose

    def noted(self: Any, batch: Any) -> TokenTree:
        tree = propose(self, batch)
        for i, sequence in enumerate(batch.sequences):
            num = int(tree.num_nodes[i])
            made.append((list(sequence.tokens), tree.tokens[i, :num].tolist(), tree.parents[i, :num].tolist()))
        return tree

    monkeypatch.setattr(AssistantProposer, "propose", noted)
    params = SamplingParams(max_new_tokens=NUM_TOKENS)
    results = tree_engine.generate(PROMPTS, params, batch_size=2)
    plain = tree_engine.generate(PROMPTS, params, batch_size=2, speculative=False)
    assert [r.tokens for r in results] == [r.tokens for r in plain]
    trees = [(text, nodes, parents) for text, nodes, parents in made if len(nodes) == 5]
    assert len(trees) > 20 and sum(r.stats["num_accepted"] for r in results) > 0
    for text, nodes, parents in trees[:: len(trees) // 5]:
        _, logits = own_drafts(target, assistant, text, 1)
        roots = [node for node in range(1, 5) if parents[node] == 0]
        assert [nodes[node] for node in roots] == logits[0].topk(2).indices.tolist()
        for node in roots:
            (child,) = (c for c in range(1, 5) if parents[c] == node)
            assert nodes[child] == own_drafts(target, assistant, text, 2, [nodes[node]])[0][1]


def test_the_check_of_acceptance_fails_where_every_draft_is_shifted_by_one(engine):
    check_that_a_shift_shows(engine, PROMPTS * 3, NUM_TOKENS)


def test_sampled_text_does_not_depend_on_the_batch(engine):
    params = [SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed) for seed in range(3)]
    single = [r.tokens for r in engine.generate(PROMPTS, params, batch_size=1)]
    assert [r.tokens for r in engine.generate(PROMPTS, params, batch_size=2)] == single


def test_the_doctor_knows_the_layout(pair):
    folder = pair[0]
    check_speculator(folder / "assistant", FORMATS, read_dims(folder / "target"))


def test_what_the_config_leaves_out_is_read_off_the_weights(pair, tmp_path):
    folder = pair[0]
    config = json.loads((folder / "assistant/config.json").read_text())
    wanted = config.pop("backbone_hidden_size")
    (tmp_path / "assistant").mkdir()
    (tmp_path / "assistant/config.json").write_text(json.dumps({**config, "num_centroids": None}))
    (tmp_path / "assistant/model.safetensors").symlink_to(folder / "assistant/model.safetensors")
    (tmp_path / "target").symlink_to(folder / "target")
    made = source(tmp_path)
    made.check()
    assert made.make_module() is not None and made.dims.hidden_size == wanted


def test_another_target_is_refused(pair, tmp_path):
    folder = pair[0]
    for name, change, message in (
        ("vocab_size", {"vocab_size": VOCAB + 1}, "vocabulary"),
        ("head_dim", {"head_dim": 16}, "heads of 16 columns in layers of sliding_attention"),
    ):
        made = tmp_path / name
        made.mkdir()
        config = json.loads((folder / "assistant/config.json").read_text())
        config["text_config"] |= change
        (made / "config.json").write_text(json.dumps(config))
        (made / "model.safetensors").symlink_to(folder / "assistant/model.safetensors")
        (tmp_path / "target").unlink(missing_ok=True)
        (tmp_path / "target").symlink_to(folder / "target")
        with pytest.raises(RecipeError, match=message):
            source(tmp_path, name)
    config = json.loads((folder / "target/config.json").read_text())
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.json").write_text(json.dumps(config | {"model_type": "gemma3_text"}))
    context = SourceContext(
        "checkpoint", 64, 8, read_dims(tmp_path / "plain"), GraphJob("target", str(tmp_path / "plain"))
    )
    with pytest.raises(RecipeError, match="a gemma3_text model"):
        AssistantSource(GraphJob("heads", str(folder / "assistant"), options=FormOptions()), context)
    with pytest.raises(CheckpointError, match=r"a causal language model .* expected a speculator's checkpoint"):
        source(folder, "target")
