# SPDX-License-Identifier: Apache-2.0
"""Block drafters under training: one text learnt by heart, the exported graph's numbers, and what is written."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from speccompile.checkpoints.checkpoint import read_dims
from speccompile.core import registry
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.core.specs import CANDIDATES, FEATURE_NODES, FEATURES, LENGTHS, START_NODES, TOKENS, hidden_name
from speccompile.doctor.doctor import examine
from speccompile.errors import RecipeError
from speccompile.graph_kinds.blocks import PAIR_SCORES
from speccompile.training.losses import LossOptions, TrainedModule
from speccompile.training.stage import make_optimizer, measures_from_sums
from speccompile.training.states import batch_from_outputs
from speccompile.training.target import Target
from tests.speculators import eagle_lab
from tests.training.test_trainables import shake

METHOD = registry.method("dflash")
LAYERS, BLOCK, NUM = [1, 3, 5], 5, 6
SMALL = {"layers": tuple(LAYERS), "num_layers": 2, "intermediate_size": 24, "block_size": BLOCK, "mask_token_id": 37}
FORMS = {
    "two": {"conv_group_size": 4, "selector_rank": 5, "selector_top_k": NUM},
    "one": {"conv_kernel_size": 0, "selector_rank": 0, "num_layers": 1},
    "causal": {"conv_group_size": 8, "selector_rank": 3, "selector_top_k": NUM, "is_causal": True, "num_layers": 1},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return Target(eagle_lab.write_target(tmp_path_factory.mktemp("blocks") / "target"), torch.float32)


def make(target, form, **changes):
    config = METHOD.TrainingConfig(**{**SMALL, **FORMS[form], **changes})
    torch.manual_seed(2)
    parts = target.parts(torch.ones(target.dims.vocab_size, dtype=torch.int64))
    trainer = registry.trainer("dflash")
    return trainer.make(config, parts, None), trainer.needs(config, target.config)


@pytest.mark.parametrize("form", ["one", "two"])
def test_one_text_is_learnt_by_heart(form, target):
    trainable, needs = make(target, form, starts=0.5, num_layers=1)
    module = TrainedModule(trainable, LossOptions(1.0, 0.8, torch.float32), target.dims.vocab_size)
    tokens = torch.randint(3, 36, (1, 24), generator=torch.Generator().manual_seed(0))
    held, optimizer = target.run(tokens, needs), make_optimizer(module, 0.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    for seed in range(70):
        loss, sums = module(batch_from_outputs(tokens, held, seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if seed == 0:
            first = measures_from_sums(sums)["acceptance_length"]
    _, sums = module(batch_from_outputs(tokens, held, 100))
    assert first < 2.5 and measures_from_sums(sums)["acceptance_length"] > 4.2


def test_bfloat16_arithmetic_has_nearly_the_loss_and_the_gradients_of_float32(target):
    trainable, needs = make(target, "two")
    shake(trainable)
    tokens = torch.randint(3, 36, (2, 16), generator=torch.Generator().manual_seed(4))
    batch, found = batch_from_outputs(tokens, target.run(tokens, needs), 0), []
    for dtype in (torch.float32, torch.bfloat16):
        module = TrainedModule(trainable, LossOptions(1.0, 0.8, dtype), target.dims.vocab_size)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss, _ = module(batch)
        names, parameters = zip(*trainable.named_parameters(), strict=True)
        found.append((float(loss.detach()), torch.autograd.grad(loss, parameters)))
    assert found[1][0] == pytest.approx(found[0][0], rel=0.03)
    for name, wide, narrow in zip(names, found[0][1], found[1][1], strict=True):
        assert wide.abs().max() > 0, name
        assert torch.nn.functional.cosine_similarity(wide.flatten(), narrow.flatten(), 0) > 0.97, name


@pytest.mark.parametrize("form", FORMS)
def test_the_trained_network_is_the_exported_graph(form, target, tmp_path):
    """From the written file: features, candidates and scores of a block over a text's first positions."""
    trainable, needs = make(target, form)
    shake(trainable)
    with torch.no_grad():
        for parameter in trainable.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    (tmp_path / "made").mkdir()
    trainable.save(tmp_path / "made")
    config = METHOD.Config(str(tmp_path / "made"), tree="chain", num_draft_tokens=BLOCK - 1, slot_candidates=NUM)
    context = SourceContext(
        "checkpoint", 40, BLOCK, read_dims(target.folder), GraphJob("target", str(target.folder), options=None)
    )
    draft, fusion, _ = (registry.find_class(job.source)(job, context) for job in METHOD.graph_jobs(config))
    rows = 40 + BLOCK + 1 + draft.spec().rows_written_ahead
    engine = eagle_lab.compiled(draft, tmp_path / "draft", rows=rows)[0]
    tokens = torch.randint(3, 36, (1, 12), generator=torch.Generator().manual_seed(1))
    held = target.run(tokens[:, :-1], needs)
    batch = batch_from_outputs(tokens, held, 0)
    with torch.no_grad():
        wanted = trainable.heads([batch.layers[i] for i in LAYERS])
    features = wanted.numpy()
    if form == "one":  # it is the same in all forms
        fuse = eagle_lab.compiled(fusion, tmp_path / "fusion")[0]
        features = np.array(fuse.run({hidden_name(i): batch.layers[i].numpy() for i in LAYERS})[FEATURES])
        np.testing.assert_allclose(features, wanted.numpy(), rtol=0, atol=1e-5 * float(wanted.abs().max()))
    feeds = {LENGTHS: np.array([0]), FEATURES: features, FEATURE_NODES: np.arange(11)[None]}
    outputs = engine.run({**feeds, TOKENS: tokens[:, -1:].numpy(), START_NODES: np.array([10])})
    candidates, scores = np.array(outputs[CANDIDATES])[0], np.array(outputs[PAIR_SCORES])[0]
    heads, num = trainable.heads, BLOCK - 1
    with torch.no_grad():
        states = trainable._blocks(wanted, tokens[:, -1:], torch.tensor([[11]]), num)[0, 0]
        top, best = (states @ trainable.lm_head.T).topk(NUM)
        np.testing.assert_array_equal(candidates, best.numpy())
        made = top[:, None]
        if form != "one":
            before = torch.cat((tokens[0, -1:].expand(1, NUM), best[:-1]))
            pairs = [heads.pair_scores(states, before[:, i], best) for i in range(NUM)]
            made = made + torch.stack(pairs, 1)
            assert float(torch.stack(pairs).abs().max()) > 0.01
    np.testing.assert_allclose(scores, made.numpy(), rtol=0, atol=1e-5 * float(made.abs().max()))
    # The walk that training measures is the graph's.
    row, walk = 0, []
    for slot in range(num):
        row = int(scores[slot, 0 if form == "one" else row].argmax())
        walk.append(int(candidates[slot, row]))
    assert trainable.draft(batch, num).tolist() == walk


