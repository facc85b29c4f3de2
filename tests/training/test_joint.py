# SPDX-License-Identifier: Apache-2.0
"""Joint training: gradients of the changes, the tether, the adapter that is written, and the bundle built with it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from speccompile.bundle.publish import card_from_manifest
from speccompile.checkpoints.lora import open_lora
from speccompile.errors import RecipeError
from speccompile.export.lora import merge_lora
from speccompile.recipe import load_recipe
from speccompile.recipe.training import JointSection
from speccompile.recipe.training_plan import resolve_training
from speccompile.training import reference
from speccompile.training.joint import JointModule, tether_terms
from speccompile.training.losses import KINDS, LossOptions, losses_by_autograd
from speccompile.training.target import Target
from speccompile.training_contract import Drafted, TargetNeeds, TrainingBatch
from tests.training.test_run import Stopped, rows, run

pytest.importorskip("matplotlib")
pytest.importorskip("tensorboard")

JOINT = 'training.joint={"kl": 0.05, "rank": 2, "alpha": 4.0}'


class OneHead(torch.nn.Module):
    """Drafts the token after the next from the hidden state by the identity's projection of it."""

    num_positions = 1

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.head = torch.nn.Parameter(torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(3)) * 0.1)

    def forward(self, batch: TrainingBatch) -> Drafted:
        num, nodes = batch.tokens.shape
        labels = torch.arange(num * nodes).reshape(num, nodes)[:, 1:].reshape(-1, 1)
        return Drafted(batch.hidden[:, :-1].flatten(0, 1)[:, None], labels, (self.head,))


def make_joint(folder: Path, kind: str = "lk", **fields) -> tuple[JointModule, TrainingBatch]:
    target = Target(folder, torch.float32)
    target.model.double()
    torch.manual_seed(0)
    module = JointModule(
        OneHead(16, target.dims.vocab_size),
        LossOptions(1.0, 1.0, torch.float64, kind),
        target,
        TargetNeeds(hidden=True),
        JointSection.model_validate({"rank": 2, "modules": ("q_proj", "down_proj"), **fields}),
    ).double()
    for change in module.changes:
        torch.nn.init.normal_(change.b, std=0.3)
    tokens = torch.randint(3, target.dims.vocab_size, (2, 7), generator=torch.Generator().manual_seed(1))
    is_label = torch.ones_like(tokens, dtype=torch.bool)
    is_label[1, 3:] = False
    empty = torch.zeros(*tokens.shape, 0)
    return module, TrainingBatch(tokens, empty.long(), empty, is_label=is_label)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_loss_written_out(target, kind, monkeypatch):
    """Through the states and through the target's distribution, by autograd of all logits in float64."""
    module, batch = make_joint(target, kind, cross_entropy=0.3)
    monkeypatch.setattr(module, "_adapt", lambda divergence: None)
    loss, _ = module(batch)
    names, parameters = zip(*module.named_parameters(), strict=True)
    got = torch.autograd.grad(loss, parameters)
    [model] = (one.model for one in module._target)
    with module._changed():
        out = model(batch.tokens, output_hidden_states=True)
    p = out.logits.topk(16).values.log_softmax(-1).exp()
    ids = out.logits.topk(16).indices
    q = (out.hidden_states[-1] @ module.trainable.head.T).log_softmax(-1)
    # The draft at position i is learned where the distribution after i + 1 is.
    rows = batch.is_label[:, 1:]
    each, _ = losses_by_autograd(kind, p[:, 1:][rows], q[:, :-1].gather(-1, ids[:, 1:])[rows])
    base = model(batch.tokens).logits.detach()
    chosen = batch.is_label[:, :-1]
    before, after = (part[:, :-1][chosen].log_softmax(-1) for part in (base, out.logits))
    cross = -after.gather(-1, batch.tokens[:, 1:][chosen][:, None]).mean()
    divergence = (before.exp() * (before - after)).sum(-1).mean()
    wanted = each.sum() / rows.sum() + 0.3 * cross + divergence
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    for name, one, other in zip(names, got, torch.autograd.grad(wanted, parameters), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-6, msg=name)


def test_tether_counts_learned_positions_that_a_token_follows():
    generator = torch.Generator().manual_seed(2)
    base, changed = (torch.randn(2, 4, 5, generator=generator) for _ in range(2))
    tokens = torch.tensor([[1, 2, 3, 4], [0, 1, 2, 3]])
    is_label = torch.tensor([[True, False, True, True], [False, False, False, True]])
    divergence, before, after, count = tether_terms(base, changed, tokens, is_label)
    p, q = base.double().softmax(-1), changed.double().softmax(-1)
    positions = [(0, 0), (0, 2)]
    assert int(count) == 2
    wanted = sum(float((p[i] * (p[i] / q[i]).log()).sum()) for i in positions)
    assert float(divergence) == pytest.approx(wanted, rel=1e-5)
    for probs, got in ((p, before), (q, after)):
        assert float(got) == pytest.approx(
            -sum(float(probs[i][tokens[i[0], i[1] + 1]].log()) for i in positions), rel=1e-5
        )


def test_strength_grows_above_the_bound_and_shrinks_below(target):
    module, batch = make_joint(target, kl=1e-12)
    module(batch)
    assert float(module.strength) == pytest.approx(torch.tensor(0.1).exp())
    module.joint = module.joint.model_copy(update={"kl": 1e3})
    with torch.no_grad():
        module(batch)  # a measurement changes nothing
    assert float(module.strength) == pytest.approx(torch.tensor(0.1).exp())
    module(batch)
    assert float(module.strength) < 1.01


