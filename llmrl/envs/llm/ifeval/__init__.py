"""IFEval: prompts with instructions that a program can check. `checks` has the 25 instructions."""

from llmrl.envs.llm.ifeval.checks import CHECKS
from llmrl.envs.llm.ifeval.env import IFEvalEnv
from llmrl.envs.llm.ifeval.evaluation import Instructions, Verdict, evaluate
from llmrl.envs.llm.ifeval.scorer import IFEvalScoreData, IfEvalScorer

__all__ = ["CHECKS", "IFEvalEnv", "IFEvalScoreData", "IfEvalScorer", "Instructions", "Verdict", "evaluate"]
