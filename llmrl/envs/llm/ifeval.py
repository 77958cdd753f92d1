"""The documented import path of IFEval; the code is in `llmrl.envs.llm.tasks`."""

from llmrl.envs.llm.tasks.ifeval import IFEvalEnv, IFEvalScoreData, IfEvalScorer, Instructions, Verdict, evaluate
from llmrl.envs.llm.tasks.ifeval_checks import CHECKS

__all__ = ["CHECKS", "IFEvalEnv", "IFEvalScoreData", "IfEvalScorer", "Instructions", "Verdict", "evaluate"]
