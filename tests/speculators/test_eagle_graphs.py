# SPDX-License-Identifier: Apache-2.0
"""The graphs of EAGLE drafters against plain torch: chains in several steps, trees, distributions, variants."""

import json
import shutil

import numpy as np
import pytest

from speccompile.checkpoints.checkpoint import read_dims
from speccompile.core.jobs import CandidateOptions, GraphJob, SourceContext
from speccompile.core.specs import (
    CANDIDATE_PROBS,
    CANDIDATES,
    FEATURE_NODES,
    FEATURES,
    LENGTHS,
    NEXT_FEATURES,
    NODE_PROBS,
    SCORED_NODES,
    TEMPERATURE,
    TOKENS,
    TREE_MASK,
    hidden_name,
)
from speccompile.errors import CheckpointError, ExportError, RecipeError

torch = pytest.importorskip("torch")

from tests.speculators import eagle_lab as lab  # noqa: E402

BACKENDS = ("reference", "onnxruntime")
TOLERANCE = 1e-5  # of the largest number: float32 sums in another order differ by about 1e-6
TOKENS_READ, TREE = [5, 1, 33, 7, 20], [11, 2, 30, 8]  # a chain, and two branches after it: 11 (2, 30) and 8
SEEN = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]  # by node of the tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("eagle")
    lab.write_target(made / "target")
    return made


def context(folder, weights="checkpoint"):
    target = folder / "target"
    return SourceContext(weights, 64, 6, read_dims(target), GraphJob("target", str(target)))


def eagle3_source(folder, name, kind="Draft", weights="checkpoint", layers=None, dists=False):
    from speccompile.drafting.feature_config import FusionOptions
    from speccompile.speculators.eagle3 import checkpoint as source
    from speccompile.speculators.eagle3.config import DraftOptions

    made = DraftOptions(4, dists, layers, max_parallel=4) if kind == "Draft" else FusionOptions(layers)
    job = GraphJob(kind.lower(), str(folder / name), options=made)
    return getattr(source, f"{kind}Source")(job, context(folder, weights))


def eagle_source(folder, name, weights="checkpoint"):
    from speccompile.speculators.eagle.checkpoint import DraftSource

    job = GraphJob("draft", str(folder / name), options=CandidateOptions(4, gives_probs=False))
    return DraftSource(job, context(folder, weights))


def assert_close(got, wanted):
    wanted = np.asarray(wanted)
    assert np.abs(got - wanted).max() <= TOLERANCE * np.abs(wanted).max()


def features_of(width, seed=0):
    return np.random.default_rng(seed).normal(size=(len(TOKENS_READ), width)).astype(np.float32)


def drafted(engine, features, warp=None):
    """A chain read in two steps (the second in slot 1 of a ragged batch), then a tree after it on own features.

    Returns:
        Outputs of the second step and of the tree, of slot 1.
    """
    split = 2
    first = {TOKENS: np.array([TOKENS_READ[:split]]), LENGTHS: np.array([0]), FEATURES: features[None]}
    engine.run({**first, FEATURE_NODES: np.arange(split)[None], SCORED_NODES: np.array([[0]])}, first_slot=1)
    rest = len(TOKENS_READ) - split
    tokens = np.array([[9] * rest, TOKENS_READ[split:]])
    both = np.stack((np.ones_like(features), features[::-1]))  # rows are picked, so their order is free
    rows = np.array([[0, 1, 2], [len(features) - 1 - i for i in range(split, len(features))]])
    feeds = {TOKENS: tokens, LENGTHS: np.array([0, split]), FEATURES: both, FEATURE_NODES: rows, **(warp or {})}
    outputs = engine.run({**feeds, SCORED_NODES: np.array([[0], [rest - 1]])})
    chain = {name: np.asarray(value)[1].copy() for name, value in outputs.items()}
    told = np.asarray(outputs[NEXT_FEATURES]).copy()
    # Both first nodes read the root's own feature, row `rest` of the outputs; the others' parent is node 0.
    top = engine.run(
        {
            TOKENS: np.array([[1], TREE[:1]]),
            LENGTHS: np.array([0, len(TOKENS_READ)]),
            FEATURES: told,
            FEATURE_NODES: np.array([[0], [rest]]),
            **(warp or {}),
        }
    )
    told = np.asarray(top[NEXT_FEATURES]).copy()
    mask = np.stack((np.eye(4, dtype=bool), np.array(SEEN, dtype=bool)))
    outputs = engine.run(
        {
            TOKENS: np.array([[1] * 4, TREE]),
            LENGTHS: np.array([0, len(TOKENS_READ)]),
            TREE_MASK: mask,
            FEATURES: told,
            FEATURE_NODES: np.array([[0] * 4, [0, 1, 1, 0]]),
            SCORED_NODES: np.array([[0, 0], [3, 1]]),
            **(warp or {}),
        }
    )
    return chain, {name: np.asarray(value)[1] for name, value in outputs.items()}


