# SPDX-License-Identifier: Apache-2.0
"""A tiny Gemma 3 with images, end to end: transformers' text offline, in the scheduler, over HTTP and for Triton."""

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import build_bundle
from tests.export import image_lab as lab

torch = pytest.importorskip("torch")
Pillow = pytest.importorskip("PIL.Image")

import speccompile  # noqa: E402
from speccompile import SamplingParams  # noqa: E402
from speccompile.cli.main import main  # noqa: E402
from speccompile.errors import RuntimeFault  # noqa: E402
from speccompile.runtime import sequences  # noqa: E402
from speccompile.runtime.control import FixedLength  # noqa: E402
from speccompile.runtime.images import PromptImages  # noqa: E402
from speccompile.runtime.requests import Request  # noqa: E402
from speccompile.runtime.scheduler import Scheduler  # noqa: E402
from speccompile.runtime.sequences import RequestHandle  # noqa: E402
from speccompile.runtime.service import Service, make_scheduler, open_outputs  # noqa: E402
from speccompile.serving.openai.app import make_app  # noqa: E402
from speccompile.serving.openai.server import OpenAIServer, ServerOptions  # noqa: E402
from speccompile.serving.triton.contract import text_outputs  # noqa: E402
from speccompile.serving.triton.repository import RepositoryOptions, write_repository  # noqa: E402
from speccompile.serving.triton.request_parsing import Rules, call_from_arrays  # noqa: E402
from tests.serving.asgi_lab import ask  # noqa: E402

NUM_TOKENS = 16
PARAMS = SamplingParams(max_new_tokens=NUM_TOKENS)
FIRST, SECOND = lab.image(1), lab.image(2, 64, 40)
LONG = " ".join(f"w{i}" for i in range(30, 42))  # with an image more than the tokens that a cache is kept for
CASES: list[tuple[str, list[np.ndarray]]] = [
    ("w7 w8 <start_of_image> w9 w10", [FIRST]),
    ("w7 <start_of_image> w9 w10 w11 <start_of_image> w12", [SECOND, FIRST]),
    ("w4 w5 w6 w7", []),
    ("w7 w8 <start_of_image> w9 w10", [SECOND]),
    (f"{LONG} <start_of_image> w5 w6", [FIRST]),
    (f"{LONG} <start_of_image> w5 w6", [SECOND]),
]
TEXTS, IMAGES = [case[0] for case in CASES], [case[1] for case in CASES]


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("vlm")
    return folder, lab.make_vlm(folder / "target")


@pytest.fixture(scope="module")
def bundle(vlm: tuple[Path, Any]) -> Path:
    """The target drafts for itself as a model of text: it embeds image tokens where the target has rows of an image."""
    model = vlm[0] / "target"
    recipe = (
        f"target: {{model: {model}, vision: true}}\n"
        f"speculator: {{method: draft_model, model: {model}, num_draft_tokens: 4}}\n"
        "engine: {max_batch_size: 4, max_seq_len: 64, max_draft_nodes: 8, threads: 1}\n"
    )
    return build_bundle(vlm[0], "bundle", recipe)


@pytest.fixture(scope="module")
def expected(vlm: tuple[Path, Any]) -> list[list[int]]:
    """The tokens of transformers' own greedy generate."""
    process, texts = lab.processor(vlm[0] / "target"), []
    for text, images in CASES:
        given = process(images=[images] if images else None, text=[text], return_tensors="pt")
        out = vlm[1].generate(**given, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=2)
        texts.append(out[0, given["input_ids"].shape[1] :].tolist())
    assert len({tuple(text) for text in texts}) == len(CASES)  # every image changes the text
    return texts


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:  # no clock decides whether to draft
        patch.setattr("speccompile.runtime.spec_engine.controller_of", lambda proposer: None)
        yield speccompile.load(bundle)


def _tokens(engine: Any, **options: Any) -> list[list[int]]:
    return [r.tokens for r in engine.generate(TEXTS, PARAMS, images=IMAGES, **options)]


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_greedy_text_equals_transformers(bundle, expected, method, monkeypatch):
    monkeypatch.setattr("speccompile.runtime.spec_engine.controller_of", lambda proposer: None)
    engine = speccompile.load(bundle, method=method, verify=False)
    for batch_size in (1, 4):
        results = engine.generate(TEXTS, PARAMS, images=IMAGES, batch_size=batch_size)
        assert [r.tokens for r in results] == expected
        assert method == "ngram" or sum(r.stats["num_accepted"] for r in results) > 0
        assert _tokens(engine, batch_size=batch_size, speculative=False) == expected


def test_chunks_of_a_prompt_never_cut_an_image(engine, expected, monkeypatch):
    for chunk in (1, 5):
        monkeypatch.setattr(engine.verifier, "chunk", chunk)
        assert _tokens(engine) == expected


