# SPDX-License-Identifier: Apache-2.0
"""Self-speculation: the graph is the target's first layers, and whatever they draft, the text is the target's."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from speccompile.checkpoints.checkpoint import read_dims
from speccompile.core import specs
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.errors import CheckpointError, ExportError, RecipeError
from speccompile.export.heads_file import write_heads
from speccompile.export.weights import load_model
from speccompile.speculators.early_exit.checkpoint import ExitSource
from speccompile.speculators.early_exit.config import DRAFT, ExitOptions
from speccompile.speculators.early_exit.config import ExitConfig as Config
from speccompile.speculators.early_exit.model import ExitHead, ExitSizes, replace_norm
from tests.lab.graphs import compile_graph

pytestmark = pytest.mark.usefixtures("cheap_measurements")
NUM_LAYERS = 2
SIZES = ExitSizes(48, 61, NUM_LAYERS, 24)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(target, trained head)."""
    target, head = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    made = ExitHead(SIZES)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    write_heads(head, SIZES.config_from_sizes(), made.state_dict())
    return target, head


def source_of(folders, head, asked=None, weights="checkpoint", model=None):
    options = ExitOptions(4, gives_probs=True, has_head=head, num_exit_layers=asked)
    job = GraphJob(DRAFT, str(model or folders[1]) if head else "target", options=options)
    context = SourceContext(weights, 64, 8, read_dims(folders[0]), GraphJob("target", str(folders[0])))
    return ExitSource(job, context)


def expected_dists(folders, tokens, head, num_layers):
    """Returns [nodes, vocab]: transformers' stream after the first layers, then the head or the final norm."""
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    with torch.no_grad():
        stream = []
        model.model.layers[num_layers - 1].register_forward_hook(
            lambda module, args, out: stream.append(out[0] if isinstance(out, tuple) else out)
        )
        model(input_ids=torch.from_numpy(tokens))
        norm = model.model.norm
        if head:
            from safetensors.torch import load_file

            norm = ExitHead(SIZES)
            norm.load_state_dict({k: v.float() for k, v in load_file(folders[1] / "model.safetensors").items()})
        return model.lm_head(norm(stream[0])).softmax(-1)[0].numpy()


@pytest.mark.parametrize(("head", "asked"), [(False, 1), (False, None), (True, None)])
def test_the_graph_is_the_targets_first_layers(folders, tmp_path, head, asked):
    source = source_of(folders, head, asked)
    source.check()
    model, dims = source.export(lambda stage: None)
    num_layers = asked or NUM_LAYERS
    assert dims.num_layers == num_layers and {cache_ref.cache for cache_ref in source.spec().borrowed} == set(
        source.spec().caches
    )
    tokens = np.random.default_rng(2).integers(0, 61, (1, 17))
    want = expected_dists(folders, tokens, head, num_layers)
    for backend in ("reference", "onnxruntime"):
        engine, got = compile_graph(model, source.spec(), tmp_path / backend, backend).open(max_rows=73), []
        for start, end in ((0, 9), (9, 10), (10, 17)):
            feeds = {specs.TOKENS: tokens[:, start:end], specs.LENGTHS: np.array([start])}
            got.append(np.array(engine.run({**feeds, specs.TEMPERATURE: np.ones(1, np.float32)})[specs.NODE_PROBS])[0])
        np.testing.assert_allclose(np.concatenate(got), want, atol=2e-5)


def test_random_layers_are_those_of_the_random_target(folders):
    """Whatever the number of layers: the target's weights are made first, then cut."""
    draft, _ = source_of(folders, False, 2, "random").export(lambda stage: None)
    theirs = load_model(folders[0], "random").state_dict()
    held = {n: v.const_value.numpy() for n, v in draft.graph.initializers.items() if n.startswith("model.layers")}
    assert {name.split(".")[2] for name in held} == {"0", "1"}
    for name, array in held.items():
        want = theirs[name.removesuffix(".transposed")].numpy()
        assert any(np.array_equal(form, want) for form in (array, array.T))


def test_layers_that_cannot_draft_are_refused(folders, tmp_path):
    with pytest.raises(RecipeError, match=r"num_exit_layers: got 5; expected 1 to 4, the target's layers but its last"):
        source_of(folders, False, 5)
    with pytest.raises(RecipeError, match=r"num_exit_layers: got 3; expected 2, as the head was trained"):
        source_of(folders, True, 3)
    with pytest.raises(RecipeError, match=r"speculator\.num_exit_layers: got 0; expected 1 or more"):
        Config(num_exit_layers=0)
    with pytest.raises(RecipeError, match=r"speculator\.drafts: got sampled with tree: auto; expected auto or greedy"):
        Config(tree="auto", drafts="sampled")
    config = SIZES.config_from_sizes()
    for key, value, error, message in (
        ("hidden_size", 64, RecipeError, "got hidden_size 64; expected 48, as the target has"),
        ("num_exit_layers", "two", CheckpointError, r"\(num_exit_layers\): got 'two'; expected a positive integer"),
        ("rms_norm_eps", "small", CheckpointError, r"\(rms_norm_eps\): got 'small'; expected a number, or none"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(error, match=message):
            source_of(folders, True, weights="random", model=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": None}))
    assert source_of(folders, True, weights="random", model=tmp_path).dims.rms_norm_eps == 1e-5


def test_the_doctor_knows_the_heads_layout(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    source_of(folders, True).check()
    tensors = load_file(folders[1] / "model.safetensors")
    tensors["adapter.up_proj.weight"] = tensors["adapter.up_proj.weight"][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders[1] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"adapter\.up_proj\.weight"):
        source_of(folders, True, model=tmp_path).check()


def test_a_model_without_a_norm_of_that_name_takes_no_head():
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=61, n_embd=48, n_layer=3, n_head=4, n_positions=32)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ExportError, match="GPT2LMHeadModel: got no module `norm` after its layers"):
        replace_norm(model, ExitHead(SIZES))
