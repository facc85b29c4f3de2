# SPDX-License-Identifier: Apache-2.0
"""Drafters as vLLM, the speculators library and NVIDIA store them compute what plain torch computes of their files."""

import json
from dataclasses import replace

import numpy as np
import pytest

from speccompile.core.specs import CANDIDATES, FEATURES, NEXT_FEATURES, TOKENS, hidden_name

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from tests.speculators import eagle_lab as lab  # noqa: E402
from tests.speculators import heads_lab  # noqa: E402
from tests.speculators import test_eagle_graphs as eagle  # noqa: E402
from tests.speculators import test_medusa_heads as medusa  # noqa: E402

KEPT = torch.tensor([39, 4, 0, 17, 8, 30, 22, 5])  # draft tokens in the order of the head's rows
LLAMA = {"rope_scaling": None, "tie_word_embeddings": False, "pretraining_tp": 1, "max_position_embeddings": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("layouts")
    lab.write_target(made / "target")
    return made


def write(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


def eagle_files(variant, held, config, head):
    """The config and the tensors of a variant of EAGLE-1, and the tokens of its head's rows."""
    inner = {**{k: v for k, v in config.items() if k != "bias"}, **LLAMA, "eagle_fc_bias": True}
    nested = {"model_type": "eagle", "model": inner, "truncated_vocab_size": len(KEPT)}
    if variant == "script":
        return {"model_type": "eagle", "model": inner}, {**held, "lm_head.weight": head}, None
    if variant == "cut":
        wrapped = {k if k.startswith("fc") else f"model.{k}": t for k, t in held.items()}
        return {**inner, **nested}, {**wrapped, "lm_head.weight": head, "token_map": KEPT}, KEPT
    if variant == "rows":
        return nested, {**held, "lm_head.weight": head[KEPT], "token_map": KEPT.int()}, KEPT
    if variant == "no-head":
        return nested, {**held, "token_map": KEPT}, KEPT
    names = {k: k.replace("fc.", "fusion_fc.", 1).replace("layers.0.", "transformer.") for k in held}
    own = {"speculators_model_type": "eagle", "layernorms": False, "fusion_bias": True}
    layer = {k: v for k, v in config.items() if k not in ("bias", "architectures")}
    kept = {names[k]: t for k, t in held.items() if "embed" not in k}
    return {**own, "transformer_layer_config": layer}, kept, None


@pytest.mark.parametrize("variant", ["script", "cut", "rows", "no-head", "speculators"])
def test_eagle_drafts_with_the_head_and_the_tokens_of_its_files(folder, tmp_path, variant):
    tables = load_file(folder / "target" / "model.safetensors")
    plain = lab.write_eagle(tmp_path / "plain")
    held, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    held["embed_tokens.weight"] = tables["model.embed_tokens.weight"]
    save_file(held, plain / "model.safetensors")
    head = torch.randn(lab.VOCAB, lab.HIDDEN, generator=torch.Generator().manual_seed(6))
    made, tensors, tokens = eagle_files(variant, held, config, head)
    write(folder / variant, made, tensors)
    source = eagle.eagle_source(folder, variant)
    source.check()
    assert source.needs_tables is (variant in ("no-head", "speculators"))
    features, num = eagle.features_of(lab.HIDDEN), len(eagle.TOKENS_READ)
    [engine] = lab.compiled(source, tmp_path, "reference")
    chain, _ = eagle.drafted(engine, features)
    mask = torch.ones(num, num, dtype=torch.bool).tril()
    own = lab.eagle_forward(
        plain, torch.tensor(eagle.TOKENS_READ), torch.from_numpy(features), mask, torch.arange(num)
    )[0]
    eagle.assert_close(chain[NEXT_FEATURES][1:], own[2:])
    rows = tables["lm_head.weight"] if variant in ("no-head", "speculators") else head
    wanted = (own[-1] @ (rows if tokens is None else rows[tokens]).T).topk(4).indices
    assert chain[CANDIDATES].ravel().tolist() == (wanted if tokens is None else tokens[wanted]).tolist()


@pytest.mark.parametrize("rows", ["whole", "cut"])
@pytest.mark.parametrize("head", ["own", "shared", "first", "target"])
def test_medusa_heads_draft_the_tokens_of_their_map(tmp_path, head, rows):
    held, vocab, kept = medusa.weights(), medusa.VOCAB, KEPT % medusa.VOCAB
    lm_heads = {f"lm_heads.{i}.weight": torch.from_numpy(held[f"{i}.2.weight"]) for i in range(3)}
    shared = torch.randn(vocab, medusa.HIDDEN, generator=torch.Generator().manual_seed(6))
    medusa.fakes.make_checkpoint(tmp_path / "target", hidden=medusa.HIDDEN)
    lm_heads = {"own": lm_heads, "shared": {"lm_head.weight": shared}, "first": {"lm_heads.0.weight": shared}}.get(
        head, {}
    )
    stored = {k: t[kept] if rows == "cut" else t for k, t in lm_heads.items()}
    for name, array in held.items():
        i, j, _, *rest = name.split(".")
        stored |= {f"blocks.{i}.layers.{j}.{rest[0]}": torch.from_numpy(array)} if rest else {}
    sizes = {"hidden_size": medusa.HIDDEN, "vocab_size": vocab, "truncated_vocab_size": len(kept)}
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 3, "num_hidden_layers": 2, **sizes}
    write(tmp_path / "in", {**config, "original_lm_head": head != "own"}, {**stored, "token_map": kept})
    source = medusa.open_source(tmp_path / "in", target=str(tmp_path / "target"), num_candidates=5)
    if head == "target":  # vLLM does not load them without
        with pytest.raises(medusa.CheckpointError, match=r"lm_heads.0.weight\): got no such key"):
            source.check()
        return
    source.check()
    given = heads_lab.feeds(medusa.HIDDEN, vocab)
    del given[TOKENS]
    outputs = lab.compiled(source, tmp_path, "reference", slots=4)[0].run(given)
    for slot, state in enumerate(heads_lab.starts(given)):
        logits = medusa.logits_of(held, state, None if head == "own" else shared.double().numpy())
        for i, row in enumerate(logits):
            best = heads_lab.likeliest(row[kept.numpy()], 5)[0]
            np.testing.assert_array_equal(outputs[CANDIDATES][slot, i], kept.numpy()[best])


def test_eagle3_reads_the_norms_of_an_object_and_the_targets_head(folder, tmp_path):
    tables = load_file(folder / "target" / "model.safetensors")
    heads = lab.random_eagle3(lab.config_of(draft_vocab_size=lab.VOCAB, norm_output=True))
    norm = {"input_norm.weight": torch.rand(3 * lab.HIDDEN, generator=torch.Generator().manual_seed(3)) + 0.5}
    heads = replace(heads, tensors={**heads.tensors, **norm, "lm_head.weight": tables["lm_head.weight"]})
    ids = heads.config["eagle_aux_hidden_state_layer_ids"]
    inner = {"eagle_aux_hidden_state_layer_ids": ids, "norm_before_fc": True, "return_hidden_post_norm": True}
    config = {k: v for k, v in heads.config.items() if k != "norm_output" and "layer_ids" not in k}
    tensors = {k.replace("midlayer", "layers.0"): t for k, t in heads.tensors.items() if k != "lm_head.weight"}
    write(folder / "nvidia", {**config, "draft_vocab_size": None, "eagle_config": inner}, tensors)
    source, features = eagle.eagle3_source(folder, "nvidia"), eagle.features_of(lab.HIDDEN)
    source.check()
    chain, tree = eagle.drafted(lab.compiled(source, tmp_path, "reference")[0], features)
    streams = torch.randn(3, 1, 4, lab.HIDDEN, generator=torch.Generator().manual_seed(4))
    [fusion] = lab.compiled(eagle.eagle3_source(folder, "nvidia", "Fusion"), tmp_path, "reference")
    fused = fusion.run({hidden_name(i): x.numpy() for i, x in zip(lab.STREAMS, streams, strict=True)})[FEATURES]
    with torch.no_grad():
        own, nodes = eagle.by_oracle(heads, tables["model.embed_tokens.weight"], features)
        eagle.assert_close(chain[NEXT_FEATURES][1:], own[2:])
        wanted = heads.logits(nodes[[3, 1]]).argsort(-1, descending=True)[:, :4]
        assert np.array_equal(tree[CANDIDATES], wanted.numpy())
        eagle.assert_close(np.asarray(fused), heads.fuse(list(streams)))
