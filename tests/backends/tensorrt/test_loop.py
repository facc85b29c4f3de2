# SPDX-License-Identifier: Apache-2.0
"""The whole product loop on TrtEngine over the fakes: the same tokens as on ONNX Runtime, for every method."""

import numpy as np
import pytest

from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.backends.writing import lower_and_save
from speccompile.core import specs
from speccompile.core.jobs import MethodContext
from speccompile.core.sampling import SamplingParams
from speccompile.core.tree import TokenTree
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, rollback_spec, verified_spec
from speccompile.ops.registry import attach_functions
from speccompile.passes.pipelines import tensorrt_table
from speccompile.passes.rollback import build_rollback
from speccompile.passes.save import save_model
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.speculators.draft_model.config import DraftModelConfig, DraftModelMethod
from speccompile.speculators.ngram.config import NgramConfig, NgramMethod
from speccompile.speculators.none.config import NoneProposer
from tests.backends.tensorrt.trt_lab import Lab

pytestmark = pytest.mark.plan

ROWS, SPARE, SLOTS = 160, 8, 3
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1] * 40, [8, 2, 8], [5], [9, 9, 3, 1] * 8]
GREEDY = SamplingParams(max_new_tokens=18)
MIXED = [
    SamplingParams(max_new_tokens=14, temperature=0.3, seed=4),
    GREEDY,
    SamplingParams(max_new_tokens=11, temperature=0.5, top_k=12, top_p=0.9, seed=5),
    SamplingParams(max_new_tokens=17, temperature=0.2, seed=6),
    GREEDY,
]


class TreeProposer(NoneProposer):
    """Trees around known continuations: a wrong child before the right one, so that kept paths have gaps."""

    def __init__(self, known):
        self.known = known
        self.rng = np.random.default_rng(2)

    def propose(self, batch):
        tokens = np.zeros((len(batch.sequences), 6), np.int64)
        parents = np.full(tokens.shape, -1)
        for b, sequence in enumerate(batch.sequences):
            whole = next(k for k in self.known if k[: len(sequence.tokens)] == sequence.tokens)
            nodes, right = [sequence.tokens[-1]], 0
            following = whole[len(sequence.tokens) :][: min(sequence.max_drafts, 3)]
            for token in following if self.rng.random() < 0.8 else following[:1]:
                for candidate in ((token + 1) % 97, token)[int(len(nodes) > 4) :]:
                    if len(nodes) < 6:
                        parents[b, len(nodes)] = right
                        nodes.append(candidate)
                right = len(nodes) - 1
            tokens[b, : len(nodes)] = nodes
        return TokenTree.tree(tokens, parents)


@pytest.fixture(scope="module")
def make(compiled):
    """(engine opener) -> a SpecEngine over the tiny random target with the method of that name."""

    def build(kind, load_target, load_draft, known=()):
        context = MethodContext(SLOTS, ROWS, SPARE - 1)
        target = load_target()
        drafts = {}
        if kind == "draft_model":
            drafts["draft"] = load_draft()
            proposer = DraftModelMethod().make_proposer(DraftModelConfig("d", num_draft_tokens=3), drafts, context)
        elif kind == "ngram":
            proposer = NgramMethod().make_proposer(NgramConfig(min_match=1, max_match=2), {}, context)
        else:
            proposer = TreeProposer(known) if kind == "tree" else NoneProposer()
        return SpecEngine(target, drafts, proposer, None, context, chunk=50)

    return build


@pytest.fixture
def wanted(make, open_engine):
    """Tokens on ONNX Runtime's CPU, plain decoding."""
    plain = make("none", lambda: open_engine(max_rows=ROWS + SPARE), None)
    return {name: [r.tokens for r in plain.generate(PROMPTS, p)] for name, p in (("greedy", GREEDY), ("mixed", MIXED))}


