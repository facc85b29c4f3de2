# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of exporting a random Llama of about 1.1 billion parameters, and of saving it.

    python bench/export_1b.py [--layers 16] [--save DIR]

Peaks are of this process, sampled every 20 ms; "over weights" is what the export needs beyond torch's own copy.
"""

import argparse
import json
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def rss_bytes() -> int:
    """Returns the resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Peaks:
    """Samples resident memory in a thread; `stage` takes the peak of a block."""

    def __init__(self) -> None:
        self.peak, self.rows = 0, []
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, rss_bytes())
            time.sleep(0.02)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block and take its peak."""
        before, start = rss_bytes(), time.perf_counter()
        self.peak = before
        yield
        seconds = time.perf_counter() - start
        self.rows.append((name, seconds, before, max(self.peak, rss_bytes())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--save", type=Path, help="folder for the saved graph; a temporary one if not given")
    args = parser.parse_args()

    from speccompile.export.decoder import export_decoder
    from speccompile.passes.save import save_model

    peaks, marks = Peaks(), []
    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIG, "num_hidden_layers": args.layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))

        def note(stage: str) -> None:
            marks.append((stage, time.perf_counter(), rss_bytes()))

        with peaks.stage("export"):
            model, dims = export_decoder(Path(folder), weights="random", max_seq_len=4096, progress=note)
            note("end")
        with peaks.stage("save"):
            save_model(model, (args.save or Path(folder)) / "graph.onnx")

    gib = 1 << 30
    weights = 4 * dims.num_params
    print(f"{dims.num_params / 1e9:.3f} billion parameters, {weights / gib:.2f} GiB, {model.graph.num_nodes()} nodes")
    for (stage, start, rss), (_, end, _) in pairwise(marks):
        print(f"  {stage:30s} {end - start:7.2f} s   {rss / gib:6.2f} GiB at its start")
    for name, seconds, before, peak in peaks.rows:
        print(f"{name:8s} {seconds:7.1f} s   {before / gib:6.2f} GiB before   {peak / gib:6.2f} GiB peak")
    highest = max(peak for *_, peak in peaks.rows)
    print(
        f"peak over weights {highest / weights:.3f} (torch's copy included), VmHWM "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / gib:.2f} GiB"
    )


if __name__ == "__main__":
    main()
