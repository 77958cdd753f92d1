"""A server of the official package with a few tools, run as a process of its own by the tests."""

import os
import sys
import time
from pathlib import Path


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def environment() -> str:
    """The names of all environment variables."""
    return " ".join(sorted(os.environ))


def fail(reason: str) -> str:
    """Always fails."""
    raise ValueError(reason)


def hang() -> str:
    """Does not end."""
    time.sleep(3600)
    return "never"


def die() -> str:
    """Ends the server in the middle of the call."""
    os._exit(3)


def meet(folder: str, name: str, others: int) -> str:
    """Waits until as many calls as ``others`` are inside at once."""
    Path(folder, name).touch()
    deadline = time.monotonic() + 20
    while len(list(Path(folder).iterdir())) < others and time.monotonic() < deadline:
        time.sleep(0.01)
    return f"{len(list(Path(folder).iterdir()))} met"


if __name__ == "__main__":
    from mcp.server.mcpserver import MCPServer  # here, so that the file can be collected without the package

    server = MCPServer("things")
    for function in (add, environment, fail, hang, die, meet):
        server.tool()(function)
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")
