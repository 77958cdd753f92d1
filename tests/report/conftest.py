"""Pages in a real browser."""

from __future__ import annotations

import pytest

from llmrl.tools.browser import find_chromium


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: llmrl[browser]")
    if find_chromium() is None:
        pytest.skip("needs a Chromium: scripts/setup --browser")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=find_chromium())
        yield made
        made.close()


@pytest.fixture
def open_page(browser):
    """Opens a file or an address; at the end the browser must have had nothing to complain of, nor asked others."""
    contexts, complaints = [], []

    def start(address, scheme="light", width=1280):
        address = str(address) if "://" in str(address) else address.as_uri()
        viewport = {"width": width, "height": 800}
        contexts.append(browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce"))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message) or dialog.dismiss())
        own = ("file:", "about:", address)
        page.on("request", lambda request: None if request.url.startswith(own) else complaints.append(request.url))
        page.goto(address)
        return page

    yield start
    for context in contexts:
        context.close()
    assert complaints == []
