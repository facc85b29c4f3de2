# SPDX-License-Identifier: Apache-2.0
"""The heads against a twin written from the published formula, in torch, on ONNX Runtime and the reference."""

import gc
import itertools
import json
import math
import weakref

import numpy as np
import pytest
from scipy.special import erf

torch = pytest.importorskip("torch")

from speccompile.backends.base import CompileJob, LoadJob  # noqa: E402
from speccompile.core import registry, specs  # noqa: E402
from speccompile.core.dims import ModelDims  # noqa: E402
from speccompile.core.jobs import GraphJob, SourceContext  # noqa: E402
from speccompile.core.sampling import draw, warp  # noqa: E402
from speccompile.doctor.doctor import open_config  # noqa: E402
from speccompile.errors import CheckpointError, RecipeError  # noqa: E402
from speccompile.export.own_drafts import export_heads  # noqa: E402
from speccompile.export.tree_drafters import Chain  # noqa: E402
from speccompile.speculators.mlp.checkpoint import FORMATS, PREFIX, HeadsSource, sizes_of  # noqa: E402
from speccompile.speculators.mlp.config import WEIGHTS, HeadsSizes  # noqa: E402
from speccompile.speculators.mlp.config import MlpConfig as Config  # noqa: E402
from speccompile.speculators.mlp.model import MlpExpander, MlpHeads, make_heads  # noqa: E402
from tests.lab.graphs import compile_graph  # noqa: E402
from tests.speculators import heads_lab  # noqa: E402

VOCAB, HIDDEN, INNER = 97, 20, 12
pytestmark = [pytest.mark.usefixtures("cheap_measurements"), pytest.mark.export]
VARIANTS = {"plain": (3, False, False), "tied": (3, True, False), "scaled": (2, False, True), "both": (5, True, True)}


def sizes(variant, num_drafts=None):
    num, tied, scaled = VARIANTS[variant]
    return HeadsSizes("mlp_speculator", VOCAB, HIDDEN, INNER, num, num_drafts or num, tied, scaled)


def config(variant="plain", **changed):
    num, tied, scaled = VARIANTS[variant]
    base = {"model_type": "mlp_speculator", "emb_dim": HIDDEN, "inner_dim": INNER, "vocab_size": VOCAB}
    return {**base, "n_predict": num, "tie_weights": tied, "scale_input": scaled, **changed}


def random_state(variant, seed=0):
    """Weights of the published names, norms included, none of them trivial."""
    rng = np.random.default_rng(seed)
    made, known = {}, {"vocab": VOCAB, "inner": INNER}
    for head, (kind, dims, least) in itertools.product(range(VARIANTS[variant][0]), WEIGHTS):
        shape = tuple(known[d] for d in dims) if head >= least else (INNER, HIDDEN)
        first = made.get(kind.format(sizes(variant).shares(kind, head)))
        scale = 1.0 if len(shape) == 1 else 0.4
        fresh = (rng.normal(size=shape) * scale).astype(np.float32)
        made[kind.format(head)] = fresh if first is None else first
    return made


def paths_twin(weights, variant, hidden, tokens):
    """Returns logits [batch, vocab] float64 after tokens [batch, nodes] by the formula: hidden [batch, HIDDEN]."""
    num, _, scaled = VARIANTS[variant]
    state_weight = 0.5 ** (0.5 / num)
    token_weight = math.sqrt((1 - state_weight**2) * (INNER / 2)) / state_weight

    def norm(x):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)

    state = hidden.astype(np.float64)
    state = norm(state) / math.sqrt(2) if scaled else state
    for i in range(tokens.shape[1]):
        w = {kind: weights[f"{kind}.{i}.weight"].astype(np.float64) for kind in ("emb", "proj", "head", "ln")}
        mixed = norm(state @ w["proj"].T + token_weight * w["emb"][tokens[:, i]]) * w["ln"] + weights[f"ln.{i}.bias"]
        state = mixed * 0.5 * (1 + erf(mixed / math.sqrt(2)))
    return state @ w["head"].T


def twin(weights, variant, hidden, tokens, draws, warping):
    """(tokens, confidences, distributions) of a chain: state [batch, HIDDEN], tokens [batch]."""
    read, drafted, sure, dists = tokens[:, None], [], [], []
    for i in range(VARIANTS[variant][0]):
        logits = paths_twin(weights, variant, hidden, read).astype(np.float32)
        dist = warp(logits, *warping)
        tokens = draw(dist, draws[:, i])
        plain = np.exp(logits - logits.max(axis=-1, keepdims=True))
        drafted.append(tokens)
        sure.append(plain[np.arange(len(tokens)), tokens] / plain.sum(axis=-1))
        dists.append(dist)
        read = np.append(read, tokens[:, None], axis=1)
    return np.stack(drafted, 1), np.stack(sure, 1), np.stack(dists, 1)


