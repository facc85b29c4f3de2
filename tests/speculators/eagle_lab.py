# SPDX-License-Identifier: Apache-2.0
"""A tiny target whose text varies, and drafters in the published layouts, briefly trained on it."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests import store
from tests.export.eagle3_reference import Oracle, causal
from tests.lab.graphs import compile_graph
from tests.pipeline import fakes

VOCAB, HIDDEN, DRAFTED, LAYERS = 40, 32, 24, 7
STREAMS = (1, 2, 3)  # the published choice for seven layers
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1], [8], [8, 2, 8, 1, 8], [30, 4, 9, 9], [1, 2], [17] * 9, [0, 39]]


def write_target(folder: Path, seed: int = 3) -> Path:
    """A Llama of seven layers whose greedy text does not fall into one token."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, rms_norm_eps=1e-5, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.0 if "embed" in name else 0.35)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(fakes.tokenizer(VOCAB)))
    return folder


def config_of(**changes) -> dict:
    """Returns the config of an EAGLE-3 drafter in the layout of the first release."""
    plain = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "vocab_size": VOCAB, "draft_vocab_size": DRAFTED, "tie_word_embeddings": False, "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in STREAMS],
    }  # fmt: skip
    return {**plain, **changes}


def shapes_of(config: dict) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of its weights, without embeddings and maps."""
    width, inner, target = (config[f"{n}_size"] for n in ("hidden", "intermediate", "target_hidden"))
    queries, keys = (config[f"num_{n}_heads"] * config["head_dim"] for n in ("attention", "key_value"))
    rank, drafted = config.get("head_rank"), config["draft_vocab_size"]
    made = {"fc": (width, 3 * target)}
    if config.get("fc_norm"):
        made |= {f"fc_norm.{i}": (target,) for i in range(3)}
    for layer in ("midlayer", *(f"layers.{i}" for i in range(1, config["num_hidden_layers"]))):
        read = 2 * width if layer == "midlayer" else width
        made |= {f"{layer}.input_layernorm": (width,)}
        made |= {
            f"{layer}.self_attn.{n}_proj": (num, read) for n, num in zip("qkv", (queries, keys, keys), strict=True)
        }
        made |= {f"{layer}.self_attn.o_proj": (width, queries), f"{layer}.post_attention_layernorm": (width,)}
        made |= {f"{layer}.mlp.{n}_proj": (inner, width) for n in ("gate", "up")}
        made |= {f"{layer}.mlp.down_proj": (width, inner)}
        made |= {"midlayer.hidden_norm": (width,)} if layer == "midlayer" else {}
    made |= {"norm": (width,), **({"lm_head_down": (rank, width)} if rank else {}), "lm_head": (drafted, rank or width)}
    return {f"{name}.weight": shape for name, shape in made.items()}


def random_eagle3(config: dict, seed: int = 0) -> Oracle:
    """Returns a drafter in which every part affects the output."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes_of(config).items():
        weight = tensors[name] = torch.empty(shape)
        if len(shape) > 1:
            weight.normal_(0, 0.3, generator=generator)
        else:
            weight.uniform_(0.5, 1.5, generator=generator)
    num, vocab = config["draft_vocab_size"], config["vocab_size"]
    if num != vocab:
        chosen = torch.randperm(vocab, generator=generator)[:num].sort().values
        tensors["d2t"] = chosen - torch.arange(num)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    return Oracle(config, tensors)


def write_eagle3(folder: Path, drafter: Oracle, extra: dict[str, torch.Tensor] | None = None, **config) -> Path:
    """Writes the layout of the first release, in float32."""
    folder.mkdir()
    tensors = {**drafter.tensors, **(extra or {})}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**drafter.config, **config}))
    return folder


@torch.no_grad()
def texts_of(target: Path) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, ...]]]:
    """Returns the target's texts after the prompts, and its states before each layer and after the norm."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    texts = [list(prompt) for prompt in PROMPTS]
    for _ in range(40):
        rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        logits = model(rows, use_cache=False).logits
        for row, text in zip(logits, texts, strict=True):
            text.append(int(row[len(text) - 1].argmax()))
    tensors = [torch.tensor([text]) for text in texts]
    return tensors, [model(text, output_hidden_states=True).hidden_states for text in tensors]


def fitted(inputs: list[torch.Tensor], wanted: list[torch.Tensor], penalty: float) -> torch.Tensor:
    """Returns the linear layer [out, in] that best maps inputs to the wanted outputs (ridge regression)."""
    x, y = torch.cat(inputs).double(), torch.cat(wanted).double()
    return torch.linalg.solve(x.T @ x + penalty * torch.eye(x.shape[1]), x.T @ y).T.float().contiguous()


@torch.no_grad()
def fit_eagle3(target: Path, drafter: Oracle, embeddings: torch.Tensor, window: int = 0) -> Oracle:
    """Gives a drafter the LM head that fits the target's texts best."""
    texts, states = texts_of(target)
    inputs, wanted = [], []
    for text, seen in zip(texts, states, strict=True):
        features, nodes = drafter.fuse([seen[i + 1][0, :-2] for i in STREAMS]), text.shape[1] - 2
        own = drafter.own(embeddings[text[0, 1:-1]], features, torch.arange(nodes), causal(nodes, window))
        inputs.append(drafter.scored(own))
        wanted.append(8 * torch.eye(VOCAB)[text[0, 2:]][:, drafter.target_tokens()])
    return replace(drafter, tensors={**drafter.tensors, "lm_head.weight": fitted(inputs, wanted, 0.1)})