def by_oracle(oracle, embeddings, features, window=99):
    """Returns the same from whole rows: own features of the chain [nodes, hidden], and of the tree's nodes."""
    num, tokens = len(TOKENS_READ), torch.tensor(TOKENS_READ + TREE)
    positions = torch.tensor([*range(num), num, num + 1, num + 1, num])
    seen = torch.ones(num + 4, num + 4, dtype=torch.bool).tril()
    seen[num:, num:] = torch.tensor(SEEN).bool()
    seen &= positions[:, None] - positions < window

    def own(read):
        count = len(read)
        return oracle.own(embeddings[tokens[:count]], read, positions[:count], seen[:count, :count])

    chain = own(torch.from_numpy(features))
    first = own(torch.cat((torch.from_numpy(features), chain[-1:])))[-1:]
    nodes = own(torch.cat((torch.from_numpy(features), chain[-1:], first, first, chain[-1:])))[num:]
    return chain, nodes


@pytest.fixture(scope="module")
def reduced(folder):
    """A drafter with a draft vocabulary, and its folder; embeddings are the target's."""
    drafter = lab.random_eagle3(lab.config_of(norm_before_residual=True))
    lab.write_eagle3(folder / "reduced", drafter)
    return drafter


def test_eagle3_graph_drafts_what_the_heads_do(folder, reduced, tmp_path):
    from speccompile.checkpoints.target_tables import read_tables

    source = eagle3_source(folder, "reduced", dists=True)
    source.check()
    features = features_of(lab.HIDDEN)
    heat = {TEMPERATURE: np.full(2, 0.7, np.float32)}
    d2t = reduced.target_tokens().numpy()
    with torch.no_grad():
        own, nodes = by_oracle(reduced, read_tables(context(folder)).embeddings, features)
        logits = [reduced.logits(state).double() for state in (own[-1:], nodes[[3, 1]])]
    for engine in lab.compiled(source, tmp_path, *BACKENDS):
        chain, tree = drafted(engine, features, heat)
        assert_close(chain[NEXT_FEATURES], torch.cat((torch.from_numpy(features[2:3]), own[2:])))
        assert_close(tree[NEXT_FEATURES], torch.cat((own[-1:], nodes)))
        for got, raw in zip((chain, tree), logits, strict=True):
            order = raw.argsort(-1, descending=True)[:, :4].numpy()
            assert np.array_equal(got[CANDIDATES], d2t[order])
            assert_close(got[CANDIDATE_PROBS], np.take_along_axis(raw.softmax(-1).numpy(), order, -1))
            dists = np.zeros((len(raw), lab.VOCAB))
            dists[:, d2t] = (raw / 0.7).softmax(-1).numpy()
            assert_close(got[NODE_PROBS], dists)
            assert not got[NODE_PROBS][:, np.setdiff1d(np.arange(lab.VOCAB), d2t)].any()
        if engine.__class__.__name__ == "OrtEngine":  # a greedy batch gets a dummy distribution
            assert drafted(engine, features)[0][NODE_PROBS].shape == (1, 1)