def save(folder, weights, config, form="safetensors", prefix=PREFIX):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {prefix + name: torch.from_numpy(w.copy()) for name, w in weights.items()}
    if form == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        from safetensors.torch import save_file

        save_file(tensors, folder / "model.safetensors")
    return folder


def open_source(folder, weights="checkpoint", num_drafts=None, hidden=HIDDEN, vocab=VOCAB, max_draft_nodes=16):
    target = ModelDims("llama", vocab, hidden, 2, 4, 2, 8, 64)
    job = GraphJob("heads", str(folder), options=Config("heads", num_draft_tokens=num_drafts or "auto").form_options())
    return HeadsSource(job, SourceContext(weights, 64, max_draft_nodes, target))


def make_feeds(num, batch=4, nodes=5, hot=True):
    rng = np.random.default_rng(7)
    heat = np.array([1.0, 0.0, 0.6, 1.4], np.float32)[:batch]
    warping = {
        specs.TEMPERATURE: heat if hot else 0 * heat,
        specs.TOP_K: np.array([0, 0, 9, 0])[:batch],
        specs.TOP_P: np.array([1, 1, 1, 0.8], np.float32)[:batch],
    }
    return {
        specs.HIDDEN: rng.normal(size=(batch, nodes, HIDDEN)).astype(np.float32),
        specs.START_NODES: rng.integers(0, nodes, batch),
        specs.TOKENS: rng.integers(0, VOCAB, (batch, 1)),
        specs.UNIFORMS: rng.random((batch, num)).astype(np.float32),
        **warping,
    }


def wanted_from(weights, variant, feeds):
    batch = len(feeds[specs.TOKENS])
    start = feeds[specs.HIDDEN][np.arange(batch), feeds[specs.START_NODES]]
    warping = [feeds[name] for name in (specs.TEMPERATURE, specs.TOP_K, specs.TOP_P)]
    return twin(weights, variant, start, feeds[specs.TOKENS][:, 0], feeds[specs.UNIFORMS], warping)


@pytest.mark.parametrize("variant", VARIANTS)
def test_torch_is_the_formula(variant):
    weights = random_state(variant)
    heads = MlpHeads(sizes(variant))
    heads.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
    feeds = make_feeds(sizes(variant).num_heads)
    drafter = Chain(MlpExpander(heads.eval()), sizes(variant).num_heads)
    with torch.no_grad():
        got = drafter(*(torch.from_numpy(feeds[t.name]) for t in sizes(variant).spec("h").inputs))
    drafted, sure, dists = wanted_from(weights, variant, feeds)
    np.testing.assert_array_equal(got[0].numpy(), drafted)
    np.testing.assert_allclose(got[1].numpy(), sure, rtol=2e-5)
    np.testing.assert_allclose(np.stack([dist.numpy() for dist in got[2:]], 1), dists, atol=2e-6)


@pytest.mark.parametrize(
    ("variant", "form"), [("plain", "safetensors"), ("tied", "bin"), ("scaled", "bin"), ("both", "safetensors")]
)
def test_a_checkpoint_becomes_a_graph_that_computes_the_formula(variant, form, tmp_path):
    weights = random_state(variant)
    is_tied = VARIANTS[variant][1]
    # In safetensors no two names may share memory; there a tied speculator holds the first copies.
    all_heads = itertools.product(range(VARIANTS[variant][0]), WEIGHTS)
    own = {k.format(h) for h, (k, _, _) in all_heads if sizes(variant).shares(k, h) == h}
    held = {n: w for n, w in weights.items() if n in own} if is_tied and form == "safetensors" else weights
    source = open_source(save(tmp_path / "in", held, config(variant), form))
    source.check()
    model, dims = source.export(lambda stage: None)
    assert dims.num_params == sum(weights[name].size for name in own)
    names = [name for name in model.graph.initializers if "head." in name or "emb." in name]
    assert len(names) == (2 if is_tied else 2 * sizes(variant).num_heads)
    spec = source.spec()
    for backend in ("onnxruntime", "reference"):
        engine = compile_graph(model, spec, tmp_path / backend, backend).open(4)
        for batch, nodes, hot in ((4, 5, True), (1, 1, True), (3, 2, False)):
            feeds = make_feeds(sizes(variant).num_heads, batch, nodes, hot)
            got, (drafted, sure, dists) = engine.run(feeds), wanted_from(weights, variant, feeds)
            np.testing.assert_array_equal(got[specs.SAMPLED_TOKENS], drafted)
            np.testing.assert_allclose(got[specs.CONFIDENCES], sure, rtol=1e-4)
            width = VOCAB if hot else 1
            assert got[specs.CHAIN_PROBS].shape == (batch, sizes(variant).num_heads + 1, width)
            if hot:
                np.testing.assert_allclose(got[specs.CHAIN_PROBS][:, 1:], dists, atol=2e-6)


