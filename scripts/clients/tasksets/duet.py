"""Two agents: a writer, and a critic that is not trained unless it is asked for."""

import asyncio

import verifiers.v1 as vf


class DuetConfig(vf.EnvConfig):
    writer: vf.AgentConfig = vf.AgentConfig()
    twin: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()
    max_concurrent_agents: int | None = None


class Duet(vf.Env[DuetConfig]):
    async def setup(self, agents):
        agents.critic.trainable = False

    async def run(self, task, agents):
        said = await asyncio.gather(agents.writer.run(task), agents.twin.run(task))  # two that ask the same
        await agents.critic.run(task.with_data(prompt=f"Is this good? {said[0].last_reply}"))

    async def finalize(self, task, episode):
        for number, trace in enumerate(sorted(episode.traces, key=lambda trace: trace.agent.name)):
            trace.record_reward("place", number)


class DuetTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        for word in ("sea", "sky"):
            yield vf.Task(vf.TaskData(prompt=f"Write about the {word}."), self.config.task)


__all__ = ["Duet", "DuetTaskset"]