def learnt_eagle3(target: Path, window: int = 0) -> Oracle:
    """Returns a wide drafter over most of the vocabulary, fitted to the target's texts."""
    config = config_of(hidden_size=96, intermediate_size=96, head_dim=24, draft_vocab_size=34)
    return fit_eagle3(target, random_eagle3(config, seed=1), wide_embeddings(), window)


def wide_embeddings() -> torch.Tensor:
    """Embeddings of the drafter's own, for drafters that are wider than the target."""
    return torch.randn((VOCAB, 96), generator=torch.Generator().manual_seed(5))


def write_eagle(folder: Path, seed: int = 0, num_layers: int = 1, bias: bool = True, inner: int = 48) -> Path:
    """Writes EAGLE-1's layout with random weights, in float32."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)

    folder.mkdir()
    kv = HIDDEN // 2
    tensors = {"embed_tokens.weight": draw(VOCAB, HIDDEN) * 3, "fc.weight": draw(HIDDEN, 2 * HIDDEN)}
    if bias:
        tensors["fc.bias"] = draw(HIDDEN) - 1
    for i in range(num_layers):
        rows = {"q": HIDDEN, "k": kv, "v": kv, "o": HIDDEN}
        tensors |= {f"layers.{i}.self_attn.{n}_proj.weight": draw(width, HIDDEN) for n, width in rows.items()}
        tensors |= {f"layers.{i}.mlp.{n}_proj.weight": draw(inner, HIDDEN) for n in ("gate", "up")}
        tensors[f"layers.{i}.mlp.down_proj.weight"] = draw(HIDDEN, inner)
        tensors[f"layers.{i}.post_attention_layernorm.weight"] = draw(HIDDEN)
        if i:
            tensors[f"layers.{i}.input_layernorm.weight"] = draw(HIDDEN)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "bias": bias,
        "intermediate_size": inner, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
        "num_hidden_layers": num_layers, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def eagle_forward(
    folder: Path, tokens: torch.Tensor, features: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs EAGLE-1's layers in plain torch, from the public description.

    Args:
        folder: as `write_eagle` writes it.
        tokens: [nodes] int64.
        features: [nodes, HIDDEN].
        mask: [nodes, nodes] bool, what each sees.
        positions: [nodes].

    Returns:
        Own features, and the input of the last layer's down projection with the residual it adds to.
    """
    t, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    drafter = Oracle({**config, "head_dim": 8}, t)
    x = drafter.linear(torch.cat((t["embed_tokens.weight"][tokens], features), -1), "fc") + t.get("fc.bias", 0)
    for layer in (f"layers.{i}" for i in range(config["num_hidden_layers"])):
        read = x if layer == "layers.0" else drafter.norm(x, f"{layer}.input_layernorm")
        before = x + drafter.attend(layer, read, positions, mask)
        inner = drafter.inner(layer, before)
        x = before + drafter.linear(inner, f"{layer}.mlp.down_proj")
    return x, inner, before


@torch.no_grad()
def fit_eagle(folder: Path, target: Path) -> Path:
    """Gives a drafter the down projection that fits the target's features best."""
    texts, states = texts_of(target)
    inputs, wanted = [], []
    for text, seen in zip(texts, states, strict=True):
        nodes = text.shape[1] - 1
        mask = torch.ones(nodes, nodes, dtype=torch.bool).tril()
        _, inner, before = eagle_forward(folder, text[0, 1:], seen[-1][0, :-1], mask, torch.arange(nodes))
        inputs.append(inner)
        wanted.append(seen[-1][0, 1:] - before)
    held = load_file(folder / "model.safetensors")
    held["layers.0.mlp.down_proj.weight"] = fitted(inputs, wanted, 0.03)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_learnt_eagle3(folder: Path, target: Path) -> Path:
    """An EAGLE-3 drafter fitted to the target's texts, with embeddings and a vocabulary of its own."""
    return write_eagle3(folder, learnt_eagle3(target), {"embed_tokens.weight": wide_embeddings()})


def write_windowed_eagle3(folder: Path, target: Path, window: int) -> Path:
    """The same with a window."""
    layer = {"layer_types": ["sliding_attention"], "sliding_window": window}
    return write_eagle3(folder, learnt_eagle3(target, window), {"embed_tokens.weight": wide_embeddings()}, **layer)


def write_learnt_eagle(folder: Path, target: Path) -> Path:
    """An EAGLE-1 drafter fitted to the target's texts."""
    return fit_eagle(write_eagle(folder, inner=224), target)


def compiled(source, folder: Path, *backends: str, slots: int = 2, rows: int = 64) -> list:
    """The engines of a source's graph, exported once, on backends of the CPU."""
    model, dims, engines = store.export(source)[0], source.dims if source.role == "target" else None, []
    for name in backends or ("onnxruntime",):
        with store.cheap_measurements():
            built = compile_graph(model, source.spec(), folder / name / source.job.name, name, dims)
        engines.append(built.open(slots, max_rows=rows))
    return engines