def test_eagle_graph_drafts_what_the_published_layers_do(folder, tmp_path):
    from speccompile.checkpoints.target_tables import read_tables

    name, num = "eagle", len(TOKENS_READ)
    lab.write_eagle(folder / name, num_layers=2)
    source = eagle_source(folder, name)
    source.check()
    features = features_of(lab.HIDDEN)
    told, text = torch.from_numpy(features), torch.tensor(TOKENS_READ + TREE)
    mask = torch.zeros(num + 4, num + 4, dtype=torch.bool)
    mask[:num, :num] = torch.ones(num, num, dtype=torch.bool).tril()
    mask[num:, :num], mask[num:, num:] = True, torch.tensor(SEEN).bool()
    positions = torch.tensor([*range(num), num, num + 1, num + 1, num])

    def forward(count):
        return lab.eagle_forward(folder / name, text[:count], told, mask[:count, :count], positions[:count])[0]

    chain_wanted = forward(num)
    told = torch.cat((told, chain_wanted[-1:]))
    first = forward(num + 1)[-1:]
    told = torch.cat((told, first, first, chain_wanted[-1:]))
    nodes = forward(num + 4)
    logits = nodes[[num + 3, num + 1]] @ read_tables(context(folder)).lm_head.T
    for engine in lab.compiled(source, tmp_path, *BACKENDS):
        chain, tree = drafted(engine, features)
        assert_close(chain[NEXT_FEATURES][1:], chain_wanted[2:])
        assert_close(tree[NEXT_FEATURES][1:], nodes[num:])
        assert np.array_equal(tree[CANDIDATES], logits.argsort(-1, descending=True)[:, :4].numpy())


@pytest.mark.parametrize("variant", ["plain", "norm_before_fc", "fc_norm"])
def test_fusion_follows_the_variants_of_the_config(folder, tmp_path, variant):
    heads = lab.random_eagle3(lab.config_of(draft_vocab_size=lab.VOCAB))
    rng = torch.Generator().manual_seed(2)
    streams = [torch.randn(1, 3, lab.HIDDEN, generator=rng) for _ in lab.STREAMS]
    weights = torch.rand(3 * lab.HIDDEN, generator=rng)
    extra, config, joined = {}, {}, torch.cat(streams, -1)

    def normed(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + heads.config["rms_norm_eps"])

    if variant == "norm_before_fc":
        extra, config, joined = {"input_norm.weight": weights}, {variant: True}, normed(joined) * weights
    if variant == "fc_norm":
        extra = {f"fc_norm.{i}.weight": part for i, part in enumerate(weights.chunk(3))}
        joined = torch.cat([normed(x) for x in streams], -1) * weights
    lab.write_eagle3(folder / variant, heads, extra, **config)
    source = eagle3_source(folder, variant, "Fusion")
    source.check()
    assert source.dims.layers == lab.STREAMS
    [engine] = lab.compiled(source, tmp_path)
    feeds = {hidden_name(i): x.numpy() for i, x in zip(lab.STREAMS, streams, strict=True)}
    got = np.asarray(engine.run(feeds)[FEATURES])
    assert_close(got, joined @ heads.tensors["fc.weight"].T)


@pytest.mark.parametrize("rank", [0, 8])
def test_eagle_3_1_drafts_as_it_is_trained(folder, tmp_path, rank):
    from speccompile.checkpoints.target_tables import read_tables

    heads, name = lab.random_eagle3(lab.config_of(fc_norm=True, norm_output=True, head_rank=rank)), f"trained{rank}"
    lab.write_eagle3(folder / name, heads)
    features, streams = features_of(lab.HIDDEN), torch.randn(3, 1, 4, lab.HIDDEN)
    chain, tree = drafted(lab.compiled(eagle3_source(folder, name), tmp_path)[0], features)
    [fusion] = lab.compiled(eagle3_source(folder, name, "Fusion"), tmp_path)
    fused = fusion.run({hidden_name(i): x.numpy() for i, x in zip(lab.STREAMS, streams, strict=True)})[FEATURES]
    with torch.no_grad():
        own, nodes = by_oracle(heads, read_tables(context(folder)).embeddings, features)
        assert_close(chain[NEXT_FEATURES][1:], own[2:])
        assert_close(tree[NEXT_FEATURES][1:], nodes)
        logits = heads.logits(nodes[[3, 1]])
        wanted = heads.target_tokens()[logits.argsort(-1, descending=True)[:, :4]]
        assert np.array_equal(tree[CANDIDATES], wanted.numpy())
        assert_close(np.asarray(fused), heads.fuse(list(streams)))


