# SPDX-License-Identifier: Apache-2.0
"""transformers' config of a checkpoint folder, and of the decoder in it."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speccompile.checkpoints.checkpoint import read_config
from speccompile.checkpoints.config_values import SAME_AS, TODO, TOWERS, plain_values
from speccompile.common.json_reader import shown
from speccompile.errors import CheckpointError

_MAX_SAID = 200
_FIELD = re.compile(r"field '(\w+)'")


@contextmanager
def config_errors(where: str, config: Mapping[str, Any]) -> Iterator[None]:
    """Turns what transformers' classes say of a config's values into a CheckpointError with file, key and value."""
    from huggingface_hub.errors import StrictDataclassError  # it derives from Exception

    try:
        yield
    except (StrictDataclassError, KeyError, TypeError, AttributeError) as fault:
        field = _FIELD.search(str(fault))
        said = re.sub(r"^\w+: ", "", str(fault).strip().splitlines()[-1].strip()).rstrip(".")[:_MAX_SAID]
        got = shown(config.get(field[1])) if field else "values that do not go together"
        at = f"{where} ({field[1]})" if field else where
        raise CheckpointError(at, got, f"what transformers takes: {said}", TODO) from fault


def read_whole_config(source: Path) -> Any:
    """Returns transformers' config of a folder; imports transformers."""
    from transformers import AutoConfig

    held = read_config(source)
    text = json.dumps(plain_values(held))
    # Without trust_remote_code=False transformers would ask on the terminal.
    options = {"local_files_only": True, "trust_remote_code": False}
    with config_errors(str(source / "config.json"), held), tempfile.TemporaryDirectory() as scratch:
        if text == json.dumps(held):
            return AutoConfig.from_pretrained(source, **options)
        (Path(scratch) / "config.json").write_text(text, encoding="utf-8")
        return AutoConfig.from_pretrained(scratch, **options)


def read_model_config(source: Path) -> Any:
    """Returns transformers' config of the language model in `source`; imports transformers."""
    from transformers import CONFIG_MAPPING

    config = read_whole_config(source)
    _drop_far_pads(config)
    if config.model_type in ("muse_glimmer", "muse_glimmer_text"):
        from speccompile.checkpoints.muse_glimmer import register

        register()
    if config.model_type not in TOWERS:
        return config
    text = config.get_text_config()
    if hasattr(config, "tie_word_embeddings"):
        text.tie_word_embeddings = config.tie_word_embeddings
    if text.model_type in SAME_AS:
        fields = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        text = CONFIG_MAPPING[SAME_AS[text.model_type]](**fields)
    if text.architectures is None:
        text.architectures = config.architectures
    _drop_far_pads(text)
    return text


def _drop_far_pads(config: Any) -> None:
    pad, vocab = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if isinstance(pad, int) and isinstance(vocab, int) and not -vocab <= pad < vocab:
        config.pad_token_id = None
