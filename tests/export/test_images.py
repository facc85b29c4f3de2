# SPDX-License-Identifier: Apache-2.0
"""A multimodal checkpoint with its images: the vision graph, and the target's graph over rows of images."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file, save_file

from speccompile.backends.base import CompileJob, LoadJob
from speccompile.backends.onnxruntime.backend import OnnxRuntimeBackend
from speccompile.backends.onnxruntime.kernel_library import find_library
from speccompile.backends.reference.backend import ReferenceBackend
from speccompile.bundle.manifest_records import ImageRecord
from speccompile.checkpoints.vision import check_vision, image_record, read_vision_dims
from speccompile.core.jobs import DecoderOptions, GraphJob, SourceContext
from speccompile.core.specs import IMAGE_ROWS, LENGTHS, LOGITS, TOKENS, TREE_MASK
from speccompile.errors import CheckpointError, RecipeError
from speccompile.export.decoder_source import DecoderSource
from speccompile.export.vision_source import VisionSource, own_name
from speccompile.graph_kinds.decoder import IMAGE_EMBEDDING, PIXELS
from speccompile.runtime.images import ImageEncoder
from tests import store
from tests.export import image_lab as lab

torch = pytest.importorskip("torch")
pytest.importorskip("PIL")

MAX_SEQ_LEN = 64
TOLERANCE = 2e-5  # of logits and rows of order 1: float32 sums in another order
TEXT = "w7 w8 <start_of_image> w9 w10 w11 <start_of_image> w12 w13"


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("vlm") / "target"
    return folder, lab.make_vlm(folder)


@pytest.fixture(scope="module")
def inputs(vlm: tuple[Path, Any]) -> Any:
    """What transformers' processor makes of a text with two images."""
    pictures = [lab.image(1), lab.image(2, 64, 40)]
    return lab.processor(vlm[0])(images=[pictures], text=[TEXT], return_tensors="pt")


def _source(folder: Path) -> DecoderSource:
    job = GraphJob("target", str(folder), options=DecoderOptions(keep_logits=True, images=True))
    return DecoderSource(job, SourceContext("checkpoint", MAX_SEQ_LEN, 8))


def _vision(folder: Path) -> VisionSource:
    target = _source(folder).dims
    return VisionSource(GraphJob("vision", str(folder)), SourceContext("checkpoint", MAX_SEQ_LEN, 8, target))


def _load(backend: Any, source: Any, graph: ir.Model, folder: Path, form: str | None = None) -> Any:
    spec = source.spec()
    backend.compile(CompileJob(graph.clone(), spec, folder, form=form))
    rows = MAX_SEQ_LEN if spec.caches else 0
    return backend.load(LoadJob(folder / backend.graph_file, spec, max_rows=rows))


@pytest.fixture(scope="module")
def vision(vlm: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ImageEncoder]:
    """Engine of the vision graph without quantisation, and an encoder over it."""
    source = _vision(vlm[0])
    graph, dims = store.export(source)
    form = "fp32" if find_library() is None else "packed"
    engine = _load(OnnxRuntimeBackend(), source, graph, tmp_path_factory.mktemp("vision"), form)
    assert dims.num_params > 0 and source.check_compiled(engine, 2) == {"num_tokens": lab.NUM_TOKENS}
    return engine, ImageEncoder(engine, ImageRecord(**source.record), None)


@pytest.fixture(scope="module")
def exported(vlm: tuple[Path, Any]) -> tuple[DecoderSource, ir.Model]:
    source = _source(vlm[0])
    return source, store.export(source)[0]


def test_images_are_prepared_as_by_the_processor(vision, inputs):
    for number, picture in enumerate([lab.image(1), lab.image(2, 64, 40)]):
        pixels = vision[1].read(picture).pixels
        np.testing.assert_allclose(pixels[0], inputs["pixel_values"][number].numpy(), rtol=0, atol=1e-6)


def test_rows_of_an_image_equal_transformers(vlm, vision, inputs):
    with torch.no_grad():
        wanted = vlm[1].get_image_features(inputs["pixel_values"].float()).pooler_output.numpy()
    for pixels, rows in zip(inputs["pixel_values"].numpy(), wanted, strict=True):
        got = np.asarray(vision[0].run({PIXELS: pixels[None].astype(np.float32)})[IMAGE_EMBEDDING])[0]
        np.testing.assert_allclose(got, rows, rtol=0, atol=TOLERANCE)


