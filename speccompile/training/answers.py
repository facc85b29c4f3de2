# SPDX-License-Identifier: Apache-2.0
"""Text of the target's own: prompts cut from texts and conversations, continued by its bundle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speccompile.bundle.stage_cache import StageCache
from speccompile.bundle.staging import disk_faults
from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import BuildError, RecipeError
from speccompile.pipeline import build
from speccompile.recipe.models import Recipe, SpeculatorSection
from speccompile.recipe.plan import find_device, resolve
from speccompile.recipe.training import GeneratedSection
from speccompile.recipe.training_plan import check_prompt_tokens
from speccompile.runtime.engine import load
from speccompile.training.conversations import ChatReader, TokenRow, rows_from_tokens
from speccompile.training.corpus import HELD_OUT_SHARE, Document
from speccompile.training.windows import HELD_OUT, TRAIN, Rows, rows_of_stream

MIN_ANSWER = 16  # tokens that a conversation's prompt leaves for the answer
_TRIES = 20  # lines of texts that are tried for each prompt


@dataclass(frozen=True)
class Prompt:
    """What the target continues."""

    tokens: list[int]
    is_chat: bool  # it ends where the assistant has the word; the answer alone is learned, and is a window with it
    temperature: float


def choose_prompts(
    documents: Iterable[Document], reader: ChatReader, section: GeneratedSection, seed: int
) -> dict[str, list[Prompt]]:
    """Returns the prompts by split, in an order that depends on the documents and the seed.

    Conversations come first: each answer's prompt once a temperature. Each text begins at a random line.

    Raises:
        RecipeError: a split has none; see `ChatReader.samples`.
    """
    num_held_out = max(1, round(section.num_sequences * HELD_OUT_SHARE))
    wanted = {TRAIN: section.num_sequences, HELD_OUT: num_held_out}
    by_split = _take(documents, wanted)
    rng, found = np.random.default_rng(seed), {}
    for split, num in wanted.items():
        heats, chats = section.temperatures, _chat_prompts(by_split[split], reader, section)
        rounds = [(heats[(i + again) % len(heats)], ids) for again in range(len(heats)) for i, ids in enumerate(chats)]
        found[split] = [Prompt(ids, True, heat) for heat, ids in rounds[:num]]
        texts = [document for document in by_split[split] if document.conversation is None]
        if texts:
            check_prompt_tokens(section)
        cut = _text_prompts(texts, reader, section.prompt_tokens, num - len(found[split]), rng)
        found[split] += [Prompt(ids, False, heats[i % len(heats)]) for i, ids in enumerate(cut)]
        if not found[split]:
            num_tokens = section.prompt_tokens
            got = f"no line of {split} text is followed by {num_tokens} tokens" if texts else f"no {split} prompt"
            expected = f"more, or conversations whose prompts have at most {section.seq_len - MIN_ANSWER} tokens"
            todo = "Give more documents (3 percent are held out), shorter prompts, or a larger generated.seq_len."
            raise RecipeError("training.text", got, expected, todo)
    return found


def _take(documents: Iterable[Document], wanted: dict[str, int]) -> dict[str, list[Document]]:
    by_split: dict[str, list[Document]] = {TRAIN: [], HELD_OUT: []}
    for document in documents:
        split = HELD_OUT if document.is_held_out else TRAIN
        if len(by_split[split]) < wanted[split]:
            by_split[split].append(document)
        if all(len(by_split[s]) >= wanted[s] for s in wanted):
            break
    return by_split


def _chat_prompts(documents: Sequence[Document], reader: ChatReader, section: GeneratedSection) -> list[list[int]]:
    texts = [
        reader.prompt(document, turn)
        for document in documents
        if document.conversation is not None
        for turn in document.conversation.turns()
    ]
    most = section.seq_len - MIN_ANSWER
    return [ids for ids in reader.encode(texts) if len(ids) <= most]


def _text_prompts(
    documents: Sequence[Document], reader: ChatReader, size: int, num: int, rng: np.random.Generator
) -> list[list[int]]:
    found: list[list[int]] = []
    for tries in range(_TRIES * num if documents else 0):
        lines = documents[tries % len(documents)].text.splitlines(keepends=True)
        first = int(rng.integers(len(lines)))
        [ids] = reader.encode(["".join(lines[first : first + size])], special=True)
        if len(ids) >= size:
            found.append(ids[:size])
        if len(found) == num:
            break
    return found


def generate(
    recipe: Recipe, prompts: dict[str, list[Prompt]], folder: Path, padding: int, progress: Callable[[str], None]
) -> dict[str, Rows]:
    """Returns windows of prompts and what the target's bundle writes after them, by a seed and temperature each.

    Args:
        folder: of the bundle, and of a file `answers-SPLIT.jsonl` of the sequences so far for each split.

    Raises:
        BuildError: the bundle cannot be built, a file cannot be written, or a sequence ended with an error.
        RecipeError: what was written fills no window.
    """
    assert recipe.training is not None
    section, seed = recipe.training.generated, recipe.training.seed
    progress("text: build the target")
    plan = resolve(_plain_recipe(recipe, section), find_device(recipe.engine.device))
    engine = load(build(plan, folder / "bundle", cache=StageCache(None)).path)
    windows = {}
    for split, rows in prompts.items():
        sampling = [_sampling(section.seq_len, seed + i, prompt) for i, prompt in enumerate(rows)]
        journal = _Journal(folder / f"answers-{split}.jsonl")
        todo = [i for i in range(len(rows)) if i not in journal.answers]
        left, chosen = [rows[i].tokens for i in todo], [sampling[i] for i in todo]
        run = engine.run(left, chosen, speculative=False, batch_size=section.batch_slots) if todo else iter(())
        for at, generation in run:
            if generation.error is not None:
                raise BuildError(f"text: generate {split}", generation.error, "an answer", "See the error.")
            journal.add(todo[at], generation.tokens)
            progress(f"text: generate {split} {len(journal.answers)}/{len(rows)}")
        windows[split] = _windows(rows, journal.answers, section.seq_len, padding)
    return windows


def _sampling(seq_len: int, seed: int, prompt: Prompt) -> SamplingParams:
    room = seq_len - len(prompt.tokens)
    return SamplingParams(max_new_tokens=room, temperature=prompt.temperature, seed=seed)


class _Journal:
    """Answers that were written so far, a line each; the line that a stop cut is written again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[int, list[int]] = dict(self._read()) if path.is_file() else {}

    def _read(self) -> Iterator[tuple[int, list[int]]]:
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")
        for line in whole.splitlines():
            held = json.loads(line)
            yield held["index"], held["tokens"]

    def add(self, index: int, tokens: list[int]) -> None:
        self.answers[index] = tokens
        with disk_faults(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"index": index, "tokens": tokens}) + "\n")


