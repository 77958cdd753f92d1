"""The browser tool, with the system's Chromium and pages served by this process."""

import contextlib
import importlib.util
import os
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tensordict import TensorDict

from llmrl.envs.llm import ChatEnv
from llmrl.envs.llm.transforms import BrowserTransform
from llmrl.errors import ConfigError
from llmrl.testing import ScriptedPolicy
from llmrl.tools import ToolCall, ToolError, ToolTimeout
from llmrl.tools.browser import BrowserTool, find_chromium
from llmrl.tools.runner import ToolRunner
from tests.support.processes import descendants, wait_until

HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
needs_playwright = pytest.mark.skipif(not HAS_PLAYWRIGHT, reason="needs the package playwright: llmrl[browser]")
WAIT_S = 60.0


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        site, path = self.server, self.path
        site.requests.append((self.headers["Host"].partition(":")[0], path))
        if path == "/slow":
            site.holds.wait(WAIT_S)
        page = site.pages.get(path.partition("?")[0])
        self.send_response(302 if path in site.redirects else 404 if page is None else 200)
        if path in site.redirects:
            self.send_header("Location", site.redirects[path])
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write((page or "nothing here").encode())


class Site(ThreadingHTTPServer):
    """Pages by path, and the (host, path) of every request that arrived."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages, self.redirects, self.requests = {}, {}, []
        self.holds = threading.Event()

    def url(self, path="/", host="localhost"):
        return f"http://{host}:{self.server_port}{path}"


@pytest.fixture(scope="module")
def server():
    with Site() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.holds.set()
        made.shutdown()


@pytest.fixture
def site(server):
    for kept in (server.pages, server.redirects, server.requests):
        kept.clear()
    return server


@pytest.fixture(scope="module")
def browser():
    tool = BrowserTool(["localhost"])
    yield tool
    tool.close()


def act(tool, conversation=0, deadline=None, **arguments):
    deadline = time.monotonic() + WAIT_S if deadline is None else deadline
    return tool.call(arguments, conversation=conversation, deadline=deadline)


def needs_chromium(test):
    """These start a real browser, which takes a second or two."""
    skip = pytest.mark.skipif(
        not HAS_PLAYWRIGHT or find_chromium() is None, reason="needs playwright (llmrl[browser]) and a Chromium"
    )
    return pytest.mark.slow(skip(test))


@needs_chromium
def test_a_page_is_opened_read_clicked_typed_into_and_scrolled(browser, site):
    site.pages["/"] = (
        "<title>Shop</title><h1>Hats</h1><a id='more' href='/more'>more hats</a>"
        "<form action='/find'><input name='q' id='q'></form><div style='height: 4000px'></div><p>the end</p>"
    )
    site.pages["/more"] = "<title>More</title><p>A bowler.</p>"
    site.pages["/find"] = "<title>Found</title><p>A fez.</p>"
    assert act(browser, action="navigate", url=site.url()).startswith(f"Shop\n{site.url()}\n\nHats\nmore hats")
    assert act(browser, action="extract", selector="h1") == "Hats"
    assert act(browser, action="scroll", amount=10_000).endswith("\n\nthe end")
    assert act(browser, action="click", selector="#more") == f"More\n{site.url('/more')}\n\nA bowler."
    act(browser, action="navigate", url=site.url())
    found = act(browser, action="type", selector="#q", text="red fez", submit=True)
    assert found == f"Found\n{site.url('/find?q=red+fez')}\n\nA fez."


@needs_chromium
def test_hosts_are_allowed_by_their_exact_names_in_links_resources_and_redirects(browser, site):
    """Regression: an allow-list by suffix let evil-example.com pass for example.com."""
    foreign = ["http://evil-localhost/", "http://localhost.evil.test/", "file:///etc/passwd"]
    for url in (site.url(host="127.0.0.1"), *foreign):
        with pytest.raises(ToolError, match="http or https address of localhost"):
            act(browser, action="navigate", url=url)
    other = site.url("/other", host="127.0.0.1")
    site.pages["/"] = (
        f"<title>Page</title><img src='{other}?img'><iframe src='{other}?frame'></iframe>"
        f"<a id=away href='{other}?link'>x</a>"
        f"<script>fetch('{other}?fetch'); new Image().src = '{site.url('/hop')}';"
        f"try {{ new WebSocket('ws://127.0.0.1:{site.server_port}/socket') }} catch (e) {{}}</script>"
    )
    site.redirects["/hop"] = site.redirects["/jump"] = other
    site.pages["/other"] = "<title>Other</title>"
    assert act(browser, action="navigate", url=site.url()).startswith("Page\n")
    with pytest.raises(ToolError, match="navigate"):
        act(browser, action="navigate", url=site.url("/jump"))
    act(browser, action="navigate", url=site.url())
    with contextlib.suppress(ToolError):
        act(browser, action="click", selector="#away")
    assert ("localhost", "/jump") in site.requests
    assert {host for host, _ in site.requests} == {"localhost"}, "nothing else was even asked for"
    assert act(browser, action="navigate", url=site.url()).startswith("Page\n"), "and the page can still be used"


@needs_chromium
def test_what_the_model_writes_is_never_run_as_code(browser, site):
    """Regression: text of the model was pasted into the page's JavaScript."""
    site.pages["/"] = "<title>T</title><input id='q'>"
    act(browser, action="navigate", url=site.url())
    evil = "\"'); document.title = 'owned'; ('`${document.title = 'owned'}"
    act(browser, action="type", selector="#q", text=evil)
    with pytest.raises(ToolError, match="click"):
        act(browser, action="click", selector=evil)
    with pytest.raises(ToolError, match="extract"):
        act(browser, action="extract", selector=evil)
    with pytest.raises(ToolError, match="valid integer"):
        act(browser, action="scroll", amount=evil)
    with pytest.raises(ToolError, match="http or https"):
        act(browser, action="navigate", url="javascript:document.title='owned'")
    assert act(browser, action="scroll", amount=1).startswith("At pixel")
    assert "owned" not in act(browser, action="type", selector="#q", text="x").splitlines()[0]


