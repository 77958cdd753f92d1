"""Runs clients (sides.py) against the endpoint, and compares what they saw with the recorded calls and rows.

python scripts/clients/check.py FOLDER [CHECK...]      # FOLDER: their environments, which scripts/foreign_clients makes
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from sides import CHECKS

from llmrl.endpoint import RecordingEndpoint
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine
from llmrl.testing import FakeEngine, tiny_model, tiny_tokenizer

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
AGENT = [CALL % ("add", '{"a": 2, "b": 2}'), CALL % ("transfer_to_helper", "{}"), "It is 4."]
DEADLINE_S = 300


def check(name: str, python: Path) -> str:
    """Runs one check; returns what was compared, in words. Raises AssertionError for what differs."""
    tokenizer = tiny_tokenizer()
    is_agent = name.startswith("agents")
    engine: Any = FakeEngine(AGENT, tokenizer=tokenizer, streams=True) if is_agent else tiny_engine(tokenizer)
    params = SamplingParams(max_new_tokens=64 if is_agent else 12)
    with RecordingEndpoint(engine, tokenizer, params=params, train="all") as endpoint:
        key = endpoint.begin()
        seen = run(name, python, endpoint.url, key)
        if name == "openenv-grade":
            return "graded tokens"
        calls = [call.turn for call in endpoint.rollout(key).calls]
        rows = endpoint.finish(key, 1.0)
    assert len(calls) == len(seen), f"{len(calls)} calls were recorded: the client saw {len(seen)}"
    for turn, saw in zip(calls, seen, strict=True):
        text = tokenizer.decode(turn.ids, skip_special_tokens=True)
        if "stop" in saw:  # which ends the text, and is in the ids
            text = text.partition(saw["stop"])[0]
        have = {"text": text, "ids": turn.ids.tolist(), "count": len(turn.ids)}
        for field in have.keys() & saw.keys():
            assert saw[field] == have[field], f"{field}: the client saw {saw[field]!r}: recorded {have[field]!r}"
        if "log_probs" in saw:
            torch.testing.assert_close(torch.tensor(saw["log_probs"]), turn.log_probs.float())
    ids, masks = rows.get(("tokens", "full"), as_list=True), rows.get(("masks", "all_assistant_mask"), as_list=True)
    trained = [token for row, mask in zip(ids, masks, strict=True) for token in row[mask].tolist()]
    kept = calls[:-2] + calls[-1:] if name == "openai" else calls  # of its two last answers (n=2) one is trained
    assert trained == [token for turn in kept for token in turn.ids.tolist()], "the rows train other ids"
    expected = 2 if is_agent else 1  # another agent has other instructions
    assert len(rows) == expected, f"{len(rows)} rows: expected {expected}"
    return f"{len(calls)} calls, {len(rows)} rows, {len(trained)} trained ids"


def tiny_engine(tokenizer: Any) -> TransformersEngine:
    ids = {"eos_token_ids": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return TransformersEngine(tiny_model(tokenizer), tokenizer=tokenizer, seed=0, **ids)


def run(name: str, python: Path, url: str, key: str) -> list[dict[str, Any]]:
    keys = {"OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key, "ANTHROPIC_BASE_URL": url, "OPENAI_BASE_URL": f"{url}/v1"}
    quiet = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # they would call home
    unset = ("PYTHONPATH", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
    env = {name: value for name, value in os.environ.items() if name not in unset} | keys | quiet
    command = [str(python), str(Path(__file__).with_name("sides.py")), name]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"the client failed:\n{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def main(folder: str, *names: str) -> int:
    failed = 0
    for name in names or CHECKS:
        python = Path(folder, "openenv" if name.startswith("openenv") else "agents", "bin", "python")
        try:
            print(f"{name}: {check(name, python)}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"{name}: FAILED: {error}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
