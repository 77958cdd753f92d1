"""A web browser for models: Chromium through Playwright, one page per conversation, with an exact host allow-list.

The model chooses actions and selectors; nothing that it writes is run as JavaScript. The text of a page is untrusted:
an allowed host controls what the model reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Coroutine, Hashable, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from llmrl.concurrency.background_loop import BackgroundLoop
from llmrl.errors import ConfigError, LLMRLError, did_you_mean
from llmrl.optional import require
from llmrl.tools.base import Tool, ToolError, ToolTimeout
from llmrl.tools.schema import Signature

_START_S, _CLOSE_S = 30.0, 8.0
_PAGE_S = 5.0  # to open or close a page; a browser that takes longer is restarted
_ELEMENT_S = 3.0  # to wait for an element that the page may still create
_DISABLED = ("gpu", "quic", "background-networking", "component-update", "sync")
_WEBRTC_POLICY = ("webrtc-ip-handling-policy", "force-webrtc-ip-handling-policy")  # its names in different versions
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


def browser(
    action: Literal["navigate", "click", "type", "extract", "scroll"],
    url: Annotated[str, "for navigate"] = "",
    selector: Annotated[str, "a CSS selector, for click, type and extract"] = "body",
    text: Annotated[str, "for type"] = "",
    submit: Annotated[bool, "for type: press Enter afterwards"] = False,
    amount: Annotated[int, "for scroll: pixels"] = 600,
) -> str:
    """A web browser that keeps one page open. navigate opens a url; click and type act on the first element that
    matches a CSS selector; extract reads the text of the elements that match one, or of the page; scroll moves down by
    a number of pixels, or up by a negative one, and reads what is then visible.
    """
    raise AssertionError("read for its signature alone")


_SIGNATURE = Signature(browser, "browser")
_ARGUMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # action -> required and optional arguments
    "navigate": (("url",), ()),
    "click": (("selector",), ()),
    "type": (("selector", "text"), ("submit",)),
    "extract": ((), ("selector",)),
    "scroll": ((), ("amount",)),
}
_LONGEST = {"selector": 1_000, "url": 8_000, "text": 100_000}  # a selector of 800,000 stops all pages for 10 s


class BrowserTool(Tool):
    """One page per conversation: navigate, click, type, extract, scroll.

    Reads   allowed_hosts  exact names, such as "en.wikipedia.org", for pages, their resources and redirects; no
                           sub-domain is implied. None: every host, including those of the machine's own network
            executable     path of Chromium; default: $LLMRL_CHROMIUM, one on the PATH, or Playwright's own
            max_chars      limit on the page text in one answer; title and address get a quarter of it each
    Raises  ConfigError for a host that is not a plain name; MissingDependencyError without Playwright

    The browser starts at the first call. A page that hangs or crashes is closed, and the conversation's next call gets
    a new one; a browser that exited is restarted. Chromium's own sandbox cannot run as root and is switched off then:
    in that case allow only hosts that you trust.
    """

    name = "browser"
    description = " ".join(_SIGNATURE.description.split())
    parameters = _SIGNATURE.json_schema

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
        self._stale: set[Any] = set()  # pages whose navigation failed
        self._opening: dict[Hashable, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Future[Any]] = set()

    def call(self, arguments: dict[str, Any], *, conversation: Hashable, deadline: float) -> str:
        given = _checked(arguments)
        try:
            return self._loop.run(self._act(given, conversation, deadline), deadline)
        except TimeoutError:
            raise ToolTimeout(f"browser: {given['action']} did not end in time.") from None

    def end(self, conversation: Hashable) -> None:
        """Closes the conversation's page, with its cookies and storage."""
        page = self._pages.pop(conversation, None)
        if page is not None:
            self._stale.discard(page)
            self._wait_for(_quietly(page.context.close()))

    def close(self) -> None:
        """Ends the browser."""
        if self._browser is not None:
            self._pages.clear()
            self._wait_for(_ended(self._browser, self._driver))
        self._loop.close()

    def _wait_for(self, coroutine: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(LLMRLError, TimeoutError):
            self._loop.run(coroutine, time.monotonic() + _CLOSE_S)

    # -- in the background loop: actions -------------------------------------------------------------------------------

    async def _act(self, given: dict[str, Any], conversation: Hashable, deadline: float) -> str:
        errors = require("playwright.async_api", extra="browser", used_by="BrowserTool")
        page = await self._page(conversation)
        action, selector = given["action"], given.get("selector") or "body"
        left_ms = max(1.0, 900 * (deadline - time.monotonic()))  # Playwright must time out before the call does
        element_ms = min(left_ms, 1000 * _ELEMENT_S)
        try:
            if action == "navigate":
                return await self._navigate(page, given["url"], left_ms)
            if action == "scroll":
                return await self._scroll(page, given.get("amount", 600))
            if action == "extract":
                return await self._extract(page, selector)
            element = page.locator(selector).first
            if action == "click":
                await element.click(timeout=element_ms)
            else:
                await element.fill(given["text"], timeout=element_ms)
                if given.get("submit"):
                    await element.press("Enter", timeout=element_ms)
            # The action may have loaded another page, whose text is the answer.
            await page.wait_for_load_state("domcontentloaded", timeout=left_ms)
            return await self._state(page)
        except asyncio.CancelledError:  # the call's deadline passed: the page did not respond to Playwright
            self._drop(conversation, page)
            raise
        except errors.TimeoutError:
            if action == "navigate" or time.monotonic() >= deadline - left_ms / 9000:
                raise ToolTimeout(f"browser: {action} did not end in time.") from None
            raise ToolError(f"browser: {action}: no element that matches {selector!r} could be used.") from None
        except ToolError:
            raise
        except Exception as error:  # Playwright's own errors, and others that it raises once its driver has exited
            if page.is_closed() or any(word in str(error).lower() for word in ("closed", "crashed")):
                self._drop(conversation, page)
            raise ToolError(f"browser: {action}: {_error_text(error)}") from None

    async def _navigate(self, page: Any, url: str, timeout_ms: float) -> str:
        if not self._allows(url):
            hosts = "" if self.allowed_hosts is None else f" of {', '.join(sorted(self.allowed_hosts)) or 'no host'}"
            raise ToolError(f"browser: navigate: the url must be an http or https address{hosts}: got {url[:200]!r}.")
        try:
            response = await page.goto(url, wait_until="domcontentloaded", timeout=timeout_ms)
        except BaseException:
            self._stale.add(page)  # its pending load, even of an error page, would interrupt the next action
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
        text = await page.locator("body").first.inner_text(timeout=1000 * _ELEMENT_S)
        limit = self.max_chars // 4
        title, url = (s if len(s) <= limit else f"{s[:limit]}..." for s in (await page.title(), page.url))
        return f"{title}\n{url}\n\n{self._shown(text.strip())}"

    def _shown(self, text: str) -> str:
        if len(text) <= self.max_chars:
            return text
        return f"{text[: self.max_chars]}\n[{len(text) - self.max_chars:,} more characters; extract a part by selector]"

    def _allows(self, url: str) -> bool:
        try:
            parts = urlsplit(url)
            host = parts.hostname
        except ValueError:
            return False
        if parts.scheme not in ("http", "https") or not host:
            return False
        return self.allowed_hosts is None or host.lower() in self.allowed_hosts

    # -- in the background loop: pages and the browser -----------------------------------------------------------------

    async def _page(self, conversation: Hashable) -> Any:
        """The conversation's page. A call's deadline does not cancel opening a page or starting the browser."""
        opening = self._opening.get(conversation)
        if opening is None:
            opening = self._opening[conversation] = asyncio.ensure_future(self._opened(conversation))
            opening.add_done_callback(lambda done: self._opening.pop(conversation) and done.exception())
        return await asyncio.shield(opening)

    async def _opened(self, conversation: Hashable) -> Any:
        if self._browser is not None and self._browser.done():
            failed = self._browser.cancelled() or self._browser.exception() is not None
            if failed or not self._browser.result().is_connected():
                self._forget()  # it crashed or failed to start: its pages are gone
        reason = ""
        for _ in range(3):  # first the current page, then a new page, then a new browser
            browser = self._browser = self._browser or asyncio.ensure_future(asyncio.wait_for(self._launch(), _START_S))
            try:
                launched = await asyncio.shield(browser)
            except Exception as error:
                raise ToolError(f"browser: could not be started: {_error_text(error)}") from error
            try:
                return await asyncio.wait_for(self._page_of(launched, conversation), 2 * _PAGE_S)
            except Exception as error:  # the page, the browser or Playwright's driver exited or hangs
                reason = _error_text(error)
                if (page := self._pages.get(conversation)) is not None:
                    self._drop(conversation, page)
                elif self._browser is browser:
                    self._forget()
        raise ToolError(f"browser: no page could be opened: {reason}")

    async def _page_of(self, browser: Any, conversation: Hashable) -> Any:
        page = self._pages.get(conversation)
        if page is None:
            # Each context has its own cookies and storage. Requests of service workers would bypass the route below.
            context = await browser.new_context(accept_downloads=False, service_workers="block")
            if self.allowed_hosts is not None:
                await context.route("**/*", self._guard)
        elif page in self._stale:
            context = page.context
            self._stale.discard(page)
            await _quietly(page.close())  # before opening the next one, which may get the same process
        else:
            return page
        page = self._pages[conversation] = await _new_page(context)
        page.on("crash", lambda crashed: self._drop(conversation, crashed))
        return page

    def _drop(self, conversation: Hashable, page: Any) -> None:
        """Closes a failed page and its cookies; the next call opens a new one."""
        if self._pages.get(conversation) is page:
            del self._pages[conversation]
        self._stale.discard(page)
        self._in_background(_quietly(page.context.close()))

    def _forget(self) -> None:
        """Closes the browser and its driver in the background; the next call starts new ones."""
        browser, driver = self._browser, self._driver
        self._browser = self._driver = None
        self._pages.clear()
        self._stale.clear()
        self._in_background(_ended(browser, driver))

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._tasks.discard)

    async def _launch(self) -> Any:
        api = require("playwright.async_api", extra="browser", used_by="BrowserTool")
        flags = ["--no-first-run", *(f"--disable-{name}" for name in _DISABLED)]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            flags.append("--no-sandbox")
        if self.allowed_hosts is not None:
            # Requests of redirects, WebSockets and prefetches bypass the route, so other hosts must not resolve.
            excluded = "".join(f", EXCLUDE {host}" for host in sorted(self.allowed_hosts))
            flags.append(f"--host-resolver-rules=MAP * ~NOTFOUND{excluded}")
            # WebRTC and WebTransport connect to IP addresses over UDP: a proxy that does not exist blocks them.
            # `<-loopback>` sends this machine's own names through it as well, unless they are allowed.
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


