# SPDX-License-Identifier: Apache-2.0
"""The page in headless Chromium, on a server that runs the example pair.

UPDATE_SCREENSHOTS=1 writes docs/assets/page-*.png anew.
"""

import os
import shutil
from pathlib import Path

import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.runtime.engine import load
from tests.serving.live_server import live_server

DOCS = Path(__file__).parents[3] / "docs/assets"
PROGRAMS = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
pytestmark = [
    pytest.mark.skipif(
        None in PROGRAMS.values(), reason="THE PAGE IS NOT TESTED: no browser; apt-get install chromium chromium-driver"
    ),
    pytest.mark.live,
]
webdriver = pytest.importorskip("selenium.webdriver")
WAIT_S = 60
# Elements whose text has less contrast than WCAG's 4.5 : 1 to its background.
LOW_CONTRAST = """
const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).map(Number);
  return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
};
const ground = (element) => {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if (!/, 0\\)$/.test(colour)) return colour;
  }
};
const ratio = (element) => {
  const [a, b] = [light(getComputedStyle(element).color), light(ground(element))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
};
const names = "h1, h2, label, button, dt, dd, th, td, kbd, .chip, .note, .share, .legend *, #output span";
return [...document.querySelectorAll(names)]
  .filter((element) => element.checkVisibility() && element.textContent.trim() && !element.disabled)
  .map((element) => [element.outerHTML.slice(0, 80), ratio(element)]).filter(([, ratio]) => ratio < 4.5);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = PROGRAMS["chromium"]
    profile = tmp_path_factory.mktemp("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(PROGRAMS["chromedriver"])
    browser = webdriver.Chrome(options=options, service=service)
    try:
        yield browser
    finally:
        browser.quit()


@pytest.fixture
def page(browser, live):
    """Yields the page, freshly loaded; at the end nothing may have been logged."""
    size(browser, 1360, 940)
    theme(browser, "light")
    browser.get(live.url)
    wait(browser, "return !document.getElementById('model').hidden")
    assert browser.execute_script("return !document.getElementById('as_chat-row').hidden")  # it has a template
    prompt = browser.execute_script("return document.getElementById('prompt').defaultValue")
    fill(browser, as_chat="no", prompt=prompt)
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def size(browser, width, height):
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def theme(browser, name):
    features = [{"name": "prefers-color-scheme", "value": name}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def wait(browser, script):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, WAIT_S).until(lambda _: browser.execute_script(script))


def fill(browser, **values):
    script = "document.getElementById(arguments[0]).value = arguments[1]"
    for name, value in values.items():
        browser.execute_script(script, name, value)


def text(browser, name):
    return browser.execute_script("return document.getElementById(arguments[0]).textContent", name)


def generate(browser, **values):
    """Generate, wait for the end; the generated text by kind of token."""
    num = browser.execute_script("return document.getElementById('runs').rows.length")
    fill(browser, **values)
    browser.execute_script("document.getElementById('go').click()")
    wait(
        browser,
        f"return document.getElementById('runs').rows.length > {num} || document.getElementById('message').textContent",
    )
    script = "return [...document.querySelectorAll('#output span')].map((s) => [s.className, s.textContent])"
    return browser.execute_script(script)


def counts(browser):
    return {kind: int(text(browser, f"num-{kind}")) for kind in ("accepted", "recovered", "bonus", "plain")}


def show_a_step_with_many_drafts(browser):
    """Shows a step in which some drafts were kept and some were not, if there is one."""
    worth = "(s) => s.num_draft_tokens + (s.num_accepted && s.num_accepted < s.num_draft_tokens ? 100 : 0)"
    script = f"run.shown = run.steps.map({worth}).reduce((best, n, i, all) => n > all[best] ? i : best, 0); drawStep()"
    browser.execute_script(script)


def save(browser, name):
    if os.environ.get("UPDATE_SCREENSHOTS"):
        browser.save_screenshot(str(DOCS / name))


def test_a_generation_is_shown(page, pair):
    prompt = page.execute_script("return document.getElementById('prompt').value")
    spans = generate(page, max_tokens="120", temperature="0", speculation="on")
    offline = load(pair).generate(prompt, SamplingParams(max_new_tokens=120))[0]
    assert spans[0] == ["prompt", prompt]
    assert "".join(text for _, text in spans[1:]) == offline.text
    found = counts(page)
    assert sum(found.values()) == 120 and found["accepted"] > 0 and found["recovered"] > 0 and found["bonus"] > 0
    for kind in ("accepted", "recovered", "bonus"):
        assert any(name == kind for name, _ in spans)
    colour = "getComputedStyle(document.querySelector('#output .' + kind)).color"
    colours = f"return new Set(['accepted', 'recovered', 'bonus'].map((kind) => {colour})).size"
    assert page.execute_script(colours) == 3
    steps = int(text(page, "at").split()[-1])
    assert f"{120 / steps:.2f}" in text(page, "length")
    assert float(text(page, "rate").split()[0]) > 0
    bars = page.execute_script("return [...document.querySelectorAll('#bars .share')].map((s) => s.textContent)")
    assert (bars and bars[0].endswith(f" of {steps - found['plain']}")) or found["plain"]
    show_a_step_with_many_drafts(page)
    nodes = page.execute_script("return document.querySelectorAll('#tree .node').length")
    assert nodes == page.execute_script("return run.steps[run.shown].tree.texts.length") + 1
    save(page, "page-light.png")


def test_steps_can_be_looked_at_again(page):
    generate(page, max_tokens="24", speculation="on")
    last = text(page, "at")
    page.execute_script("document.getElementById('back').click()")
    assert text(page, "at") != last and text(page, "tree-title") == "Tree of a step"
    kept = page.execute_script("return document.querySelectorAll('#tree .node.accepted').length")
    drafts = page.execute_script("return run.steps.at(-2).num_draft_tokens")
    assert text(page, "tree-note").startswith(f"{drafts} {'draft' if drafts == 1 else 'drafts'} scored, {kept} kept")
    page.execute_script("document.getElementById('forth').click()")
    assert text(page, "at") == last and text(page, "tree-title") == "Tree of the last step"


def test_without_speculation_nothing_is_coloured(page):
    spans = generate(page, max_tokens="20", speculation="off")
    assert text(page, "drafts") == "drafts off: speculation is off"
    assert {name for name, _ in spans[1:]} == {"plain"}
    assert counts(page) == {"accepted": 0, "recovered": 0, "bonus": 0, "plain": 20}
    assert text(page, "bars") == "Nothing was drafted."


def test_a_refused_request_is_shown(page):
    generate(page, prompt="x " * 1200)
    assert "`prompt`: got 1201 tokens; expected at most 1024" in text(page, "message")
    # The browser itself logs the 400.
    [entry] = [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    assert "400" in entry["message"]


# Inside the page: a command from outside may come after the last token.
STOP_EARLY = """
window.stopped = false;
document.getElementById('go').click();
const timer = setInterval(() => {
  if (!run || run.steps.length < 3) return;
  clearInterval(timer);
  document.getElementById('stop').click();
  window.stopped = true;
}, 1);
"""


def test_a_generation_can_be_stopped(page, live):
    before = live.metric("generated_tokens_total")
    fill(page, max_tokens="440", speculation="off")
    page.execute_script(STOP_EARLY)
    wait(page, "return stopped && !document.getElementById('go').disabled")
    assert text(page, "status").startswith("stopped: ")
    while live.metric("active_outputs"):
        pass
    assert live.metric("generated_tokens_total") - before < 440


def test_a_chat_model_gets_a_message_and_the_next_one(page, pair, chat_bundle):
    spans = generate(page, as_chat="yes", prompt="def add(a, b):", max_tokens="12", temperature="0")
    tokens = load(pair).encode("<s># user: def add(a, b):\n# assistant:")
    offline = load(pair).generate([tokens], SamplingParams(max_new_tokens=12))[0]
    assert spans[0] == ["prompt", "def add(a, b):\n\n"]
    assert "".join(text for _, text in spans[1:]) == offline.text
    spans = generate(page, as_chat="next", prompt="and b?", max_tokens="12", temperature="0")
    messages = [
        {"role": "user", "content": "def add(a, b):"},
        {"role": "assistant", "content": offline.text},
        {"role": "user", "content": "and b?"},
    ]
    answer = load(chat_bundle).chat(messages, SamplingParams(max_new_tokens=12))
    assert [text for kind, text in spans if kind == "prompt"] == [f"{m['content']}\n\n" for m in messages]
    assert "".join(text for _, text in spans[3:]) == answer.text


def test_markup_in_prompts_and_texts_stays_text(page):
    spans = generate(page, prompt="<img src=x onerror=alert(1)><b>", max_tokens="4")
    assert spans[0] == ["prompt", "<img src=x onerror=alert(1)><b>"]
    assert page.execute_script("return document.querySelectorAll('#output img, #output b').length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(page, scheme):
    """WCAG's 4.5 : 1 for each colour of text on its own ground."""
    theme(page, scheme)
    generate(page, max_tokens="60", speculation="on")
    assert page.execute_script(LOW_CONTRAST) == []
    show_a_step_with_many_drafts(page)
    if scheme == "dark":
        save(page, "page-dark.png")