@needs_chromium
def test_every_conversation_has_a_page_and_cookies_of_its_own(browser, site):
    """Regression: one page was shared by the whole batch."""
    site.pages["/"] = "<title>T</title><p id='c'></p><script>c.textContent = document.cookie || 'none'</script>"
    site.pages["/set"] = "<title>S</title><script>document.cookie = 'seen=1'</script>"
    act(browser, "a", action="navigate", url=site.url("/set"))
    assert act(browser, "a", action="navigate", url=site.url()).endswith("seen=1")
    assert act(browser, "b", action="navigate", url=site.url()).endswith("none")
    browser.end("a")
    with pytest.raises(ToolError, match="no page is open"):
        act(browser, "a", action="extract")
    assert act(browser, "a", action="navigate", url=site.url()).endswith("none")


@needs_chromium
def test_failures_are_said_and_leave_the_page_usable(browser, site):
    site.pages["/"] = "<title>T</title><p>Hi</p>"
    assert act(browser, action="navigate", url=site.url("/gone")).startswith("HTTP status 404\n")
    with pytest.raises(ToolTimeout, match="navigate did not end in time"):
        act(browser, action="navigate", url=site.url("/slow"), deadline=time.monotonic() + 0.5)
    assert "Hi" in act(browser, action="navigate", url=site.url())
    with pytest.raises(ToolError, match="no element matches 'h5'"):
        act(browser, action="extract", selector="h5")
    with pytest.raises(ToolError, match="no element that matches 'h5' could be used"):
        act(browser, action="click", selector="h5")
    site.pages["/stay"] = (
        "<p>Stay</p><a href='/'>go</a><script>onbeforeunload = event => event.preventDefault()</script>"
    )
    for leave in ({"action": "click", "selector": "a"}, {"action": "navigate", "url": site.url()}):
        act(browser, action="navigate", url=site.url("/stay"))
        act(browser, action="click", selector="p")  # a page may ask only after it was used
        assert "Hi" in act(browser, **leave)


@needs_chromium
def test_conversations_wait_for_slow_pages_side_by_side(browser, site):
    """Both pages arrive only when both have been asked for."""
    site.pages["/slow"] = "<title>Slow</title>"
    site.holds.clear()

    def release():
        wait_until(lambda: [path for _, path in site.requests].count("/slow") >= 2, WAIT_S)
        site.holds.set()

    threading.Thread(target=release, daemon=True).start()
    runner = ToolRunner([browser], timeout_s=WAIT_S)
    arguments = {"action": "navigate", "url": site.url("/slow")}
    results = runner.run([ToolCall("browser", arguments, name, name) for name in ("x", "y")])
    assert [result.content.partition("\n")[0] for result in results] == ["Slow", "Slow"]


@needs_chromium
def test_the_transform_browses_by_the_documented_tags(site):
    site.pages["/"] = "<title>T</title><p>Hello from the page</p>"
    env = ChatEnv(batch_size=[1]).append_transform(BrowserTransform(["localhost"], timeout=WAIT_S))
    try:
        td = env.reset(TensorDict(query="?", batch_size=[1]))
        answer = f'<tool>browser\n{{"action": "navigate", "url": "{site.url()}"}}</tool>'
        td = env.step(ScriptedPolicy([answer])(td))
        message = td["next", "history"].prompt.to_chats()[0][-1]
        assert message["role"] == "tool"
        assert "Hello from the page" in message["content"]
    finally:
        env.close()


