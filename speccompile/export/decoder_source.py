# SPDX-License-Identifier: Apache-2.0
"""A causal language model as the source of a graph: the target, or a draft with caches of its own."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.checkpoint import check_checkpoint, layers_key, read_config, read_dims, read_text_config
from speccompile.checkpoints.config_values import check_architecture
from speccompile.checkpoints.draft_vocab import DraftTokens, choose_tokens
from speccompile.checkpoints.folders import digests_from_checkpoint, find_folder
from speccompile.checkpoints.layer_sizes import GEMMA4_TYPES
from speccompile.checkpoints.lora import digests_of_adapter, digests_of_adapters, open_adapters, open_lora
from speccompile.checkpoints.vision import check_vision, image_record, read_vision_dims
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import DecoderOptions, GraphJob, SourceContext, WeightCounts
from speccompile.core.specs import GraphSpec
from speccompile.doctor.doctor import check_method
from speccompile.errors import CheckpointError, RecipeError
from speccompile.export.checks import check_decoder
from speccompile.graph_kinds.decoder import VocabCandidateOptions, candidate_spec, decoder_spec, verified_spec

if TYPE_CHECKING:
    import onnx_ir as ir

    from speccompile.core.protocols import Engine

# Of a config: lists with an entry for each layer.
BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "attention_layers")
MASK_TOKEN = "pard_token"  # in the config.json of a draft: what stands for a token that is not known
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.gguf", "generation_config.json", "tokenizer.json")


class DecoderSource:
    """A `GraphSource`; without a target in `context` it is the target itself."""

    has_tokenizer = True
    shares_weights = needs_tables = False
    is_needed = True

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        self.job, self.context = job, context
        self.options: DecoderOptions = job.options
        self.role = "target" if context.target is None else "draft"
        self.folder = find_folder(job, context.weights)
        if self.role == "draft" and context.weights == "checkpoint":
            check_method(self.folder, None)
        check_architecture(read_config(self.folder))
        self.dims: ModelDims = read_dims(self.folder)
        if self.options.num_layers is not None:
            self.dims = self._with_layers(self.options.num_layers)
        layers = self.options.hidden_layers
        if not isinstance(layers, tuple):
            layers = layers.layers(self.dims.num_layers, context.weights)
        self.outputs: dict[str, Any] = {"hidden": self.options.hidden, "hidden_layers": layers}
        if self.options.images:
            self.outputs["image_tokens"] = self._image_tokens()
        self.max_rows = min(context.max_seq_len, self.dims.max_positions)
        if context.target is None and self.max_rows < context.max_seq_len:
            got, expected = f"{context.max_seq_len}", f"at most {self.max_rows}, the positions of {job.model}"
            raise RecipeError("engine.max_seq_len", got, expected, "Lower it.")

    def _image_tokens(self) -> int:
        check_vision(read_config(self.folder))
        num = read_vision_dims(self.folder, self.dims.hidden_size).num_tokens
        record = image_record(self.folder, self.context.weights)
        if record["image_token_id"] >= self.dims.vocab_size:
            got, expected = f"image token {record['image_token_id']}", f"one below vocab_size {self.dims.vocab_size}"
            raise RecipeError("target.vision", got, expected, "Use a checkpoint whose embedding has the image token.")
        if num + 2 >= self.context.max_seq_len:
            got, expected = str(self.context.max_seq_len), f"more than {num + 2}, an image and its text"
            raise RecipeError("engine.max_seq_len", got, expected, "Raise it, or leave target.vision out.")
        return num

    def _with_layers(self, num_layers: int) -> ModelDims:
        if num_layers > self.dims.num_layers:
            expected = f"at most {self.dims.num_layers}, the layers of {self.job.model}"
            raise RecipeError("target.num_layers", str(num_layers), expected, "Lower it.")
        if self.dims.model_type in GEMMA4_TYPES and num_layers != self.dims.num_layers:
            expected = f"{self.dims.num_layers}: the kinds of layers and what they share are a whole"
            raise RecipeError("target.num_layers", str(num_layers), expected, "Leave target.num_layers out.")
        return replace(self.dims, num_layers=num_layers)

    def check(self) -> None:
        """Checks that the weights are complete and belong to the config, and that an adapter can be merged."""
        check_checkpoint(self.folder, self.dims)
        if self.job.lora is not None:
            open_lora(self.job.lora)
        if self.job.adapters:
            open_adapters(self.job)

    @functools.cached_property
    def draft_tokens(self) -> DraftTokens | None:
        """The tokens that a draft may name; None: all."""
        options, target = self.options.candidates, self.context.target
        if target is None or not isinstance(options, VocabCandidateOptions) or options.vocab is None:
            return None
        return choose_tokens(options.vocab, self.folder, min(self.dims.vocab_size, target.vocab_size))

    def digests(self) -> dict[str, str]:
        own = digests_from_checkpoint(self.folder, self.context.weights, WEIGHT_FILES)
        kept = {} if self.draft_tokens is None else {"draft_vocab": self.draft_tokens.digest}
        if self.job.lora is not None or self.job.adapters:
            own |= digests_of_adapter(self.job) | digests_of_adapters(self.job)
        return own | kept

    def counts(self) -> WeightCounts | None:
        """Returns None: they follow from config.json and the sizes."""
        return None

    def spec(self) -> GraphSpec:
        """Returns the spec: a target verifies; a draft has candidates after every node, in the target's vocabulary."""
        target = self.context.target
        dims = self.dims if target is None else replace(self.dims, vocab_size=target.vocab_size)
        max_pending = self.context.max_draft_nodes + 1
        plain = decoder_spec(
            self.job.name, dims, **self.outputs, max_pending=max_pending, adapters=bool(self.job.adapters)
        )
        plain = replace(plain, max_rows=self.max_rows)
        if target is None:
            return verified_spec(plain, self.options.keep_logits)
        candidates = self.options.candidates
        num = min(candidates.num_candidates, self.dims.vocab_size, target.vocab_size)
        made = candidate_spec(plain, num, candidates.gives_probs)
        if (token := self._mask_token()) is None:
            return made
        num_drafts = min(candidates.max_parallel, self.context.max_draft_nodes)
        return replace(made, num_drafts=num_drafts, mask_token=token)

    def _mask_token(self) -> int | None:
        candidates, num = self.options.candidates, self.dims.vocab_size
        token = read_config(self.folder).get(MASK_TOKEN)
        if candidates.max_parallel == 1 and not candidates.is_parallel:
            return None
        if token is None and not candidates.is_parallel:
            return None
        if type(token) is not int or not 0 <= token < num:
            where, expected = f"{self.folder / 'config.json'} ({MASK_TOKEN})", f"a token of the {num} that it reads"
            todo = "Use a draft that was trained with masks (PARD), or leave speculator.parallel_drafting out."
            raise CheckpointError(where, repr(token), expected, todo)
        return token

    def check_compiled(self, engine: Engine, max_nodes: int) -> dict[str, Any]:
        kept = {} if self.draft_tokens is None else {"draft_vocab": self.draft_tokens.record()}
        return check_decoder(engine, max_nodes) | kept

    def export(self, progress: Callable[[str], None]) -> tuple[ir.Model, ModelDims]:
        return self.export_changed(None, progress)

    def export_changed(
        self, prepare: Callable[[Any, ModelDims], ModelDims] | None, progress: Callable[[str], None]
    ) -> tuple[ir.Model, ModelDims]:
        """Exports the model after `prepare` has changed it; see `speccompile.export.decoder.export_decoder`."""
        from speccompile.export.decoder import export_decoder

        with tempfile.TemporaryDirectory() as scratch:
            source = self.folder if self.options.num_layers is None else self._write_config(Path(scratch))
            weights: Any = self.context.weights
            model, dims = export_decoder(
                source,
                weights=weights,
                max_seq_len=self.max_rows,
                lora=None if self.job.lora is None else open_lora(self.job.lora),
                adapters=open_adapters(self.job) if self.job.adapters else (),
                prepare=prepare,
                kept_tokens=() if self.draft_tokens is None else self.draft_tokens.ids,
                progress=progress,
                **self.outputs,
            )
        return model, dims

    def _write_config(self, folder: Path) -> Path:
        config = read_text_config(self.folder)
        config[layers_key(config)] = self.dims.num_layers
        for name in BY_LAYER:
            if isinstance(held := config.get(name), list):
                config[name] = held[: self.dims.num_layers]
        if kinds := config.get("attention_types"):  # GPT-Neo's: kinds, and how often they come
            every = [kind for group, num in kinds for kind in group * num]
            config["attention_types"] = [[every[: self.dims.num_layers], 1]]
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder
