# SPDX-License-Identifier: Apache-2.0
"""Markers by need, one thread a process, CPU time of unmarked tests; the bundle of the trained example pair."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from speccompile.backends import machine
from tests import tiers
from tests.cpu_time import CpuTimes

TESTS = Path(__file__).parent

# The models are tiny, and workers share the cores; children inherit this. Set before anything imports torch or numpy.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# One compiled library of CPU kernels for all tests and their children, whatever cache folder a test chooses.
_STORE = os.environ.get("SPECCOMPILE_TEST_CACHE") or TESTS.parent / ".pytest_cache/speccompile"
os.environ.setdefault("SPECCOMPILE_CPU_KERNELS", str(Path(_STORE) / "cpu_kernels"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("speccompile")
    group.addoption("--unmarked", action="store_true", help="only tests without a marker (make check)")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in tiers.MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if config.getoption("--unmarked"):
        config.pluginmanager.register(CpuTimes(), "cpu_times")
        # Bodies of ops run in place of kernels, which take 17 s to compile; tests with a marker compile them.
        os.environ["SPECCOMPILE_CPU_KERNELS"] = "off"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --unmarked, a module whose every test has a marker is not even imported."""
    if not config.getoption("--unmarked") or collection_path.suffix != ".py":
        return None
    return bool(tiers.markers_of_module(collection_path)) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collects no garbage meanwhile: what the modules make stays, and walking it takes a sixth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        names = tiers.markers_of(item.path, getattr(item, "fixturenames", ()))
        for name in sorted(names):
            item.add_marker(name)
    if config.getoption("--unmarked"):
        marked = [item for item in items if any(item.get_closest_marker(name) for name in tiers.MARKERS)]
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in set(marked)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """See `_freeze`."""
    if session.config.getoption("--unmarked") and "torch" in sys.modules:
        raise pytest.UsageError("a file of an unmarked test imports torch, through what it imports: tests/README.md")
    _freeze()
    gc.set_threshold(50_000, 20, 20)  # a trace makes millions of objects that live until its end


def _freeze() -> None:
    """Freezes what the collection and imports made: full garbage collections, which builds ask for, need not walk it.

    A build collects after every graph, which takes 0.3 s where torch and transformers are walked.
    """
    gc.collect()
    gc.freeze()
    _frozen.append(len(sys.modules))


_frozen: list[int] = []  # how many modules there were then
_NEW_MODULES = 200  # of which a freeze is worth its own collection


def pytest_runtest_setup() -> None:
    """Freezes the modules that tests have imported since."""
    if len(sys.modules) > _frozen[-1] + _NEW_MODULES:
        _freeze()
    _keep_tables()


def _keep_tables() -> None:
    """Keeps the table of ONNX translations, which torch's exporter makes anew for every graph: a tenth of its time."""
    first = sys.modules.get("onnxscript._framework_apis.torch_2_5")
    if first is None or hasattr(first.get_torchlib_ops, "cache_info"):
        return
    kept = functools.cache(first.get_torchlib_ops)
    for name in [name for name in sys.modules if name.startswith("onnxscript._framework_apis.torch_2_")]:
        if hasattr(sys.modules[name], "get_torchlib_ops"):  # later versions import it from the first one
            sys.modules[name].get_torchlib_ops = kept  # type: ignore[attr-defined]
    from torch import ops
    from torch._dynamo import config
    from torch._export import utils
    from torch.onnx._internal.exporter import _schemas

    # Each export also reads the signatures of all translations, and loads all of torch's composite ops, 50 times.
    _schemas.op_signature_from_function = functools.lru_cache(2000)(_schemas.op_signature_from_function)
    load = functools.cache(lambda num_namespaces, load=utils._materialize_cpp_cia_ops: load())
    utils._materialize_cpp_cia_ops = lambda: load(len(ops._dir))
    # In a graph of one or two layers most shapes occur once: to keep the results of operators takes longer.
    config.fake_tensor_cache_enabled = False


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """Files of tests need not outlive a power cut: a build waits for the disk 30 times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def real_wait_share() -> Iterator[float]:
    """Lets measurements beside other work count, as another worker always runs: else each is taken three times.

    Yields the product's bound, for tests of what it does: see `with_wait_share`.
    """
    bound = machine.MAX_WAIT_SHARE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "MAX_WAIT_SHARE", 1.0)
        yield bound


@pytest.fixture
def with_wait_share(real_wait_share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubts measurements beside other work as the product does."""
    monkeypatch.setattr(machine, "MAX_WAIT_SHARE", real_wait_share)


@pytest.fixture(scope="module")
def cheap_measurements() -> Iterator[None]:
    """See `tests.store.cheap_measurements`."""
    from tests import store

    with store.cheap_measurements():
        yield


@pytest.fixture(scope="module")
def grammars() -> Iterator[Any]:
    """Grammars over the vocabulary of `tests.runtime.grammar_lab`."""
    from tests.runtime.grammar_lab import make_grammars

    grammars = make_grammars()
    yield grammars
    grammars.close()


@pytest.fixture(scope="session")
def e2e_folder(tmp_path_factory) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("onnxruntime")
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def pair(e2e_folder) -> Path:
    """Returns the trained example pair in fp32."""
    from tests.e2e.conftest import build_bundle, pair_recipe

    return build_bundle(e2e_folder, "pair", pair_recipe("none"))
