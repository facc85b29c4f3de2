# SPDX-License-Identifier: Apache-2.0
"""Where images stand in a prompt, what is fed of them, and what their rows are kept for; no model."""

import builtins
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from speccompile.bundle.manifest_records import ImageRecord
from speccompile.core.specs import IMAGE_NODES, IMAGE_ROWS, TREE_MASK
from speccompile.errors import RuntimeFault
from speccompile.graph_kinds.decoder import IMAGE_EMBEDDING, PIXELS
from speccompile.runtime import images
from speccompile.runtime.images import Image, ImageEncoder

IMAGE, NUM, HIDDEN = 9, 3, 2
RECORD = ImageRecord(
    image_size=4, num_tokens=NUM, begin_token_id=7, image_token_id=IMAGE, end_token_id=8, resample=2, scale=1 / 255,
    mean=[0.5] * 3, std=[0.5] * 3,
)  # fmt: skip
FIRST, SECOND = (Image(np.full((1, 3, 4, 4), value, np.float32), str(value) * 64) for value in (1, 2))
PROMPT = [1, 2, *[IMAGE] * NUM, 3, *[IMAGE] * NUM, 4, 5]


class Tower:
    """Rows of an image: its number, and the index of the row."""

    def __init__(self) -> None:
        self.num_runs = 0

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.num_runs += 1
        rows = np.stack([np.full(NUM, feeds[PIXELS][0, 0, 0, 0]), np.arange(NUM)], axis=-1)
        return {IMAGE_EMBEDDING: rows[None].astype(np.float32)}


def make_encoder() -> tuple[ImageEncoder, Tower]:
    tower: Any = Tower()
    names = {7: "<begin>", IMAGE: "<image>", 8: "<end>"}
    tokenizer: Any = SimpleNamespace(id_to_token=names.get)
    return ImageEncoder(tower, RECORD, tokenizer), tower


def test_chunks_hold_all_tokens_of_an_image_or_none():
    placed = make_encoder()[0].locate("prompt", PROMPT, [FIRST, SECOND])
    assert [(b.start, b.end) for b in placed.blocks] == [(2, 5), (6, 9)]
    assert [placed.chunk(0, num) for num in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)] == [1, 2, 2, 2, 5, 6, 6, 6, 9, 10]
    assert [placed.chunk(2, num) for num in (1, 2, 3, 4, 5)] == [3, 3, 3, 4, 4]
    assert placed.chunk(3, 1) == 2  # a prompt that begins in an image that a cache holds


def test_feeds_are_rows_and_blocks_that_see_each_other():
    encoder, tower = make_encoder()
    placed = encoder.locate("prompt", PROMPT, [FIRST, SECOND])
    assert placed.feeds(0, 2) == {} == placed.feeds(9, 1)
    feeds = placed.feeds(1, 9)
    nodes = [False, True, True, True, False, True, True, True, False]
    assert feeds[IMAGE_NODES].tolist() == [nodes]
    assert feeds[IMAGE_ROWS][0, [1, 2, 3, 5, 6, 7]].tolist() == [[i, row] for i in (1, 2) for row in range(NUM)]
    expected = np.tri(9, dtype=bool)
    expected[1:4, 1:4] = expected[5:8, 5:8] = True
    np.testing.assert_array_equal(feeds[TREE_MASK][0], expected)
    inside = placed.feeds(3, 2)
    assert inside[IMAGE_ROWS][0].tolist() == [[1, 1], [1, 2]] and inside[TREE_MASK].all()
    assert tower.num_runs == 2  # once for an image


def test_rows_are_kept_for_the_last_images(monkeypatch):
    monkeypatch.setattr(images, "MAX_KEPT", 1)
    encoder, tower = make_encoder()
    for image, num_runs in ((FIRST, 1), (FIRST, 1), (SECOND, 2), (FIRST, 3)):
        assert encoder.rows(image)[0, 0] == image.pixels[0, 0, 0, 0]
        assert tower.num_runs == num_runs


def test_caches_are_compared_by_what_an_image_shows():
    encoder = make_encoder()[0]
    keys = [encoder.locate("prompt", PROMPT, pair).keys(PROMPT) for pair in ([FIRST, FIRST], [FIRST, SECOND])]
    assert keys[0][:6] == keys[1][:6] and keys[0][6:9] != keys[1][6:9] and keys[0][9:] == PROMPT[9:]
    assert all(key < 0 for key in keys[0][2:5])


def test_a_text_gets_the_tokens_of_its_images():
    encoder = make_encoder()[0]
    assert encoder.expand("prompt", "a<begin>b", 1) == "a\n\n<begin><image><image><image><end>\n\nb"
    with pytest.raises(RuntimeFault, match="0 marks <begin>"):
        encoder.expand("prompt", "ab", 1)


def test_without_pillow_the_extra_is_named(monkeypatch):
    found = builtins.__import__

    def without_pillow(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "PIL":
            raise ImportError(name)
        return found(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    with pytest.raises(RuntimeFault, match=r"pip install .*\[vision\]"):
        make_encoder()[0].read(b"")


def test_large_images_are_refused(monkeypatch):
    pillow = pytest.importorskip("PIL.Image")
    import io

    file = io.BytesIO()
    pillow.fromarray(np.zeros((9, 8, 3), np.uint8)).save(file, "PNG")
    encoder = make_encoder()[0]
    assert encoder.read(file.getvalue()).pixels.shape == (1, 3, 4, 4)
    monkeypatch.setattr(images, "MAX_PIXELS", 71)
    with pytest.raises(RuntimeFault, match="8 x 9 pixels"):
        encoder.read(file.getvalue())
    monkeypatch.setattr(images, "MAX_BYTES", 10)
    with pytest.raises(RuntimeFault, match="at most 10"):
        encoder.read(file.getvalue())
    with pytest.raises(RuntimeFault, match="no image that can be decoded"):
        encoder.read(file.getvalue()[:9])