@pytest.mark.parametrize("compacts", [False, True])
@pytest.mark.parametrize("kind", ["none", "ngram", "draft_model", "tree"])
def test_tokens_equal_onnxruntimes(monkeypatch, tmp_path, compiled, make, open_engine, wanted, kind, compacts):
    lab = Lab(monkeypatch, tmp_path)
    known = [p + t for p, t in zip(PROMPTS, wanted["greedy"], strict=True)]
    target = compiled("onnxruntime", "none", "fp32", "target")
    draft = compiled("onnxruntime", "int4", "blocks32", "draft")
    engine = make(
        kind,
        lambda: lab.load(target, rows=ROWS + SPARE, compacts=compacts),
        lambda: lab.load(draft, rows=ROWS + SPARE),
        known,
    )
    for batch_size in (1, SLOTS):
        results = engine.generate(PROMPTS, GREEDY, batch_size=batch_size)
        assert [r.tokens for r in results] == wanted["greedy"]
        if kind != "none":
            assert sum(r.stats["num_accepted"] for r in results) > 5
    assert lab.cuda.num_launches > 10


@pytest.mark.parametrize("kind", ["none", "draft_model"])
def test_sampled_tokens_equal_onnxruntimes(monkeypatch, tmp_path, compiled, make, open_engine, wanted, kind):
    """With distributions that come from the draft's engine, and slots that sample beside greedy ones."""
    lab = Lab(monkeypatch, tmp_path)
    target = compiled("onnxruntime", "none", "fp32", "target")
    draft = compiled("onnxruntime", "int4", "blocks32", "draft")
    ours = make(kind, lambda: lab.load(target, rows=ROWS + SPARE), lambda: lab.load(draft, rows=ROWS + SPARE))
    theirs = make(
        kind,
        lambda: open_engine(max_rows=ROWS + SPARE),
        lambda: open_engine(quantization="int4", form="blocks32", role="draft", max_rows=ROWS + SPARE),
    )
    for batch_size in (1, SLOTS):
        got, known = (e.generate(PROMPTS, MIXED, batch_size=batch_size) for e in (ours, theirs))
        assert [r.tokens for r in got] == [r.tokens for r in known]
    if kind == "none":
        assert [r.tokens for r in got] == wanted["mixed"]
    else:
        assert sum(r.stats["num_accepted"] for r in got) > 5


@pytest.fixture(scope="module")
def lowered(neutral, tmp_path_factory):
    """role -> (graph in TensorRT's form without plugins, neutral spec, rollback graph), all float32."""
    model, dims = neutral
    folder = tmp_path_factory.mktemp("lowered")
    rollback = build_rollback(tensorrt_spec(rollback_spec(dims), "float32", ROWS + SPARE))
    attach_functions(rollback, "tensorrt", SPARE)
    save_model(rollback, folder / "rollback.onnx")
    made = {}
    for role in ("target", "draft"):
        decoder = decoder_spec(role, dims)
        spec = candidate_spec(decoder, 1, dists=True) if role == "draft" else verified_spec(decoder, keep_logits=True)
        table = tensorrt_table(tensorrt_spec(spec, "float32", ROWS + SPARE), "none", dtype="float32")
        lower_and_save(model, table, folder / f"{role}.onnx", dialect="tensorrt", max_nodes=SPARE)
        made[role] = (folder / f"{role}.onnx", spec, folder / "rollback.onnx")
    return made


@pytest.mark.parametrize("kind", ["none", "ngram", "draft_model", "tree"])
def test_graphs_lowered_for_tensorrt_give_onnxruntimes_tokens(monkeypatch, tmp_path, lowered, make, wanted, kind):
    """What the parser gets is what runs here: static caches, kv_rows, bodies without branches."""
    lab = Lab(monkeypatch, tmp_path)
    known = [p + t for p, t in zip(PROMPTS, wanted["greedy"], strict=True)]
    loaded = {role: lambda role=role: lab.load(lowered[role], rows=ROWS + SPARE) for role in lowered}
    engine = make(kind, loaded["target"], loaded["draft"], known)
    for batch_size in (1, SLOTS):
        results = engine.generate(PROMPTS, GREEDY, batch_size=batch_size)
        assert [r.tokens for r in results] == wanted["greedy"]
    target, rows = lab.load(lowered["target"], rows=ROWS + SPARE), np.array([PROMPTS[1]])
    dists = lab.load(lowered["draft"], rows=ROWS + SPARE).run(
        {specs.TOKENS: rows, specs.LENGTHS: np.zeros(1, np.int64)}
    )
    assert dists[specs.NODE_PROBS].shape == (*rows.shape, 97)
    assert target.run({specs.TOKENS: rows, specs.LENGTHS: np.zeros(1, np.int64)})[specs.PATH].shape == rows.shape
