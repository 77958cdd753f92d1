"""A server that speaks the protocol by hand, and breaks it in the ways that its tools are called after."""

import json
import os
import subprocess
import sys
import time

TOOLS = ["echo", "huge", "endless", "binary", "null", "refuse", "odd_error", "no_content", "silent", "orphan"]


def write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def answer(number: int, **fields: object) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": number, **fields}).encode() + b"\n")


def text(said: str) -> dict[str, object]:
    return {"content": [{"type": "text", "text": said}]}


def call(number: int, name: str) -> None:
    if name == "echo":
        answer(number, result=text("here"))
    elif name == "huge":
        answer(number, result=text("x" * (20 << 20)))
    elif name == "endless":
        write(f'{{"jsonrpc": "2.0", "id": {number}, "result": "'.encode())
        while True:
            write(b"x" * (1 << 20))
    elif name == "binary":
        head, tail = json.dumps({"jsonrpc": "2.0", "id": number, "result": text("|")}).split("|")
        write(head.encode() + b"PNG\xff\xfe" + tail.encode() + b"\n")
    elif name == "null":
        answer(number, result=None)
    elif name == "refuse":
        answer(number, error={"code": -32000, "message": "the disk is full"})
    elif name == "odd_error":
        answer(number, error="out of order")
    elif name == "no_content":
        answer(number, result={"content": None})
    elif name == "silent":
        time.sleep(3600)
    elif name == "orphan":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], stdout=subprocess.DEVNULL)
        answer(number, result=text(str(child.pid)))
        os.close(1)
        time.sleep(3600)


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        number, method = asked.get("id"), asked["method"]
        if method == "initialize":
            about = {"name": "hostile", "version": "0"}
            version = asked["params"]["protocolVersion"]
            answer(number, result={"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about})
        elif method == "tools/list":
            answer(number, result={"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]})
        elif method == "tools/call":
            call(number, asked["params"]["name"])
        elif number is not None:
            answer(number, error={"code": -32601, "message": "no such method"})
