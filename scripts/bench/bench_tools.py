"""Times tool calls: the overhead of the runner and a warm sandbox, and the concurrency of calls.

    python scripts/bench/bench_tools.py [--conversations 64] [--repeats 5]

The tool itself is the floor: the same code by ``exec`` in this process, the same function called directly. The rest is
the cost of a thread, two pipes and another process for each call. Starting interpreters is not included: in a run they
start while the model generates.
"""

from __future__ import annotations

import time

from table import Row, benchmark
from timing import best

from llmrl.tools import ToolCall, ToolRunner, load_tool
from llmrl.tools.calculator import calculator
from llmrl.tools.python import PythonTool

CODE = "total = 0\nfor n in range(1000):\n    total += n * n\nprint(total)"
EXPRESSION = "(1234 * 5678 + 91011) / 12"
ADVERSARIAL = "45**67**89"


def calls(name: str, count: int, **arguments: str) -> list[ToolCall]:
    return [ToolCall(name, dict(arguments), id=f"call_{n}", conversation=n) for n in range(count)]


def run(runner: ToolRunner, asked: list[ToolCall]) -> None:
    for result in runner.run(asked):
        assert result.status == "ok", result.content


def main(conversations: int, repeats: int) -> list[Row]:
    count, rows = conversations, []

    python = PythonTool(max_interpreters=max(64, count), spare=count)
    with ToolRunner([python, load_tool("calculator")], timeout_s=60, max_concurrency=max(64, count)) as runner:
        started = time.perf_counter()
        deadline = time.monotonic() + 300
        python.execute("", deadline=deadline)  # the first call starts the spare interpreters
        while len(python.pool._ready) < count:
            time.sleep(0.01)
        for session in list(python.pool._ready):
            session.wait_ready(deadline)
        print(f"{count} interpreters started in {1e3 * (time.perf_counter() - started):.0f} ms")

        # First calls of new conversations, in interpreters from the pool; then calls that reuse the conversation's own.
        started = time.perf_counter()
        run(runner, calls("python", count, code=CODE))
        first = 1e3 * (time.perf_counter() - started)
        one = calls("python", 1, code=CODE)
        many = calls("python", count, code=CODE)
        quiet = {"print": lambda value: None}
        batch, single, floor = best(
            lambda: run(runner, many), lambda: run(runner, one), lambda: exec(CODE, dict(quiet)), repeats=repeats
        )
        print(f"python, {count} calls at once: first {first:.1f} ms, later {batch:.1f} ms; floor {floor:.2f} ms each")
        rows.append(Row("python, one call alone: beyond the code", single - floor, 15, "ms"))
        each = f"calls at once, each / {count}"
        rows.append(Row(f"python, {count} {each}: beyond the code", batch / count - floor, 15, "ms"))
        rows.append(Row(f"python, {count} first {each}: the same", first / count - floor, 15, "ms"))

        sleep = "import time\ntime.sleep(1)"
        eight = calls("python", 8, code=sleep)
        run(runner, calls("python", 8, code="pass"))
        (seconds,) = best(lambda: run(runner, eight), repeats=2)
        rows.append(Row("python, 8 blocks of 1 s at once", seconds / 1e3, 1.5, "s"))

        sums = calls("calculator", count, expression=EXPRESSION)
        through, direct = best(
            lambda: run(runner, sums), lambda: [calculator(EXPRESSION) for _ in range(count)], repeats=repeats
        )
        added = (through - direct) / count
        rows.append(Row(f"calculator, {count} calls at once, each / {count}: beyond the tool", added, 1, "ms"))
        bad = ToolCall("calculator", {"expression": ADVERSARIAL}, id="call_0")
        (refused,) = best(lambda: runner.run([bad]), repeats=repeats)
        rows.append(Row(f"calculator, {ADVERSARIAL}: until it is refused", refused, 10, "ms"))

    return rows


if __name__ == "__main__":
    benchmark(main, __doc__, conversations=64, repeats=5)