def _checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """The validated arguments. Raises ToolError if they do not fit the action."""
    _, given = _SIGNATURE.bind(arguments)
    action = given["action"]
    required, optional = _ARGUMENTS[action]
    for name in required:
        if name not in given:
            raise ToolError(f"browser: {action} needs {name!r}: got {', '.join(map(repr, given))}.")
    known = (*required, *optional)
    for name, value in given.items():
        if (limit := _LONGEST.get(name)) is not None and len(value) > limit:
            raise ToolError(f"browser: {action}: {name} must have at most {limit:,} characters: got {len(value):,}.")
        # A model may pass arguments of other actions if they equal the schema's defaults.
        if name not in ("action", *known) and value != BrowserTool.parameters["properties"][name]["default"]:
            raise ToolError(f"browser: {action} takes no {name!r}, only {', '.join(known)}.{did_you_mean(name, known)}")
    return given


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
    """The environment of the browser process, without secrets of the training run."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR", "DISPLAY") if name in os.environ}


def _error_text(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].removeprefix("Error: ") if lines else type(error).__name__


async def _new_page(context: Any) -> Any:
    page = await context.new_page()
    # A conversation has one page: popups and dialogs of a site are closed.
    page.on("popup", lambda popup: asyncio.ensure_future(_quietly(popup.close())))
    page.on("dialog", lambda dialog: asyncio.ensure_future(_quietly(_answer(dialog))))
    return page


async def _answer(dialog: Any) -> None:
    """Closes a dialog. Accepts only the one that asks whether to leave the page: dismissed, it would keep it open."""
    await (dialog.accept() if dialog.type == "beforeunload" else dialog.dismiss())


async def _quietly(work: Coroutine[Any, Any, Any], timeout_s: float = _PAGE_S) -> None:
    """Awaits ``work``, ignoring errors and hangs: the page, the browser or the driver may have exited."""
    with contextlib.suppress(Exception):
        await asyncio.wait_for(work, timeout_s)


async def _ended(browser: asyncio.Future[Any] | None, driver: Any) -> None:
    with contextlib.suppress(Exception):
        if browser is not None:
            await _quietly((await asyncio.wait_for(asyncio.shield(browser), _PAGE_S / 2)).close())
    if driver is not None:
        await _quietly(driver.stop(), _PAGE_S / 2)
