"""A task whose answer only a tool knows."""

import verifiers.v1 as vf


class Secrets(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def look_up(self, name: str) -> str:
        """The number of that name."""
        return {"alpha": "4"}.get(name, "unknown")


class ToolTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def found(self, trace) -> float:
        return float("4" in trace.last_reply and len(trace.tool_messages) == 1)


class EchoTool(vf.Taskset[ToolTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Secrets(vf.SharedToolsetConfig())]  # one server for all tasks

    def load(self):
        yield ToolTask(vf.TaskData(prompt="What is alpha?"), self.config.task)


__all__ = ["EchoTool"]

if __name__ == "__main__":  # the server of the tools runs this module
    Secrets.run()
