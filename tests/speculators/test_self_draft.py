# SPDX-License-Identifier: Apache-2.0
"""Self-drafting without training: the graph is the target's own layers, on a coarser grid, on the target's caches."""

import numpy as np
import pytest

from speccompile.checkpoints.checkpoint import read_dims
from speccompile.core import specs
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.errors import RecipeError
from speccompile.speculators.self_draft.checkpoint import SelfDraftSource, spread
from speccompile.speculators.self_draft.config import DRAFT, SelfDraftConfig, SelfDraftOptions
from tests.lab.graphs import compile_graph

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("cheap_measurements")
NUM_LAYERS = 5


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A Gemma 2 of five layers, every second of which has a window: the kinds of layers are listed in its config."""
    from transformers import AutoModelForCausalLM, Gemma2Config

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(1)
    config = Gemma2Config(
        vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, sliding_window=6, initializer_range=0.2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def source_of(target, num_layers="all", quantization="int4", of_target="none"):
    options = SelfDraftOptions(4, gives_probs=True, num_layers=num_layers)
    job = GraphJob(DRAFT, "target", quantization, options=options)
    context = SourceContext("checkpoint", 64, 8, read_dims(target), GraphJob("target", str(target), of_target))
    return SelfDraftSource(job, context)


def expected_dists(target, tokens, layers):
    """Returns [nodes, vocab] of transformers' model with these layers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
    model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in layers)
    model.config.num_hidden_layers = len(layers)
    model.config.layer_types = [model.config.layer_types[i] for i in layers]
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens), use_cache=False).logits.softmax(-1)[0].numpy()


@pytest.mark.parametrize(("num_layers", "layers"), [("all", (0, 1, 2, 3, 4)), (4, (0, 1, 3, 4)), (2, (0, 4))])
def test_the_graph_is_the_targets_layers_on_its_caches(target, tmp_path, num_layers, layers):
    source = source_of(target, num_layers)
    source.check()
    model, dims = source.export(lambda stage: None)
    spec = source.spec()
    assert dims.num_layers == len(layers) and spec.own_caches == ()
    assert [cache_ref.cache for cache_ref in spec.borrowed] == [n for i in layers for n in specs.cache_names(i)]
    tokens = np.random.default_rng(2).integers(0, 61, (1, 17))
    want = expected_dists(target, tokens, layers)
    for backend in ("reference", "onnxruntime"):
        engine, got = compile_graph(model, spec, tmp_path / backend, backend).open(max_rows=73), []
        for start, end in ((0, 9), (9, 10), (10, 17)):
            feeds = {specs.TOKENS: tokens[:, start:end], specs.LENGTHS: np.array([start])}
            got.append(np.array(engine.run({**feeds, specs.TEMPERATURE: np.ones(1, np.float32)})[specs.NODE_PROBS])[0])
        np.testing.assert_allclose(np.concatenate(got), want, atol=2e-5)  # float32, other orders of sums


def test_layers_left_out_are_spread_between_the_first_and_the_last():
    assert spread(30, 29) == (*range(15), *range(16, 30))
    assert spread(6, 4) == (0, 1, 3, 5) and spread(5, 2) == (0, 4)
    for num_layers in range(2, 40):
        for num in range(2, num_layers + 1):
            kept = spread(num_layers, num)
            assert len(kept) == num and {0, num_layers - 1} <= set(kept) and list(kept) == sorted(kept)


def test_a_draft_that_cannot_be_made_or_is_no_cheaper_is_refused(target):
    with pytest.raises(RecipeError, match=r"num_layers: got 6; expected all, or 2 to 5, the layers of the target"):
        source_of(target, 6)
    with pytest.raises(RecipeError, match=r"speculator\.num_layers: got 1; expected all, or 2 or more"):
        SelfDraftConfig(num_layers=1)
    with pytest.raises(
        RecipeError, match=r"quantization: got int4 with all layers, as the target; expected a draft th"
    ):
        source_of(target, of_target="int4")
    assert source_of(target, 4, of_target="int4").layers == (0, 1, 3, 4)
