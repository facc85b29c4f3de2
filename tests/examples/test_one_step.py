# SPDX-License-Identifier: Apache-2.0
"""A step by hand and the notebook of trees run as they stand; the client says that there is no server."""

import contextlib
import importlib.util
import io
import json
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest

from speccompile.core.sampling_params import SamplingParams
from tests.golden.method_fakes import make_engine

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("method", ["none", "draft_model", "eagle3", "medusa"])
def test_a_step_by_hand_gives_the_tokens_that_generate_gives(method, capsys):
    spec = importlib.util.spec_from_file_location("one_step", EXAMPLES / "one_step.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.one_step(make_engine(method), "abc")
    *tree, last = capsys.readouterr().out.splitlines()
    num, of, text = re.fullmatch(r"(\d+) of (\d+) draft tokens accepted; the text goes on: '(\w+)'", last).groups()
    assert len(text) == int(num) + 1 and "".join(tree).count("*") == int(num) + 1
    assert (int(of) > 0) == (method != "none")
    root = re.match(r"'(\w)'", tree[0])[1]  # the prompt's last token, or the one that came with it
    wanted = make_engine("none").generate(["abc"], SamplingParams(max_new_tokens=12))[0].text
    assert f"c{wanted}".partition(root)[2].startswith(text)


@pytest.mark.distribution
def test_the_notebook_runs_and_its_text_has_the_targets_distribution():
    notebook = json.loads((EXAMPLES / "trees.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    names, texts = {}, []
    for cell in cells:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec("".join(cell["source"]), names)
        texts.append(out.getvalue())
    rows = re.findall(r"target ([\d.]+)  text ([\d.]+)", texts[-1])
    assert len(rows) == 6 and all(abs(float(wanted) - float(got)) < 0.02 for wanted, got in rows)
    expected = float(re.search(r"([\d.]+) by the target", texts[2])[1])
    assert abs(expected - float(re.search(r"accepted draft tokens: ([\d.]+)", texts[-1])[1])) < 0.03
    assert texts[1].count("└─") == 3 and "*" in texts[3]


CLIENT = Path(__file__).parents[2] / "examples/openai_client.py"


def test_no_server_is_one_line(monkeypatch, capsys):
    pytest.importorskip("openai")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: every connection is refused
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        monkeypatch.setattr(sys, "argv", [str(CLIENT), "def add(a, b):", "--url", url])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(CLIENT), run_name="__main__")
    # Python prints a text on stderr and exits with 1.
    assert stop.value.code == f"no server answers at {url}; start a server: speccompile serve bundles/pycode"
    assert capsys.readouterr() == ("", "")