@pytest.mark.parametrize(("quantization", "near"), [("int8", 0.05), ("int4", 0.5)])
def test_quantised_heads_run_and_are_near(quantization, near, tmp_path):
    weights = random_state("plain")
    source = open_source(save(tmp_path / "in", weights, config()))
    model, _ = source.export(lambda stage: None)
    maker = registry.backend("onnxruntime")
    report = maker.compile(CompileJob(model, source.spec(), tmp_path / "q", quantization=quantization))
    engine = maker.load(LoadJob(tmp_path / "q/graph.onnx", source.spec(), max_slots=4, tuning={"threads": 1}))
    feeds = make_feeds(3, hot=False)
    sure = wanted_from(weights, "plain", feeds)[1][:, 0]
    np.testing.assert_allclose(engine.run(feeds)[specs.CONFIDENCES][:, 0], sure, rtol=near)
    linears = (
        f"speccompile::PackedLinear{quantization.capitalize()}" if report["form"] == "packed" else "com.microsoft::"
    )
    assert any(op.startswith(linears) for op in report["op_histogram"]["after"])


def test_fewer_heads_than_the_checkpoint_has_draft_its_first_tokens(tmp_path):
    weights = random_state("plain")
    source = open_source(save(tmp_path / "in", weights, config()), num_drafts=2)
    model, _ = source.export(lambda stage: None)
    assert not any("head.2" in name for name in model.graph.initializers)
    engine = compile_graph(model, source.spec(), tmp_path / "g", "onnxruntime").open(4)
    feeds = make_feeds(3)
    got = engine.run({**feeds, specs.UNIFORMS: feeds[specs.UNIFORMS][:, :2]})[specs.SAMPLED_TOKENS]
    np.testing.assert_array_equal(got, wanted_from(weights, "plain", feeds)[0][:, :2])


@pytest.mark.parametrize("tree", [[[0], [1], [0, 0], [1, 1], [1, 1, 0]], "auto"], ids=str)
def test_a_tree_is_that_of_its_paths(tree, tmp_path):
    weights = random_state("plain")
    folder = save(tmp_path / "in", weights, config())
    options = Config("heads", tree=tree, tree_width=2, num_candidates=3).form_options()
    source = HeadsSource(GraphJob("heads", str(folder), options=options), heads_lab.context(HIDDEN, VOCAB))

    def logits(state, tokens):
        return paths_twin(weights, "plain", state[None], np.array([tokens]))[0]

    for engine in heads_lab.engines(source, tmp_path):
        heads_lab.check_tree(engine, source.form, logits, heads_lab.feeds(HIDDEN, VOCAB))


@pytest.mark.parametrize("name", heads_lab.PUBLISHED_MLP)
def test_published_configs_give_their_sizes(name, tmp_path):
    hidden, inner, vocab, num, tied, scaled = heads_lab.PUBLISHED_MLP[name]
    flags = {"tie_weights": tied, "scale_input": scaled} if tied or scaled else {}
    written = {"emb_dim": hidden, "inner_dim": 0 if inner == hidden else inner, "vocab_size": vocab, "n_predict": num}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mlp_speculator", **written, **flags}))
    source = open_source(tmp_path, "random", hidden=hidden, vocab=vocab)
    made = source.dims
    assert (made.hidden_size, made.inner_size, made.num_heads, made.is_tied) == (hidden, inner, num, tied)
    assert source.spec().output(specs.CHAIN_PROBS).dims == ("batch", num + 1, "draft_vocab")
    tables, projections = (1, 2) if tied else (num, num)
    linear = tables * vocab * inner + inner * hidden + (projections - 1) * inner * inner
    assert source.counts().num_linear == linear
    assert source.counts().num_params == linear + tables * (vocab * inner + 2 * inner)
    # The same with a tiny inner size goes through torch, forwards.
    small = HeadsSizes("mlp_speculator", 64, 16, 8, num, num, tied, scaled)
    spec = small.spec("heads")
    shapes = {"batch": 2, "nodes": 3}
    feeds = [torch.zeros([shapes.get(d, d) for d in t.dims], dtype=getattr(torch, t.dtype)) for t in spec.inputs]
    feeds[-1] += 1  # top_p: off
    assert Chain(MlpExpander(make_heads(small)), num)(*feeds)[0].shape == (2, num)


