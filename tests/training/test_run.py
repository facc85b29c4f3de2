# SPDX-License-Identifier: Apache-2.0
"""Whole runs: their files, a stopped run that resumes exactly, several processes that agree with one."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speccompile.errors import BuildError, RecipeError
from speccompile.recipe import load_recipe
from speccompile.recipe.training_plan import resolve_training
from speccompile.training import run as run_module
from speccompile.training import stage as stage_module
from speccompile.training import text as text_module
from speccompile.training.checkpoints import make_run_folder
from speccompile.training.run import Listener, train
from speccompile.training.text import TextBook

pytest.importorskip("matplotlib")
pytest.importorskip("tensorboard")
pytest.importorskip("onnxruntime")


class Stopped(Exception):
    """The process ends here."""


def run(recipe: Path, *overrides: str, stop_at: int | None = None):
    def step(name, index, steps, row):
        if index == stop_at:
            raise Stopped

    loaded = load_recipe(recipe, overrides)
    return train(loaded, resolve_training(loaded), Listener(step=step))


def rows(output: Path):
    return [json.loads(line) for line in Path(f"{output}.run", "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(write_recipe):
    """An uninterrupted run: the curve, and the folder."""
    recipe = write_recipe("medusa", "whole", steps=8)
    result = run(recipe)
    output = resolve_training(load_recipe(recipe)).output
    return result, output


def test_a_run_leaves_a_speculator_its_figures_and_its_curves(whole):
    result, output = whole
    assert sorted(p.name for p in output.iterdir()) == [
        ".speccompile.json", "config.json", "model.safetensors", "training.json", "training.png",
    ]  # fmt: skip
    assert (output / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((output / "training.json").read_text()) == json.loads(json.dumps(result))
    assert result["plan"]["target"] == "target" and "/" not in json.dumps(result["plan"])
    assert set(result["cpu_seconds"]) == set(result["seconds"]) == {"plain"}
    assert 0 < result["cpu_seconds"]["plain"] <= 1.2 * result["seconds"]["plain"] * result["threads"]
    events = list(Path(f"{output}.run", "events").iterdir())
    assert len(events) == 1 and events[0].stat().st_size > 1000
    curve = rows(output)
    assert [row["step"] for row in curve] == list(range(9))
    assert [row["step"] for row in curve if "held_out" in row] == [0, 4, 8]
    assert all(len(row["train"]["loss"]) == 3 for row in curve[1:])
    assert curve[-1]["train"]["loss"][0] < curve[1]["train"]["loss"][0]


@pytest.mark.parametrize("states", ["disk", "live"])
def test_a_stopped_run_goes_on_with_the_same_numbers(whole, write_recipe, states):
    _, output = whole
    recipe = write_recipe("medusa", f"stopped-{states}", steps=8)
    settings = [f"training.states={states}"]
    with pytest.raises(Stopped):
        run(recipe, *settings, stop_at=6)  # the checkpoint is of step 4
    stopped = resolve_training(load_recipe(recipe)).output
    assert not stopped.exists() and len(rows(stopped)) == 5
    run(recipe, *settings)
    if states == "live":  # what is kept on the disk has the precision of bfloat16
        assert rows(stopped) == rows(output)
        assert (stopped / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()
    else:
        other = write_recipe("medusa", "unstopped-disk", steps=8)
        run(other, *settings)
        assert rows(stopped) == rows(resolve_training(load_recipe(other)).output)


def test_a_stopped_run_keeps_to_where_the_targets_outputs_come_from(write_recipe, monkeypatch):
    recipe, wishes = write_recipe("medusa", "stopped-auto", steps=8), []
    monkeypatch.setattr(run_module, "choose", lambda *given: (wishes.append(given[-1]) is not None, {}))
    with pytest.raises(Stopped):
        run(recipe, stop_at=6)
    run(recipe)
    assert wishes == ["auto", "live"]


def test_a_checkpoint_of_another_run_is_refused(whole, write_recipe, folder):
    recipe = write_recipe("medusa", "whole", steps=8)
    with pytest.raises(BuildError, match=r"another setting: training\.seed was 0, is 1; expected one of this run"):
        run(recipe, "training.seed=1")
    damaged = folder / "out" / "damaged.run"
    make_run_folder(damaged)
    (damaged / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(BuildError, match="cannot be read"):
        run(write_recipe("medusa", "damaged", steps=8))


def test_stage_2_begins_anew_after_the_kept_stage_1_where_its_settings_change(write_recipe):
    recipe = write_recipe("medusa", "corrected", steps=4, generated=4)
    first, output = run(recipe), resolve_training(load_recipe(recipe)).output
    before = rows(output)
    shown = []
    loaded = load_recipe(recipe, ["training.generated.learning_rate=0.001", "training.measure_every=2"])
    second = run_module.train(loaded, resolve_training(loaded), run_module.Listener(shown.append))
    assert "training.generated.learning_rate was 0.003, is 0.001: what does not depend on it is kept" in shown
    assert f"go on from the checkpoint in {output}.run, generated 0/4" in shown
    after = rows(output)
    assert after[:5] == before[:5] and after[5:] != before[5:] and len(after) == len(before)
    assert second["seconds"]["plain"] == first["seconds"]["plain"]


def test_a_finished_run_is_written_again_over_its_own_output_alone(whole, write_recipe):
    _, output = whole
    recipe = write_recipe("medusa", "whole", steps=8)
    events = Path(f"{output}.run", "events", "mine.txt")
    events.write_text("precious")
    run(recipe)
    assert events.exists() and len(list(events.parent.iterdir())) == 2
    (output / "notes.txt").write_text("precious")
    with pytest.raises(BuildError, match=r"did not write: notes\.txt"):
        run(recipe)
    (output / "notes.txt").unlink()
    events.unlink()


def test_an_output_with_other_things_is_refused_before_the_work(write_recipe, folder, monkeypatch):
    monkeypatch.setattr(run_module, "join_team", None)  # the first thing after the checks
    recipe = write_recipe("medusa", "taken", steps=8)
    thesis = folder / "out" / "taken" / "thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("precious")
    with pytest.raises(BuildError, match=r"a folder with other things in it: thesis\.txt"):
        run(recipe)
    thesis.unlink()
    log = folder / "out" / "taken.run" / "log.jsonl"
    log.parent.mkdir()
    log.write_text("of another program")
    with pytest.raises(BuildError, match=r"got log\.jsonl, which speccompile did not write"):
        run(recipe)
    assert log.read_text() == "of another program"


def test_what_is_not_installed_is_said_first(write_recipe, monkeypatch):
    monkeypatch.setattr(run_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"pip install .*\[train\]"):
        run(write_recipe("medusa", "bare", steps=8))


def test_the_target_writes_the_text_of_the_second_stage(write_recipe, target, monkeypatch):
    recipe = write_recipe("prophet", "two", steps=4, generated=4)
    result = run(recipe)
    assert sorted(result["held_out"]) == ["generated", "plain"]
    loaded = load_recipe(recipe)
    monkeypatch.setattr(text_module, "generate", None)  # generated text is not generated again
    windows = TextBook(loaded, target, lambda message: None).windows("generated")
    tokens = torch.from_numpy(windows.rows("train", range(windows.counts["train"])).tokens).long()
    assert tokens.shape[1] == 20 and 16 <= windows.counts["train"] <= 24
    # Every second sequence is greedy: there each new token is the target's own first choice.
    from speccompile.training.target import Target
    from speccompile.training_contract import TargetNeeds

    dists = Target(target, torch.float32).run(tokens, TargetNeeds())
    follows = (dists["dist_tokens"][:, 5:-1, 0] == tokens[:, 6:]).all(-1)
    assert follows.sum() >= 8


def test_the_target_writes_up_to_its_context(write_recipe, folder):
    recipe = write_recipe("medusa", "context", steps=0, generated=1)
    run(recipe, "training.generated.seq_len=64")
    windows = TextBook(load_recipe(recipe, ["training.generated.seq_len=64"]), folder / "target", print).windows
    assert windows("generated").counts["train"] >= 16  # a few texts end early


def test_two_processes_train_as_one_does(whole, write_recipe):
    _, output = whole
    recipe = write_recipe("medusa", "two-processes", steps=8)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "speccompile", "train", str(recipe), "--json"], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["processes"] == 2
    sharded = resolve_training(load_recipe(recipe)).output
    for one, two in zip(rows(output), rows(sharded), strict=True):
        for part in set(one) & {"train", "held_out"}:
            assert two[part]["loss"] == pytest.approx(one[part]["loss"], abs=2e-3)
    assert (sharded / "model.safetensors").stat().st_size == (output / "model.safetensors").stat().st_size


def test_outputs_are_kept_where_they_are_read_often(write_recipe, folder, monkeypatch):
    """One pass is cheapest without stored outputs; a dozen are not, where a read takes half of a forward."""
    from speccompile.training import states as module
    from speccompile.training.states import CachedStates, LiveStates, choose, output_names, token_bytes, write_states
    from speccompile.training.target import Target
    from speccompile.training_contract import TargetNeeds

    loaded = load_recipe(write_recipe("medusa", "whole"))
    target = Target(folder / "target", torch.float32)
    windows = TextBook(loaded, folder / "target", lambda message: None).windows("plain")
    states, needs = folder / "kept" / "states", TargetNeeds(hidden=True, layers=(1,), caches=True)
    assert choose(states, target, windows, needs, passes=1.0, wish="auto")[0] is False
    monkeypatch.setattr(module, "_time_outputs", lambda *_: (2.0, 9.0, 1.0))
    for passes, wanted in ((11.0, False), (12.0, True)):
        assert choose(states, target, windows, needs, passes, wish="auto")[0] is wanted
    assert list((folder / "kept").iterdir()) == []
    seen = []
    write_states(states, target, windows, needs, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (sum(windows.counts.values()),) * 2
    files = list(states.glob("*.npy"))
    num_tokens = sum(windows.counts.values()) * windows.seq_len
    assert sum(f.stat().st_size - 128 for f in files) == token_bytes(target, needs) * num_tokens  # 128: numpy's header
    assert choose(states, target, windows, needs, passes=0.1, wish="auto") == (True, {"wish": "auto", "missing": []})
    tokens = windows.rows("train", [600, 3]).tokens
    kept = CachedStates(states, output_names(needs)).read("train", [600, 3], tokens)
    live = LiveStates(target, needs).read("train", [600, 3], tokens)
    assert kept["dist_tokens"].tolist() == live["dist_tokens"].tolist()
    for name in set(live) - {"dist_tokens"}:  # a relative error of 2^-8 is bfloat16's
        torch.testing.assert_close(kept[name].float(), live[name].float(), rtol=2**-8, atol=1e-6)


def test_outputs_beyond_the_cache_s_limit_are_not_kept(write_recipe, folder, tmp_path, monkeypatch):
    from speccompile.training.states import choose
    from speccompile.training.target import Target
    from speccompile.training_contract import TargetNeeds

    monkeypatch.setenv("SPECCOMPILE_CACHE_GIB", "0.001")
    loaded = load_recipe(write_recipe("medusa", "whole"))
    target, needs = Target(folder / "target", torch.float32), TargetNeeds(hidden=True, layers=(0, 1, 2))
    windows = TextBook(loaded, folder / "target", lambda message: None).windows("plain")
    is_kept, facts = choose(tmp_path / "states", target, windows, needs, passes=1e6, wish="auto")
    assert not is_kept and not facts["fits"] and facts["disk_bytes"] > 0.001 * 2**30
    with pytest.raises(BuildError, match=r"training.states \(.*\): got 0.00 GiB of the target's outputs"):
        choose(tmp_path / "states", target, windows, needs, passes=1.0, wish="disk")
    assert choose(tmp_path / "states", target, windows, needs, passes=1.0, wish="live")[0] is False


def test_a_batch_is_split_evenly_or_not_at_all(write_recipe):
    section = resolve_training(load_recipe(write_recipe("medusa", "even"), ["training.plain.batch_size=6"])).section
    run_module._check_batches(section, ["plain"], 3)
    with pytest.raises(RecipeError, match=r"training.plain.batch_size: got 6; expected a multiple of the 4"):
        run_module._check_batches(section, ["plain"], 4)


@pytest.mark.parametrize(
    ("setting", "got"),
    [("heads.num_heads=24", "24; expected more than 24 drafts"), ("plain.seq_len=9999", "9999; expected at most ")],
)
def test_windows_hold_a_chain_and_fit_the_context(write_recipe, setting, got):
    with pytest.raises(RecipeError, match=rf"training\.plain\.seq_len: got {got}"):
        run(write_recipe("medusa", "lengths"), f"training.{setting}")


def test_a_run_that_diverges_writes_nothing(write_recipe):
    recipe, settings = write_recipe("medusa", "diverged", steps=8), ["training.plain.learning_rate=1e38"]
    with pytest.raises(BuildError) as caught:
        run(recipe, *settings)
    assert caught.value.where == "training.plain, step 2" and "nan" in caught.value.got
    assert "Lower training.plain.learning_rate" in caught.value.todo
    output = resolve_training(load_recipe(recipe)).output
    assert not output.exists() and not Path(f"{output}.run", "checkpoint.pt").exists()


def test_a_perplexity_too_large_is_infinite():
    assert stage_module._cost_of_joint(0.0, 0.0, 1e4, 1.0)["perplexity"] == math.inf


def test_a_start_that_gives_no_numbers_is_no_learning_rate_s_fault(write_recipe, monkeypatch):
    recipe = write_recipe("medusa", "broken-start", steps=8)
    monkeypatch.setattr(run_module, "measures_from_sums", lambda sums: {"loss": [1.0], "perplexity": float("inf")})
    with pytest.raises(BuildError, match=r"training\.plain, step 0: got perplexity inf; .*training\.start"):
        run(recipe)
