# SPDX-License-Identifier: Apache-2.0
"""Graphs of heads on every backend that runs here, trees drafted step by step, and tiny speculators."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from speccompile.core import specs
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.graph_kinds.heads import DraftForm
from tests import store
from tests.lab.graphs import compile_graph

BACKENDS = ("onnxruntime", "reference")
Logits = Callable[[np.ndarray, list[int]], np.ndarray]  # of a state and the tokens from the root on


def target_dims(hidden: int, vocab: int) -> ModelDims:
    return ModelDims("llama", vocab, hidden, 2, 4, 2, 8, 64)


def context(hidden: int, vocab: int, weights: str = "checkpoint", target: str = "") -> SourceContext:
    job = GraphJob("target", target) if target else None
    return SourceContext(weights, 64, 16, target_dims(hidden, vocab), job)


# (hidden, inner, vocabulary, heads, tied, scaled) of the published speculators.
PUBLISHED_MLP = {
    "llama-13b": (5120, 4096, 32000, 3, False, False),
    "llama-13b-code": (5120, 4096, 32016, 7, False, False),
    "llama3-8b": (4096, 3072, 128256, 4, False, False),
    "llama3-70b": (8192, 3584, 128256, 4, True, True),
    "codellama-34b": (8192, 8192, 32000, 5, True, True),
    "granite-34b": (6144, 6144, 49152, 5, True, False),
}


def engines(source: Any, folder: Any) -> Iterator[Any]:
    """The graph of a source on each backend."""
    model, _ = store.export(source)
    for name in BACKENDS:
        with store.cheap_measurements():
            built = compile_graph(model, source.spec(), folder / name, name)
        yield built.open(4)


def feeds(hidden: int, vocab: int, batch: int = 3, nodes: int = 4, seed: int = 7) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        specs.HIDDEN: rng.normal(size=(batch, nodes, hidden)).astype(np.float32),
        specs.START_NODES: rng.integers(0, nodes, batch),
        specs.TOKENS: rng.integers(0, vocab, (batch, 1)),
    }


def starts(given: dict[str, np.ndarray]) -> np.ndarray:
    """[batch, hidden] float64: the states that are drafted from."""
    rows = given[specs.HIDDEN][np.arange(len(given[specs.START_NODES])), given[specs.START_NODES]]
    return rows.astype(np.float64)


def likeliest(logits: np.ndarray, num: int) -> tuple[list[int], list[float]]:
    plain = np.exp(logits - logits.max())
    best = np.argsort(-plain, kind="stable")[:num]
    return best.tolist(), (plain[best] / plain.sum()).tolist()


def tree_by_steps(form: DraftForm, logits: Logits, state: np.ndarray, root: int) -> tuple[list, list, list]:
    """Returns (tokens, probabilities, parents) of a form's drafts; `logits` reads every path as a whole."""
    if form.choices:
        made = {(): ([root], 1.0)}
        for path in form.choices:
            above = made[path[:-1]][0]
            best, probs = likeliest(logits(state, above), path[-1] + 1)
            made[path] = ([*above, best[-1]], probs[-1])
        rows = [made[path] for path in form.choices]
        number = {path: i for i, path in enumerate(((), *form.choices))}
        return [r[0][-1] for r in rows], [r[1] for r in rows], [number[path[:-1]] for path in form.choices]
    level, drafts = [([root], 1.0, 0)], []
    for _ in range(form.depth):
        fresh = []
        for above, path, parent in level:
            for token, prob in zip(*likeliest(logits(state, above), form.num_candidates), strict=True):
                drafts.append((token, prob, parent))
                fresh.append(([*above, token], path * prob, len(drafts)))
        level = sorted(fresh, key=lambda row: -row[1])[: form.width]
    return tuple(list(column) for column in zip(*drafts, strict=True))


def check_tree(engine: Any, form: DraftForm, logits: Logits, given: dict[str, np.ndarray]) -> None:
    """Checks that the engine drafts the same tree as steps of `logits` do."""
    outputs, states = engine.run(given), starts(given)
    for slot, root in enumerate(given[specs.TOKENS][:, 0].tolist()):
        tokens, probs, parents = tree_by_steps(form, logits, states[slot], root)
        np.testing.assert_array_equal(outputs[specs.SAMPLED_TOKENS][slot], tokens)
        np.testing.assert_allclose(outputs[specs.CONFIDENCES][slot], probs, rtol=2e-4)
        if form.width:
            np.testing.assert_array_equal(outputs[specs.DRAFT_PARENTS][slot], parents)


def write_medusa(folder: Path, target: Path, num_heads: int = 3) -> None:
    """Medusa heads briefly trained on the target's greedy texts, which they then draft exactly."""
    import torch
    from safetensors.torch import save_file
    from torch.nn.functional import cross_entropy
    from transformers import LlamaForCausalLM

    from speccompile.speculators.medusa.config import HeadsSizes
    from speccompile.speculators.medusa.model import MedusaHeads
    from tests.speculators.eagle_lab import HIDDEN, PROMPTS, VOCAB

    model, states, labels = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval(), [], []
    for prompt in PROMPTS:
        text = model.generate(torch.tensor([prompt]), max_new_tokens=44, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            states.append(model.model(text).last_hidden_state[0, : -1 - num_heads])
        # The state at a token gives the root, and head i the token i + 1 after that.
        labels.append(torch.stack([text[0, 2 + i : text.shape[1] - num_heads + i + 1] for i in range(num_heads)], 1))
    torch.manual_seed(1)
    heads = MedusaHeads(HeadsSizes(HIDDEN, VOCAB, num_heads, 2, False))
    optimizer = torch.optim.Adam(heads.parameters(), lr=2e-2)
    for _ in range(150):
        loss = cross_entropy(heads(torch.cat(states)).flatten(0, 1), torch.cat(labels).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": num_heads, "medusa_num_layers": 2}))
    tensors = {name: tensor.contiguous() for name, tensor in heads.state_dict().items()}
    save_file(tensors, folder / "medusa_lm_head.safetensors")


def write_prophet(folder: Path, target: Path) -> None:
    """A Prophet whose layers change little, with a table of successors."""
    import torch
    from transformers import LlamaForCausalLM

    from speccompile.export.heads_file import write_heads
    from speccompile.speculators.prophet.config import ProphetSizes
    from speccompile.speculators.prophet.model import Prophet
    from tests.speculators.eagle_lab import HIDDEN, PROMPTS, VOCAB

    model, counts = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval(), torch.zeros(VOCAB, VOCAB)
    for prompt in PROMPTS:
        text = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)[0]
        counts.index_put_((text[1:], text[:-1]), torch.ones(len(text) - 1), accumulate=True)
    sizes = ProphetSizes(VOCAB, HIDDEN, VOCAB, 24, 1, 2, 1, VOCAB // 2, 8, uses_target_embeddings=False)
    torch.manual_seed(1)  # the same weights, and so the same exported graph, in every test that writes one
    heads = Prophet(sizes)
    with torch.no_grad():
        for name, weight in heads.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.1)
        heads.embed_tokens.weight.copy_(torch.eye(VOCAB))
        heads.lm_head.weight.copy_(counts / (1 + counts.sum(0)))
    folder.mkdir()
    write_heads(folder, sizes.config_from_sizes(), heads.state_dict())