def _causal(feeds: dict[str, Any]) -> None:
    feeds.pop(TREE_MASK, None)


def _shifted(feeds: dict[str, Any]) -> None:
    if "image_rows" in feeds:
        feeds["image_rows"] = np.roll(feeds["image_rows"], 1, axis=1)


def _logits(engine: Any, encoder: ImageEncoder, tokens: list[int], chunk: int, change: Any = None) -> np.ndarray:
    """The logits after every token of a prompt that is read in chunks."""
    placed = encoder.locate("prompt", tokens, [encoder.read(lab.image(1)), encoder.read(lab.image(2, 64, 40))])
    rows, start = [], 0
    while start < len(tokens):
        num = placed.chunk(start, min(chunk, len(tokens) - start))
        feeds: dict[str, Any] = dict(placed.feeds(start, num))
        if change is not None:
            change(feeds)
        step = engine.run({TOKENS: np.array([tokens[start : start + num]]), LENGTHS: np.array([start]), **feeds})
        rows.append(np.array(step[LOGITS])[0])
        start += num
    return np.concatenate(rows)


def test_logits_of_a_prompt_with_images_equal_transformers(vlm, vision, exported, inputs, tmp_path):
    """Neutral, lowered and fused, in chunks of any size; sliding layers forget the text before an image within it."""
    with torch.no_grad():
        wanted = vlm[1](**inputs).logits[0].numpy()
    source, graph = exported
    tokens = inputs["input_ids"][0].tolist()
    assert tokens.count(lab.IMAGE) == 2 * lab.NUM_TOKENS
    scale = np.abs(wanted).max()
    forms = {"fp32", "packed"} if find_library() is not None else {"fp32"}
    engines = [_load(OnnxRuntimeBackend(), source, graph, tmp_path / form, form) for form in sorted(forms)]
    fused = (tmp_path / sorted(forms)[-1] / "graph.onnx").read_bytes()
    assert (b"NormRotaryQkvAttention" in fused) == ("packed" in forms)
    engines.append(_load(ReferenceBackend(), source, graph, tmp_path / "reference"))
    for number, engine in enumerate(engines):
        for chunk in (len(tokens), 5, 1) if number < 2 else (len(tokens),):
            got = _logits(engine, vision[1], tokens, chunk)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * scale)
        if number < 2:  # one array for all shapes of a step: rows of images are large
            held = [binding.arrays[IMAGE_ROWS] for binding in engine._bindings]
            assert len(held) > 2 and all(np.shares_memory(rows, held[0]) for rows in held)
        for mutant in (_causal, _shifted):
            assert np.abs(_logits(engine, vision[1], tokens, len(tokens), mutant) - wanted).max() > 1e-2 * scale


def test_weights_are_found_under_the_names_of_every_version():
    assert own_name("vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias") == "tower.encoder.layers.0.mlp.fc1.bias"
    assert own_name("model.vision_tower.post_layernorm.weight") == "tower.post_layernorm.weight"
    assert own_name("multi_modal_projector.mm_soft_emb_norm.weight") == "projector.mm_soft_emb_norm.weight"
    assert own_name("vision_tower.vision_model.head.probe") is None
    assert own_name("language_model.model.norm.weight") is None