def test_every_control_has_a_name(page):
    script = """return [...document.querySelectorAll("button, input, textarea, select")]
      .filter((e) => !(e.labels && e.labels.length) && !e.textContent.trim() && !e.getAttribute("aria-label")).length"""
    assert page.execute_script(script) == 0


def test_a_narrow_window_does_not_scroll_sideways(page):
    size(page, 390, 800)
    generate(page, max_tokens="30", speculation="on")
    assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")


def test_on_a_phone_the_buttons_stand_in_one_line(page):
    size(page, 390, 800)
    tops = "return ['stop', 'go'].map((id) => document.getElementById(id).getBoundingClientRect().top)"
    stop, go = page.execute_script(tops)
    assert stop == go


def test_a_desktop_window_has_one_scroll_bar(page):
    size(page, 1280, 1000)
    for _ in range(3):
        generate(page, max_tokens="300", speculation="on")
    assert page.execute_script("return document.documentElement.scrollHeight <= window.innerHeight")
    script = """return [...document.querySelectorAll("body *")].filter((e) => e.scrollHeight > e.clientHeight + 1
      && ["auto", "scroll"].includes(getComputedStyle(e).overflowY) && e.id !== "prompt").map((e) => e.id)"""
    assert page.execute_script(script) == ["output"]


