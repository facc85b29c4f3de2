# SPDX-License-Identifier: Apache-2.0
"""Tampered bundles through `inspect` and `load`: most manifests are signed again, so that their values are read."""

import contextlib
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speccompile.backends.base import LoadJob
from speccompile.bundle.format import digest_from_manifest
from speccompile.bundle.stage_cache import StageCache
from speccompile.pipeline import build
from speccompile.runtime.engine import load
from tests.fuzz.mutate import command, damage, fuzz, mutate, text_of
from tests.mock_lm import MockEngine, MockLM
from tests.pipeline import fakes


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yields a bundle of the pipeline tests' fakes, which `load` can load."""
    with pytest.MonkeyPatch.context() as patch:
        fakes.install(patch.setattr, lambda name, module: patch.setitem(sys.modules, name, module))
        top = tmp_path_factory.mktemp("bundle")
        built = build(fakes.make_plan(fakes.write_recipe(top / "in")), top / "out", cache=StageCache(None))
        patch.setattr(fakes.FakeBackend, "load", load_mock)
        yield built.path


def load_mock(self: Any, job: LoadJob) -> MockEngine:
    """Returns an engine of the sizes that the manifest asks for."""
    if job.max_slots * job.max_rows > 1_000_000:
        raise MemoryError
    return MockEngine(MockLM(seed=1), job.spec.name, job.max_slots, job.max_rows)


def make_case(rng: random.Random, bundle: Path) -> tuple[str, bytes]:
    """Returns (file of the bundle, its new contents)."""
    manifest: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())
    kind = rng.random()
    if kind < 0.8:
        changed = mutate(rng, manifest)
        with contextlib.suppress(TypeError, RecursionError):  # too deep to be signed
            changed["digest"] = digest_from_manifest(changed)
        return "manifest.json", text_of(changed).encode()
    if kind < 0.85:
        return "manifest.json", text_of(mutate(rng, manifest)).encode()
    if kind < 0.9:
        return "manifest.json", damage(rng, json.dumps(manifest).encode())
    name = rng.choice([*manifest["files"], "tokenizer/chat_template.jinja", "graphs/x/y", "notes.txt"])
    held = (bundle / name).read_bytes() if (bundle / name).exists() else b"planted"
    return name, damage(rng, held)


def write(bundle: Path, case: tuple[str, bytes], dest: Path) -> Path:
    shutil.rmtree(dest, ignore_errors=True)
    shutil.copytree(bundle, dest)
    (dest / case[0]).parent.mkdir(exist_ok=True)
    (dest / case[0]).write_bytes(case[1])
    return dest


def test_the_seed_loads(bundle):
    load(bundle)
    assert command("inspect", bundle, "--json") == "ok"


def test_a_tampered_bundle_is_shown_with_its_fault(bundle, tmp_path):
    def attempt(case: tuple[str, bytes]) -> str:
        return command("inspect", write(bundle, case, tmp_path / "case"), "--json")

    counts = fuzz("inspect", lambda rng: make_case(rng, bundle), attempt)
    assert set(counts) <= {"ok", "BundleError"}


def test_a_tampered_bundle_loads_or_is_refused(bundle, tmp_path):
    def attempt(case: tuple[str, bytes]) -> str:
        load(write(bundle, case, tmp_path / "case"))
        return "ok"

    counts = fuzz("load", lambda rng: make_case(rng, bundle), attempt)
    assert set(counts) <= {"ok", "BundleError", "RecipeError"}
