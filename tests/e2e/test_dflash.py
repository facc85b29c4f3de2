# SPDX-License-Identifier: Apache-2.0
"""Drafters of DFlash 2, LiLiCorr and Domino through the engine: every draft is the twin's walk over its block."""

import json

import pytest

from speccompile.core import registry
from speccompile.core.jobs import MethodContext
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.training_contract import TargetParts, TrainingBatch
from tests import store
from tests.method_rows import MAX_NODES, MAX_ROWS, MAX_SEQ, ROWS, config_of, sources

torch = pytest.importorskip("torch")

SLOTS, NUM_DRAFTS = 4, 4


@pytest.fixture(scope="module", params=["dflash", "lilicorr", "domino"])
def kind(request):
    """Returns the row of the drafter."""
    return request.param


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, kind):
    from tests.speculators import eagle_lab

    folder = tmp_path_factory.mktemp("block_texts")
    eagle_lab.write_target(folder / "target")
    store.write_checkpoint(ROWS[kind].write, folder / "draft", folder / "target")
    return folder


@pytest.fixture(scope="module")
def engine(checkpoints, kind):
    from tests.speculators.eagle_lab import compiled

    made = {}
    for source in sources(kind, "chain", checkpoints / "target", checkpoints / "draft"):
        rows, graphs = MAX_ROWS + source.spec().rows_written_ahead, checkpoints / "graphs" / source.job.name
        made[source.job.name] = compiled(source, graphs, slots=SLOTS, rows=rows)[0]
    target, context = made.pop("target"), MethodContext(SLOTS, MAX_SEQ, MAX_NODES)
    config = config_of(kind, "chain", checkpoints / "draft")
    return SpecEngine(target, made, registry.method("dflash").make_proposer(config, made, context), None, context)


@pytest.fixture(scope="module")
def found(engine):
    """Returns (text with the root, drafts) of all proposals over the prompts, batch after batch."""
    from tests.speculators.eagle_lab import PROMPTS

    found, propose = [], engine.proposer.propose

    def proposing(batch):
        tree = propose(batch)
        for row, sequence in enumerate(batch.sequences):
            found.append((tuple(sequence.tokens), tuple(tree.tokens[row, 1 : int(tree.num_nodes[row])].tolist())))
        return tree

    engine.proposer.propose = proposing
    params = [SamplingParams(max_new_tokens=10 + i, ignore_eos=True) for i in range(len(PROMPTS))]
    results = engine.generate(PROMPTS, params, batch_size=3)
    plain = engine.generate(PROMPTS, params, speculative=False, batch_size=1)
    assert [r.tokens for r in results] == [r.tokens for r in plain]
    assert sum(r.stats["num_accepted"] for r in results) > 15
    return [(text, drafts) for text, drafts in dict.fromkeys(found) if drafts]


@pytest.fixture(scope="module")
def streams(checkpoints):
    """Returns a function: text, shift -> the target's streams [positions, ..], of layers shifted by so many."""
    from transformers import LlamaForCausalLM

    from tests.speculators.dflash_lab import READ

    model, known = LlamaForCausalLM.from_pretrained(checkpoints / "target", dtype=torch.float32).eval(), {}

    @torch.no_grad()
    def read(text, shift=0):
        if text not in known:
            known[text] = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        return torch.cat([known[text][layer + 1 + shift][0] for layer in READ], -1)

    return read


def walk(twin, streams, root):
    """Returns the likeliest walk over a lattice."""
    from tests.speculators.domino_lab import scores_after

    path, before = [], 0
    if "gru_hidden_dim" in twin.made["dflash_config"]:
        with torch.no_grad():
            hidden = twin.states(streams, root, NUM_DRAFTS)
            base, tokens = (hidden @ twin.head.T).topk(16)
            for slot in range(NUM_DRAFTS):
                path.append(int(tokens[slot, scores_after(twin, hidden, root, path, tokens, base).argmax()]))
        return path
    tokens, scores = twin.block(streams, root, NUM_DRAFTS, 8)
    for slot in range(NUM_DRAFTS):
        before = int(scores[slot, before].argmax())
        path.append(int(tokens[slot, before]))
    return path


def num_wrong(checkpoints, found, streams, shift=0, faults=()):
    from tests.speculators import dflash_lab

    twin = dflash_lab.twin(checkpoints / "draft", checkpoints / "target", faults)
    pairs = [(walk(twin, streams(text[:-1], shift), text[-1]), list(drafts)) for text, drafts in found]
    return sum(right[: len(drafts)] != drafts for right, drafts in pairs)


def test_every_draft_is_the_twins(checkpoints, found, streams):
    assert num_wrong(checkpoints, found, streams) == 0 and len(found) > 30


def test_the_probe_drafts_the_same(checkpoints, streams):
    """Blocks after many roots of one text at once, without caches."""
    from safetensors.torch import load_file

    from speccompile.doctor.doctor import make_case, open_checkpoint
    from speccompile.speculators.dflash.layouts import FORMATS
    from speccompile.speculators.dflash.probe import DflashProbe
    from tests.speculators import dflash_lab
    from tests.speculators.eagle_lab import PROMPTS

    held, text = load_file(checkpoints / "target/model.safetensors"), tuple(PROMPTS[0])
    config, tables = json.loads((checkpoints / "target/config.json").read_text()), ("model.embed_tokens", "lm_head")
    parts = TargetParts(config, checkpoints / "target", *(held[f"{name}.weight"] for name in tables), None)
    found = open_checkpoint(checkpoints / "draft", FORMATS)
    probe = DflashProbe(make_case(found, found.layout), parts)
    layers = {layer: part[None] for layer, part in zip(dflash_lab.READ, streams(text).chunk(3, -1), strict=True)}
    batch, roots = TrainingBatch(torch.tensor([text]), None, None, layers=layers), torch.arange(1, len(text))
    with torch.no_grad():
        drafts = probe.draft({c.name: c.stated for c in probe.conventions}, batch, roots, NUM_DRAFTS)
    twin = dflash_lab.twin(checkpoints / "draft", checkpoints / "target")
    walks = [walk(twin, streams(text)[:root], text[root]) for root in roots.tolist()]
    assert drafts.tolist() == walks and len({tuple(draft) for draft in walks}) > 5


FAULTS = {
    "dflash": ("slots", "taps", "predecessor"),
    "lilicorr": ("slots", "anchor", "unary"),
    "domino": ("slots", "order", "corrected"),
}


@pytest.mark.parametrize("number", range(3))
def test_a_fault_of_the_twin_changes_most_drafts(checkpoints, kind, found, streams, number):
    assert num_wrong(checkpoints, found[:20], streams, faults=(FAULTS[kind][number],)) > 10


@pytest.mark.parametrize("shift", [1, -1])
def test_layers_off_by_one_change_most_drafts(checkpoints, found, streams, shift):
    assert num_wrong(checkpoints, found[:20], streams, shift) > 10
