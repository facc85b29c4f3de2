# SPDX-License-Identifier: Apache-2.0
"""build --dump-passes and inspect --diff: graphs as text, after each pass, and line by line."""

import json
import logging
from typing import Any

import onnx_ir as ir
import pytest

from speccompile.cli import inspect_diff
from speccompile.passes.base import Pass, run_pipeline
from tests.passes.test_base import make_model
from tests.pipeline import fakes

PASSES_LOG = logging.getLogger("speccompile.passes.base")
NO_DIFFERENCE = "no difference; of weights type and shape alone are compared\n"


def drop_one(model: ir.Model) -> int:
    """Removes the last of two nodes."""
    first, last = model.graph
    model.graph.outputs[0] = first.outputs[0]
    model.graph.remove(last, safe=False)
    return 1


@pytest.fixture
def with_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the fake backend run two passes, of which one changes nothing."""
    compiles = fakes.FakeBackend.compile

    def compile_graph(*args: Any, **options: Any) -> Any:
        run_pipeline(make_model(), [Pass("idle", lambda model: 0), Pass("drop_one", drop_one)])
        return compiles(*args, **options)

    monkeypatch.setattr(fakes.FakeBackend, "compile", compile_graph)


@pytest.mark.usefixtures("with_passes")
def test_each_pass_that_changes_a_graph_is_a_file(run, recipe, tmp_path):
    assert run("build", recipe, "-o", "made")[0] == 0  # its stages are kept, and run again
    code, _, err = run("build", recipe, "-o", "made", "--dump-passes", "dump")
    assert code == 0, err
    files = sorted(file.relative_to(tmp_path / "dump").as_posix() for file in (tmp_path / "dump").rglob("*.txt"))
    names = ("000-start.txt", "001-drop_one.txt")
    assert files == [f"compile-{graph}/{name}" for graph in ("draft", "target") for name in names]
    texts = [(tmp_path / "dump/compile-target" / name).read_text() for name in names]
    assert [text.count(" = Neg(") for text in texts] == [2, 1]
    assert PASSES_LOG.level == logging.NOTSET and not PASSES_LOG.handlers
    code, _, err = run("build", recipe, "-o", "made", "--dump-passes", "dump")
    assert code == 6 and "a new or empty folder" in err


@pytest.mark.usefixtures("with_passes")
def test_dumps_differ_line_by_line(run, recipe):
    assert run("build", recipe, "-o", "made", "--dump-passes", "dump")[0] == 0
    folder = "dump/compile-target"
    code, out, _ = run("inspect", f"{folder}/000-start.txt", "--diff", f"{folder}/001-drop_one.txt")
    lines = [line for line in out.splitlines() if line.startswith(("-", "+")) and " = Neg(" in line]
    assert code == 0 and len(lines) == 1 and lines[0].startswith("-")
    assert run("inspect", folder, "--diff", "dump/compile-draft")[:2] == (0, NO_DIFFERENCE)


def test_bundles_differ_in_recipe_and_graphs(run, recipe, monkeypatch):
    monkeypatch.setattr(inspect_diff, "_text_from_graph", lambda path: f"{path.parent.name} of {path.parents[2].name}")
    for name, seed in (("a", 4), ("b", 5)):
        assert run("build", recipe, "-o", name, "--set", f"decoding.seed={seed}")[0] == 0
    code, out, _ = run("inspect", "a", "--diff", "b", "--json")
    found = json.loads(out)["differences"]
    assert code == 0 and list(found) == ["recipe", "target", "draft", "rollback"]
    assert [line for line in found["recipe"] if line.startswith(("- ", "-d", "+d"))] == [
        "-decoding.seed: 4",
        "+decoding.seed: 5",
    ]
    assert found["target"][-2:] == ["-target of a", "+target of b"]


def test_graphs_are_compared_by_their_nodes_alone(run, tmp_path):
    model = make_model()
    ir.save(model, tmp_path / "a.onnx")
    for number, node in enumerate(model.graph):
        node.name = f"other_{number}"
    ir.save(model, tmp_path / "b.onnx")
    drop_one(model)
    ir.save(model, tmp_path / "c.onnx")
    assert run("inspect", "a.onnx", "--diff", "b.onnx")[:2] == (0, NO_DIFFERENCE)
    code, out, _ = run("inspect", "a.onnx", "--diff", "c.onnx")
    assert code == 0 and sum(line.startswith("-") and "Neg" in line for line in out.splitlines()) == 1


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("none", "a.txt", "no such file or folder"),
        (".", "a.txt", "a folder of texts and a text; expected two paths of one kind"),
        ("a.txt", "b.txt", "a text in UTF-8"),
        ("empty", "empty", "a folder without texts; expected a bundle, or a folder of"),
        ("a.onnx", "a.onnx", "an ONNX model"),
    ],
)
def test_paths_that_cannot_be_compared_are_refused(run, tmp_path, first, second, words):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.onnx").write_bytes(b"no model")
    code, out, _ = run("inspect", first, "--diff", second, "--json")
    error = json.loads(out)["error"]
    assert code == 7 and words in f"{error['got']}; expected {error['expected']}"


def test_values_that_are_numbered_anew_are_no_difference_but_other_inputs_are(run, tmp_path):
    (tmp_path / "a.txt").write_text("%1 = Neg(x)\n%2 = Abs(%1)\ny <- %2\n")
    (tmp_path / "b.txt").write_text("%1 = Cast(x)\n%2 = Neg(x)\n%3 = Abs(%2)\ny <- %3\n")
    (tmp_path / "c.txt").write_text("%1 = Neg(x)\n%2 = Abs(%2)\ny <- %2\n")
    _, out, _ = run("inspect", "a.txt", "--diff", "b.txt")
    assert out.splitlines()[2:] == ["@@ -1,3 +1,4 @@", "+%1 = Cast(x)", " %2 = Neg(x)", " %3 = Abs(%2)", " y <- %3"]
    _, out, _ = run("inspect", "a.txt", "--diff", "c.txt")
    assert [line for line in out.splitlines()[2:] if line[0] in "+-"] == ["-%2 = Abs(%1)", "+%2 = Abs(%2)"]