def test_a_window_counts_positions_on_the_path_alone(folder, tmp_path):
    """Neither other branches of a tree nor rows of rejected drafts age it."""
    from speccompile.checkpoints.target_tables import read_tables

    heads = lab.random_eagle3(lab.config_of())
    lab.write_eagle3(folder / "windowed", heads, layer_types=["sliding_attention"], sliding_window=3)
    source, features = eagle3_source(folder, "windowed"), features_of(lab.HIDDEN)
    source.check()
    chain, tree = drafted(lab.compiled(source, tmp_path)[0], features)
    embeddings = read_tables(context(folder)).embeddings
    with torch.no_grad():
        own, nodes = by_oracle(heads, embeddings, features, window=3)
        assert_close(chain[NEXT_FEATURES][1:], own[2:])
        assert_close(tree[NEXT_FEATURES][1:], nodes)
        for window in (2, 4):
            _, others = by_oracle(heads, embeddings, features, window)
            assert (others[-1] - nodes[-1]).abs().max() > 100 * TOLERANCE


def test_wide_drafters_have_embeddings_of_their_own(folder, tmp_path):
    heads = lab.random_eagle3(lab.config_of(hidden_size=48, head_dim=12))
    own = torch.randn(lab.VOCAB, 48, generator=torch.Generator().manual_seed(4))
    lab.write_eagle3(folder / "wide", heads, {"embed_tokens.weight": own})
    source = eagle3_source(folder, "wide")
    source.check()
    assert not source.needs_tables and not any(name.startswith("target/") for name in source.digests())
    features = features_of(48)
    chain, _ = drafted(lab.compiled(source, tmp_path)[0], features)
    with torch.no_grad():
        wanted, _ = by_oracle(heads, own, features)
    assert_close(chain[NEXT_FEATURES][1:], wanted[2:])


def test_weights_are_counted_before_they_are_read(folder, reduced):
    from speccompile.speculators.eagle import model as eagle
    from speccompile.speculators.eagle3 import model as eagle3

    lab.write_eagle(folder / "counted", num_layers=2, bias=False)
    draft, fusion = eagle3_source(folder, "reduced"), eagle3_source(folder, "reduced", "Fusion")
    older = eagle_source(folder, "counted")
    for source, module in (
        (draft, eagle3.make_body(draft.config, draft.dims, None, None)),
        (fusion, eagle3.make_fusion(fusion.config, fusion.dims, None)),
        (older, eagle.make_body(older.config, older.dims, None, None)),
    ):
        assert source.counts().num_params == sum(p.numel() for p in module.parameters())


def test_random_weights_need_a_config_alone_and_layers_follow_the_target(folder, tmp_path):
    alone = tmp_path / "config"
    alone.mkdir()
    held = json.loads(
        (lab.write_eagle3(tmp_path / "w", lab.random_eagle3(lab.config_of())) / "config.json").read_text()
    )
    (alone / "config.json").write_text(json.dumps({**held, "eagle_aux_hidden_state_layer_ids": [2, 16, 29]}))
    shutil.copytree(folder / "target", tmp_path / "target")
    source = eagle3_source(tmp_path, "config", weights="random")
    assert source.dims.layers == (1, 2, 3)  # no 28 among seven
    model, _ = source.export(lambda stage: None)
    assert any(n.op_type == "CachedAttention" for n in model.graph)


