# SPDX-License-Identifier: Apache-2.0
"""transformers' config of the decoder in a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccompile.checkpoints.text_towers import SAME_AS, TOWERS


def read_model_config(source: Path) -> Any:
    """Returns transformers' config of the language model in `source`; imports transformers.

    Raises:
        OSError: no config.json.
        ValueError: transformers does not know the architecture.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    # Without trust_remote_code=False transformers would ask on the terminal.
    config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
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
    return text