def test_an_export_that_is_over_holds_no_weights():
    """Globals of torch and onnxscript keep the last export; a second large one would not fit beside it."""
    heads = make_heads(sizes("scaled"))
    held = [weakref.ref(parameter) for parameter in heads.parameters()]
    graph = export_heads(Chain(MlpExpander(heads), 2), sizes("scaled").spec("heads"), lambda stage: None)
    del heads, graph
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_random_heads_are_the_same_every_time():
    first, second = (make_heads(sizes("both")).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert float(first["emb.0.weight"].std()) == pytest.approx(INNER**-0.5, rel=0.1)


def without(name):
    return lambda w: {k: v for k, v in w.items() if k != name}


BAD_WEIGHTS = [
    (without("proj.1.weight"), r"speculator\.proj\.1\.weight\): got no such key"),
    (
        lambda w: {**w, "emb.3.weight": w["emb.0.weight"]},
        r"speculator\.emb\.3\.weight\): got a key that the layout does not have",
    ),
    (
        lambda w: {**w, "ln0.weight": w["ln.0.weight"]},
        r"speculator\.ln0\.weight\): got a key that the layout does not have",
    ),
    (lambda w: {**w, "proj.0.weight": w["proj.1.weight"]}, r"speculator\.proj\.0\.weight\): got \[12, 12\]"),
    (lambda w: {**w, "head.2.weight": w["head.2.weight"][:-1]}, r"speculator\.head\.2\.weight\): got \[96, 12\]"),
]


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("case", range(len(BAD_WEIGHTS)))
def test_a_wrong_missing_or_extra_weight_is_refused(case, form, tmp_path):
    change, got = BAD_WEIGHTS[case]
    source = open_source(save(tmp_path, change(random_state("plain")), config(), form))
    with pytest.raises(CheckpointError, match=got):
        source.check()
    with pytest.raises(CheckpointError, match=got):
        source.export(lambda stage: None)


def test_weights_without_prefix_are_read_and_a_mixture_is_refused(tmp_path):
    weights = random_state("plain")
    open_source(save(tmp_path / "a", weights, config(), prefix="")).check()
    mixed = {**weights, "emb.0.weight": weights["emb.0.weight"]}
    mixed = {("" if n == "emb.0.weight" else PREFIX) + n: w for n, w in mixed.items()}
    with pytest.raises(CheckpointError, match=r"speculator\.emb\.0\.weight\): got no such key"):
        open_source(save(tmp_path / "b", mixed, config(), prefix="")).check()


def test_tied_copies_that_differ_are_refused(tmp_path):
    weights = random_state("tied")
    weights["emb.1.weight"] = weights["emb.1.weight"] + 1
    source = open_source(save(tmp_path, weights, config("tied")))
    source.check()
    with pytest.raises(CheckpointError, match=r"emb\.1\.weight\): got other values than speculator\.emb\.0\.weight"):
        source.export(lambda stage: None)


def test_a_pickle_that_holds_more_than_tensors_is_not_unpickled(tmp_path):
    class Boom:
        def __reduce__(self):
            return (exec, ("raise SystemExit('ran')",))

    folder = save(tmp_path, random_state("plain"), config(), "bin")
    torch.save({"a": Boom()}, folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError,
        match=r"pytorch_model\.bin: got a pickle that torch.s weights-only reader refuses: it asks for .*exec",
    ):
        open_source(folder).check()


@pytest.mark.parametrize(
    ("changed", "got"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"n_predict": 0}, "n_predict.*got 0"),
        ({"emb_dim": "20"}, "emb_dim.*got '20'"),
        ({"tie_weights": 1}, "tie_weights.*got 1"),
        ({"tie_weights": True, "n_predict": 1}, "1 with tie_weights"),
        ({"vocab_size": None}, "vocab_size.*got None"),
    ],
)
def test_a_config_that_is_wrong_is_refused(changed, got, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config(**changed)))
    with pytest.raises(CheckpointError, match=got):
        sizes_of(open_config(tmp_path, FORMATS, FORMATS[0]))


def test_a_speculator_of_another_target_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config()))
    with pytest.raises(RecipeError, match="a hidden size of 20; expected 24"):
        open_source(tmp_path, "random", hidden=24)
    with pytest.raises(RecipeError, match="a vocabulary of 97 tokens; expected 98"):
        open_source(tmp_path, "random", vocab=98)
    with pytest.raises(RecipeError, match=r"num_draft_tokens: got 4; expected at most 3"):
        open_source(tmp_path, "random", num_drafts=4)
    with pytest.raises(RecipeError, match=r"max_draft_nodes: got 2; expected at least 3"):
        open_source(tmp_path, "random", max_draft_nodes=2)
