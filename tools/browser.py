"""A web browser for models: Chromium through Playwright, one page per conversation, hosts by an exact allow-list.

The model names actions and selectors; nothing it writes becomes JavaScript. What a page says is text of a stranger: an
allowed host decides what the model reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

from llmrl.concurrency.background_loop import BackgroundLoop
from llmrl.errors import ConfigError, LLMRLError, did_you_mean
from llmrl.optional import require
from llmrl.tools.base import Tool, ToolError, ToolTimeout

__all__ = ["BrowserTool", "find_chromium"]

_START_S, _CLOSE_S = 30.0, 8.0
_PAGE_S = 5.0  # to open or close a page; a browser that takes longer is started again
_ELEMENT_S = 3.0  # to wait for an element that a page may still be making
_FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_WEBRTC_POLICY = ("webrtc-ip-handling-policy", "force-webrtc-ip-handling-policy")  # its names over the versions
_VISIBLE_TEXT = """() => {
  const walker = document.createTreeWalker(document.body || document, NodeFilter.SHOW_TEXT), found = [];
  const hidden = new Set(["SCRIPT", "STYLE", "NOSCRIPT", "TEMPLATE"]), range = document.createRange();
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (!node.data.trim() || hidden.has(node.parentNode.nodeName)) continue;
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (box.height && box.bottom > 0 && box.top < innerHeight) found.push(node.data.trim());
  }
  return [Math.round(scrollY), document.documentElement.scrollHeight - innerHeight, found.join("\\n")];
}"""


class BrowserTool(Tool):
    """A page that a conversation keeps: navigate, click, type, extract, scroll.

    Reads   allowed_hosts  exact names, such as "en.wikipedia.org": of pages, of what they load, and of redirects; no
                           sub-domain is implied. None: every host, those of the machine's own network included
            executable     of Chromium; by default $LLMRL_CHROMIUM, one on the PATH, or Playwright's own
            max_chars      of the text that one answer shows; of its title and of its address a quarter of that
    Raises  ConfigError for a host that is none; MissingDependencyError without Playwright. The browser itself starts at
            the first call

    A page that hangs or crashes is closed, and the conversation's next call has a new one; a browser that ended is
    started again. As root Chromium's own sandbox cannot run and is switched off: then give it only hosts that you
    trust.
    """

    name = "browser"
    description = (
        "A web browser that keeps one page open. navigate opens a url; click and type act on the first element that "
        "matches a CSS selector; extract reads the text of the elements that match one, or of the page; scroll moves "
        "down by a number of pixels, or up by a negative one, and reads what is then visible."
    )
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "action": {"type": "string", "enum": ["navigate", "click", "type", "extract", "scroll"]},
            "url": {"type": "string", "description": "for navigate"},
            "selector": {"type": "string", "description": "a CSS selector, for click, type and extract"},
            "text": {"type": "string", "description": "for type"},
            "submit": {"type": "boolean", "description": "for type: press Enter afterwards"},
            "amount": {"type": "integer", "description": "for scroll: pixels"},
        },
        "required": ["action"],
    }
    _needs: ClassVar[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {  # required and optional arguments
        "navigate": (("url",), ()),
        "click": (("selector",), ()),
        "type": (("selector", "text"), ("submit",)),
        "extract": ((), ("selector",)),
        "scroll": ((), ("amount",)),
    }

    def __init__(
        self,
        allowed_hosts: Sequence[str] | None = None,
        *,
        headless: bool = True,
        timeout_s: float | None = 30.0,
        executable: str | None = None,
        max_chars: int = 3000,
    ):
        require("playwright.async_api", extra="browser", used_by="BrowserTool")
        if isinstance(allowed_hosts, str):
            raise ConfigError(f"BrowserTool: allowed_hosts must be a list of host names: got {allowed_hosts!r}.")
        self.allowed_hosts = None if allowed_hosts is None else frozenset(map(_host_name, allowed_hosts))
        self.headless = headless
        self.timeout_s = timeout_s
        self.max_chars = max_chars
        self.executable = executable or find_chromium()
        self._loop = BackgroundLoop("browser")
        self._driver: Any = None
        self._browser: asyncio.Future[Any] | None = None
        self._pages: dict[Hashable, Any] = {}
        self._stale: set[Any] = set()
        self._opening: dict[Hashable, asyncio.Future[Any]] = {}
        self._work: set[asyncio.Future[Any]] = set()

    def call(self, arguments: dict[str, Any], *, conversation: Hashable, deadline: float) -> str:
        action = self._checked(arguments)
        try:
            return self._loop.run(self._act(action, arguments, conversation, deadline), deadline)
        except TimeoutError:
            raise ToolTimeout(f"browser: {action} did not end in time.") from None

    def end(self, conversation: Hashable) -> None:
        """Closes the conversation's page, with its cookies and storage."""
        page = self._pages.pop(conversation, None)
        if page is not None:
            self._stale.discard(page)
            self._soon(_closed(page.context))

    def close(self) -> None:
        """Ends the browser."""
        if self._browser is not None:
            self._soon(self._shut_down())
        self._loop.close()

    # -- in the background loop ----------------------------------------------------------------------------------------

    async def _act(self, action: str, arguments: dict[str, Any], conversation: Hashable, deadline: float) -> str:
        errors = require("playwright.async_api", extra="browser", used_by="BrowserTool")
        page = await self._page(conversation)
        left_ms = max(1.0, 900 * (deadline - time.monotonic()))  # Playwright's own deadline is before the call's
        patience_ms = min(left_ms, 1000 * _ELEMENT_S)
        try:
            if action == "navigate":
                return await self._navigate(page, arguments["url"], left_ms)
            if action == "scroll":
                return await self._scroll(page, arguments.get("amount", 600))
            selector = arguments.get("selector") or "body"
            if action == "extract":
                return await self._extract(page, selector)
            element = page.locator(selector).first
            if action == "click":
                await element.click(timeout=patience_ms)
            else:
                await element.fill(arguments["text"], timeout=patience_ms)
                if arguments.get("submit"):
                    await element.press("Enter", timeout=patience_ms)
            await page.wait_for_load_state("domcontentloaded", timeout=left_ms)
            return await self._state(page)
        except asyncio.CancelledError:  # the call's deadline: the page did not even answer Playwright
            self._drop(conversation, page)
            raise
        except errors.TimeoutError:
            if action == "navigate" or time.monotonic() >= deadline - left_ms / 9000:
                raise ToolTimeout(f"browser: {action} did not end in time.") from None
            raise ToolError(f"browser: {action}: no element that matches {selector!r} could be used.") from None
        except ToolError:
            raise
        except Exception as error:  # Playwright's, and what it lets through when its driver has ended
            if page.is_closed() or any(word in str(error).lower() for word in ("closed", "crashed")):
                self._drop(conversation, page)
            raise ToolError(f"browser: {action}: {_first_line(error)}") from None

    async def _navigate(self, page: Any, url: str, timeout_ms: float) -> str:
        self._check_url(url)
        try:
            response = await page.goto(url, wait_until="domcontentloaded", timeout=timeout_ms)
        except BaseException:
            self._stale.add(page)  # what it still loads, be it an error page, would interrupt what comes next
            raise
        status = f"HTTP status {response.status}\n" if response is not None and response.status >= 400 else ""
        return status + await self._state(page)

    async def _scroll(self, page: Any, amount: int) -> str:
        await page.evaluate("amount => window.scrollBy(0, amount)", amount)
        place, end, text = await page.evaluate(_VISIBLE_TEXT)
        return f"At pixel {place} of {max(place, end)}.\n\n{self._shown(text)}"

    async def _extract(self, page: Any, selector: str) -> str:
        if page.url == "about:blank":
            raise ToolError("browser: extract: no page is open; navigate to one first.")
        texts = [text.strip() for text in await page.locator(selector).all_inner_texts()]
        if not texts:
            raise ToolError(f"browser: extract: no element matches {selector!r}.")
        return self._shown("\n".join(texts))

    async def _state(self, page: Any) -> str:
        """Where the page is and what it says."""
        text = await page.locator("body").first.inner_text(timeout=1000 * _ELEMENT_S)
        title, url = (_cut(line, self.max_chars // 4) for line in (await page.title(), page.url))
        return f"{title}\n{url}\n\n{self._shown(text.strip())}"

    def _shown(self, text: str) -> str:
        if len(text) <= self.max_chars:
            return text
        return f"{text[: self.max_chars]}\n[{len(text) - self.max_chars:,} more characters; extract a part by selector]"

    async def _page(self, conversation: Hashable) -> Any:
        """The conversation's page. A caller that gives up waiting does not stop its opening, or the browser's start."""
        opening = self._opening.get(conversation)
        if opening is None:
            opening = self._opening[conversation] = asyncio.ensure_future(self._opened(conversation))
            opening.add_done_callback(lambda done: self._opening.pop(conversation) and done.exception())
        return await asyncio.shield(opening)

    async def _opened(self, conversation: Hashable) -> Any:
        if self._browser is not None and self._browser.done():
            failed = self._browser.cancelled() or self._browser.exception() is not None
            if failed or not self._browser.result().is_connected():
                self._forget()  # it crashed, or never started: its pages are gone
        reason = ""
        for _ in range(3):  # with the page that there is, with a new one, with a new browser
            browser = self._browser = self._browser or asyncio.ensure_future(asyncio.wait_for(self._launch(), _START_S))
            try:
                launched = await asyncio.shield(browser)
            except Exception as error:
                raise ToolError(
                    f"browser: it could not be started: {_first_line(error) or type(error).__name__}"
                ) from error
            try:
                return await asyncio.wait_for(self._page_of(launched, conversation), 2 * _PAGE_S)
            except Exception as error:  # the page, the browser or Playwright's driver ended or hangs
                reason = _first_line(error) or type(error).__name__
                if (page := self._pages.get(conversation)) is not None:
                    self._drop(conversation, page)
                elif self._browser is browser:
                    self._forget()
        raise ToolError(f"browser: no page could be opened: {reason}")

    async def _page_of(self, browser: Any, conversation: Hashable) -> Any:
        """The conversation's page, opened where it has none."""
        page = self._pages.get(conversation)
        if page is None:
            context = await browser.new_context(accept_downloads=False, service_workers="block")
            if self.allowed_hosts is not None:
                await context.route("**/*", self._guard)
        elif page in self._stale:
            context = page.context
            self._stale.discard(page)
            await _closed(page)  # first: the next one may be given the same process
        else:
            return page
        page = self._pages[conversation] = await _new_page(context)
        page.on("crash", lambda crashed: self._drop(conversation, crashed))
        return page

    def _drop(self, conversation: Hashable, page: Any) -> None:
        """Closes a page that is of no use any more, with its cookies; the next call opens another one."""
        if self._pages.get(conversation) is page:
            del self._pages[conversation]
        self._stale.discard(page)
        self._in_background(_closed(page.context))

    def _forget(self) -> None:
        """Leaves the browser and its driver to their end; the next call starts others."""
        browser, driver = self._browser, self._driver
        self._browser = self._driver = None
        self._pages.clear()
        self._stale.clear()
        self._in_background(_ended(browser, driver))

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._work.discard)

    async def _launch(self) -> Any:
        api = require("playwright.async_api", extra="browser", used_by="BrowserTool")
        flags = [*_FLAGS]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            flags.append("--no-sandbox")
        if self.allowed_hosts is not None:
            # Requests that a redirect, a WebSocket or a prefetch makes are never seen by a route: they have no address.
            excluded = "".join(f", EXCLUDE {host}" for host in sorted(self.allowed_hosts))
            flags.append(f"--host-resolver-rules=MAP * ~NOTFOUND{excluded}")
            # WebRTC and WebTransport go to addresses, and by UDP: they must take a proxy, which is not there.
            # `<-loopback>` has this machine's names go through it as well, unless they are allowed.
            flags.append("--proxy-server=http://127.0.0.1:9")
            flags += [f"--{name}=disable_non_proxied_udp" for name in _WEBRTC_POLICY]
            flags.append(f"--proxy-bypass-list={';'.join(['<-loopback>', *sorted(self.allowed_hosts)])}")
        if self._driver is None:
            self._driver = await api.async_playwright().start()
        return await self._driver.chromium.launch(
            executable_path=self.executable, headless=self.headless, args=flags, env=_environment()
        )

    async def _guard(self, route: Any) -> None:
        if self._allows(route.request.url):
            await route.continue_()
        else:
            await route.abort("blockedbyclient")

    async def _shut_down(self) -> None:
        self._pages.clear()
        await _ended(self._browser, self._driver)

    def _soon(self, awaitable: Any) -> None:
        with contextlib.suppress(LLMRLError, TimeoutError):
            self._loop.run(awaitable, time.monotonic() + _CLOSE_S)

    # -- what is allowed -----------------------------------------------------------------------------------------------

    def _allows(self, url: str) -> bool:
        try:
            parts = urlsplit(url)
            host = parts.hostname
        except ValueError:
            return False
        if parts.scheme not in ("http", "https") or not host:
            return False
        return self.allowed_hosts is None or host.lower() in self.allowed_hosts

    def _check_url(self, url: str) -> None:
        if not self._allows(url):
            hosts = "" if self.allowed_hosts is None else f" of {', '.join(sorted(self.allowed_hosts)) or 'no host'}"
            raise ToolError(f"browser: navigate: the url must be an http or https address{hosts}: got {url[:200]!r}.")

    def _checked(self, arguments: dict[str, Any]) -> str:
        """The action. Raises ToolError for one that is not known, or arguments that are not its own."""
        action = arguments.get("action")
        if not isinstance(action, str) or action not in self._needs:
            hint = did_you_mean(action, self._needs) if isinstance(action, str) else ""
            raise ToolError(f"browser: action must be one of {', '.join(self._needs)}: got {action!r:.80}.{hint}")
        required, optional = self._needs[action]
        for name in required:
            if name not in arguments:
                raise ToolError(f"browser: {action} needs {name!r}: got {', '.join(map(repr, arguments))}.")
        kinds = {"string": str, "boolean": bool, "integer": int}
        for name, value in arguments.items():
            if name not in ("action", *required, *optional):
                known = (*required, *optional)
                raise ToolError(
                    f"browser: {action} takes no {name!r}: known are {', '.join(known)}.{did_you_mean(name, known)}"
                )
            kind = self.parameters["properties"][name]["type"]
            if not isinstance(value, kinds[kind]) or (kind == "integer" and isinstance(value, bool)):
                raise ToolError(f"browser: {action}: {name!r} must be of type {kind}: got {value!r:.80}.")
        return action


def find_chromium() -> str | None:
    """The Chromium to use: $LLMRL_CHROMIUM, or one on the PATH; None for Playwright's own."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return os.environ.get("LLMRL_CHROMIUM") or next((path for name in names if (path := shutil.which(name))), None)


def _host_name(host: Any) -> str:
    if not isinstance(host, str) or not host or urlsplit(f"//{host}").hostname != host.lower() or "*" in host:
        raise ConfigError(
            "BrowserTool: allowed_hosts must be plain host names, such as 'example.com', without scheme, port, path or "
            f"'*': got {host!r}."
        )
    return host.lower()


def _environment() -> dict[str, str | float | bool]:
    """What the browser's process gets of the environment: no secrets of the training run."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR", "DISPLAY") if name in os.environ}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].removeprefix("Error: ") if lines else ""


async def _new_page(context: Any) -> Any:
    page = await context.new_page()
    page.on("popup", lambda popup: asyncio.ensure_future(_closed(popup)))
    page.on("dialog", lambda dialog: asyncio.ensure_future(_dismissed(dialog)))
    return page


async def _closed(thing: Any) -> None:
    with contextlib.suppress(Exception):
        await asyncio.wait_for(thing.close(), _PAGE_S)


async def _ended(browser: asyncio.Future[Any] | None, driver: Any) -> None:
    with contextlib.suppress(Exception):
        if browser is not None:
            await _closed(await asyncio.wait_for(asyncio.shield(browser), _PAGE_S / 2))
    with contextlib.suppress(Exception):
        if driver is not None:
            await asyncio.wait_for(driver.stop(), _PAGE_S / 2)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


async def _dismissed(dialog: Any) -> None:
    with contextlib.suppress(Exception):
        await dialog.dismiss()
