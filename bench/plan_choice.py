# SPDX-License-Identifier: Apache-2.0
"""What `plan` chooses, and what it promised, against a measured grid of method x draft length x precision at batch 1.

    python bench/plan_choice.py MODEL [--speculator FOLDER] [--prompts FILE] [--draft-tokens 1,2,4,8] [--cpu-time]

Acceptance is counted in every other prompt of a kind, with the longest drafts; the grid decodes those between them, so
`plan` knows no text of the grid. Steps after the first token count, not the prompt; settings take turns text by text in
one process. Each decodes a text twice, of which the second counts, and the fastest of the rounds. "auto" is a recipe as
`plan` writes it: the controller decides how long drafts are.
"""

import argparse
import itertools
import json
import tempfile
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from speccompile.bundle.bundle import read_bundle
from speccompile.cli.bench import read_samples
from speccompile.cli.options import prepare_source
from speccompile.core import registry
from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import SpecCompileError
from speccompile.planner.acceptance import Acceptance, read_acceptance
from speccompile.planner.candidates import PLAIN, Candidate, candidates_of_source
from speccompile.planner.forecast import forecast, forms
from speccompile.planner.measuring import kept_machine, measure_machine
from speccompile.planner.outlook import Row, choose
from speccompile.planner.traffic import Traffic
from speccompile.recipe.model_recipe import ModelOptions
from speccompile.runtime.engine import load
from speccompile.runtime.spec_engine import SpecEngine

AUTO = "auto"
FORM = "target.quantization"
SIZE = "engine.max_batch_size=1"


