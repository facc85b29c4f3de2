# SPDX-License-Identifier: Apache-2.0
"""What a section asks of a bundle besides its tokens: CUDA graphs, memory, a second load, a server, a wide head."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import speccompile
from bench.gpu_check.report import row
from speccompile.bundle.format import MANIFEST, digest_from_manifest, read_json
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.spec_engine import SpecEngine

NUM_REQUESTS, NUM_WARM = 1000, 200
MAX_LOST_BYTES = 8 << 20  # other processes of the GPU may take some; a leak of one context a request is far more
CLIENTS, SECONDS, CANCELS = 8, 20.0, 0.2  # seconds of each of the two phases
WIDE_VOCAB, WIDE_PROMPT, WIDE_TOKENS, ROUNDS = 128256, 512, 64, 3


class MemoryOf(Protocol):
    """A device that tells its memory: `Device`."""

    def memory_bytes(self) -> tuple[int, int]:
        """Returns free and total bytes."""
        ...


def graph_rows(loaded: SpecEngine) -> list[dict[str, Any]]:
    """Returns whether each graph of an engine that has decoded ran as CUDA graphs, and why not."""
    rows = []
    for engine in loaded.engines:
        plan = engine.plan
        num = plan.num_graphs if plan.captures_itself else engine.runner.num_graphs
        got = f"{num} captured" + (f"; {engine.graph_fault}" if engine.graph_fault else "")
        rows.append(row(f"CUDA graphs, {plan.spec.name}", got, "at least one", num > 0 and not engine.graph_fault))
    return rows


def edited_copy(bundle: Path, dest: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """Returns a copy of a bundle whose manifest was changed by `edit`."""
    shutil.rmtree(dest, ignore_errors=True)
    shutil.copytree(bundle, dest)
    manifest = read_json(dest / MANIFEST)
    edit(manifest)
    manifest["digest"] = digest_from_manifest(manifest)
    (dest / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return dest


def own_capture_rows(bundle: Path, dest: Path, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Returns ms a token, plain, with and without the CUDA graphs that TensorRT-RTX captures by itself.

    It falls back without a word where it cannot capture, so a time is all that shows it.

    Args:
        bundle: of TensorRT-RTX.
        dest: for a copy without CUDA graphs.
        prompts: token ids.
    """

    def switch_off(manifest: dict[str, Any]) -> None:
        for graph in manifest["graphs"].values():
            graph["tuning"] = {**graph.get("tuning", {}), "cuda_graphs": False}

    off = edited_copy(bundle, dest, switch_off)
    engines = {name: speccompile.load(path, method="none") for name, path in (("with", bundle), ("without", off))}
    medians = {name: statistics.median(times) for name, times in _ms_per_token(engines, prompts).items()}
    ratio = medians["without"] / medians["with"]
    texts = {name: f"{value:.3f} ms a token" for name, value in medians.items()}
    got = f"{texts['with']}; without {texts['without']} (x{ratio:.2f})"
    return [row("CUDA graphs of TensorRT-RTX", got, "not slower than without", ratio > 0.97)]