def test_a_causal_image_and_shifted_rows_are_noticed(engine, expected, monkeypatch):
    feeds = PromptImages.feeds

    def causal(self: PromptImages, start: int, num: int) -> dict[str, Any]:
        return {name: value for name, value in feeds(self, start, num).items() if name != "tree_mask"}

    def shifted(self: PromptImages, start: int, num: int) -> dict[str, Any]:
        return {n: np.roll(v, 1, axis=1) if n == "image_rows" else v for n, v in feeds(self, start, num).items()}

    for mutant in (causal, shifted):
        monkeypatch.setattr(PromptImages, "feeds", mutant)
        found = _tokens(engine)
        assert found[2] == expected[2]  # without an image
        assert sum(a != b for a, b in zip(found, expected, strict=True)) >= 2


def test_files_and_token_ids_are_read_alike(engine, expected, tmp_path):
    path = tmp_path / "first.png"
    Pillow.fromarray(FIRST).save(path)
    ids = [7, 8, *lab.BLOCK, 9, 10]
    for prompt, image in ((TEXTS[0], path), (TEXTS[0], path.read_bytes()), (ids, FIRST)):
        assert engine.generate(prompt, PARAMS, images=[image])[0].tokens == expected[0]
    assert [t for step in engine.stream(ids, PARAMS, images=[FIRST]) for t in step.tokens] == expected[0]


def test_the_command_line_reads_images(bundle, expected, tmp_path, capsys):
    for name, image in (("first.png", FIRST), ("second.png", SECOND)):
        Pillow.fromarray(image).save(tmp_path / name)
    found = tmp_path / "found.json"
    common = ["generate", str(bundle), "--max-new-tokens", str(NUM_TOKENS), "--json", str(found)]
    two = [word for name in ("second.png", "first.png") for word in ("--image", str(tmp_path / name))]
    assert main([*common, "--raw", "--prompt", TEXTS[1], *two]) == 0
    assert [row["tokens"] for row in json.loads(found.read_text())] == [expected[1]]
    names = {id(FIRST): "first.png", id(SECOND): "second.png"}
    rows = [{"prompt": text, "images": [names[id(image)] for image in images]} for text, images in CASES]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*common, "--prompts", str(file)]) == 0
    assert [row["tokens"] for row in json.loads(found.read_text())] == expected
    capsys.readouterr()
    for options, message in (
        (["--raw", "--prompt", "w7", "--image", str(tmp_path / "first.png")], "0 marks <start_of_image> in the text"),
        (["--prompts", str(file), "--image", str(tmp_path / "first.png")], "lines of a file have `images`"),
    ):
        assert main([*common, *options]) != 0
        assert message in " ".join(capsys.readouterr().err.split())


def _drain(scheduler: Scheduler, engine: Any, *requests: Request) -> list[tuple[list[int], dict[str, Any]]]:
    """Submits requests at once; returns tokens and stats of each."""
    found: dict[int, tuple[list[int], dict[str, Any]]] = {}
    for number, request in enumerate(requests):
        handle = RequestHandle(number, 0.0)
        open_outputs(handle, [request], engine, "auto")
        scheduler.add(handle)
        found[number] = ([], {})
    while scheduler.has_work:
        for handle, output in scheduler.step():
            found[handle.number][0].extend(output.tokens)
            found[handle.number][1].update(output.stats or {})
    return list(found.values())


def _request(case: int) -> Request:
    return Request(TEXTS[case], PARAMS, images=IMAGES[case])


def test_a_kept_cache_is_never_that_of_another_image(engine, expected, monkeypatch):
    scheduler = make_scheduler(engine, FixedLength(), prefill_chunk=3)
    reused = []
    for case in (4, 5, 4, 5):
        [(tokens, stats)] = _drain(scheduler, engine, _request(case))
        assert tokens == expected[case]
        reused.append(stats["num_reused_tokens"])
    begin = 12 + 2  # the text before the image, the line break and the token that begins it
    assert reused[:2] == [0, 0] and begin < 16 < begin + lab.NUM_TOKENS <= min(reused[2:])

    monkeypatch.setattr(sequences.TokenSequence, "keys", property(lambda self: self.tokens))
    scheduler = make_scheduler(engine, FixedLength(), prefill_chunk=3)
    assert [_drain(scheduler, engine, _request(case))[0][0] for case in (4, 5)] != [expected[4], expected[5]]


def test_prompts_with_images_are_read_again_after_a_fault(engine, expected, monkeypatch):
    """A decoding step fails while another prompt is half read: that one is read again from its start."""
    scheduler = make_scheduler(engine, FixedLength(), prefill_chunk=3)
    score, failed = engine.verifier.score, []

    def fail_once(tree: Any, batch: Any) -> Any:
        reading = scheduler.allocator.reading
        if not failed and reading is not None and engine.verifier.lengths[scheduler.allocator.reading_slot] > 3:
            failed.append(reading)
            raise RuntimeFault("engine target", "a fault", "none", "Try again.")
        return score(tree, batch)

    monkeypatch.setattr(engine.verifier, "score", fail_once)
    first, *others = _drain(scheduler, engine, *(_request(case) for case in (0, 1, 4)))
    assert failed and len(first[0]) < NUM_TOKENS
    assert [tokens for tokens, _ in others] == [expected[1], expected[4]]


