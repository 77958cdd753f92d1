"""Tasks on which rollouts go wrong, each in its own way."""

import asyncio
import os
import signal

import verifiers.v1 as vf


class TroubleTask(vf.Task[vf.TaskData]):
    async def setup(self, trace, runtime) -> None:
        if self.data.name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.data.name == "slow":
            await asyncio.sleep(60)
        if self.data.name == "raises":
            raise KeyError("no such page")

    async def score(self, trace, runtime=None) -> None:
        if self.data.name not in ("unscored", "long"):
            trace.record_reward("given", 1.0)


class Troubles(vf.Taskset[TroubleTask, vf.TasksetConfig]):
    def load(self):
        for name in ("killed", "slow", "raises", "unscored", "long", "stopped"):
            prompt = "word " * 5000 if name == "long" else "say it"
            timeout = vf.TaskTimeout(agent=0.001) if name == "stopped" else vf.TaskTimeout()
            yield TroubleTask(vf.TaskData(name=name, prompt=prompt, timeout=timeout), self.config.task)


__all__ = ["Troubles"]
