# SPDX-License-Identifier: Apache-2.0
"""A manifest whose graphs contradict themselves is refused; see `tests/fuzz/test_manifests.py` for whole bundles."""

import json
from dataclasses import replace
from typing import Any

import pytest

from speccompile.bundle.bundle import check_specs
from speccompile.core.specs import BorrowedCache, GraphSpec, TensorSpec, spec_from_json
from speccompile.errors import BundleError


def tensor(name: str, *dims: str | int, dtype: str = "int64") -> TensorSpec:
    return TensorSpec(name, dims or ("batch", "nodes"), dtype)


ROWS = ("batch", 2, "max_seq", 8)
CACHES = tuple(tensor(f"{kind}_cache.0", *ROWS, dtype="float32") for kind in "kv")
TARGET = GraphSpec(
    "target",
    (tensor("tokens"), *CACHES),
    (tensor("next_token", "batch"), *(tensor(f"{t.name}.updated", *ROWS, dtype="float32") for t in CACHES)),
    caches=("k_cache.0", "v_cache.0"),
    vocab_size=40,
)
DRAFT = replace(TARGET, name="draft", mask_token=39, num_candidates=4, draft_vocab=12)
READER = GraphSpec("reader", CACHES, (tensor("x"),), borrowed=(BorrowedCache("k_cache.0", "k_cache.0"),), vocab_size=40)


def test_sound_graphs_pass():
    check_specs("manifest.json", {"target": TARGET, "draft": DRAFT, "reader": READER})


WRONG: dict[str, tuple[GraphSpec, str]] = {
    "another name": (replace(DRAFT, name="x"), r"spec\.name\): got 'x'; expected 'draft'"),
    "an input twice": (replace(DRAFT, inputs=(*DRAFT.inputs, tensor("tokens"))), "'tokens' twice"),
    "an output twice": (replace(DRAFT, outputs=(*DRAFT.outputs, tensor("next_token"))), "'next_token' twice"),
    "a dtype of nobody": (replace(DRAFT, inputs=(tensor("a", dtype="x"), *CACHES)), "'a' of dtype 'x'"),
    "a cache that is no input": (replace(DRAFT, caches=(*DRAFT.caches, "k_cache.1")), "got 'k_cache.1'"),
    "a cache without its update": (replace(DRAFT, outputs=DRAFT.outputs[:-1]), "an input with an output 'v_cache.0"),
    "a cache twice": (replace(DRAFT, caches=(*DRAFT.caches, "k_cache.0")), "once"),
    "a cache that is not named": (replace(DRAFT, caches=("v_cache.0",)), "got no 'k_cache.0'"),
    "caches in another order": (replace(DRAFT, caches=DRAFT.caches[::-1]), "another order"),
    "a state that is no input": (replace(DRAFT, states=("state.0",)), r"spec\.states\): got 'state.0'"),
    "a draft vocabulary beyond it": (replace(DRAFT, draft_vocab=41), r"draft_vocab\): got 41"),
    "more candidates than tokens": (
        replace(DRAFT, num_candidates=13),
        r"num_candidates\): got 13; expected at most 12",
    ),
    "a cache of no graph": (replace(DRAFT, borrowed=(BorrowedCache("k_cache.0", "k_cache.0", "x"),)), "in 'x'"),
    "a cache of its own": (replace(DRAFT, borrowed=(BorrowedCache("k_cache.0", "k_cache.0", "draft"),)), "in 'draft'"),
    "another's cache that is not there": (
        replace(DRAFT, borrowed=(BorrowedCache("k_cache.0", "k", "target"),)),
        "of 'k'",
    ),
}


@pytest.mark.parametrize(("draft", "said"), WRONG.values(), ids=WRONG.keys())
def test_graphs_that_contradict_themselves_are_refused(draft, said):
    with pytest.raises(BundleError, match=said) as caught:
        check_specs("manifest.json", {"target": TARGET, "draft": draft})
    assert caught.value.where.startswith("manifest.json (graphs.draft.spec.")


SHAPES: dict[str, Any] = {
    "a size": lambda t: {**t, "dims": [t["dims"][0], 3, *t["dims"][2:]]},
    "a dim more": lambda t: {**t, "dims": [*t["dims"], 1]},
    "another kind": lambda t: {**t, "dtype": "int64"},
    "another dim's name": lambda t: {**t, "dims": ["nodes", *t["dims"][1:]]},
}


@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES.keys())
def test_a_graph_of_other_shapes_than_its_manifest_says_is_refused(change):
    from types import SimpleNamespace

    from speccompile.backends.onnxruntime.engine import check_tensors

    def held(tensors: tuple[TensorSpec, ...]) -> list[Any]:
        kinds = {"float32": "float"}
        return [
            SimpleNamespace(name=t.name, shape=list(t.dims), type=f"tensor({kinds.get(t.dtype, t.dtype)})")
            for t in tensors
        ]

    session: Any = SimpleNamespace(get_inputs=lambda: held(TARGET.inputs), get_outputs=lambda: held(TARGET.outputs))
    check_tensors(None, TARGET, session)  # type: ignore[arg-type]
    data = json.loads(json.dumps(TARGET.json_from_spec()))
    data["inputs"][1] = change(data["inputs"][1])
    with pytest.raises(BundleError, match=r"k_cache\.0 tensor\(float\) .*; expected .*as the manifest says"):
        check_tensors(None, spec_from_json(data), session)  # type: ignore[arg-type]