@needs_chromium
def test_nothing_is_sent_by_udp_past_the_allow_list(browser, site):
    """Regression: WebRTC asked any address for its own. What it may not send, no candidate can come of."""
    addresses = {"127.0.0.1", own_address()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, socket.socket() as tcp:
        udp.bind(("0.0.0.0", 0))
        tcp.bind(("0.0.0.0", 0))
        tcp.listen()
        udp.settimeout(0.2), tcp.settimeout(0.2)
        servers = [
            server
            for address in addresses
            for server in (
                f"{{urls: 'stun:{address}:{udp.getsockname()[1]}'}}",
                f"{{urls: 'turn:{address}:{udp.getsockname()[1]}', username: 'u', credential: 'c'}}",
                f"{{urls: 'turn:{address}:{tcp.getsockname()[1]}?transport=tcp', username: 'u', credential: 'c'}}",
            )
        ]
        quic = [f"https://{address}:{udp.getsockname()[1]}/" for address in addresses]
        site.pages["/"] = f"""<title>T</title><p id=p>gathering</p><script>
            for (const url of {quic}) try {{ new WebTransport(url).ready.catch(() => 0) }} catch (e) {{}}
            const peer = new RTCPeerConnection({{iceServers: [{", ".join(servers)}]}});
            peer.createDataChannel("x");
            peer.onicegatheringstatechange = () => {{ p.textContent = peer.iceGatheringState }};
            peer.createOffer().then(offer => peer.setLocalDescription(offer));
            setTimeout(() => {{ p.textContent = "complete" }}, 3000);
        </script>"""
        act(browser, action="navigate", url=site.url())
        wait_until(lambda: act(browser, action="extract", selector="#p") == "complete", WAIT_S)
        with pytest.raises(TimeoutError):
            udp.recvfrom(100)
        with pytest.raises(TimeoutError):
            tcp.accept()
    assert act(browser, action="navigate", url=site.url()).startswith("T\n")


def own_address():
    """The machine's address in its network, or that of its loopback where it is in none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


@needs_chromium
def test_long_pages_titles_and_addresses_are_shown_in_part(site):
    site.pages["/"] = f"""<p>{"word " * 5000}</p><script>
        document.title = "t".repeat(2e5); history.pushState(0, "", "/?" + "u".repeat(1e5)) </script>"""
    with contextlib.closing(BrowserTool(["localhost"], max_chars=400)) as tool:
        shown = act(tool, action="navigate", url=site.url())
        assert shown.startswith("t" * 100 + "...\nhttp://localhost:")
        assert "more characters" in shown
        assert len(shown) < 800


@needs_chromium
@pytest.mark.parametrize("script", ["for (;;);", "setTimeout(() => { for (;;); }, 100)"])
def test_a_page_that_hangs_is_closed_and_the_next_call_has_another_one(browser, site, script):
    site.pages["/"] = f"<title>Hangs</title><p>text</p><script>{script}</script>"
    site.pages["/fine"] = "<title>Fine</title>"
    with contextlib.suppress(ToolTimeout):  # it may hang while it is read
        act(browser, "h", action="navigate", url=site.url(), deadline=time.monotonic() + 3)
    time.sleep(0.3)
    with contextlib.suppress(ToolError):
        act(browser, "h", action="extract", deadline=time.monotonic() + 3)
    assert act(browser, "h", action="navigate", url=site.url("/fine")).startswith("Fine\n")


@needs_chromium
@pytest.mark.parametrize("what", ["renderer", "browser", "driver"])
def test_after_one_of_its_processes_was_killed_the_tool_works_again(site, what):
    """Regression: the conversation's tool failed for good."""
    site.pages["/"] = "<title>T</title>"
    with contextlib.closing(BrowserTool(["localhost"])) as tool:
        act(tool, action="navigate", url=site.url())
        killed = [pid for pid, command in descendants(os.getpid()) if what in kinds(command)]
        assert killed
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ToolError):
            act(tool, action="extract", deadline=time.monotonic() + 5)
        assert act(tool, action="navigate", url=site.url()).startswith("T\n")


def kinds(command):
    if "--type=" in command:
        return {"renderer"} if "--type=renderer" in command else set()
    return {"driver"} if "run-driver" in command else {"browser"} if "--remote-debugging" in command else set()


@needs_playwright
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"action": "tipe"}, "did you mean 'type'"),
        ({}, "argument 'action' is missing"),
        ({"action": ["navigate"]}, r"argument 'action': .*: got \['navigate'\]"),
        ({"action": "navigate"}, "navigate needs 'url'"),
        ({"action": "click", "selector": "a", "url": "x"}, "click takes no 'url'"),
        ({"action": "click", "selector": ["a"]}, "valid string"),
        ({"action": "scroll", "amount": "far"}, "valid integer"),
        ({"action": "extract", "selector": "a," * 400_000}, "selector must have at most 1,000 characters: got 800,000"),
    ],
)
def test_wrong_arguments_are_said_without_starting_a_browser(arguments, says):
    with contextlib.closing(BrowserTool(["localhost"])) as tool:
        with pytest.raises(ToolError, match=says):
            act(tool, **arguments)
        assert tool._browser is None


@needs_playwright
@pytest.mark.parametrize("host", ["http://a.com", "a.com/x", "*.a.com", "a.com:80", "", 5])
def test_hosts_that_are_not_plain_names_are_refused(host):
    with pytest.raises(ConfigError, match="plain host names"):
        BrowserTool([host])


@needs_playwright
def test_a_browser_that_cannot_start_is_an_error_of_the_call():
    tool = BrowserTool(executable="/no/such/browser")
    with pytest.raises(ToolError, match="could not be started"):
        act(tool, action="extract")
    tool.close()