def test_the_file_is_the_published_layout(target, tmp_path):
    trainable, _ = make(target, "two")
    shake(trainable)  # the doctor warns of weights that are all zero
    trainable.save(tmp_path)
    held, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    layer = {
        *(f"self_attn.{p}_proj.weight" for p in "qkvo"), "self_attn.q_norm.weight", "self_attn.k_norm.weight",
        *(f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
        *(f"{p}_conv.{part}" for p in ("attention", "mlp") for part in ("base_kernel", "kernel_projection.weight")),
        "input_layernorm.weight", "post_attention_layernorm.weight",
    }  # fmt: skip
    codebooks = {f"candidate_selector.{p}_codebook" for p in ("predecessor", "successor")}
    whole = {"fc.weight", "hidden_norm.weight", "norm.weight", "candidate_selector.hidden_projection.weight"}
    assert set(held) == whole | codebooks | {f"layers.{i}.{name}" for i in range(2) for name in layer}
    assert held["layers.0.attention_conv.base_kernel"].shape == (2, 2, 32)
    assert held["layers.0.mlp_conv.kernel_projection.weight"].shape == (2 * 2 * 32 // 4, 32)
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    assert config["architectures"] == ["DFlash2DraftModel"] and config["is_causal"] is False
    assert config["dflash_config"] == {
        "block_size": BLOCK, "mask_token_id": 37, "target_layer_ids": LAYERS, "conv_kernel_size": 2,
        "conv_group_size": 4, "selector_rank": 5, "selector_top_k": NUM,
    }  # fmt: skip
    report = examine(str(tmp_path), str(target.folder))
    assert (report.format, report.findings) == ("dflash/ours", ())


def test_a_drafter_begins_as_the_targets_last_layers_without_pair_scores(target):
    trainable, _ = make(target, "two", intermediate_size=0)
    heads, layers = trainable.heads, target.model.model.layers
    for own, whose in zip(heads.layers, layers[-2:], strict=True):
        assert torch.equal(own.mlp.up_proj.weight, whose.mlp.up_proj.weight)
        assert torch.equal(own.self_attn.q_proj.weight, whose.self_attn.q_proj.weight)
    x = torch.randn(1, 4, 32)
    conv = heads.layers[0].attention_conv
    assert torch.equal(conv(x, conv.kernels(x), 0), x)
    states, tokens = torch.randn(3, 32), torch.arange(3)
    assert not heads.pair_scores(states, tokens, torch.arange(6).reshape(3, 2)).any()


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"block_size": 1}, "block_size"),
        ({"num_layers": 0}, "num_layers"),
        ({"conv_kernel_size": -1}, "conv_kernel_size"),
        ({"starts": 0.0}, "starts"),
    ],
)
def test_settings_out_of_range_are_refused(fields, where):
    with pytest.raises(RecipeError) as caught:
        METHOD.TrainingConfig(**fields)
    assert caught.value.where == f"training.heads.{where}"


def test_a_target_without_padding_needs_the_masks_token(target):
    with pytest.raises(RecipeError) as caught:
        make(target, "two", mask_token_id=-1)
    assert caught.value.where == "training.heads.mask_token_id"