@pytest.mark.parametrize(
    ("prompt", "images", "got"),
    [
        ("w7 w8", [FIRST], "0 marks <start_of_image>"),
        ("<start_of_image> w7 <start_of_image> w8", [FIRST], "2 marks"),
        ([7, 90, 90, 8], [FIRST], "a run of 2 image tokens"),
        ([7, *lab.BLOCK, 8], [FIRST, FIRST], "1 images by their tokens"),
        ([7, 91, 90, 90, 90, 90], [FIRST], "an image at its end"),
        ("<start_of_image> w7", [b"no image"], "no image that can be decoded"),
        ("<start_of_image> w7", [np.zeros((2, 2), np.uint8)], "an array uint8"),
        ("<start_of_image> w7", ["first.png"], "a str"),
    ],
)
def test_wrong_images_are_refused(engine, prompt, images, got):
    with pytest.raises(RuntimeFault, match=got):
        engine.generate(prompt, PARAMS, images=images)


def _data_url(image: np.ndarray, form: str = "PNG") -> str:
    file = io.BytesIO()
    Pillow.fromarray(image).save(file, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def _chat(url: str, text: str = "w9 w10") -> dict[str, Any]:
    parts = [{"type": "text", "text": "w7 w8"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], "max_tokens": 8}


def test_chats_with_images_are_answered_over_http(engine, vlm):
    service = Service(engine)
    app = make_app(OpenAIServer(service, ServerOptions("tiny")))
    prompt = [7, 8, *lab.BLOCK, 9, 10, 5]  # as the chat template writes it
    given = lab.processor(vlm[0] / "target")(images=[[FIRST]], text=["w7 w8 <start_of_image> w9 w10 w5"])
    assert list(given["input_ids"][0]) == prompt
    tokens = engine.generate(prompt, SamplingParams(max_new_tokens=8), images=[FIRST])[0].tokens
    service.start()
    try:

        def post(body: dict[str, Any]) -> Any:
            return asyncio.run(ask(app, "POST", "/v1/chat/completions", body))

        answer = post(_chat(_data_url(FIRST)))
        assert answer.status == 200, answer.body
        said = answer.json()
        decode = engine.tokenizer.decode  # a text is what its tokens add to the prompt's
        assert said["choices"][0]["message"]["content"] == decode([*prompt, *tokens]).removeprefix(decode(prompt))
        assert said["usage"]["prompt_tokens"] == len(prompt)
        other = post(_chat(_data_url(SECOND, "JPEG"))).json()
        assert other["choices"][0]["message"]["content"] != said["choices"][0]["message"]["content"]
        for url, code, message in (
            ("https://example.com/cat.png", "unsupported_url", "fetches nothing"),
            ("file:///etc/passwd", "unsupported_url", "fetches nothing"),
            ("data:image/png;base64,?", "invalid_value", "not base64"),
            ("data:image/png;base64,AAAA", "invalid_value", "no image that can be decoded"),
            ("data:text/plain;base64,AAAA", "invalid_value", "no data URL of an image"),
        ):
            error = post(_chat(url)).json()["error"]
            assert (error["code"], error["param"]) == (code, "messages") and message in error["message"]
        error = post(_chat(_data_url(FIRST), "<start_of_image>")).json()["error"]
        assert error["param"] == "messages" and "2 marks" in error["message"]
        many = {"type": "image_url", "image_url": {"url": _data_url(FIRST)}}
        error = post({"messages": [{"role": "user", "content": [many] * 17}]}).json()["error"]
        assert error["param"] == "messages" and "at most 16" in error["message"]
    finally:
        service.close()


def test_tritons_model_reads_images(engine, bundle, expected, tmp_path):
    write_repository(bundle, tmp_path / "models", RepositoryOptions(links_bundle=True))
    assert 'name: "image"' in (tmp_path / "models/speccompile/config.pbtxt").read_text()
    rules = Rules(PARAMS, engine.eos_token_ids, engine.tokenizer)
    outputs = frozenset(tensor.name for tensor in text_outputs(True))
    requests = list[Request]()
    for text, images in CASES[:3]:
        arrays = {"text_input": np.array([text.encode()], dtype=np.object_)}
        if images:  # what follows the comma of a data URL is the file in base64
            coded = [_data_url(image).partition(",")[2].encode() for image in images]
            arrays["image"] = np.array(coded, dtype=np.object_)
        requests += call_from_arrays(arrays, outputs, outputs, rules).rows
    service = Service(engine)
    service.start()
    try:
        answers = [asyncio.run(service.generate(request))[0].tokens for request in requests]
    finally:
        service.close()
    assert answers == expected[:3]
