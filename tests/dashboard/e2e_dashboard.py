"""The dashboard in a real browser, with a real service under load. Run by `make e2e-dashboard`.

With PICTURES=FOLDER, the pictures used in the docs are written to that folder: dashboard.png, dashboard-dark.png and
top.svg.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from midstream.cli.top.board import Board
from midstream.cli.top.view import frame
from midstream.client import AsyncClient
from tests.dashboard.conftest import HOSTILE, TOKEN
from tests.dashboard.webdriver import Browser
from tests.integration.service import Service

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("load")]

_LIVE = "return document.querySelector('#link').dataset.state === 'live'"
_OUTAGE_OF = """return [...document.querySelectorAll('#outages tbody tr')]
  .filter((row) => row.cells[1].textContent === arguments[0]).map((row) => row.cells[3].innerText).join()"""
_STATE_OF = """return [...document.querySelectorAll('#parts tr')]
  .filter((row) => row.cells[1].textContent === arguments[0]).map((row) => row.cells[2].innerText).join()"""


def url_of(service: Service) -> str:
    return f"http://{service.processes('router')[0]['addresses']['http']}/dashboard"


@pytest.fixture
def page(service: Service, browser: Browser) -> Browser:
    browser.emulate(1280, 1400)
    browser.open(url_of(service))
    browser.wait_for(_LIVE)
    browser.wait_for("return document.querySelector('#tile-inter').innerText !== '–'", limit_s=120)
    return browser


def changes(page: Browser, selector: str) -> bool:
    """Return whether the text of an element changes within 10 seconds."""
    before, deadline = page.text(selector), time.monotonic() + 10
    while page.text(selector) == before:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def test_metrics_are_exported_and_change(page: Browser) -> None:
    page.wait_for("return Number(document.querySelector('#tile-tokens').innerText) > 0", limit_s=60)
    assert page.number("#tile-requests") > 0
    assert page.number("#tile-kv") > 0
    for selector in ("#tile-tokens", "#tile-kv-more", "#groups", "#ended"):
        assert changes(page, selector), selector
    assert page.run("return document.querySelectorAll('#groups canvas').length") == 2
    assert page.text("#states").split("\n")[1::2] == ["generating", "in context", "queued", "paused"]
    # Ten clients share eight rows, so that some of them wait.
    assert page.number("#tile-requests-more") > 0
    drawn = """const canvas = document.querySelector('#groups canvas'), {width, height} = canvas;
      return new Set(new Uint32Array(canvas.getContext('2d').getImageData(0, 0, width, height).data.buffer)).size"""
    assert page.run(drawn) >= 3
    assert page.complaints() == []


def test_every_control_does_what_it_says(page: Browser) -> None:
    page.click("[data-window='60']")
    page.wait_for("return document.querySelector('.chart svg').textContent.includes('−60 s')")
    page.click("[data-window='300']")
    page.wait_for("return document.querySelector('.chart svg').textContent.includes('−300 s')")

    page.click("#pause")
    assert not changes(page, "#foot")
    page.click("#pause")
    assert changes(page, "#foot")

    assert page.run("return [...document.querySelectorAll('.chart table')].every((table) => table.hidden)")
    page.click("#tables")
    page.wait_for("return document.querySelectorAll('.chart tbody tr').length >= 8")
    assert "generated" in page.text(".chart table")
    page.click("#tables")

    background = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    page.click("#theme")  # from "system", which resolves to light in this browser, to light
    assert page.run(background) == light
    page.click("#theme")
    assert page.run(background) != light
    page.click("#theme")
    assert page.run(background) == light
    assert page.text("#theme") == "Theme: system"

    page.run("document.querySelector('.chart svg').focus()")
    page.write(".chart svg", "\ue012\ue012")  # left arrow key
    assert "s ago" in page.text(".chart figcaption")
    assert "seconds ago" in page.run("return document.querySelector('.chart svg').getAttribute('aria-label')")
    assert page.complaints() == []


def test_everything_fits_a_small_screen(page: Browser) -> None:
    page.emulate(390, 800)
    page.wait_for("return innerWidth === 390")
    assert page.run("return document.documentElement.scrollWidth") <= 390
    for scheme in ("light", "dark"):
        page.emulate(1280, 1400, scheme)
        assert page.run("return document.documentElement.scrollWidth") <= 1280


def test_a_name_with_markup_is_shown_as_text(page: Browser, hostile: subprocess.Popen[bytes]) -> None:
    page.wait_for(f"{_STATE_OF} === '● serving'", HOSTILE, limit_s=60)
    assert page.run("return document.querySelectorAll('main img, main script').length") == 0
    assert page.run("return document.title") == "Midstream"
    hostile.kill()
    page.wait_for(f"{_STATE_OF} === '✕ lost'", HOSTILE, limit_s=30)


def test_a_killed_worker_is_lost_and_comes_back(page: Browser, service: Service) -> None:
    page.wait_for(f"{_STATE_OF} === '● serving'", "worker-1", limit_s=60)
    (worker,) = (item for item in service.processes("gpu_worker") if item["name"] == "worker-1")
    os.kill(worker["pid"], signal.SIGKILL)
    page.wait_for(f"{_STATE_OF} === '✕ lost'", "worker-1", limit_s=30)
    page.wait_for(f"{_OUTAGE_OF}.endsWith('still lost')", "worker-1")
    page.wait_for("return document.querySelectorAll('#groups canvas').length === 1")
    page.wait_for(f"{_STATE_OF} === '● serving'", "worker-1", limit_s=120)
    page.wait_for("return document.querySelectorAll('#groups canvas').length === 2")
    assert "workers lost: 1" in page.text("#events")
    page.wait_for(f"{_OUTAGE_OF}.endsWith('s ago')", "worker-1")
    assert page.run("return document.querySelectorAll('.chart .band').length") >= 4
    assert page.run("return document.querySelectorAll('#outages .outage:not(.is-open)').length") == 1


def test_pictures_can_be_taken(page: Browser, service: Service, tmp_path: Path) -> None:
    folder = Path(os.environ.get("PICTURES") or tmp_path)
    page.click("[data-window='60']")
    page.wait_for("return Number(document.querySelector('#tile-tokens').innerText) > 0", limit_s=60)
    if "PICTURES" in os.environ:
        time.sleep(20)  # so that the pictures show the worker's outage and its recovery
    for scheme, name in (("light", "dashboard.png"), ("dark", "dashboard-dark.png")):
        page.emulate(1280, page.run("return document.body.offsetHeight"), scheme)
        time.sleep(1)
        (folder / name).write_bytes(page.screenshot())
        assert 20_000 < (folder / name).stat().st_size < 600_000
    drawing = asyncio.run(_draw_top(service.routers()))
    assert "generated" in drawing
    (folder / "top.svg").write_text(drawing, encoding="utf-8")


def test_the_page_reports_the_death_of_its_router_and_reconnects(page: Browser, service: Service) -> None:
    os.kill(service.processes("router")[0]["pid"], signal.SIGKILL)
    page.wait_for("return document.querySelector('#link').dataset.state === 'lost'")
    assert "trying again" in page.text("#link")
    page.wait_for(_LIVE, limit_s=60)
    assert changes(page, "#foot")


def test_a_router_that_asks_for_a_token_gets_it_from_the_reader(browser: Browser, locked: str) -> None:
    def answers() -> bool:
        try:
            urllib.request.urlopen(f"http://{locked}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    deadline = time.monotonic() + 240
    while not answers():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    browser.emulate(1280, 1400)
    browser.open(f"http://{locked}/dashboard")
    browser.wait_for("return document.querySelector('#door')")
    assert browser.run("return document.querySelector('#main').hidden")
    browser.write("#token", "not-the-token-of-anybody")
    browser.click("#door button")
    browser.wait_for("return document.querySelector('#door-error').innerText.includes('does not know')")
    browser.write("#token", TOKEN)
    browser.click("#door button")
    browser.wait_for(_LIVE)
    assert "via locked" in browser.text("#what")
    # The token is kept while the tab is open, and never appears in a URL.
    browser.open(f"http://{locked}/dashboard")
    browser.wait_for(_LIVE)
    assert TOKEN not in browser.run("return location.href + document.documentElement.outerHTML")


async def _draw_top(routers: list[str]) -> str:
    board = Board()
    async with AsyncClient(routers) as client:
        async for status in client.status():
            board.take(status, is_first=True)
    console = Console(record=True, width=112, file=io.StringIO(), force_terminal=True)
    console.print(frame(board, console.width))
    # Use any installed monospaced font instead of Rich's font, which would be downloaded from a server.
    return re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="midstream top"), flags=re.DOTALL)
