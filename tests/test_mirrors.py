"""Settings, plan, metrics and rollouts in the files of the dashboards' own libraries."""

import json
from pathlib import Path

import pytest

from llmrl.run.masking import masked, masked_arguments, masked_text
from llmrl.run.metrics import MetricsLog
from llmrl.run.rollout_log import Rollout
from tests.support.processes import wait_until

SERVER = {"command": "x", "env": {"NAME": "SECRET1"}, "args": ["--api-key", "SECRET2", "--token=SECRET3"]}
WEB = {"url": "http://me:SECRET4@host/?api_key=SECRET5", "headers": {"X-Auth": "SECRET6"}, "password": "SECRET7"}
CONFIG = {"steps": 2, "optim": {"lr": 1e-4}, "env": {"name": "sums", "tools": [{"mcp": {"a": SERVER, "b": WEB}}]}}
PLAN = [("model", "a tiny one"), ("batch", "2 prompts"), ("judge", "http://me:SECRET8@host")]
HOSTILE = "<script>alert(1)</script>"


def write(folder, name):
    rollouts = [Rollout(f"p{n}", HOSTILE, float(n), 0.0, "eos", version=0, tokens=3) for n in range(40)]
    with MetricsLog(folder, mirrors=[name], config=CONFIG, plan=PLAN) as log:
        log.log(1, {"policy/loss": 0.5, "reward/mean": 0.25})
        log.log_rollouts(1, [*rollouts, Rollout("failed", "", None, None, "eos", version=0, tokens=0)])
        log.log(2, {"policy/loss": 0.25})
        log.log_rollouts(2, rollouts)


@pytest.mark.parametrize(
    "shown",
    [
        masked(CONFIG),
        masked_arguments([f"env={json.dumps(CONFIG['env'])}"]),
        masked_arguments(["x.yaml", "--token", "SECRET"]),
        masked_arguments(["env.rewards=[{judge: {api_key: SECRET}"]),  # no YAML
        masked({"options": {"credentials": {"user": "SECRET"}}}),
        masked_arguments([f"env.tools={json.dumps(CONFIG['env']['tools'])}"]),
        masked_text(f"must be text: got { ({'api_key': 'SECRET'})!r}, http://me:SECRET@host, hf_SECRETSECRET"),
        masked_text("api_key='SECRET' Authorization: Bearer SECRETSECRET"),
    ],
)
def test_secrets_of_settings_are_replaced_and_the_rest_is_shown(shown):
    assert "SECRET" not in str(shown)
    assert "***" in str(shown)
    kept = {"env": {"name": "sums", "rewards": [{"answer_key": "gold"}]}, "judge": {"api_key_env": "MY_KEY"}, "n": 3}
    assert masked(kept) == kept
    for name in ["key", "api_key", "APIKEY", "apiKey", "mykey", "commonkey", "x-api-key", "hftoken", "PGPASSWORD"]:
        assert masked({name: "a"}) == {name: "***"}, name
    for name in ["monkey", "Donkey", "my_turkey", "answer_key", "data_key", "keyword"]:
        assert masked({name: "a"}) == {name: "a"}
    assert masked_text("the key: 'a', token=3, max_tokens=5") == "the key: 'a', token=3, max_tokens=5"


def test_tensorboard_has_the_scalars_and_the_texts(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("policy/loss")] == [(1, 0.5), (2, 0.25)]

    def texts(tag):
        return [event.tensor_proto.string_val[0].decode() for event in events.Tensors(f"{tag}/text_summary")]

    assert '"lr": 0.0001' in texts("settings")[0]
    assert "SECRET" not in texts("settings")[0] + texts("plan")[0]
    assert "a tiny one" in texts("plan")[0]
    (rollouts,) = texts("rollouts")
    assert rollouts.count(HOSTILE) == 15, "16 rows, one of them failed"
    assert all(line.startswith("    ") for line in rollouts.splitlines()), "code, which Markdown leaves as it is"


@pytest.mark.slow
def test_mlflow_has_the_run_under_its_name_also_after_a_resumption(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write(tmp_path / "mine", "mlflow")
    with MetricsLog(tmp_path / "mine", mirrors=["mlflow"], resume_step=2) as log:
        log.log(3, {"eval/sums/pass@2": 1.0})
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mine/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("llmrl").experiment_id])
    assert run.info.run_name == "mine"
    assert [metric.value for metric in client.get_metric_history(run.info.run_id, "policy/loss")] == [0.5, 0.25]
    assert run.data.metrics["eval/sums/pass_2"] == 1.0
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"settings.json", "plan.txt", "rollouts"}
    (file,) = client.list_artifacts(run.info.run_id, "rollouts")
    lines = Path(client.download_artifacts(run.info.run_id, file.path, str(tmp_path))).read_text().splitlines()
    assert {json.loads(line)["prompt"] for line in lines} >= {"p39", "failed"}, "the best and the worst"


@pytest.mark.slow
def test_wandb_has_the_settings_and_a_table_of_rollouts(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write(tmp_path / "mine", "wandb")
    (folder,) = (tmp_path / "mine" / "wandb").glob("offline-run-*-mine")
    (table,) = folder.glob("files/media/table/rollouts_*.json")
    found = json.loads(table.read_text())
    assert found["columns"][:3] == ["step", "prompt", "completion"]
    assert len(found["data"]) == 16
    record = folder / "run-mine.wandb"
    wait_until(lambda: b"policy/loss" in record.read_bytes())  # written by a process of the library
    assert b"a tiny one" in record.read_bytes(), "the plan"
