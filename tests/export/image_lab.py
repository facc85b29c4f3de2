# SPDX-License-Identifier: Apache-2.0
"""A tiny Gemma 3 with a vision tower as a hub would hold it: weights, tokenizer, image processor, chat template."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.export.families import VOCAB
from tests.export.towers import make_tower, tower_config

IMAGE, BEGIN, END, NEWLINES = 90, 91, 92, 93
NUM_TOKENS, IMAGE_SIZE = 4, 28
# Shorter than an image and the text around it, so that a sliding layer hides rows before an image from its last ones.
WINDOW = 6
BLOCK = [NEWLINES, BEGIN, *[IMAGE] * NUM_TOKENS, END, NEWLINES]
SPECIAL = {"<pad>": 0, "<eos>": 2, "<image_soft_token>": IMAGE, "<start_of_image>": BEGIN, "<end_of_image>": END,
           "\n\n": NEWLINES}  # fmt: skip
PROCESSOR = {
    "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True,
    "image_mean": [0.5, 0.4, 0.3], "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": NUM_TOKENS,
    "image_std": [0.5, 0.6, 0.7], "resample": 2, "rescale_factor": 0.00392156862745098,
    "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for item in message.content %}{% if item.type == 'image' %}{{ '<start_of_image>' }}"
    "{% else %}{{ item.text }}{% endif %}{% endfor %}{% endif %} w5 {% endfor %}"
)


def image(seed: int, height: int = 20, width: int = 31) -> np.ndarray:
    """A picture of random blocks, [height, width, 3] uint8."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return np.ascontiguousarray(blocks.repeat(4, 0).repeat(4, 1)[:height, :width])


def make_vlm(folder: Path, seed: int = 0) -> Any:
    """Writes the checkpoint; returns transformers' whole model with its eager attention."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = tower_config("gemma3", num_hidden_layers=3, layer_types=kinds, sliding_window=WINDOW,
                          max_position_embeddings=96, query_pre_attn_scalar=8)  # fmt: skip
    config.mm_tokens_per_image = NUM_TOKENS
    config.image_token_id, config.boi_token_id, config.eoi_token_id = IMAGE, BEGIN, END
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False  # tied ones repeat their last token
    config.vision_config.patch_size, config.vision_config.num_hidden_layers = 7, 2
    model = make_tower(config, folder, seed)
    words = {f"w{i}": i for i in range(VOCAB) if i not in SPECIAL.values()} | SPECIAL
    added = [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": text != "\n\n"} for text, i in sorted(SPECIAL.items(), key=lambda row: row[1])]  # fmt: skip
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"},
                 "model": {"type": "WordLevel", "vocab": words, "unk_token": "w3"}}  # fmt: skip
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>",
             "eos_token": "<eos>", "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return model


def processor(folder: Path) -> Any:
    """transformers' processor of the checkpoint."""
    from transformers import AutoTokenizer
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = ("boi_token", "eoi_token", "image_token")
    for name in names:
        text = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
        setattr(tokenizer, name, text[name])
        setattr(tokenizer, f"{name}_id", SPECIAL[text[name]])
    images = Gemma3ImageProcessorPil.from_pretrained(folder)
    return Gemma3Processor(images, tokenizer, image_seq_length=NUM_TOKENS)