def write_deepspec(folder, num_layers=1, layers=(0, 1, 3, 4, 6)):
    """DeepSpec's layout: norms of queries and keys, layers by their outputs, the whole vocabulary."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(11)
    heads = lab.random_eagle3(lab.config_of(draft_vocab_size=lab.VOCAB, num_hidden_layers=num_layers))
    lab.write_eagle3(folder, heads, {"embed_tokens.weight": torch.randn(lab.VOCAB, lab.HIDDEN)})
    held = load_file(folder / "model.safetensors")
    held = {k.replace("midlayer", "layers.0"): t for k, t in held.items() if k not in ("d2t", "t2d")}
    held["fc.weight"] = torch.randn(lab.HIDDEN, len(layers) * lab.HIDDEN) * 0.3
    held |= {f"layers.{i}.self_attn.{p}_norm.weight": torch.rand(8) + 0.5 for i in range(num_layers) for p in "qk"}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in config.items() if "layer_ids" not in k and k != "draft_vocab_size"}
    config |= {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": list(layers)}
    (folder / "config.json").write_text(json.dumps(config))
    return held, config


@pytest.mark.parametrize("num_layers", [1, 2])
def test_norms_of_queries_and_keys_and_five_layers_of_the_target(folder, tmp_path, num_layers):
    from tests.export.eagle3_reference import target_logits

    name = f"deepspec-{num_layers}"
    held, config = write_deepspec(folder / name, num_layers)
    draft, fusion = eagle3_source(folder, name), eagle3_source(folder, name, "Fusion")
    draft.check()
    layers = tuple(config["target_layer_ids"])
    assert draft.dims.layers == layers
    assert [t.name for t in fusion.spec().inputs] == [hidden_name(i) for i in layers]
    states = torch.randn(len(TOKENS_READ), 5 * lab.HIDDEN, generator=torch.Generator().manual_seed(2))
    [fused] = lab.compiled(fusion, tmp_path)
    streams = {hidden_name(i): x[None].numpy() for i, x in zip(layers, states.chunk(5, -1), strict=True)}
    features = np.asarray(fused.run(streams)[FEATURES])[0]
    assert_close(features, states @ held["fc.weight"].T)
    wanted = target_logits(config, held, "layers.0", torch.tensor(TOKENS_READ), states)
    for engine in lab.compiled(draft, tmp_path, *BACKENDS):
        chain, _ = drafted(engine, features)
        assert np.asarray(chain[CANDIDATES]).ravel().tolist() == wanted[-1].topk(4).indices.tolist()
    # The norms matter.
    plain = {k: t for k, t in held.items() if f"{num_layers - 1}.self_attn.q_norm" not in k}
    other = target_logits(config, plain, "layers.0", torch.tensor(TOKENS_READ), states)
    assert (other[-1] - wanted[-1]).abs().max() > 100 * TOLERANCE * wanted[-1].abs().max()


REFUSED_CONFIGS = [
    ({"eagle_config": {"use_aux_hidden_state": False}}, CheckpointError, r"use_aux_hidden_state\): got False"),
    ({"sliding_window": 512}, CheckpointError, r"sliding_window\): got None and a window of 512 tokens"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ExportError, "rope type 'dynamic'"),
    ({"target_hidden_size": 64}, RecipeError, "target states of 64; expected 32"),
    ({"vocab_size": 48}, RecipeError, "a vocabulary of 48 tokens; expected 40"),
    ({"num_attention_heads": 0}, CheckpointError, r"\(num_attention_heads\): got 0"),
    ({"ptd_token_id": 40}, CheckpointError, r"\(ptd_token_id or .*\): got 40; expected a token of the 40"),
    ({"parallel_drafting": True}, CheckpointError, r"\(ptd_token_id or .*\): got None"),
]


@pytest.mark.parametrize(("config", "error", "message"), REFUSED_CONFIGS)
def test_variants_that_are_not_computed_are_refused_by_name(folder, tmp_path, config, error, message):
    held = json.loads(
        (lab.write_eagle3(tmp_path / "w", lab.random_eagle3(lab.config_of())) / "config.json").read_text()
    )
    (tmp_path / "w" / "config.json").write_text(json.dumps({**held, **config}))
    shutil.copytree(folder / "target", tmp_path / "target")
    with pytest.raises(error, match=message):
        eagle3_source(tmp_path, "w", weights="random")


def test_biases_of_queries_keys_and_values_are_those_of_every_layer(folder):
    config = lab.config_of(num_hidden_layers=2, qkv_bias=True)
    widths = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    stems = ("midlayer", "layers.1")
    biases = {f"{s}.self_attn.{name}.bias": torch.randn(n) for s in stems for name, n in widths.items()}
    extra = {**biases, "embed_tokens.weight": torch.randn(lab.VOCAB, lab.HIDDEN)}
    lab.write_eagle3(folder / "biased", lab.random_eagle3(config), extra)
    source = eagle3_source(folder, "biased")
    source.check()
    made = dict(source.make_module().named_parameters())
    assert all(torch.equal(made[name], bias) for name, bias in biases.items())
    assert "layers.1.self_attn.o_proj.bias" not in made


def test_heads_may_have_a_width_that_does_not_divide_the_hidden_size(folder):
    config = lab.config_of(num_attention_heads=3, num_key_value_heads=1)
    lab.write_eagle3(folder / "odd", lab.random_eagle3(config))
    source = eagle3_source(folder, "odd")
    source.check()
    assert source.make_module().midlayer.self_attn.q_proj.weight.shape == (24, 64)
