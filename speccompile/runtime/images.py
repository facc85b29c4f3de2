# SPDX-License-Identifier: Apache-2.0
"""Images of prompts: decoded and prepared as the model's processor does, and where their tokens stand in a prompt."""

from __future__ import annotations

import hashlib
import io
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from speccompile.bundle.manifest_records import ImageRecord
from speccompile.common.extras import install_command
from speccompile.core.protocols import Engine
from speccompile.core.specs import IMAGE_NODES, IMAGE_ROWS, TREE_MASK
from speccompile.core.tree import Floats
from speccompile.errors import RuntimeFault
from speccompile.graph_kinds.decoder import IMAGE_EMBEDDING, PIXELS

if TYPE_CHECKING:
    from PIL import Image as Pillow

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_BYTES, MAX_PIXELS = 16 << 20, 1 << 25  # of one image: in its file, and decoded
MAX_KEPT = 16  # images whose rows are kept: several outputs of a request, and turns of a chat, have the same
_TODO = f"Give each as bytes, a path ({', '.join(FORMATS)}), or an array [height, width, 3] uint8."


@dataclass(frozen=True, eq=False)
class Image:
    """One image, ready for the vision tower."""

    pixels: Floats  # [1, 3, height, width] float32
    digest: str  # SHA-256 of the pixels: images of one digest have equal rows

    @property
    def key(self) -> int:
        return -1 - int(self.digest[:15], 16)


ImageData = bytes | Path | NDArray[np.uint8] | Image


@dataclass(frozen=True)
class Block:
    """The tokens of one image in a prompt."""

    start: int
    end: int
    image: Image


class ImageEncoder:
    """Prepares images, and gives their rows in the target's embedding."""

    def __init__(self, engine: Engine, record: ImageRecord, tokenizer: Tokenizer | None) -> None:
        self.engine, self.record, self.tokenizer = engine, record, tokenizer
        self._kept: OrderedDict[str, Floats] = OrderedDict()

    def read(self, data: ImageData) -> Image:
        """Returns an image, prepared; may be called on any thread. Raises RuntimeFault: it cannot be read."""
        if isinstance(data, Image):
            return data
        record = self.record
        small = _decode(data).resize((record.image_size, record.image_size), record.resample)
        scaled: Floats = np.asarray(small, np.float32) * np.float32(record.scale)
        mean, std = (np.array(row, np.float32) for row in (record.mean, record.std))
        normal: Floats = (scaled - mean) / std
        pixels: Floats = np.ascontiguousarray(normal.transpose(2, 0, 1)[None])
        return Image(pixels, hashlib.sha256(pixels.tobytes()).hexdigest())

    def rows(self, image: Image) -> Floats:
        """Returns the rows of an image, [image_tokens, hidden] float32; the vision tower runs unless they are kept."""
        kept = self._kept
        if image.digest not in kept:
            rows = np.asarray(self.engine.run({PIXELS: image.pixels})[IMAGE_EMBEDDING])[0]
            kept[image.digest] = np.array(rows, dtype=np.float32)
        kept.move_to_end(image.digest)
        if len(kept) > MAX_KEPT:
            kept.popitem(last=False)
        return kept[image.digest]

    def expand(self, where: str, text: str, num_images: int) -> str:
        """Returns a text with the tokens of each image at its mark, as the model's processor writes them.

        Raises:
            RuntimeFault: the marks (tokens that begin an image) are not as many as images, or there is no tokenizer.
        """
        record, tokenizer = self.record, self.tokenizer
        if tokenizer is None:
            expected = "token ids with the tokens of each image"
            raise RuntimeFault(where, "a text", expected, "This bundle has no tokenizer: it was built from a config.")
        ids = (record.begin_token_id, record.image_token_id, record.end_token_id)
        begin, image, end = (str(tokenizer.id_to_token(i)) for i in ids)
        if text.count(begin) != num_images:
            got, expected = f"{text.count(begin)} marks {begin} in the text", f"{num_images}, one for each image"
            raise RuntimeFault(where, got, expected, f"Write {begin} where an image stands, and nowhere else.")
        return text.replace(begin, f"\n\n{begin}{image * record.num_tokens}{end}\n\n")

    def locate(self, where: str, tokens: Sequence[int], images: Sequence[Image]) -> PromptImages:
        """Returns where the tokens of each image stand in a prompt.

        Raises:
            RuntimeFault: there is not one run of `num_tokens` image tokens for each image, or the prompt ends in one.
        """
        token, num = self.record.image_token_id, self.record.num_tokens
        runs = list(_runs(tokens, token))
        wrong = next((end - start for start, end in runs if end - start != num), None)
        if wrong is not None or len(runs) != len(images):
            got = f"{len(runs)} images by their tokens" if wrong is None else f"a run of {wrong} image tokens"
            expected = f"{num} tokens {token} in a row for each of {len(images)} images"
            raise RuntimeFault(where, got, expected, "Write the tokens that the model's processor writes.")
        if runs and runs[-1][1] == len(tokens):
            raise RuntimeFault(where, "an image at its end", "text after the last image", "Add a token after it.")
        return PromptImages([Block(*run, image) for run, image in zip(runs, images, strict=True)], self)


