# SPDX-License-Identifier: Apache-2.0
"""`--speculative-config`: vLLM's names and keys as a speculator section, or an error that says what is known."""

from pathlib import Path

import pytest

from speccompile.core import registry
from speccompile.errors import RecipeError
from speccompile.recipe.speculative_config import find_method_of, read_speculative_config, section_from_config
from tests.pipeline import fakes

pytestmark = pytest.mark.usefixtures("real_methods")


@pytest.mark.parametrize(
    ("config", "section"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
            {"method": "ngram", "num_draft_tokens": 5, "min_match": 2, "max_match": 4},
        ),
        ({"method": "ngram_gpu"}, {"method": "ngram"}),
        (
            {
                "method": "suffix",
                "suffix_decoding_max_tree_depth": 24,
                "suffix_decoding_min_token_prob": 0.2,
                "suffix_decoding_max_cached_requests": 0,
            },
            {"method": "suffix", "depth": 24, "min_prob": 0.2},
        ),
        ({"method": "mlp_speculator", "model": "m"}, {"method": "mlp", "model": "m"}),
        (
            {"method": "eagle3", "model": "m", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1},
            {"method": "eagle3", "model": "m", "num_draft_tokens": 3, "tree": "chain"},
        ),
        (
            {"method": "eagle3", "model": "m", "num_speculative_tokens": 3, "parallel_drafting": True},
            {"method": "eagle3", "model": "m", "num_draft_tokens": 3, "tree": "chain", "parallel_drafting": True},
        ),
        (
            {"method": "eagle3", "model": "m", "parallel_drafting": False},
            {"method": "eagle3", "model": "m", "parallel_drafting": False},
        ),
        ({"method": "medusa", "model": "m", "parallel_drafting": False}, {"method": "medusa", "model": "m"}),
        (
            {"method": "eagle", "model": "m", "num_speculative_tokens": 3, "tree": "auto"},
            {"method": "eagle", "model": "m", "num_draft_tokens": 3, "tree": "auto"},
        ),
        (
            {"method": "draft_model", "model": "m", "draft_sample_method": "probabilistic", "quantization": None},
            {"method": "draft_model", "model": "m", "drafts": "sampled"},
        ),
        (
            {"method": "draft_model", "model": "m", "use_heterogeneous_vocab": True},
            {"method": "draft_model", "model": "m", "allow_tokenizer_mismatch": True},
        ),
        ({"method": "medusa", "model": "m"}, {"method": "medusa", "model": "m"}),
        ({"method": "mtp", "num_speculative_tokens": 2}, {"method": "mtp", "num_draft_tokens": 2}),
        ({"method": "qwen3_next_mtp"}, {"method": "mtp"}),
        ({"method": "gemma4_mtp", "model": "m"}, {"method": "gemma4_assistant", "model": "m"}),
        (
            {"method": "draft_model", "model": "m", "num_speculative_tokens": 8, "parallel_drafting": True},
            {"method": "draft_model", "model": "m", "num_draft_tokens": 8, "parallel_drafting": True},
        ),
        ({"method": "dspark", "model": "m"}, {"method": "dflash", "model": "m"}),
    ],
    ids=lambda value: str(value.get("method")),
)
def test_names_and_keys_are_ours(config, section):
    assert section_from_config(config) == section


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "eagle33", "model": "m"}, r"\(method\): got 'eagle33'.*Did you mean 'eagle3'"),
        ({"method": "custom_class"}, "expected one of .*mlp_speculator"),
        ({"method": 3}, "expected one of"),
        ({"num_speculative_tokens": 3}, "neither a method nor a model"),
        ({"method": "ngram", "model": "m"}, r"\(model\): got 'm'; expected the keys of ngram.*prompt_lookup_max"),
        ({"method": "eagle3", "model": "m", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
        ({"method": "eagle3", "model": "m", "draft_sample_method": "best"}, "greedy, probabilistic"),
        ({"method": "eagle3", "model": "m", "draft_sample_method": {"a": 1}}, "greedy, probabilistic"),
    ],
    ids=range(8),
)
def test_what_is_unknown_is_named(config, words):
    with pytest.raises(RecipeError, match=words):
        section_from_config(config)


@pytest.mark.parametrize("text", ["ngram", "[1]", '{"method": "ngram"', "[" * 9999, '{"a": 1, "a": 2}'])
def test_what_is_no_object_is_refused(text):
    with pytest.raises(RecipeError, match="expected a JSON object"):
        read_speculative_config(text)
    assert read_speculative_config('{"method": "ngram"}') == {"method": "ngram"}


def test_every_name_of_vllm_belongs_to_one_method():
    names = [name for method in registry.all_methods() for name in (method.name, *method.vllm_names)]
    assert len(names) == len(set(names))


@pytest.mark.export
def test_a_name_of_several_families_means_that_of_the_model(tmp_path):
    from tests.checkpoints.gemma4_files import gemma4_assistant

    assistant, other = str(gemma4_assistant(tmp_path / "assistant")), str(fakes.make_checkpoint(tmp_path / "small"))
    for model, method in ((assistant, "gemma4_assistant"), (other, "mtp")):
        assert section_from_config({"method": "mtp", "model": model}) == {"method": method, "model": model}
    assert section_from_config({"method": "mtp"}) == {"method": "mtp"}


def test_a_model_alone_drafts_by_its_layout(tmp_path):
    model = fakes.make_checkpoint(tmp_path / "small")
    assert find_method_of(str(model)).name == "draft_model"
    assert section_from_config({"model": str(model)}) == {"method": "draft_model", "model": str(model)}
    mlp = Path(__file__).parents[2] / "examples/speculators/pycode-mlp"
    assert find_method_of(str(mlp)).name == "mlp"
