# SPDX-License-Identifier: Apache-2.0
import json
import re
from pathlib import Path

import pytest

from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.bundle.bundle import Bundle
from speccompile.cli.main import main
from speccompile.core.dims import ModelDims
from speccompile.errors import BundleError
from speccompile.graph_kinds.decoder import decoder_spec, verified_spec
from speccompile.serving.triton.config_text import ModelConfig, text_from_config
from speccompile.serving.triton.contract import TRITON_TYPES, Tensor
from speccompile.serving.triton.repository import RepositoryOptions, plan_models, write_backend, write_repository
from speccompile.serving.triton.settings import Settings, settings_from_args
from speccompile.serving.triton.trtllm import contract as trtllm
from speccompile.serving.triton.trtllm.layout import ensemble_steps, trtllm_models

TENSOR = re.compile(r'\{ name: "([^"]+)" data_type: (\w+) dims: \[ ([-\d, ]+) \]( optional: true)? \}')
PARAMETER = re.compile(r'parameters \{ key: "(\w+)" value \{ string_value: "([^"]*)" \} \}')


def tensors_from_text(text, kind):
    """Returns {name: (type, dims, optional)} of a config.pbtxt."""
    block = re.search(rf"^{kind} \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1]
    return {
        name: (dtype, tuple(int(d) for d in dims.split(",")), bool(optional))
        for name, dtype, dims, optional in TENSOR.findall(block)
    }


def config_of(repository, model):
    return (repository / model / "config.pbtxt").read_text()


def test_the_one_model(pair, tmp_path):
    names = write_repository(pair, tmp_path / "models", RepositoryOptions())
    assert names == ["speccompile"]
    text = config_of(tmp_path / "models", "speccompile")
    assert 'backend: "speccompile"' in text and "max_batch_size: 0" in text and "decoupled: true" in text
    assert "dynamic_batching" not in text and "count: 1 kind: KIND_CPU" in text
    inputs, outputs = tensors_from_text(text, "input"), tensors_from_text(text, "output")
    assert inputs["text_input"] == ("TYPE_STRING", (1,), True)
    assert inputs["seed"] == ("TYPE_UINT64", (1,), True)
    assert outputs["text_output"] == ("TYPE_STRING", (-1,), False)
    copied = tmp_path / "models/speccompile/1/bundle"
    assert (copied / "manifest.json").read_bytes() == (pair / "manifest.json").read_bytes()
    assert len(list(copied.rglob("*"))) == len(list(pair.rglob("*")))


def test_a_linked_bundle_is_not_copied_and_options_become_parameters(pair, tmp_path):
    settings = Settings(max_queue=7, timeout_s=2.5, speculation="off", threads=1)
    options = RepositoryOptions(name="mine", max_batch_size=4, links_bundle=True, settings=settings)
    write_repository(pair, tmp_path / "models", options)
    text = config_of(tmp_path / "models", "mine")
    wanted = {"part": "engine", "bundle": str(pair.resolve()), "threads": "1", "max_queue": "7", "timeout_s": "2.5"}
    assert dict(PARAMETER.findall(text)) == {**wanted, "speculation": "off"}
    assert "max_batch_size: 4" in text
    assert list((tmp_path / "models/mine/1").iterdir()) == []


def test_only_a_bundle_with_a_vision_tower_has_the_input_of_images(pair, tmp_path):
    write_repository(pair, tmp_path / "models", RepositoryOptions(links_bundle=True))
    assert "image" not in tensors_from_text(config_of(tmp_path / "models", "speccompile"), "input")


def test_five_models_whose_ensemble_is_wired_to_what_exists(pair, tmp_path):
    names = write_repository(pair, tmp_path / "models", RepositoryOptions("trtllm", max_batch_size=2))
    assert names == ["preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls"]
    inputs = {name: tensors_from_text(config_of(tmp_path / "models", name), "input") for name in names}
    outputs = {name: tensors_from_text(config_of(tmp_path / "models", name), "output") for name in names}
    made = set(inputs["ensemble"])
    for step in ensemble_steps():
        assert set(step.inputs) <= set(inputs[step.model]) and set(step.outputs) <= set(outputs[step.model])
        assert set(step.inputs.values()) <= made, "reads what no step has made"
        needed = {name for name, (_, _, optional) in inputs[step.model].items() if not optional}
        assert needed <= set(step.inputs)
        made |= set(step.outputs.values())
    assert set(outputs["ensemble"]) <= made
    assert (tmp_path / "models/preprocessing/1/tokenizer.json").is_file()
    assert (tmp_path / "models/tensorrt_llm/1/bundle/manifest.json").is_file()
    assert not list((tmp_path / "models/ensemble/1").iterdir())
    assert dict(PARAMETER.findall(config_of(tmp_path / "models", "tensorrt_llm")))["rules"] == "trtllm"


OLD_NAMES = {
    "tensorrt_llm": "input_ids input_lengths request_output_len num_return_sequences end_id pad_id stop_words_list "
    "bad_words_list embedding_bias beam_width temperature runtime_top_k runtime_top_p len_penalty early_stopping "
    "repetition_penalty min_tokens presence_penalty frequency_penalty seed return_log_probs return_context_logits "
    "return_generation_logits return_perf_metrics exclude_input_in_output stop streaming",
    "tensorrt_llm_bls": "text_input max_tokens bad_words stop_words exclude_input_in_output end_id pad_id top_k top_p "
    "temperature length_penalty repetition_penalty min_tokens presence_penalty frequency_penalty seed "
    "return_log_probs return_context_logits return_generation_logits num_return_sequences beam_width stream "
    "embedding_bias_words embedding_bias_weights num_draft_tokens return_perf_metrics",
    "preprocessing": "QUERY REQUEST_OUTPUT_LEN BAD_WORDS_DICT STOP_WORDS_DICT EMBEDDING_BIAS_WORDS "
    "EMBEDDING_BIAS_WEIGHTS END_ID PAD_ID",
    "postprocessing": "TOKENS_BATCH SEQUENCE_LENGTH",
}
OLD_RESULTS = "batch_index sequence_index acceptance_rate total_accepted_draft_tokens total_draft_tokens " + " ".join(
    f"{name}_time_ns" for name in ("arrival", "first_scheduled", "first_token", "last_token")
)


def test_what_old_clients_send_and_read_is_declared():
    models = trtllm_models(Settings(), 0, "KIND_CPU")
    for name, names in OLD_NAMES.items():
        assert set(names.split()) <= {t.name for t in models[name].inputs}, name
    for name in ("tensorrt_llm", "tensorrt_llm_bls", "ensemble"):
        assert set(OLD_RESULTS.split()) <= {t.name for t in models[name].outputs}, name
    dtypes = {t.name: t.dtype for t in models["ensemble"].outputs}
    assert [dtypes[name] for name in OLD_RESULTS.split()[:5]] == ["int32", "int32", "float32", "int32", "int32"]
    required = {t.name for t in trtllm.engine_inputs() if not t.is_optional}
    assert required == {"input_ids", "input_lengths", "request_output_len"}
    assert {t.name for t in trtllm.text_inputs() if not t.is_optional} == {"text_input", "max_tokens"}


DIMS = ModelDims("llama", 32, 16, 2, 4, 2, 4, 64)


def plan_bundle(tmp_path):
    """Returns a bundle of TensorRT as its manifest describes it; the plan's bytes are not looked at."""
    spec = tensorrt_spec(verified_spec(decoder_spec("target", DIMS)), "float16", 40, compacts=True)
    record = {
        "file": "graphs/target/graph.plan",
        "spec": json.loads(json.dumps(spec.json_from_spec())),
        "tensorrt": {
            "variant": "tensorrt",
            "version": "11.4",
            "plugins": ["SpecVerify", "KVRollback"],
            "profiles": [
                {"name": "prefill", "sizes": {"batch": [1, 1, 1], "nodes": [1, 64, 128]}},
                {"name": "decode", "sizes": {"batch": [1, 4, 8], "nodes": [1, 9, 17]}},
            ],
        },
    }
    manifest = {"graphs": {"target": record}, "recipe": {}, "files": {}}
    return Bundle(tmp_path, manifest), spec


def test_a_plan_has_its_specs_tensors(tmp_path):
    bundle, spec = plan_bundle(tmp_path)
    [(config, files)] = plan_models(bundle, "mine")
    assert files == [("model.plan", tmp_path / "graphs/target/graph.plan")]
    text = text_from_config(config)
    assert 'name: "mine_target"' in text and 'backend: "tensorrt"' in text and 'KIND_GPU profile: [ "0", "1" ]' in text
    for kind, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        wanted = {
            t.name: (TRITON_TYPES[t.dtype], tuple(d if isinstance(d, int) else -1 for d in t.dims), False)
            for t in tensors
        }
        assert tensors_from_text(text, kind) == wanted
    assert tensors_from_text(text, "input")["k_cache.0"] == ("TYPE_FP16", (-1, 2, 40, 4), False)
    assert "# Plugins: SpecVerify, KVRollback. Start the server with" in text
    assert "# Profile decode (least, best, most): batch 1, 4, 8; nodes 1, 9, 17." in text


def test_plugins_that_are_not_in_the_plan_are_named(tmp_path):
    bundle, _ = plan_bundle(tmp_path)
    [(config, _)] = plan_models(bundle, "mine")
    assert '--backend-config=tensorrt,plugins="libspeccompile_plugins.so"' in text_from_config(config)


def test_a_bundle_without_plans_has_no_such_layout(pair, tmp_path):
    with pytest.raises(BundleError, match="no TensorRT plan"):
        write_repository(pair, tmp_path / "models", RepositoryOptions("plans"))
    assert not (tmp_path / "models").exists()


def test_the_environment_must_be_one(pair, tmp_path):
    with pytest.raises(BundleError, match="no bin/python3"):
        write_repository(pair, tmp_path / "models", RepositoryOptions(python_env=tmp_path))


def test_settings_there_and_back(tmp_path):
    settings = Settings(part="bls", rules="trtllm", threads=3, drain_s=1.5, ignored_parameters="x-.*")
    parameters = {key: {"string_value": value} for key, value in settings.parameters().items()}
    args = {"model_config": json.dumps({"parameters": parameters}), "model_name": "m", "model_version": "2"}
    read, _ = settings_from_args({**args, "model_repository": str(tmp_path)})
    assert (read.part, read.rules, read.threads, read.drain_s) == ("bls", "trtllm", 3, 1.5)
    assert read.ignored_parameters == "x-.*"
    assert Path(read.bundle) == tmp_path / "2/bundle"


@pytest.mark.parametrize(("key", "value"), [("threads", "two"), ("part", "heart"), ("rules", "mine")])
def test_settings_that_cannot_be_read_are_named(key, value, tmp_path):
    config = json.dumps({"parameters": {key: {"string_value": value}}})
    args = {"model_config": config, "model_name": "m", "model_version": "1", "model_repository": str(tmp_path)}
    with pytest.raises(BundleError, match=rf"m/config.pbtxt \(parameters.{key}\): got '{value}'"):
        settings_from_args(args)


def test_text_is_quoted():
    config = ModelConfig('a"b', [Tensor("x", "bool")], [Tensor("y", "string", (-1, 2))], parameters={"p": "c:\\d"})
    text = text_from_config(config)
    assert r'name: "a\"b"' in text and r'string_value: "c:\\d"' in text


def test_the_backend_is_a_module_that_says_what_it_lacks(tmp_path):
    path = write_backend(tmp_path)
    assert path == tmp_path / "speccompile/model.py"
    assert "TritonPythonModel" in path.read_text() and "--python-env" in path.read_text()
    compile(path.read_text(), str(path), "exec")


def test_the_command(pair, tmp_path, capsys):
    assert main(["triton", str(pair), "-o", str(tmp_path / "out/models"), "--link", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["models"] == ["speccompile"]
    assert Path(written["backend"]) == tmp_path / "out/backends/speccompile/model.py"
    assert (tmp_path / "out/models/speccompile/config.pbtxt").is_file()


def test_a_server_with_several_gpus_starts_one_engine():
    """An engine's model is pinned to the first GPU; a plan of its own is served by all."""
    kinds = {"speccompile": "kind: KIND_GPU gpus: [ 0 ] }", "tensorrt": "kind: KIND_GPU }"}
    for backend, wanted in kinds.items():
        assert wanted in text_from_config(ModelConfig("m", (), (), backend, kind="KIND_GPU"))
    models = trtllm_models(Settings(), 0, "KIND_GPU")
    assert [name for name, model in models.items() if "gpus: [ 0 ]" in text_from_config(model)] == ["tensorrt_llm"]
