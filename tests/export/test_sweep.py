# SPDX-License-Identifier: Apache-2.0
"""The results of `make sweep` still hold: sweep.json, the page made from it, and the code's present verdicts."""

import sys
from importlib.metadata import version

import pytest

from speccompile.checkpoints.config_values import check_architecture
from speccompile.errors import ExportError
from tests.export import sweep_all
from tests.export.families import CONFIGS
from tests.export.harness import make_checkpoint
from tests.export.sweep import MAX_SEQ_LEN, Verdict, chain_difference, judge, refusal_of_config
from tests.export.sweep_configs import config_of

TRANSFORMERS, VERDICTS = sweep_all.read_result()
# The others need `make sweep`. These have features that no config of tests/checkpoints/families.py has.
SLICE = {
    "bloom": "position biases as columns of Q and K",
    "deepseek_v2": "latent attention over one cache, rotation by complex numbers",
    "llama4_text": "chunks, layers without rope, experts that all run",
    "biogpt": "a table of positions with an offset",
    "cohere_compass_text": "rope by the kind of layer, none in full layers",
    "glm4_moe": "a dense layer, then experts in groups with a shared one",
    "gpt_bigcode": "one key/value head by `multi_query`",
    "modernbert-decoder": "a window from `local_attention`, a layer without norm",
    "olmo3": "a window in alternate layers, norms after the blocks",
    "phimoe": "a window that the layer does not pass to its attention",
    "qwen2_moe": "a window that the layer does not pass to its attention, in some layers",
}

same_transformers = pytest.mark.skipif(
    version("transformers") != TRANSFORMERS, reason=f"sweep.json was written for transformers {TRANSFORMERS}"
)


@same_transformers
def test_every_causal_type_has_a_verdict():
    assert sorted(VERDICTS) == sweep_all.causal_types()


def test_every_type_is_equal_or_refused():
    assert {v.kind for v in VERDICTS.values()} == {"equal", "refused"}
    assert all(bool(v.reason) == bool(v.decided) == (v.kind == "refused") for v in VERDICTS.values())


def test_families_with_an_equality_test_are_equal():
    assert {VERDICTS[config["model_type"]].kind for config in CONFIGS.values()} == {"equal"}


@pytest.mark.parametrize("decided", ["name", "config", "model"])
def test_refusals_are_those_of_the_present_code(decided):
    if decided != "name":
        pytest.importorskip("transformers")
    if decided == "config" and version("transformers") != TRANSFORMERS:
        pytest.skip("configs of another transformers")
    found = {name: v for name, v in VERDICTS.items() if v.decided == decided}
    for name, verdict in found.items():
        # A refusal that needs the model comes only after its config was accepted.
        expected = None if decided == "model" else verdict
        assert refusal_of_config(name) == expected, name


def test_a_refusal_by_name_says_which_type_and_what_to_do():
    for name, verdict in VERDICTS.items():
        if verdict.decided == "name":
            with pytest.raises(ExportError) as caught:
                check_architecture({"model_type": name})
            fault = caught.value
            assert (fault.where, fault.got) == (name, verdict.reason)
            assert fault.expected and fault.todo.endswith(".")
        else:
            check_architecture({"model_type": name})


def test_the_page_is_made_of_the_result():
    assert sweep_all.page_with(sweep_all.block_from_verdicts(TRANSFORMERS, VERDICTS)) == sweep_all.PAGE.read_text()


def test_a_wrong_type_would_stand_on_the_page():
    block = sweep_all.block_from_verdicts("9", {"a": Verdict("equal"), "b": Verdict("wrong", "", "logits differ")})
    assert "| wrong: logits differ | `b` |" in block and "1 of 2" in block


@pytest.mark.parametrize("model_type", SLICE)
def test_a_slice_of_the_sweep(model_type):
    assert judge(model_type) == VERDICTS[model_type] == Verdict("equal")


@pytest.mark.parametrize("model_type", ["minicpm3", "deepseek_v2", "llama4_text", "olmo3"])
def test_chains_have_the_bits_of_single_steps(model_type, tmp_path):
    """Also where each head or expert has a matrix of its own, for which a single row has another kernel."""
    from speccompile.export.decoder import export_decoder

    make_checkpoint(config_of(model_type), tmp_path)
    made = export_decoder(tmp_path, max_seq_len=MAX_SEQ_LEN)
    assert [chain_difference(*made, batch) for batch in (1, 2)] == [0.0, 0.0]


SPIN = """
import sys, time
for line in sys.stdin:
    end = time.process_time() + float(line)
    while time.process_time() < end: pass
    print('{"kind": "equal"}', flush=True)
"""


def test_a_type_may_take_cpu_time_up_to_the_limit_and_the_next_one_has_a_new_process(tmp_path):
    child = sweep_all.Child(tmp_path / "log", (sys.executable, "-c", SPIN), limit_s=1.0)
    assert child.judge("0.3") == Verdict("equal")  # earlier CPU time does not count
    first = child.process.pid
    assert child.judge("0.8") == Verdict("equal") and child.process.pid == first
    assert child.judge("99") == Verdict("fault", "", "no verdict within 1 s of CPU time")
    assert child.judge("0") == Verdict("equal") and child.process.pid != first
    child.close()


def test_a_process_that_waits_longer_than_the_limit_is_left_alone(tmp_path):
    code = 'import time\nprint(input() and time.sleep(1.5) or \'{"kind": "equal"}\', flush=True)'
    child = sweep_all.Child(tmp_path / "log", (sys.executable, "-c", code), limit_s=0.5)
    assert child.judge("any") == Verdict("equal")
    child.close()


def test_a_process_that_dies_is_a_fault(tmp_path):
    child = sweep_all.Child(tmp_path / "log", (sys.executable, "-c", "input(); raise SystemExit(3)"))
    verdict = child.judge("any")
    assert verdict.kind == "fault" and verdict.reason.startswith("a crash (exit code ")