class PromptImages:
    """The images of one prompt."""

    def __init__(self, blocks: Sequence[Block], encoder: ImageEncoder) -> None:
        self.blocks, self.encoder = tuple(blocks), encoder

    def keys(self, tokens: Sequence[int]) -> list[int]:
        keys = list(tokens)
        for block in self.blocks:
            keys[block.start : block.end] = [block.image.key] * (block.end - block.start)
        return keys

    def chunk(self, start: int, num: int) -> int:
        """Returns how many tokens, of at most `num`, a chunk of a prompt has; an image is read whole."""
        for block in self.blocks:
            if block.start < start + num < block.end:
                return block.start - start if block.start > start else block.end - start
        return num

    def feeds(self, start: int, num: int) -> Mapping[str, NDArray[Any]]:
        """Returns the `image_nodes`, `image_rows` and `tree_mask` of a chunk; empty where it has no images.

        In the mask the nodes of an image see each other both ways.
        """
        found = [block for block in self.blocks if block.start < start + num and block.end > start]
        if not found:
            return {}
        nodes, mask = np.zeros((1, num), np.bool_), np.tri(num, dtype=np.bool_)[None]
        placed = np.zeros((1, num, self.encoder.rows(found[0].image).shape[1]), np.float32)
        for block in found:
            first, end = max(block.start - start, 0), block.end - start
            nodes[0, first:end] = mask[0, first:end, first:end] = True
            placed[0, first:end] = self.encoder.rows(block.image)[first + start - block.start :]
        return {IMAGE_NODES: nodes, IMAGE_ROWS: placed, TREE_MASK: mask}


def _runs(tokens: Sequence[int], token: int) -> Iterator[tuple[int, int]]:
    start = None
    for index, found in enumerate([*tokens, None]):
        if found == token and start is None:
            start = index
        elif found != token and start is not None:
            yield start, index
            start = None


def _decode(data: bytes | Path | NDArray[np.uint8]) -> Pillow.Image:
    """Returns an image in RGB, upright. Raises RuntimeFault: see `ImageEncoder.read`."""
    try:
        from PIL import Image as Pillow
        from PIL import ImageOps
    except ImportError as fault:
        todo = f"Install it: {install_command('vision')}."
        raise RuntimeFault("images", "an image, without Pillow to decode it", "Pillow", todo) from fault
    if isinstance(data, np.ndarray):
        if data.dtype != np.uint8 or data.ndim != 3 or data.shape[2] != 3 or not data.size:
            raise RuntimeFault("images", f"an array {data.dtype}{list(data.shape)}", "[height, width, 3] uint8", _TODO)
        return Pillow.fromarray(np.ascontiguousarray(data))
    if not isinstance(data, bytes | Path):
        raise RuntimeFault("images", f"a {type(data).__name__}", "an image", _TODO)
    try:
        raw = data if isinstance(data, bytes) else data.read_bytes()
        if len(raw) > MAX_BYTES:
            raise RuntimeFault("images", f"an image of {len(raw)} bytes", f"at most {MAX_BYTES}", "Send a smaller one.")
        opened = Pillow.open(io.BytesIO(raw), formats=FORMATS)
        if opened.width * opened.height > MAX_PIXELS:
            got, expected = f"{opened.width} x {opened.height} pixels", f"at most {MAX_PIXELS} pixels"
            raise RuntimeFault("images", got, expected, "Send a smaller one.")
        return ImageOps.exif_transpose(opened).convert("RGB")
    # What Pillow's readers raise for files that are cut off or are none of theirs.
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Pillow.DecompressionBombError) as fault:
        got = f"no image that can be decoded ({type(fault).__name__})"
        raise RuntimeFault("images", got, f"a whole file: {', '.join(FORMATS)}", _TODO) from fault
