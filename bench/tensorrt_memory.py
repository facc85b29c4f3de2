# SPDX-License-Identifier: Apache-2.0
"""Memory and size of TensorRT builds of random Llamas, over their weights: the factors that --dry-run predicts with.

    python bench/tensorrt_memory.py [--sizes 1024x2 2048x2 4096x2 5120x2] [--quantizations none int8 int4]
        [--weights random|checkpoint] [--json F]

Every row is a build of its own (speccompile build, no cache) from a config that is written for it. "held" is what the
parent process holds while the builder works; factors are least squares over the rows of a quantisation.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MIB = 2**20
TOKENIZER = Path(__file__).parents[1] / "examples/models/pycode-16m"


def write_recipe(folder: Path, hidden: int, layers: int, quantization: str, weights: str) -> Path:
    """Writes a config.json (heads of 128), float16 weights where asked for, and a recipe; returns the recipe."""
    heads = hidden // 128
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 27 // 10, "num_hidden_layers": layers}
    config = {**CONFIG, **sizes, "num_attention_heads": heads, "num_key_value_heads": heads}
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(config))
    if weights == "checkpoint":
        from transformers import LlamaConfig, LlamaForCausalLM

        LlamaForCausalLM(LlamaConfig(**config)).half().save_pretrained(folder / "model")
        for file in TOKENIZER.glob("*token*.json"):
            shutil.copy(file, folder / "model")
    recipe = {
        "target": {"model": str(folder / "model"), "weights": weights, "quantization": quantization},
        "engine": {"backend": "tensorrt", "plugins": "none", "max_batch_size": 4, "max_seq_len": 2048},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return path


def measure(hidden: int, layers: int, quantization: str, weights: str) -> dict[str, int | float | str]:
    """Build once and read the manifest."""
    with tempfile.TemporaryDirectory() as scratch:
        recipe = write_recipe(Path(scratch), hidden, layers, quantization, weights)
        bundle = Path(scratch) / "bundle"
        command = [sys.executable, "-m", "speccompile", "build", str(recipe), "-o", str(bundle), "--no-cache"]
        subprocess.run(command, check=True, capture_output=True)
        manifest = json.loads((bundle / "manifest.json").read_text())
    graph = manifest["graphs"]["target"]
    record, stages = graph["tensorrt"], {s["name"]: s for s in manifest["stages"]}
    return {
        "hidden": hidden,
        "layers": layers,
        "quantization": quantization,
        "params": graph["dims"]["num_params"],
        "weights": record["lowered_weights_bytes"],
        "weights_in_plan": record["weights_bytes"],
        "plan": record["plan_bytes"],
        "export_peak": stages["export target"]["peak_rss_bytes"],
        "lowering_peak": record["build"]["lowering_peak_bytes"],
        "held": record["build"]["parent_rss_bytes"],
        "builder_peak": record["build"]["peak_rss_bytes"],
        "seconds": record["build"]["stages"][-1]["seconds"],
    }


def fit(rows: list[dict[str, int | float | str]], of: str, over: str) -> tuple[float, float]:
    """Returns (bytes, factor) of `of` = bytes + factor * `over`."""
    x = np.array([[1.0, float(row[over])] for row in rows])
    constant, factor = np.linalg.lstsq(x, np.array([float(row[of]) for row in rows]), rcond=None)[0]
    return float(constant), float(factor)


def main() -> None:
    """Build every size in every form, print rows and factors."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["1024x2", "2048x2", "4096x2", "5120x2"])
    parser.add_argument("--quantizations", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--weights", choices=["random", "checkpoint"], default="random")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for quantization in arguments.quantizations:
        for size in arguments.sizes:
            hidden, layers = (int(n) for n in size.split("x"))
            row = measure(hidden, layers, quantization, arguments.weights)
            rows.append(row)
            cells = (f"{k} {v / MIB:.0f}" for k, v in row.items() if isinstance(v, int) and v > MIB and k != "params")
            print(f"{quantization} {size}: {', '.join(cells)} MiB, {row['seconds']} s", flush=True)
        own = [row for row in rows if row["quantization"] == quantization]
        pairs = (
            ("builder_peak", "weights"),
            ("plan", "weights"),
            ("export_peak", "params"),
            ("lowering_peak", "params"),
        )
        for of, over in pairs:
            constant, factor = fit(own, of, over)
            print(f"  {of} = {constant / MIB:.0f} MiB + {factor:.3f} x {over}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