@dataclass
class Setting:
    """A point of the grid, and the seconds of its rounds by prompt."""

    form: str
    method: str
    length: int | str
    engine: SpecEngine
    seconds: dict[int, list[float]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_steps: int = 0
    num_tokens: int = 0  # of these steps

    def speed(self) -> float:
        """Returns tokens/s."""
        return sum(len(one) - 1 for one in self.tokens.values()) / sum(map(min, self.seconds.values()))


def section_of(one: Candidate, length: int | str) -> dict[str, Any]:
    """Returns the section of a chain of drafts of a length."""
    names = {f.name for f in fields(registry.method(one.section["method"]).Config)}
    section = dict(one.section)
    if length != AUTO and "num_draft_tokens" in names:
        section |= {"num_draft_tokens": length} | ({"tree": "chain"} if "tree" in names else {})
    return section


def decode(setting: Setting, index: int, prompt: list[int], num_tokens: int, clock: Any) -> None:
    """Decodes a text twice: the second one counts, when the processor's caches have this setting's weights."""
    params = SamplingParams(max_new_tokens=num_tokens, temperature=0.0)
    for _ in setting.engine.stream(prompt, params, speculative=setting.method != PLAIN):
        pass
    steps = iter(setting.engine.stream(prompt, params, speculative=setting.method != PLAIN))
    tokens = list(next(steps).tokens)
    start = clock()
    for step in steps:
        tokens += step.tokens
        setting.num_steps += 1
        setting.num_tokens += len(step.tokens)
    setting.seconds.setdefault(index, []).append(clock() - start)
    if setting.tokens.setdefault(index, tokens) != tokens:
        raise SystemExit(f"{setting.form} {setting.method} {setting.length}: another text in another round")


def forms_of(args: Any) -> list[str]:
    return args.forms.split(",") if args.forms else forms(args.model, ModelOptions())


def count_acceptance(bundle: Path, section: dict[str, Any], prompts: list[list[int]], args: Any) -> Acceptance:
    """Returns acceptance by position, as `plan` reads it of `generate --json`."""
    engine = load(bundle, verify=False, threads=args.threads, method=section)
    texts = engine.generate(prompts, SamplingParams(max_new_tokens=args.tokens, temperature=0.0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.json"
        path.write_text(json.dumps([{"stats": text.stats} for text in texts]))
        return read_acceptance(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--speculator", action="append", default=[])
    parser.add_argument("--methods", help="of the candidates of `plan`; all that have one drafter by default")
    parser.add_argument("--forms", help="of the weights: none, bf16, int8, int4; all that the backend has by default")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int, default=12, help="prompts, of which half are counted in")
    parser.add_argument("--every", type=int, default=1, help="2 takes every second prompt, and so on")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="longer prompts are cut at the start")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--draft-tokens", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no round begins")
    parser.add_argument("--measure", action="store_true", help="the machine anew")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, on a machine that others use too")
    args = parser.parse_args()
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time needs --threads 1: waiting for other threads is CPU time too")
    clock = time.process_time if args.cpu_time else time.perf_counter
    lengths = [int(part) for part in args.draft_tokens.split(",")]
    settings, counted, prompts = open_settings(args, lengths)
    print(f"{len(settings)} settings, {len(prompts)} prompts", flush=True)
    machine = (None if args.measure else kept_machine(args.threads)) or measure_machine(args.threads, clock=clock)
    context = max(map(len, prompts)) + args.tokens // 2
    known = Traffic(given=counted, context=context)
    predicted = {}
    for form in forms_of(args):
        model = ModelOptions(settings=(SIZE, f"{FORM}={form}"))
        rows = forecast(args.model, model, machine, known, [1], context, args.speculator, args.methods)
        predicted |= {(form, row.method): row for row, _ in rows}
    start, num_rounds = time.monotonic(), 0
    while num_rounds < args.rounds and time.monotonic() - start < args.seconds:
        for index, prompt in list(enumerate(prompts))[1::2]:
            # The other way round in every second round: drifts of the machine meet both ends.
            for setting in settings if num_rounds % 2 == 0 else reversed(settings):
                decode(setting, index, prompt, args.tokens, clock)
        num_rounds += 1
    report(settings, predicted, f"{num_rounds} rounds on {machine.name}, {machine.source}")


def open_settings(args: Any, lengths: list[int]) -> tuple[list[Setting], dict[str, Acceptance], list[list[int]]]:
    """Returns the points of the grid, acceptance by candidate, and the prompts: those of odd index are the grid's."""
    model = ModelOptions(settings=(SIZE,))
    every = candidates_of_source(args.model, model, args.speculator, args.methods)
    settings, counted, prompts = [], dict[str, Acceptance](), list[list[int]]()
    for form, one in itertools.product(forms_of(args), (one for one in every if not one.is_several)):
        try:
            bundle = prepare_source(args.model, one.options(model, f"{FORM}={form}")).path
        except SpecCompileError as fault:
            print(f"left out: {one.name} ({form}): {fault}", flush=True)
            continue
        if not prompts:
            kinds = None if args.prompts else "all"
            samples = read_samples(read_bundle(bundle, verify=False), args.prompts, kinds, None)
            # By kind, so that both halves have texts of all kinds.
            used = sorted(samples[:: args.every][: args.limit], key=lambda sample: sample.category or "")
            prompts = [sample.ids[-args.prompt_tokens :] for sample in used]
        if one.name != PLAIN and one.name not in counted:
            counted[one.name] = count_acceptance(bundle, section_of(one, max(lengths)), prompts[::2], args)
        for length in [0] if one.name == PLAIN else [*lengths, AUTO]:
            engine = load(bundle, verify=False, threads=args.threads, method=section_of(one, length))
            settings.append(Setting(form, one.name, length, engine))
    return settings, counted, prompts


def report(settings: list[Setting], predicted: dict[tuple[str, str], Row], what: str) -> None:
    """Prints the grid, the fastest first, and what the choice has of the best."""
    for form in {one.form for one in settings}:
        texts = [one.tokens for one in settings if one.form == form]
        if any(one != texts[0] for one in texts):
            raise SystemExit(f"{form}: texts differ")
    plain = {one.form: one.speed() for one in settings if one.method == PLAIN}
    print(
        "| weights | method | K | tokens a step | tokens/s | of plain | predicted tokens/s | of plain |\n"
        + "|---" * 8
        + "|"
    )
    for one in sorted(settings, key=Setting.speed, reverse=True):
        row, cells = predicted.get((one.form, one.method)), ["", ""]
        if row is not None and one.length in (row.num_drafts, AUTO):
            cells = [
                f"{row.tokens_per_s[0]:.0f} to {row.tokens_per_s[1]:.0f}",
                f"{row.of_plain[0]:.2f} to {row.of_plain[1]:.2f}",
            ]
        figures = f"{one.num_tokens / one.num_steps:.2f} | {one.speed():.1f} | {one.speed() / plain[one.form]:.2f}"
        print(f"| {one.form} | {one.method} | {one.length} | {figures} | {' | '.join(cells)} |")
    best, choice = max(one.speed() for one in settings), choose(list(predicted.values()), None, False)
    print(f"{what}; texts of a form are equal. plan: {choice.sentence}")
    for one in settings:
        if predicted.get((one.form, one.method)) is choice and one.length in (choice.num_drafts, AUTO):
            print(f"K {one.length}: {one.speed() / best:.3f} of the best")


if __name__ == "__main__":
    main()
