"""The chat and the API reference in a real browser, with a real service. Run by `make e2e-dashboard`.

With PICTURES=FOLDER, the pictures used in the docs are written to that folder: chat.png and api.png.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.dashboard.conftest import TOKEN
from tests.dashboard.webdriver import Browser, chromium
from tests.integration.service import Service

pytestmark = pytest.mark.timeout(300)

TAB, ENTER = "\ue004", "\ue007"
AXE = "axe-core@4.14.1"
SIZES = [(width, scheme) for width in (1440, 390) for scheme in ("light", "dark")]
CODE = "def add(a, b):\n    return a + b  # <b>"
ANSWER = f"""# Sums

A **sum** of `a` and b, [more](https://example.org/sums), [bad](javascript:document.title='broken').

```python
{CODE}
```

| a | b |
| - | - |
| 1 | 2 |

- one
- [x] two

<img src=x onerror="document.title='broken'"><script>document.title = 'broken'</script>
![picture](https://example.org/x.png)
"""
CONVERSATION = [
    {"role": "user", "content": "<i>How</i> do I add?"},
    {"role": "assistant", "content": ANSWER, "note": "Cut off at the limit of tokens."},
]
IS_IDLE = (
    "return document.querySelector('#stop').hidden && / tokens in /.test(document.querySelector('#status').innerText)"
)
RECORD = """window.bodies = []; const send = window.fetch;
  window.fetch = (url, given) => { if (given?.body) window.bodies.push(given.body); return send(url, given); }"""


def address_of(service: Service) -> str:
    return f"http://{service.processes('router')[0]['addresses']['http']}"


@pytest.fixture
def chat(service: Service, browser: Browser) -> Browser:
    """Open the chat without a conversation."""
    browser.emulate(1440, 900)
    open_chat(browser, service, [])
    return browser


def open_chat(browser: Browser, service: Service, turns: list[dict[str, str]]) -> None:
    browser.open(address_of(service) + "/version")
    store = "localStorage.clear(); sessionStorage.clear(); localStorage.setItem('midstream-chat', arguments[0]);"
    browser.run(store, json.dumps(turns))
    browser.open(address_of(service) + "/")
    browser.wait_for("return document.querySelector('#model').innerText !== ''")
    browser.complaints()


def set_field(browser: Browser, selector: str, text: str) -> None:
    browser.run("document.querySelector('#settings').open = true")
    browser.write(selector, text)


def focused(browser: Browser) -> str:
    name: str = browser.run(
        "const at = document.activeElement; return at.id || at.getAttribute('aria-label') || at.textContent.trim()"
    )
    return name


def test_the_first_question_is_asked_with_the_keyboard_alone(chat: Browser) -> None:
    assert chat.run("return !document.querySelector('#empty').hidden")
    assert "Ask the model something" in chat.text("#empty")
    assert chat.run("return document.querySelector('#send').disabled && document.querySelector('#reset').disabled")
    chat.run("document.activeElement.blur()")
    visited = []
    while "text" not in visited:
        chat.press(TAB)
        visited.append(focused(chat))
        assert len(visited) < 12
    assert visited[:2] == ["Dashboard", "API"]
    assert "What is the capital of France?" in visited
    chat.press(*"Name one river.", ENTER)
    chat.wait_for(IS_IDLE, limit_s=120)
    assert chat.text(".turn.user") == "Name one river."
    assert chat.text(".turn.assistant .text")
    assert chat.run("return document.querySelector('#empty').hidden")
    # From the message field on: the buttons that can be used, then the settings.
    assert focused(chat) == "text"
    chat.press(TAB)
    assert focused(chat) == "reset"
    chat.press(TAB)
    assert focused(chat) == "Settings"
    chat.press(ENTER, TAB, *"Answer in one word.", TAB, *"0")
    assert chat.run("return document.querySelector('#system').value") == "Answer in one word."
    assert chat.run("return document.querySelector('#temperature').value") == "0"
    assert chat.complaints() == []


def test_the_conversation_and_the_settings_are_there_after_a_reload(chat: Browser) -> None:
    set_field(chat, "#system", "You are a pirate.")
    set_field(chat, "#temperature", "0.5")
    set_field(chat, "#max-tokens", "12")
    chat.run(RECORD)
    chat.write("#text", "Who are you?\ue007")
    chat.wait_for(IS_IDLE, limit_s=120)
    before = chat.text("#turns")
    chat.reload()
    chat.wait_for("return document.querySelectorAll('.turn').length === 2")
    assert chat.text("#turns") == before
    chat.run(RECORD)
    chat.write("#text", "And I?\ue007")
    chat.wait_for(IS_IDLE, limit_s=120)
    (body,) = [json.loads(body) for body in chat.run("return window.bodies")]
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert body["messages"][0]["content"] == "You are a pirate."
    assert (body["temperature"], body["max_tokens"]) == (0.5, 12)
    chat.click("#reset")
    assert chat.run("return document.querySelectorAll('.turn').length") == 0
    assert chat.run("return !document.querySelector('#empty').hidden")
    chat.reload()
    chat.wait_for("return !document.querySelector('#empty').hidden")
    assert chat.run("return document.querySelector('#system').value") == "You are a pirate."


def test_markdown_is_shown_and_nothing_in_it_runs(service: Service, browser: Browser) -> None:
    open_chat(browser, service, CONVERSATION)
    count = "return document.querySelectorAll(arguments[0]).length"
    shown = (
        ".markdown h3",
        ".markdown strong",
        ".markdown p > code",
        ".markdown pre",
        ".markdown table",
        ".markdown ul",
    )
    assert [browser.run(count, f".turn.assistant {selector}") for selector in shown] == [1] * len(shown)
    assert browser.run(count, "#turns img, #turns script, #turns input, #turns i") == 0
    assert browser.text(".turn.user") == "<i>How</i> do I add?"
    text = browser.text(".turn.assistant")
    assert "<img src=x onerror=" in text
    assert "<script>document.title = 'broken'</script>" in text
    assert "Cut off at the limit of tokens." in text
    links = browser.run(
        "return [...document.querySelectorAll('#turns a')].map((a) => [a.textContent, a.getAttribute('href')])"
    )
    assert links == [
        ["more", "https://example.org/sums"],
        ["bad", None],
        ["picture", "https://example.org/x.png"],
    ]
    assert browser.run("return document.title") == "Midstream chat"
    browser.allow_clipboard()
    browser.click(".code .copy")
    browser.wait_for("return document.querySelector('.code .copy').innerText === 'Copied'")
    assert browser.run("return navigator.clipboard.readText()").rstrip("\n") == CODE
    browser.click(".foot .copy")
    browser.wait_for("return document.querySelector('.foot .copy').innerText === 'Copied'")
    assert browser.run("return navigator.clipboard.readText()") == ANSWER
    assert browser.complaints() == []


def test_stop_keeps_what_has_arrived(chat: Browser) -> None:
    assert chat.run("return getComputedStyle(document.querySelector('#stop')).display") == "none"
    chat.write("#text", "Write a long story about a river, with many chapters.\ue007")
    chat.wait_for("return document.querySelector('.turn.assistant .text')?.innerText.length > 20", limit_s=120)
    assert chat.run("return document.querySelector('#send').hidden")
    chat.click("#stop")
    chat.wait_for("return document.querySelector('#stop').hidden")
    assert "Stopped." in chat.text(".turn.assistant .foot")
    assert chat.run("return document.querySelector('.turn.assistant').hasAttribute('aria-busy')") is False
    assert len(chat.run("return JSON.parse(localStorage.getItem('midstream-chat'))[1].content")) > 20


def test_the_answer_goes_on_when_the_router_is_killed(chat: Browser, service: Service) -> None:
    set_field(chat, "#temperature", "0")
    set_field(chat, "#max-tokens", "400")
    question = "Write a long story about a river, with many chapters.\ue007"
    chat.write("#text", question)
    chat.wait_for(IS_IDLE, limit_s=120)
    whole = chat.text(".turn.assistant .text")
    chat.click("#reset")
    chat.write("#text", question)
    chat.wait_for("return document.querySelector('.turn.assistant .text')?.innerText.length > 20", limit_s=60)
    os.kill(service.processes("router")[0]["pid"], signal.SIGKILL)
    chat.wait_for("return document.querySelector('#status').innerText.startsWith('Connection lost')", limit_s=60)
    chat.wait_for(IS_IDLE, limit_s=120)
    assert chat.text(".turn.assistant .text") == whole


def test_an_error_is_shown_and_can_be_tried_again(chat: Browser) -> None:
    chat.run("document.querySelector('#settings').open = true")
    chat.write("#temperature", "1000")
    chat.write("#text", "Hi\ue007")
    chat.wait_for("return document.querySelector('.turn.error')")
    assert "temperature" in chat.text(".turn.error")
    chat.run("const at = document.querySelector('#temperature'); at.value = ''")
    chat.write("#max-tokens", "8")
    chat.click(".turn.error button")
    chat.wait_for(IS_IDLE, limit_s=120)
    assert chat.run("return document.querySelectorAll('.turn').length") == 2


def test_a_wrong_key_is_called_wrong(browser: Browser, locked: str) -> None:
    wait_until_open(locked)
    browser.emulate(1440, 900)
    browser.open(f"http://{locked}/")
    browser.wait_for("return document.querySelector('#door')")
    assert browser.text("#door-error") == ""
    assert "requires an API key" in browser.text("#door")
    browser.write("#token", "not-the-key-of-anybody\ue007")
    browser.wait_for("return document.querySelector('#door-error').innerText !== ''")
    assert browser.text("#door-error") == "Wrong key: this router does not know it."
    browser.write("#token", f"{TOKEN}\ue007")
    browser.wait_for("return document.querySelector('#model').innerText !== ''")
    assert browser.run("return document.querySelector('#door').hidden")
    browser.open(f"http://{locked}/docs")
    browser.wait_for("return document.querySelector('#groups h2')")
    open_operation(browser, "GET /v1/models")
    assert "authorization: Bearer $MIDSTREAM_API_KEY" in browser.text("details[open] .code pre")


def wait_until_open(address: str) -> None:
    deadline = time.monotonic() + 240
    while True:
        try:
            urllib.request.urlopen(f"http://{address}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.fixture
def reference(service: Service, browser: Browser) -> Browser:
    browser.emulate(1440, 900)
    browser.open(address_of(service) + "/docs")
    browser.run("sessionStorage.clear()")
    browser.reload()
    browser.wait_for("return document.querySelectorAll('#groups section').length === 10", limit_s=60)
    browser.complaints()
    return browser


def open_operation(page: Browser, title: str) -> None:
    """Open the details of an operation and close all others."""
    found = page.run(
        """let found = 0; for (const box of document.querySelectorAll('#groups details')) {
          box.open = box.querySelector('summary code').textContent === arguments[0]; found += box.open; }
          return found""",
        title,
    )
    assert found == 1, title
    page.wait_for("return document.querySelector('details[open] .body')")


def test_fields_have_their_exact_bounds(reference: Browser) -> None:
    open_operation(reference, "POST /v1/chat/completions")
    rows: list[list[str]] = reference.run(
        """return [...document.querySelectorAll('details[open] tr')]
          .map((row) => [...row.cells].map((cell) => cell.innerText))"""
    )
    fields = {row[0]: row[1:] for row in rows}
    assert fields["seed"] == [
        "integer, -9223372036854775808 to 18446744073709551615",
        "the same seed and request give the same answer",
    ]
    assert fields["temperature"][0] == "number, 0 to 100"
    assert fields["top_p"][0] == "number, at most 1, above 0"
    assert fields["messages (required)"][0] == "list of (Message), at least 1 item"
    assert "messages[].role (required)" in fields
    assert all(description for _, description in (fields[name] for name in ("temperature", "stop", "n")))


def test_every_example_runs(reference: Browser) -> None:
    titles: list[str] = reference.run(
        "return [...document.querySelectorAll('#groups summary > code')].map((code) => code.innerText)"
    )
    assert len(titles) == 81

    def turn(title: str) -> tuple[bool, bool, int]:
        """Put what cancels and deletes last, and the parts of a thing before the thing."""
        deletes = title.startswith("DELETE")
        return deletes, title.endswith("/cancel"), -title.count("/") if deletes else 0

    failed = {}
    for title in sorted(titles, key=turn):
        open_operation(reference, title)
        reference.click("details[open] .try button")
        reference.wait_for("return / in [0-9.]+ s$/.test(document.querySelector('details[open] .answer p')?.innerText)")
        note = reference.text("details[open] .answer p")
        # What is to be cancelled has ended by then, if it could be cancelled at all.
        if not note.startswith(("200 ", "400 ") if title.endswith("/cancel") else "200 "):
            failed[title] = reference.text("details[open] .answer")
    assert failed == {}


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("axe")
    subprocess.run(["npm", "install", "--silent", "--prefix", str(folder), AXE], check=True, timeout=240)
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


def faults(browser: Browser, axe: str) -> list[Any]:
    """Return what axe, a checker of accessibility, finds on the page."""
    browser.run(axe + "\nwindow.axe = axe")
    found: list[Any] = browser.run(
        """return axe.run(document).then(({violations}) =>
          violations.map(({id, nodes}) => [id, nodes.map(({target, failureSummary}) => [target, failureSummary])]))"""
    )
    return found


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_pages_fit_and_are_accessible(service: Service, browser: Browser, axe: str, width: int, scheme: str) -> None:
    browser.emulate(width, 900, scheme)
    narrow = "return document.documentElement.scrollWidth <= innerWidth"
    open_chat(browser, service, [])
    assert browser.run(narrow)
    assert faults(browser, axe) == []
    open_chat(browser, service, CONVERSATION)
    browser.run("document.querySelector('#settings').open = true")
    assert browser.run(narrow)
    assert faults(browser, axe) == []
    browser.open(address_of(service) + "/docs")
    browser.wait_for("return document.querySelector('#groups h2')")
    open_operation(browser, "POST /v1/chat/completions")
    browser.click("details[open] .try button")
    browser.wait_for("return / in [0-9.]+ s$/.test(document.querySelector('details[open] .answer p')?.innerText)")
    assert browser.run(narrow)
    assert faults(browser, axe) == []
    browser.open(address_of(service) + "/dashboard")
    browser.wait_for("return document.querySelector('#link').dataset.state === 'live'")
    assert faults(browser, axe) == []


def test_pictures_can_be_taken(service: Service, browser: Browser, tmp_path: Path) -> None:
    folder = Path(os.environ.get("PICTURES") or tmp_path)
    browser.emulate(900, 640)
    open_chat(browser, service, [])
    set_field(browser, "#temperature", "0")
    browser.run("document.querySelector('#settings').open = false")
    browser.write("#text", "Write a Python function that reverses a list.\ue007")
    browser.wait_for(IS_IDLE, limit_s=120)
    browser.run("scrollTo(0, document.documentElement.scrollHeight)")
    (folder / "chat.png").write_bytes(browser.screenshot())
    browser.emulate(900, 1000)
    browser.open(address_of(service) + "/docs")
    browser.wait_for("return document.querySelector('#groups h2')")
    open_operation(browser, "POST /tokenize")
    browser.click("details[open] .try button")
    browser.wait_for("return / in [0-9.]+ s$/.test(document.querySelector('details[open] .answer p')?.innerText)")
    browser.run("document.querySelector('details[open]').scrollIntoView()")
    (folder / "api.png").write_bytes(browser.screenshot())
    for name in ("chat.png", "api.png"):
        assert 10_000 < (folder / name).stat().st_size < 400_000


def test_a_failed_test_leaves_no_browser() -> None:
    own = psutil.Process()
    before = set(own.children(recursive=True))
    started = set[psutil.Process]()

    def fail() -> None:
        with chromium() as browser:
            browser.open("about:blank")
            started.update(set(own.children(recursive=True)) - before)
            raise RuntimeError("a failed test")

    with pytest.raises(RuntimeError, match="a failed test"):
        fail()
    assert len(started) > 2  # the driver and the browser's processes
    assert psutil.wait_procs(started, timeout=30)[1] == []


def test_libraries_of_the_pages_are_unchanged(tmp_path: Path) -> None:
    vendor = Path(__file__).parents[2] / "router" / "pages" / "static" / "vendor"
    packages = json.loads((vendor / "packages.json").read_text(encoding="utf-8"))
    names = [f"{it['name']}@{it['version']}" for it in packages]
    subprocess.run(["npm", "install", "--silent", "--prefix", str(tmp_path), *names], check=True, timeout=240)
    for it in packages:
        package = tmp_path / "node_modules" / it["name"]
        assert (vendor / f"{it['name']}.js").read_bytes() == (package / it["script"]).read_bytes()
        assert (vendor / f"{it['name']}.LICENSE").read_bytes() == (package / "LICENSE").read_bytes()
    assert len(list(vendor.iterdir())) == 2 * len(packages) + 1
