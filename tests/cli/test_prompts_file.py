# SPDX-License-Identifier: Apache-2.0
import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from speccompile.cli import bench
from speccompile.cli.prompts import Request, prompts_of_bundle, read_requests, write_results
from speccompile.errors import BuildError, BundleError, RuntimeFault


def test_lines_keep_their_order_and_their_own_sampling(tmp_path):
    rows = [
        {"prompt": "a", "seed": 3, "temperature": 1, "top_k": 5, "top_p": 0.5, "max_new_tokens": 4, "stop": "x"},
        {
            "prompt": [1, 2],
            "stop": ["x", "y"],
            "id": 7,
            "logit_bias": {"5": -1},
            "min_p": 0.1,
            "adapter": "t",
            "seed": None,
        },
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    first, second = read_requests(file)
    assert first == Request(
        "a", {"seed": 3, "temperature": 1.0, "top_k": 5, "top_p": 0.5, "max_new_tokens": 4, "stop": ("x",)}
    )
    assert second == Request([1, 2], {"stop": ("x", "y"), "logit_bias": {5: -1.0}, "min_p": 0.1, "adapter": "t"})
    assert read_requests(file, limit=1) == [first]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"p\.jsonl:2: got "),
        (r'{"prompt": "\ud800"}', r"p\.jsonl:2: got text with half of a surrogate pair"),
        ("[" * 9999, r"p\.jsonl:2: got values nested more than"),
        ('"text"', r"p\.jsonl:2: got .*expected an object with `prompt`"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', r":2: got .*with `prompt`, .* or with"),
        ('{"messages": []}', r"p\.jsonl:2 \(messages\): got \[\]; expected a list of messages"),
        ('{"messages": [{"role": "user"}]}', r"jsonl:2 \(messages\[0\]\.content\): got None; expected a text, or a"),
        (
            '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 3}',
            r"\(chat_template_kwargs\): got 3; expected an object of variables",
        ),
        ('{"text": "a"}', "expected an object with `prompt`"),
        ('{"prompt": "a", "temperature": "hot"}', r"p\.jsonl:2 \(temperature\): got 'hot'; expected a number"),
        (
            '{"prompt": "a", "temperature": 1' + "0" * 400 + "}",
            r"\(temperature\): got 10{119}\.\.\.; expected a number",
        ),
        ('{"prompt": [true, false]}', "expected an object with `prompt`, a text or token ids"),
        ('{"prompt": "a", "top_k": 1.5}', r"\(top_k\): got 1\.5; expected a whole number"),
        ('{"prompt": "a", "logit_bias": {"a": 1}}', r"\(logit_bias\): got \{'a': 1\}; expected an object of biases by"),
        ('{"prompt": "a", "logit_bias": {"1": "b"}}', r"\(logit_bias\): got \{'1': 'b'\}; expected a number"),
        (
            '{"prompt": "a", "images": ["b.png"]}',
            r"\(images\): got \['b\.png'\]; expected a list of image files, by paths",
        ),
        (json.dumps({"prompt": "a", "images": ["b" * 300]}), "expected a list of image files"),
        ('{"prompt": "a", "images": "p.jsonl"}', r"\(images\): got 'p\.jsonl'; expected a list of image files"),
        ('{"prompt": "a", "stop": [""]}', r"\(stop\): got \[''\]; expected a string or a list of strings"),
        ('{"prompt": "a", "adapter": 3}', r"\(adapter\): got 3; expected a text"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(RuntimeFault, match=message):
        read_requests(file)


def test_a_line_may_be_a_conversation(tmp_path):
    messages = [{"role": "user", "content": "a"}]
    row = {"messages": messages, "category": "code", "seed": 3, "chat_template_kwargs": {"think": False}}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    wanted = Request("", {"seed": 3}, "code", messages=tuple(messages), variables={"think": False})
    assert read_requests(tmp_path / "p.jsonl") == [wanted]


def write_tokenizer(folder):
    """Writes a tokenizer of words, which begins texts with a token, and a chat template."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(("<s>", "you", "me", "a", "b", "?"))}, "?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing("<s> $0", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}you {{ m.content }} {% endfor %}{% if add_generation_prompt %}me{% endif %}"
    (folder / "chat_template.jinja").write_text(template)


def test_conversations_of_a_bundle_are_rendered_by_its_template_and_end_with_the_answers_beginning(tmp_path):
    write_tokenizer(tmp_path)
    bundle = SimpleNamespace(tokenizer_path=tmp_path / "tokenizer.json", tokenizer_folder=tmp_path, path=tmp_path)
    requests = [Request("a", {}), Request([4], {}), Request("", {}, messages=({"role": "user", "content": "b"},))]
    assert prompts_of_bundle(bundle, requests) == ["a", [4], [1, 4, 2]]
    assert bench._token_ids(bundle, requests) == [[0, 3], [4], [1, 4, 2]]
    (tmp_path / "chat_template.jinja").unlink()
    assert prompts_of_bundle(bundle, requests[:2]) == ["a", [4]]
    with pytest.raises(BundleError, match=r"prompt \(messages\): got no chat template in"):
        prompts_of_bundle(bundle, requests)


@pytest.mark.export
def test_the_doctor_and_trainings_render_by_the_targets_template(tmp_path):
    from speccompile.cli.doctor import _texts
    from speccompile.cli.train import _read_prompts

    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 6}')
    file = tmp_path / "p.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "b"}]}\n{"prompt": "a"}\n{"prompt": [4]}\n')
    assert _texts(file, str(tmp_path)) == [[1, 4, 2], "a", [4]]
    assert _read_prompts(file, 3, tmp_path) == [[1, 4, 2], [0, 3], [4]]
    file.write_text('{"prompt": [6]}\n')
    with pytest.raises(RuntimeFault, match=r"p\.jsonl:1: got \[6\]; expected at least one token id, below 6"):
        _read_prompts(file, 1, tmp_path)


@pytest.mark.parametrize("mark", ["\u2028", "\u0085"])
def test_only_a_newline_ends_a_line(tmp_path, mark):
    text = json.dumps({"prompt": f"a{mark}b"}, ensure_ascii=False) + "\r\n"
    (tmp_path / "p.jsonl").write_bytes(text.encode())
    assert read_requests(tmp_path / "p.jsonl") == [Request(f"a{mark}b", {})]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    assert read_requests(tmp_path / "p.jsonl") == [Request("a", {})]


def test_images_lie_beside_the_file(tmp_path):
    (tmp_path / "b.png").write_bytes(b"")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "images": ["b.png"]}\n{"prompt": "a", "images": []}\n')
    assert [request.images for request in read_requests(tmp_path / "p.jsonl")] == [(tmp_path / "b.png",), ()]


def test_no_file_and_no_prompt_are_named(tmp_path):
    with pytest.raises(RuntimeFault, match="expected a file of JSON lines"):
        read_requests(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RuntimeFault, match="got no prompt"):
        read_requests(tmp_path / "empty.jsonl")


def test_results_are_whole_or_not_there(tmp_path, capsys):
    write_results(tmp_path / "out.json", [1])
    assert json.loads((tmp_path / "out.json").read_text()) == [1]
    write_results(tmp_path.__class__("-"), {"a": 2})
    assert json.loads(capsys.readouterr().out) == {"a": 2}
    with pytest.raises(BuildError, match=r"no folder .*The results are on standard output"):
        write_results(tmp_path / "no" / "out.json", [1])
    assert json.loads(capsys.readouterr().out) == [1]
    assert [f.name for f in tmp_path.iterdir()] == ["out.json"]
