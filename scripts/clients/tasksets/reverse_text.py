"""Words to be said backwards."""

from difflib import SequenceMatcher

import verifiers.v1 as vf

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")


class ReverseData(vf.TaskData):
    answer: str = ""


class ReverseTask(vf.Task[ReverseData]):
    @vf.reward
    async def likeness(self, trace) -> float:
        return SequenceMatcher(None, trace.last_reply, self.data.answer).ratio()

    @vf.reward(weight=0.5)
    async def exact(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply))


class ReverseText(vf.Taskset[ReverseTask, vf.TasksetConfig]):
    def load(self):
        for word in WORDS:
            data = ReverseData(prompt=word, system_prompt="Say the word backwards.", answer=word[::-1])
            yield ReverseTask(data, self.config.task)


__all__ = ["ReverseText"]