def _ms_per_token(engines: dict[str, SpecEngine], prompts: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    params, times = SamplingParams(max_new_tokens=WIDE_TOKENS, ignore_eos=True), {name: [] for name in engines}
    for turn in range(ROUNDS + 1):
        for name, engine in engines.items():
            start = time.perf_counter()
            results = engine.generate(prompts, params, batch_size=1)
            if turn:  # the first round warms up
                num = sum(len(r.tokens) for r in results)
                times[name].append((time.perf_counter() - start) * 1e3 / num)
    return times


def activation_rows(engine: SpecEngine) -> list[dict[str, Any]]:
    """Returns the scratch memory of each plan."""
    plans = [one.plan for one in engine.engines]
    return [row(f"activation memory, {p.spec.name}, bytes", int(p.engine.device_memory_size_v2)) for p in plans]


def memory_row(device: MemoryOf, engine: SpecEngine, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns the free memory of the device before and after many requests of all batch sizes.

    Args:
        device: the GPU.
        engine: loaded.
        prompts: token ids, one or more.
    """
    frees = []
    for wanted in (NUM_WARM, NUM_REQUESTS):
        num = 0
        while num < wanted:
            for batch in (1, 3, 8):
                part = [prompts[(num + i) % len(prompts)] for i in range(batch)]
                engine.generate(part, SamplingParams(max_new_tokens=4 + num % 29), batch_size=batch)
                num += batch
        gc.collect()
        frees.append(device.memory_bytes()[0])
    lost = frees[0] - frees[1]
    got = f"{frees[0]} bytes free, then {frees[1]}"
    return row(
        f"free memory over {NUM_REQUESTS} requests", got, f"at most {MAX_LOST_BYTES} less", lost <= MAX_LOST_BYTES
    )


def loading_rows(bundle: Path, prompt: Sequence[int], clear: Callable[[], None]) -> list[dict[str, Any]]:
    """Returns the seconds until the first token: compiled kernels not kept yet, and at the next load.

    Args:
        bundle: to load.
        prompt: token ids.
        clear: forgets what an earlier load kept.
    """
    clear()
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        engine = speccompile.load(bundle)
        engine.generate([list(prompt)], SamplingParams(max_new_tokens=8))
        seconds.append(time.perf_counter() - start)
        del engine
        gc.collect()  # what was compiled is kept when the plans go
    first, again = seconds
    got = f"{first:.2f} s, again {again:.2f} s"
    return [row("load and 8 tokens", got, "no slower the second time", again <= first * 1.2)]


def server_rows(bundle: Path, work: Path) -> list[dict[str, Any]]:
    """Loads `speccompile serve` with 8 streams, then with streams that are cut off, against the offline texts.

    Args:
        bundle: to serve.
        work: for the log.
    """
    from bench.gpu_check.decoding import ROOT
    from bench.server_soak.load import Load, run_load
    from bench.server_soak.main import make_tasks, wait_empty
    from bench.server_soak.serve import ServeProcess

    tasks = make_tasks(bundle, ROOT / "examples/prompts.jsonl")
    log = work / "logs" / f"serve-{bundle.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    server, rows = ServeProcess(bundle, log), []
    try:
        for name, load in (
            (f"{CLIENTS} streams", Load(CLIENTS, SECONDS)),
            (f"{CLIENTS} streams, one in five cut off", Load(CLIENTS, SECONDS, cancels=CANCELS, seed=1)),
        ):
            seen = asyncio.run(run_load(server, tasks, load))
            counts = wait_empty(server)
            left = int(counts["active"] + counts["queued"] + counts["prefilling"])
            got = f"{dict(seen.ends)}, {left} left in the server; {'; '.join(seen.faults[:3])}"
            is_right = seen.ends["right"] > 0 and not seen.faults and left == 0
            rows.append(row(f"server, {name}", got, "right answers alone, none left", is_right))
            rows.append(row(f"server, {name}, tokens/s", round(seen.num_tokens / seen.seconds, 1)))
    finally:
        code = server.stop()
    return [*rows, row("server, exit code after SIGTERM", code, "0", code == 0)]


def wide_model(source: Path, dest: Path) -> Path:
    """Returns a copy of a checkpoint whose embedding has `WIDE_VOCAB` rows, zeros where it had none.

    Raises:
        ImportError: torch or transformers is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if (dest / "config.json").exists():
        return dest
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    num = model.config.vocab_size
    model.resize_token_embeddings(WIDE_VOCAB, mean_resizing=False)
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        part.weight.data[num:] = 0.0
    shutil.copytree(source, dest, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    model.save_pretrained(dest)
    return dest


def wide_rows(build: Callable[[Path], Path], source: Path, work: Path) -> list[dict[str, Any]]:
    """Returns the times of a prompt and of a token at a vocabulary of 128,256.

    Args:
        build: from a checkpoint to a bundle of it alone.
        source: the checkpoint to widen.
        work: for the widened checkpoint.
    """
    try:
        bundle = build(wide_model(source, work / "wide-model"))
    except ImportError as fault:
        return [row(f"vocabulary {WIDE_VOCAB}", f"not run: {fault}")]
    engine, rows = speccompile.load(bundle, method="none"), []
    prompt = [2 + i % 1000 for i in range(WIDE_PROMPT)]
    for batch in (1, 8):
        prompts, times = [prompt] * batch, {1: [], 1 + WIDE_TOKENS: []}
        for turn in range(ROUNDS + 1):
            for num in times:
                start = time.perf_counter()
                engine.generate(prompts, SamplingParams(max_new_tokens=num, ignore_eos=True), batch_size=batch)
                if turn:
                    times[num].append((time.perf_counter() - start) * 1e3)
        first, all_of = (statistics.median(times[num]) for num in times)
        where = f"vocabulary {WIDE_VOCAB}, batch {batch}"
        rows.append(row(f"{where}: prompt of {WIDE_PROMPT} and first token, ms", round(first, 2)))
        rows.append(row(f"{where}: step, ms", round((all_of - first) / WIDE_TOKENS, 3)))
    return rows