@pytest.mark.parametrize("method", ["medusa", "eagle3", "glide", "mtp"])
def test_joint_run_writes_a_drafter_and_an_adapter(write_recipe, method):
    recipe = write_recipe(method, f"joint-{method}", steps=8)
    result = run(recipe, JOINT)
    output = resolve_training(load_recipe(recipe)).output
    frontier = result["frontier"]
    assert [row["step"] for row in frontier] == [0, 4, 8]
    assert frontier[0]["kl"] == 0.0 and frontier[0]["perplexity"] == frontier[0]["base_perplexity"]
    last = frontier[-1]
    assert 0.0 < last["kl"] < 0.5 and last["perplexity"] != last["base_perplexity"]
    adapter = open_lora(str(output / "adapter"))
    assert len(adapter.changes) == 4 * 7 and not adapter.replaced  # seven linear layers in each of four
    cost = adapter.record("x")["change"]
    assert cost == {name: last[name] for name in ("kl", "perplexity", "base_perplexity")}


def test_merged_adapter_is_the_changed_target(write_recipe, target):
    recipe = write_recipe("medusa", "joint-merged", steps=8)
    run(recipe, JOINT)
    plan = resolve_training(load_recipe(recipe))
    merged = Target(target, torch.float32, lora=str(plan.output / "adapter"))
    record = torch.load(Path(f"{plan.output}.run", "checkpoint.pt"), weights_only=False)
    base = Target(target, torch.float32)
    section = load_recipe(recipe, [JOINT]).training.joint
    module = JointModule(SimpleNamespace(), LossOptions(1.0, 1.0, torch.float32), base, TargetNeeds(), section)
    changes = {name: value for name, value in record["model"].items() if name.startswith(("changes", "strength"))}
    module.load_state_dict(changes)
    tokens = torch.randint(3, base.dims.vocab_size, (2, 9))
    with module._changed(), torch.no_grad():
        changed = base.outputs(tokens, TargetNeeds())["logits"]
    torch.testing.assert_close(merged.model(tokens).logits, changed, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(changed, base.model(tokens).logits, atol=1e-4)


def test_stopped_joint_run_goes_on_to_the_same_curve(write_recipe):
    whole, stopped = (write_recipe("medusa", name, steps=8) for name in ("joint-whole", "joint-stopped"))
    run(whole, JOINT)
    with pytest.raises(Stopped):
        run(stopped, JOINT, stop_at=6)
    run(stopped, JOINT)
    first, second = (rows(resolve_training(load_recipe(recipe)).output) for recipe in (whole, stopped))
    assert first == second


def test_adapter_of_a_joint_run_is_built_and_decodes_as_the_changed_target(write_recipe, target, tmp_path):
    pytest.importorskip("onnxruntime")
    from transformers import AutoModelForCausalLM

    import speccompile
    from speccompile.core.sampling_params import SamplingParams
    from tests.pipeline import fakes

    recipe = write_recipe("medusa", "joint-built", steps=8)
    run(recipe, JOINT)
    output = resolve_training(load_recipe(recipe)).output
    path = tmp_path / "built.yaml"
    sections = {
        "target": {"model": str(target), "lora": str(output / "adapter")},
        "speculator": {"method": "medusa", "model": str(output)},
        "engine": {"max_seq_len": 64, "max_batch_size": 2},
    }
    path.write_text(json.dumps(sections))
    bundle = speccompile.build(fakes.make_plan(path), tmp_path / "bundle")
    cost = bundle.graphs["target"]["lora"]["change"]
    assert cost["kl"] > 0
    assert f"KL {cost['kl']} nats a token" in card_from_manifest(bundle.manifest, "me/joint")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    merge_lora(model, open_lora(str(output / "adapter")))
    prompt = [5, 9, 11]
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    engine = speccompile.load(bundle.path)
    [made] = engine.generate([prompt], SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert made.tokens == wanted[0, len(prompt) :].tolist()


def test_chains_of_a_joint_run_are_measured_on_the_changed_target(write_recipe, monkeypatch):
    recipe = write_recipe("medusa", "joint-chains", steps=8)
    run(recipe, JOINT)
    plan = resolve_training(load_recipe(recipe, [JOINT]))
    opened = []
    monkeypatch.setattr(reference, "Target", lambda *args: opened.append(args) or Target(*args))
    assert reference.measure_chains(plan, [[5, 9, 11]], 2)["steps"] > 0
    assert opened[0][3] == str(plan.output / "adapter")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            'training.joint={"modules": ["no_proj"]}',
            r"training\.joint\.modules: got no_proj; expected some of .*q_proj",
        ),
        ('training.joint={"kl": 0.0}', r"training\.joint\.kl\): got 0\.0"),
    ],
)
def test_wrong_joint_sections_are_refused(write_recipe, override, words):
    with pytest.raises(RecipeError, match=words):
        run(write_recipe("medusa", "joint-refused"), override)


def test_joint_training_needs_weights(write_recipe):
    recipe = load_recipe(write_recipe("medusa", "joint-bundle"), [JOINT, "training.outputs=bundle"])
    with pytest.raises(RecipeError, match=r"training\.joint: got training\.outputs: bundle"):
        resolve_training(recipe)
