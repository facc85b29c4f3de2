# SPDX-License-Identifier: Apache-2.0
"""What the server sends to the page, without a browser."""

import base64
import hashlib
import re
from importlib.resources import files

import pytest

from speccompile.common.chat_template import ChatTemplate
from speccompile.runtime.requests import StepOutput
from speccompile.serving.openai.app import make_app
from speccompile.serving.openai.server import OpenAIServer, ServerOptions
from speccompile.serving.page.routes import page_routes, policy_from_html
from tests.serving.asgi_lab import get, post
from tests.serving.mock_service import serving, text_of

HTML = files("speccompile.serving.page").joinpath("index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def app():
    with serving() as (app, _, _):
        yield app


@pytest.mark.parametrize(
    ("step_output", "kinds"),
    [
        (StepOutput(0, "", [1, 2, 3], 4, 2, False), ["accepted", "accepted", "recovered"]),
        (StepOutput(0, "", [1, 2, 3], 2, 2, True), ["accepted", "accepted", "bonus"]),
        (StepOutput(0, "", [1], 0, 0, False), ["plain"]),
        (StepOutput(0, "", [1], 3, 0, False), ["recovered"]),
        (StepOutput(0, "", [1, 2], 3, 3, True), ["accepted", "accepted"]),  # cut off by a limit
        (StepOutput(0, "", []), []),
    ],
)
def test_kinds_of_tokens(step_output, kinds):
    assert step_output.kinds == kinds


def test_steps_add_up_to_the_text_and_their_trees_to_the_tokens(app):
    reply = post(app, "/page/generate", {"prompt": "bcd", "max_tokens": 20, "speculation": "on"})
    start, *steps, end = reply.events()
    assert start == {"kind": "start", "num_prompt_tokens": 4}
    assert end["kind"] == "end" and end["reason"] == "length" and end["stats"]["num_tokens"] == 20
    assert end["drafts"].startswith("drafts on: speculation is on, ")
    text = "".join(text for step in steps for text, _ in step["tokens"]) + end["tail"]
    assert text == text_of("bcd", 20)
    assert sum(step["num_accepted"] for step in steps) == end["stats"]["num_accepted"] > 0
    for step in steps[:-1]:  # the last may be cut off
        tree = step["tree"]
        on_path = [tree["texts"][node] for node in tree["path"][1:]]
        assert [text for text, _ in step["tokens"]] == [*on_path, tree["next"]]
        assert len(tree["texts"]) == len(tree["parents"]) == step["num_draft_tokens"] + 1
        assert tree["parents"][0] == -1 and tree["path"][0] == 0
        assert step["is_bonus"] == (step["tokens"][-1][1] == "bonus")
    assert [step["time_ms"] for step in steps] == sorted(step["time_ms"] for step in steps)


def test_where_the_model_has_a_template_the_prompt_is_a_message():
    with serving() as (_, service, _):
        server = OpenAIServer(service, ServerOptions("mock"))
        server.template = ChatTemplate("{{ messages[0].content }}{% if add_generation_prompt %}bc{% endif %}")
        app = make_app(server, [page_routes])
        body = {"prompt": "dd", "max_tokens": 9, "temperature": 0, "seed": 1, "speculation": "on"}
        start, *steps, end = post(app, "/page/generate", body).events()
        text = "".join(text for step in steps for text, _ in step["tokens"]) + end["tail"]
        chat = {"messages": [{"role": "user", "content": "dd"}], "max_tokens": 9}
        answer = post(app, "/v1/chat/completions", chat).json()
        assert text == answer["choices"][0]["message"]["content"]
        assert start["num_prompt_tokens"] == answer["usage"]["prompt_tokens"] == 4
        plain = post(app, "/page/generate", {**body, "as_chat": False}).events()
        assert plain[0]["num_prompt_tokens"] == 3
        assert get(app, "/page/facts").json()["has_template"]
        assert post(app, "/page/generate", {**body, "max_tokens": 61}).status == 400
        before = [{"role": "user", "content": "cc"}, {"role": "assistant", "content": "d"}]
        server.template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
        later = post(app, "/page/generate", {**body, "before": before}).events()
        chat = {"messages": [*before, *chat["messages"]], "max_tokens": 9}
        answer = post(app, "/v1/chat/completions", chat).json()
        told = "".join(text for step in later[1:-1] for text, _ in step["tokens"]) + later[-1]["tail"]
        assert later[0]["num_prompt_tokens"] == 5 and told == answer["choices"][0]["message"]["content"]


def test_a_refused_request_is_reported_before_the_stream(app):
    reply = post(app, "/page/generate", {"prompt": "b", "temperature": -1})
    assert reply.status == 400 and reply.json()["error"]["param"] == "temperature"
    assert post(app, "/page/generate", {"messages": []}).status == 400


def test_an_engine_that_fails_ends_the_stream_with_an_error():
    with serving() as (app, _, gated):
        gated.fault = RuntimeError("out of memory")
        *_, last = post(app, "/page/generate", {"prompt": "bcd"}).events()
    assert last["kind"] == "error" and "out of memory" in last["error"]["message"]


def test_the_page_runs_its_own_script_and_nothing_else(app):
    reply = get(app, "/")
    assert reply.status == 200 and reply.body.decode() == HTML
    policy = reply.headers["content-security-policy"]
    assert policy == policy_from_html(HTML) and "default-src 'none'" in policy and "unsafe" not in policy
    [script] = re.findall(r"<script>(.*?)</script>", HTML, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_the_page_loads_nothing():
    assert not re.findall(r"(?:src|href)=\"(?!data:)|@import|url\(", HTML)
    assert set(re.findall(r"https?://\S+?(?=[\"'])", HTML)) <= {"http://www.w3.org/2000/svg"}


def test_the_server_can_do_without_the_page():
    from speccompile.runtime.service import Service
    from speccompile.serving.openai.app import make_app
    from speccompile.serving.openai.server import OpenAIServer
    from tests.serving.mock_service import make_engine

    bare = make_app(OpenAIServer(Service(make_engine()[0]), ServerOptions("mock")))
    assert get(bare, "/").status == 404