def _windows(prompts: Sequence[Prompt], answers: dict[int, list[int]], seq_len: int, padding: int) -> Rows:
    texts = [[*prompt.tokens, *answers[i]] for i, prompt in enumerate(prompts) if not prompt.is_chat]
    chats = [
        TokenRow([*prompt.tokens, *answers[i]], [False] * len(prompt.tokens) + [True] * len(answers[i]))
        for i, prompt in enumerate(prompts)
        if prompt.is_chat
    ]
    whole = [token for text in texts if len(text) == seq_len for token in text]
    rest = [token for text in texts if len(text) != seq_len for token in text]
    parts = [rows_of_stream(np.array(tokens, np.int32), seq_len) for tokens in (whole, rest)]
    rows = Rows.joined([*parts, rows_from_tokens(chats, seq_len, padding)])
    if not len(rows):
        got, expected = f"{len(whole) + len(rest)} tokens in all", f"at least {seq_len}"
        raise RecipeError("training.generated", got, expected, "Generate more sequences.")
    return rows


def _plain_recipe(recipe: Recipe, section: GeneratedSection) -> Recipe:
    sizes = {"max_batch_size": section.batch_slots, "max_seq_len": section.seq_len, "max_draft_nodes": 1}
    engine = recipe.engine.model_copy(update=sizes)
    return recipe.model_copy(update={"engine": engine, "speculator": SpeculatorSection(method="none")})
