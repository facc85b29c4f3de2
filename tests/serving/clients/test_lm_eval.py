# SPDX-License-Identifier: Apache-2.0
"""lm-eval over HTTP: a multiple-choice task by echoed logprobs, compared with those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples/models/pycode-16m"
DOCS = [
    {"question": "for i in", "choices": [" range(len(items)):", " banana pie", "\n\n\n"], "answer": 0},
    {"question": "import os\nimport", "choices": [" sys", " zebra", " ) ("], "answer": 0},
    {"question": "    def __init__(", "choices": ["self", "17", "while"], "answer": 0},
    {"question": "return", "choices": [" None", " return return", " import"], "answer": 2},
]
TASK = """
task: code_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def results(base_url, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm-eval")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder))  # read when its packages are imported
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    (folder / "code_choices.yaml").write_text(TASK.format(data=folder / "docs.jsonl"))
    given = {
        "model": "pycode",
        "base_url": f"{base_url}/completions",
        "tokenizer": str(FOLDER),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_length": 1024,
    }
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return simple_evaluate("local-completions", given, ["code_choices"], task_manager=manager, log_samples=True)


def test_choices_have_the_logprobs_of_transformers(results):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)

    def score(question: str, choice: str) -> tuple[float, bool]:
        ids, num = tokenizer(question + choice).input_ids, len(tokenizer(question).input_ids)
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
        pairs = [(rows[at - 1], ids[at]) for at in range(num, len(ids))]
        return sum(float(row[token]) for row, token in pairs), all(int(row.argmax()) == token for row, token in pairs)

    samples = results["samples"]["code_choices"]
    assert len(samples) == len(DOCS)
    right = 0
    for sample in samples:
        doc = sample["doc"]
        wanted = [score(doc["question"], choice) for choice in doc["choices"]]
        told = [(float(logprob), is_greedy in (True, "True")) for logprob, is_greedy in sample["filtered_resps"]]
        assert [logprob for logprob, _ in told] == pytest.approx([logprob for logprob, _ in wanted], abs=1e-3)
        assert [is_greedy for _, is_greedy in told] == [is_greedy for _, is_greedy in wanted]
        best = max(range(len(wanted)), key=lambda at: wanted[at][0])
        right += best == doc["answer"]
    assert 0 < right < len(DOCS)
    assert results["results"]["code_choices"]["acc,none"] == right / len(DOCS)
