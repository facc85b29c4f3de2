# SPDX-License-Identifier: Apache-2.0
"""The package with one more sampling parameter, declared in one module: what arrives of it from each surface.

python -m tests.serving.toy_parameter prints {surface: value that `SamplingParams` has}.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

HOME = "speccompile.core.sampling_params"
LINE = '    toy: float = sampling_parameter(0.5, NUMBER, "0 to below 1", "A toy.", ge=0.0, lt=1.0)\n'
LAST = "    ignore_eos: bool ="


def declare() -> None:
    """Load the module of the declarations with one line more, before anything else has loaded it."""
    spec = importlib.util.find_spec(HOME)
    assert HOME not in sys.modules and spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(LAST) == 1
    module = sys.modules[HOME] = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(LAST, LINE + LAST), spec.origin, "exec"), module.__dict__)


def from_recipe(value):
    from speccompile.core.sampling_params import SamplingParams
    from speccompile.recipe.models import DecodingSection

    return SamplingParams(**DecodingSection.model_validate({"toy": value}).model_dump()).toy


def from_command_line(arguments):
    """Returns what `generate` asks of the engine."""
    from speccompile.cli.main import main
    from speccompile.runtime import engine as loading
    from tests.runtime.test_spec_engine import make_engine

    engine, asked = make_engine(), []
    loading.load = lambda *path, **options: engine
    stream = engine.stream
    engine.stream = lambda prompt, params, **more: asked.append(params) or stream(prompt, params, **more)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        assert main(["generate", "bundle", "--max-new-tokens", "2", *arguments, "--json", str(out)]) == 0
    return asked[0].toy


def from_prompt_file(value):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prompts.jsonl")
        file.write_text(json.dumps({"prompt": "abc", "toy": value}))
        return from_command_line(["--prompts", str(file), "--toy", "0.75"])


def from_body(value):
    from speccompile.core.sampling_params import SamplingParams
    from speccompile.serving.openai.bodies import sampling_from_body
    from speccompile.serving.openai.chat_body import ChatBody
    from speccompile.serving.openai.completions import CompletionBody
    from speccompile.serving.openai.errors import ApiError

    wrong = CompletionBody.model_validate_json('{"prompt": "a", "toy": 1}')
    with pytest.raises(ApiError, match="expected 0 to below 1") as fault:
        sampling_from_body(wrong, SamplingParams())
    assert (fault.value.status, fault.value.param) == (400, "toy")
    messages = [{"role": "user", "content": "a"}]
    given = ChatBody.model_validate_json(json.dumps({"messages": messages, "toy": value}))
    return sampling_from_body(given, SamplingParams()).toy


def from_tensor(value):
    from speccompile.core.sampling_params import SamplingParams
    from speccompile.serving.triton.config_text import ModelConfig, text_from_config
    from speccompile.serving.triton.contract import text_inputs
    from speccompile.serving.triton.request_parsing import Rules, call_from_arrays
    from speccompile.serving.triton.trtllm import contract as trtllm
    from speccompile.serving.triton.trtllm.contract import TrtllmRules
    from speccompile.serving.triton.trtllm.layout import engine_names, ensemble_steps

    for inputs in (text_inputs(True), text_inputs(False), trtllm.text_inputs(), trtllm.engine_inputs()):
        text = text_from_config(ModelConfig("m", inputs, ()))
        assert '{ name: "toy" data_type: TYPE_FP32 dims: [ 1 ] optional: true }' in text
    assert engine_names()["toy"] == ensemble_steps()[1].inputs["toy"] == "toy"
    arrays = {"text_input": np.array([b"a"], dtype=np.object_), "toy": np.array([value], dtype=np.float32)}
    found = {
        call_from_arrays(arrays, (), (), kind(SamplingParams(), (), None)).rows[0].sampling.toy
        for kind in (Rules, TrtllmRules)
    }
    assert len(found) == 1
    return found.pop()


def main() -> None:
    declare()
    found = {
        "recipe": from_recipe(0.25),
        "option": from_command_line(["--prompt", "abc", "--toy", "0.25"]),
        "prompt file": from_prompt_file(0.25),
        "body": from_body(0.25),
        "tensor": from_tensor(0.25),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
