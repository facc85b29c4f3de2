# SPDX-License-Identifier: Apache-2.0
"""GLIDE: the graph has the numbers of training, and whatever it drafts, the text is the target's."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from speccompile.backends.base import CompileJob, LoadJob
from speccompile.core import registry, specs
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CandidateOptions, GraphJob, SourceContext
from speccompile.core.sampling import SamplingParams
from speccompile.drafting.tree import Expansion
from speccompile.errors import CheckpointError, RecipeError
from speccompile.export.heads_file import read_heads, write_heads
from speccompile.runtime.sequences import TokenSequence
from speccompile.speculators.glide.checkpoint import GlideSource
from speccompile.speculators.glide.config import DRAFT, GlideDims, GlideRows
from speccompile.speculators.glide.model import Glide
from speccompile.speculators.glide.trainer import TrainableGlide
from speccompile.training_contract import TrainingBatch

pytestmark = pytest.mark.usefixtures("cheap_measurements")
TARGET = ModelDims("llama", 61, 48, 3, 4, 2, 12, 128)
SIZES = GlideDims(
    "glide", 61, 32, 2, 4, 2, 8, 128, intermediate_size=40, target_hidden_size=48, target_heads=4, target_kv_heads=2,
    target_head_dim=12, target_rope_theta=5000.0,
)  # fmt: skip
BLOCK, NODES = 4, 23


@pytest.fixture(scope="module")
def trainable(tmp_path_factory):
    """A drafter of random weights as it is read back from its checkpoint, and its folder."""
    torch.manual_seed(3)
    drafter, folder = Glide(SIZES), tmp_path_factory.mktemp("glide")
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.2) + (parameter.dim() == 1)
            )
    write_heads(folder, SIZES.config(), drafter.state_dict())
    drafter.load_state_dict(read_heads(folder, drafter.state_dict()))
    return TrainableGlide(drafter.eval(), BLOCK), folder


def context(weights="checkpoint", target=TARGET):
    return SourceContext(weights, 64, 8, target, None)


def job(folder, num_candidates=3, dists=True):
    return GraphJob(DRAFT, str(folder), options=CandidateOptions(num_candidates, dists))


@pytest.fixture(scope="module")
def graph(trainable, tmp_path_factory):
    """backend -> file, and the spec."""
    source = GlideSource(job(trainable[1]), context())
    source.check()
    model, dims = source.export(lambda stage: None)
    assert dims.num_params == sum(p.numel() for p in trainable[0].drafter.parameters())
    folder = tmp_path_factory.mktemp("graph")
    for backend in ("reference", "onnxruntime"):
        registry.backend(backend).compile(CompileJob(model, source.spec(), folder / backend))
    return folder, source.spec()


@pytest.fixture
def text():
    """A batch of one text, with arbitrary rows of a target."""
    rng = torch.Generator().manual_seed(5)
    k, v = (torch.randn(1, TARGET.num_kv_heads, NODES, TARGET.head_dim, generator=rng) for _ in range(2))
    tokens = torch.randint(0, 61, (1, NODES), generator=rng)
    return TrainingBatch(tokens, None, None, k_cache=k, v_cache=v, seed=11)


def open_engine(graph, backend, batch, slots=1):
    """The drafter on the rows of `batch`, which lie in every slot."""
    folder, spec = graph
    sizes = {"max_slots": slots, "max_rows": 73}
    job = LoadJob(folder / backend / "graph.onnx", spec, **sizes, tuning={"threads": 1})
    owner = registry.backend(backend).load(job)  # its own caches stand in for the target's
    shared = {}
    for cache_ref, rows in zip(spec.borrowed, (batch.k_cache, batch.v_cache), strict=True):
        array = np.zeros((slots, TARGET.num_kv_heads, 73, TARGET.head_dim), np.float32)
        array[:, :, : rows.shape[2]] = rows.numpy()
        shared[cache_ref.cache] = array
    if backend == "reference":
        return registry.backend(backend).load(replace(job, owners={"target": SimpleNamespace(caches=shared)}))
    for cache in owner.bound:
        if cache.name in {cache_ref.name for cache_ref in spec.borrowed}:
            cache_ref = next(cache_ref for cache_ref in spec.borrowed if cache_ref.name == cache.name)
            cache.buffers.grow(73)
            cache.buffers.view(cache.index)[...] = shared[cache_ref.cache][:, :, : cache.buffers.rows]
    return owner


@pytest.mark.parametrize("backend", ["reference", "onnxruntime"])
def test_blocks_have_the_distributions_that_were_trained(trainable, graph, text, backend):
    """Each block is fed as a chain after its root, as in drafting."""
    drafted = trainable[0](text)
    want = (drafted.states[:] @ drafted.projections[0].T).softmax(-1).detach().numpy()
    engine, starts, got = open_engine(graph, backend, text), [], []
    shift = int(torch.randint(BLOCK, (1, 1), generator=torch.Generator().manual_seed(text.seed)))
    root = 0
    while root < NODES:
        end = min(root + BLOCK - (shift if root == 0 else 0), NODES)
        feeds = {
            specs.TOKENS: text.tokens[:, root:end].numpy(),
            specs.LENGTHS: np.array([root]),
            specs.TARGET_LENGTHS: np.array([root]),
            specs.TEMPERATURE: np.ones(1, np.float32),
        }
        dists = np.array(engine.run(feeds)[specs.NODE_PROBS])[0]
        if root > 0:
            starts.append(root)
            got.append(dists)
        root = end
    assert len(want) == len(starts) >= 4
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs[: len(ours)], atol=2e-5)


@pytest.mark.parametrize("backend", ["reference", "onnxruntime"])
def test_a_chain_is_the_one_that_training_drafts(trainable, graph, text, backend):
    """Prompt in chunks, then step by step."""
    text = replace(text, k_cache=text.k_cache[:, :, :-1], v_cache=text.v_cache[:, :, :-1])  # the root has no row yet
    want = trainable[0].draft(text, 5).tolist()
    rows = GlideRows(open_engine(graph, backend, text, slots=2), 64, 8)
    tokens = text.tokens[0].tolist()
    sequence = TokenSequence(0, tokens, SamplingParams(), frozenset(), None)
    rows.start(0)
    for start in (0, 9, 18):
        rows.prefill(0, sequence, np.array([tokens[start : min(start + 9, NODES - 1)]]), start, {})
    drafts = [int(np.asarray(rows.begin(SimpleNamespace(sequences=[sequence]), [0], {})[specs.CANDIDATES])[0, 0, 0])]
    for depth in range(1, 5):
        ones, nothing = np.ones((1, 1, 1), bool), np.zeros((1, 1), np.int64)
        level = Expansion(depth, np.array([[drafts[-1]]]), ones, nothing, [depth - 1], [[depth]], [[depth - 1]], {})
        outputs = rows.expand(SimpleNamespace(sequences=[sequence]), level)
        drafts.append(int(np.asarray(outputs[specs.CANDIDATES])[0, 0, 0]))
    assert drafts == want


def test_a_drafter_of_another_target_is_refused(trainable):
    for other, what in (
        (ModelDims("llama", 61, 64, 3, 4, 2, 12, 128), "a target's hidden size of 48"),
        (ModelDims("llama", 90, 48, 3, 4, 2, 12, 128), "a vocabulary of 61"),
    ):
        with pytest.raises(RecipeError, match=rf"speculator: .*: got {what}; expected"):
            GlideSource(job(trainable[1]), context(target=other))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", None, r"\(hidden_size\): got None; expected a positive integer"),
        ("attention_bias", True, r"\(attention_bias\): got True; expected False"),
        ("rope_scaling", {"factor": 2.0}, r"\(rope_scaling\): got .*; expected keys that are read"),
        ("rope_parameters", {"rope_theta": "1e4"}, r"\(rope_parameters\.rope_theta\): got '1e4'; expected a number"),
        ("large_rope_theta", [1], r"\(large_rope_theta\): got \[1\]; expected a number"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused(tmp_path, key, value, message):
    (tmp_path / "config.json").write_text(json.dumps({**SIZES.config(), key: value}))
    with pytest.raises(CheckpointError, match=message):
        GlideSource(job(tmp_path), context("random"))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"rms_norm_eps": None, "rope_theta": None, "large_rope_theta": None}, (1e-6, 10000.0, 10000.0)),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, (1e-5, 5e5, 5000.0)),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 2e5}}, (1e-5, 2e5, 5000.0)),
    ],
)
def test_missing_numbers_are_a_llama_configs(tmp_path, changes, wanted):
    (tmp_path / "config.json").write_text(json.dumps({**SIZES.config(), **changes}))
    dims = GlideSource(job(tmp_path), context("random")).dims
    assert (dims.rms_norm_eps, dims.rope_theta, dims.target_rope_theta) == wanted


def test_a_head_of_its_own_is_used(trainable, tmp_path):
    weights = {**trainable[0].drafter.state_dict(), "lm_head.weight": torch.randn(61, 32)}
    write_heads(tmp_path, {**SIZES.config(), "tie_word_embeddings": False}, weights)
    source = GlideSource(job(tmp_path), context())
    source.check()
    model, dims = source.export(lambda stage: None)
    assert any(name.startswith("lm_head") for name in model.graph.initializers)
    assert dims.num_params == sum(t.numel() for t in weights.values())
