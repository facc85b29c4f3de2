# SPDX-License-Identifier: Apache-2.0
"""A tiny Gemma 4 target and its assistant as transformers saves them, and transformers' own drafts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.export.harness import make_checkpoint
from tests.lab.weights import randomize

VOCAB, HIDDEN, WINDOW = 96, 32, 4
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 12,
    "sliding_window": WINDOW,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = ["sliding_attention", "full_attention"]


def make_target(folder: Path, family: str = "gemma4") -> Any:
    """Saves a target whose last two layers read K and V of the two before; returns it."""
    shared = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    layers = {"num_hidden_layers": 4, "layer_types": KINDS * 2, "hidden_size": HIDDEN}
    own = shared if family == "gemma4" else {"num_kv_shared_layers": 2}
    return make_checkpoint({"model_type": f"{family}_text", **_TEXT, **layers, **own}, folder)


def allow_all_shared(kind: Any) -> None:
    """Lets transformers 5.23 build a text model of which no layer has K and V, as assistants are: it refuses that."""
    own = kind.kv_sharing_modes.fget

    def modes(config: Any) -> list[str | None]:
        is_all = config.num_kv_shared_layers == config.num_hidden_layers
        return ["reuse"] * config.num_hidden_layers if is_all else own(config)

    kind.kv_sharing_modes = property(modes)


def make_assistant(folder: Path, is_ordered: bool = False, family: str = "gemma4") -> Any:
    """Saves an assistant that mostly repeats the last token, as its random target does; returns it."""
    import torch
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind, whole = CONFIG_MAPPING[f"{family}_text"], CONFIG_MAPPING[f"{family}_assistant"]
    allow_all_shared(kind)
    own = {"num_hidden_layers": 2, "layer_types": KINDS, "hidden_size": HIDDEN, "num_kv_shared_layers": 2}
    none = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0} if family == "gemma4" else {}
    text = kind(**_TEXT, **own, **none)
    centroids = {"use_ordered_embeddings": is_ordered, "num_centroids": 12, "centroid_intermediate_top_k": 3}
    config = whole(text_config=text, backbone_hidden_size=HIDDEN, **centroids)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[whole](config).to(torch.float32)
    randomize(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.layer_scalar.uniform_(0.5, 1.5)
        if is_ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    model.save_pretrained(folder)
    return model.eval()


def give_embeddings(target: Any, assistant: Any, folder: Path) -> None:
    """Gives the assistant the target's table and a projection that keeps the last token, so that drafts agree."""
    import torch

    with torch.no_grad():
        assistant.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        assistant.pre_projection.weight[:, :HIDDEN] += 3 * torch.eye(HIDDEN)
    assistant.save_pretrained(folder)


def target_step(target: Any, tokens: Sequence[int]) -> tuple[Any, dict[str, Any]]:
    """Returns the hidden state after the final norm of the last of `tokens`, [1, 1, hidden], and K and V by kind."""
    import torch

    with torch.no_grad():
        out = target.model(torch.tensor([list(tokens)]), use_cache=False, return_shared_kv_states=True)
    return out.last_hidden_state[:, -1:], dict(out.shared_kv_states)


def own_drafts(
    target: Any, assistant: Any, tokens: Sequence[int], num_drafts: int, forced: Sequence[int] = ()
) -> tuple[list[int], list[Any]]:
    """Returns the drafts of transformers' assistant after `tokens`, the last of which the target has not read.

    The first drafts are those of `forced`, whatever the assistant says; the others are its likeliest tokens.

    This is the loop of transformers' `SinglePositionMultiTokenCandidateGenerator`, on rows of a fresh run: after a
    rejection its own rows have one of the rejected draft.
    """
    import torch

    hidden, rows = target_step(target, tokens[:-1])
    token, drafts, logits = torch.tensor([[tokens[-1]]]), [], []
    position = torch.tensor([[len(tokens) - 1]])
    for i in range(num_drafts):
        x = torch.cat((target.get_input_embeddings()(token), hidden), -1)
        with torch.no_grad():
            out = assistant(inputs_embeds=x, position_ids=position, shared_kv_states=rows, use_cache=False)
        token, hidden = out.logits.argmax(-1), out.last_hidden_state
        if i < len(forced):
            token = torch.tensor([[forced[i]]])
        drafts.append(int(token))
        logits.append(out.logits[0, 0])
    return drafts, logits