def test_the_button_of_the_colours_says_what_it_does(page):
    ground = "return getComputedStyle(document.body).backgroundColor"
    click = "document.getElementById('theme').click()"
    light = page.execute_script(ground)
    assert text(page, "theme") == "Dark colours"
    page.execute_script(click)
    assert text(page, "theme") == "Light colours" and page.execute_script(ground) != light
    page.execute_script(click)
    assert text(page, "theme") == "Dark colours" and page.execute_script(ground) == light
    theme(page, "dark")
    page.get(page.current_url)
    wait(page, "return document.getElementById('theme').textContent === 'Light colours'")


def test_a_tree_with_branches_is_laid_out_without_overlap(page):
    tree = {"texts": ["a", "b", "c", " long word\\n", "e", "f"], "parents": [-1, 0, 0, 1, 1, 2], "path": [0, 1, 4]}
    step = {"num_draft_tokens": 5, "num_accepted": 2, "is_bonus": True, "tree": {**tree, "next": "g"}}
    page.execute_script("document.getElementById('tree').replaceChildren(treeOf(arguments[0], 'note'))", step)
    script = """return [...document.querySelectorAll("#tree .node")].map((node) => {
      const [box, label] = ["rect", "text"].map((name) => node.querySelector(name).getBoundingClientRect());
      const fits = label.width <= box.width;
      return { kind: node.classList[1], left: box.left, right: box.right, top: box.top, fits }; })"""
    nodes = page.execute_script(script)
    assert [node["kind"] for node in nodes] == ["root", "accepted", *["refused"] * 2, "accepted", "refused", "bonus"]
    assert all(node["fits"] for node in nodes)
    rows = [node["top"] for node in nodes]
    assert rows[0] < rows[1] == rows[2] < rows[3] == rows[4] == rows[5] < rows[6]
    for i, one in enumerate(nodes):
        for other in nodes[:i]:
            assert one["top"] != other["top"] or one["left"] >= other["right"] or other["left"] >= one["right"]
    name = page.execute_script("return document.querySelector('#tree svg').getAttribute('aria-label')")
    assert name == "note"


def test_a_server_with_a_key_asks_for_it(browser, chat_bundle):
    with live_server(chat_bundle, "--api-key", "secret") as locked:
        browser.get(locked.url)
        wait(browser, "return !document.getElementById('key-row').hidden")
        assert "API key is missing or wrong" in text(browser, "message")
        script = (
            "const key = document.getElementById('key'); key.value = 'secret'; key.dispatchEvent(new Event('change'))"
        )
        browser.execute_script(script)
        wait(browser, "return !document.getElementById('model').hidden")
        assert len(generate(browser, max_tokens="5")) > 1
        browser.get_log("browser")  # Chromium logs the 401