def test_sizes_of_a_published_tower(tmp_path):
    """Gemma 3 4B: SigLIP without its pooling head has 416.9 M parameters, the projection 2.9 M."""
    tower = {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_hidden_layers": 27}
    config = {"model_type": "gemma3", "text_config": {}, "vision_config": {**tower, "patch_size": 14}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    dims = read_vision_dims(tmp_path, 2560)
    assert dims.num_tokens == 256
    assert dims.counts().num_params == pytest.approx(416_866_032 + 2_950_272, rel=1e-4)


def test_random_weights_need_no_files_of_weights(vlm, tmp_path):
    shutil.copy(vlm[0] / "config.json", tmp_path)
    target = _source(vlm[0]).dims
    source = VisionSource(GraphJob("vision", str(tmp_path)), SourceContext("random", MAX_SEQ_LEN, 8, target))
    engine = _load(OnnxRuntimeBackend(), source, source.export(lambda stage: None)[0], tmp_path / "graph", "fp32")
    assert source.check_compiled(engine, 2) == {"num_tokens": lab.NUM_TOKENS}


def test_a_target_without_images_has_no_inputs_for_them(vlm):
    job = GraphJob("target", str(vlm[0]))
    spec = DecoderSource(job, SourceContext("checkpoint", MAX_SEQ_LEN, 8)).spec()
    assert not [t.name for t in spec.inputs if t.name.startswith("image")]
    assert spec.image_tokens == 0 and "image_tokens" not in spec.json_from_spec()


@pytest.mark.parametrize(
    ("changes", "got"),
    [({"model_type": "llava"}, "a checkpoint of type 'llava'"), ({"vision_config": None}, "without vision_config")],
)
def test_other_towers_are_refused_by_name(vlm, changes, got):
    config = json.loads((vlm[0] / "config.json").read_text())
    with pytest.raises(RecipeError, match=got) as caught:
        check_vision({**config, **changes})
    assert caught.value.where == "target.vision" and "gemma3" in caught.value.expected


@pytest.mark.parametrize(
    ("changes", "where", "got"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan", "true"),
        ({"size": {"height": 14, "width": 14}}, "size", "14"),
        ({"do_resize": False}, "size", "not resized"),
        ({"image_mean": [0.5]}, "image_mean", "0.5"),
        ({"resample": 9}, "resample", "9"),
        (None, "preprocessor_config.json", "no such file"),
    ],
)
def test_other_processors_are_refused_by_name(vlm, tmp_path, changes, where, got):
    shutil.copy(vlm[0] / "config.json", tmp_path)
    if changes is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**lab.PROCESSOR, **changes}))
    with pytest.raises(CheckpointError) as caught:
        image_record(tmp_path, "checkpoint")
    assert where in caught.value.where and got in caught.value.got


def test_newer_files_have_the_processor_in_a_section(vlm, tmp_path):
    shutil.copy(vlm[0] / "config.json", tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": lab.PROCESSOR}))
    assert image_record(tmp_path, "checkpoint") == image_record(vlm[0], "checkpoint")
    config = json.loads((vlm[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "mm_tokens_per_image": 9}))
    with pytest.raises(CheckpointError, match="square of tokens"):
        read_vision_dims(tmp_path, 32)


def _without_tower(tensors: dict[str, np.ndarray]) -> None:
    for name in [n for n in tensors if n.startswith("vision_tower")]:
        del tensors[name]


def _without_bias(tensors: dict[str, np.ndarray]) -> None:
    del tensors["vision_tower.post_layernorm.bias"]


def _other_shape(tensors: dict[str, np.ndarray]) -> None:
    tensors["multi_modal_projector.mm_input_projection_weight"] = np.zeros((32, 31), np.float32)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (_without_tower, "no weights of the vision tower"),
        (_without_bias, "tower.post_layernorm.bias"),
        (_other_shape, "projector.mm_input_projection_weight"),
    ],
)
def test_incomplete_towers_are_refused(vlm, tmp_path, change, got):
    folder = shutil.copytree(vlm[0], tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = _vision(folder)
    with pytest.raises(CheckpointError, match=got):
        source.check() if change is _without_tower else source.export(lambda stage: None)


@pytest.mark.plan
def test_both_graphs_become_plans(vlm, exported, tmp_path):
    """Built without a GPU; a chunk of a prompt may be as long as an image is."""
    from speccompile.backends.tensorrt.backend import PLAN_FILE, TensorRTBackend
    from speccompile.backends.tensorrt.config import Config
    from speccompile.backends.tensorrt.profiles import make_profiles
    from speccompile.backends.tensorrt.specs import tensorrt_spec
    from speccompile.core.jobs import CompileOptions
    from tests.rtx import load_rtx

    load_rtx()
    vision = _vision(vlm[0])
    options = CompileOptions("float16", 2, 72, 9, Config(variant="tensorrt_rtx"))
    for name, source, graph, rows in (("vision", vision, store.export(vision)[0], 0), ("target", *exported, 72)):
        report = TensorRTBackend().compile(
            CompileJob(graph.clone(), source.spec(), tmp_path / name, options=replace(options, max_rows=rows))
        )
        assert (tmp_path / name / PLAN_FILE).stat().st_size > 0
        types = {t["name"]: t["dtype"] for t in (*report["spec"]["inputs"], *report["spec"]["outputs"])}
        halves = ("pixels", "image_embedding") if name == "vision" else ("image_rows", "k_cache.0")
        assert {types[half] for half in halves} == {"float16"}
    large = tensorrt_spec(replace(exported[0].spec(), image_tokens=256), "float16", 512)
    assert make_profiles(large, replace(options, max_rows=512))[0].sizes["nodes"][2] == 256
