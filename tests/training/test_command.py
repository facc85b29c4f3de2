# SPDX-License-Identifier: Apache-2.0
"""speccompile train on the command line: results, and recipes that cannot be trained."""

import json
from pathlib import Path

import pytest

from speccompile.cli.main import main
from speccompile.core import registry
from speccompile.errors import RecipeError
from speccompile.recipe import load_recipe
from speccompile.recipe.training_plan import resolve_training
from speccompile.training import run as run_module

pytest.importorskip("matplotlib")
pytest.importorskip("tensorboard")

ROOT = Path(__file__).parents[2]


def test_the_command_trains_and_measures(write_recipe, folder, capsys):
    recipe, output = write_recipe("mlp", "command", steps=4), folder / "elsewhere"
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "w3 w4 w5"}\n{"prompt": [7, 8]}\n{"prompt": "w9"}\n')
    arguments = ["train", str(recipe), "-o", str(output), "--prompts", str(prompts), "--num-prompts", "2", "--json"]
    assert main(arguments) == 0
    out = capsys.readouterr()
    result = json.loads(out.out)
    chains = result["chains"]
    assert chains["num_prompts"] == 2 and chains["num_drafts"] == 3 and len(chains["by_position"]) == 3
    # Every step emits its accepted tokens and one more, until 128 are emitted.
    assert 1 <= chains["mean_acceptance_length"] <= 4
    assert chains["steps"] * chains["mean_acceptance_length"] == pytest.approx(2 * 127, abs=8)
    assert (output / "model.safetensors").is_file()
    assert "held out: loss" in out.err and "agreement" in out.err
    assert f"train mlp for {plan_target(recipe)} into {output}: plain text 4 steps" in out.err
    assert "measure: prompts 0/2" in out.err
    # The run is complete: started again it reports the checkpoint that it resumes.
    assert main(["train", str(recipe), "-o", str(output)]) == 0
    assert f"go on from the checkpoint in {output}.run, plain 4/4" in capsys.readouterr().err


def test_prompts_are_read_before_the_training(write_recipe, folder, capsys):
    arguments = ["train", str(write_recipe("mlp", "unread", steps=1)), "--prompts", str(folder / "none.jsonl")]
    assert main(arguments) == 8
    assert "a file of JSON lines" in capsys.readouterr().err and not (folder / "unread").exists()


def test_a_cache_that_cannot_be_written_is_named(write_recipe, folder, monkeypatch, capsys):
    (folder / "file").write_text("mine")
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(folder / "file"))
    assert main(["train", str(write_recipe("mlp", "uncached", steps=1))]) == 6
    errors = capsys.readouterr().err
    assert "BuildError  SPECCOMPILE_CACHE" in errors and f"a file at {folder}/file" in errors


def plan_target(recipe: Path) -> str:
    return str(resolve_training(load_recipe(recipe)).target)


def test_an_interrupted_run_says_where_it_goes_on(write_recipe, monkeypatch, capsys):
    recipe = write_recipe("mlp", "interrupted", steps=8)
    real = run_module.save_record

    def save_then_stop(folder, record):
        real(folder, record)
        calls.append(record.step)
        if len(calls) == 2:
            raise KeyboardInterrupt

    calls: list[int] = []
    monkeypatch.setattr(run_module, "save_record", save_then_stop)
    assert main(["train", str(recipe)]) == 130
    errors = capsys.readouterr().err
    assert "The same command goes on from plain 4/8" in errors and errors.endswith("interrupted\n")


@pytest.mark.parametrize(
    ("override", "where", "got"),
    [
        ("training.method=medua", "training.method", "'medua'"),
        ("training.method=ngram", "training.method", "'ngram'"),
        ("training.heads={num_head: 3}", "training.heads.num_head", "an unknown key"),
        ("training.heads={num_heads: many}", "training.heads.num_heads", "'many'"),
        ("training.heads={num_heads: 0}", "training.heads.num_heads", "0"),
        ("training.plain.steps=0", "training.plain.steps", "0 in both stages"),
        ("training.plain.step=3", "training.plain.step", "unknown key"),
        ("training.text.files=[none.txt]", "training.text.files", "does not exist"),
        ("training.start=nowhere", "training.start", "does not exist"),
        ("training.plain.learning_rate=.inf", "training.plain.learning_rate", "inf"),
        ("training.generated.learning_rate=.inf", "training.generated.learning_rate", "inf"),
        ("training.joint={kl: .inf}", "training.joint.kl", "inf"),
        ("training.weight_decay=.inf", "training.weight_decay", "inf"),
        ("training.max_grad_norm=.inf", "training.max_grad_norm", "inf"),
    ],
)
def test_a_recipe_that_cannot_be_trained_is_refused(write_recipe, override, where, got):
    with pytest.raises(RecipeError) as caught:
        resolve_training(load_recipe(write_recipe("medusa", "refused"), [override]))
    assert where in caught.value.where and got in caught.value.got


@pytest.mark.parametrize(
    ("method", "override", "where", "got"),
    [
        ("mlp", "training.heads={tie_weights: true, num_heads: 1}", "training.heads.num_heads", None),
        ("prophet", "training.heads={num_heads: 5}", "training.heads.num_kv_heads", "2 for 5 heads"),
        ("draft_model", "training.heads={num_kv_heads: 3}", "training.heads.num_heads", "4 heads, 3 key heads"),
    ],
)
def test_an_error_about_a_default_says_so(write_recipe, method, override, where, got):
    with pytest.raises(RecipeError) as caught:
        resolve_training(load_recipe(write_recipe(method, "defaults"), [override]))
    assert caught.value.where == where and (got or "") in caught.value.got
    assert (f"by default: {where} is not written" in caught.value.got) == (got is not None)


def test_the_default_length_of_prompts_is_refused_where_texts_are_cut_by_it(write_recipe):
    """Whether there are texts, and not conversations alone, is known once they are read."""
    recipe = load_recipe(write_recipe("medusa", "prompts"), ["training.generated={steps: 1, seq_len: 20}"])
    with pytest.raises(RecipeError, match=r"48 with seq_len 20, by default: training.generated.prompt_tokens is not w"):
        run_module.train(recipe, resolve_training(recipe), run_module.Listener())


def test_a_default_that_the_target_refuses_is_named_so(write_recipe):
    """The published choice of three layers needs a deeper target."""
    recipe = load_recipe(write_recipe("eagle3", "shallow", steps=1), ["training.heads={draft_vocab_size: 20}"])
    with pytest.raises(RecipeError) as caught:
        run_module.train(recipe, resolve_training(recipe), run_module.Listener())
    assert caught.value.got == "(1, 1, 0), by default: training.heads.layers is not written"


def test_prompts_need_room(write_recipe):
    settings = ["training.generated.steps=1", "training.generated.prompt_tokens=20"]
    with pytest.raises(RecipeError, match="room for new tokens"):
        resolve_training(load_recipe(write_recipe("medusa", "refused"), settings))


def test_a_recipe_without_the_section_says_so(tmp_path, target):
    recipe = tmp_path / "plain.yaml"
    recipe.write_text(f"target: {{model: {target}}}\n")
    with pytest.raises(RecipeError, match="no such section"):
        resolve_training(load_recipe(recipe))


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/train/*.yaml")), ids=lambda p: p.stem)
def test_every_training_recipe_resolves(path):
    plan = resolve_training(load_recipe(path))
    assert plan.section.method == plan.method.name and registry.method(plan.method.name).trainer
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert plan.output.parent == ROOT / "trained" and "/trained/" in ignored
