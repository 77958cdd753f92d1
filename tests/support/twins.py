"""An algorithm with a second model, which is trained beside the policy and kept in checkpoints; it reads a column."""

from typing import ClassVar

from llmrl.objectives import Metric
from llmrl.objectives.llm import Algorithm, GRPOLoss


class Twins(Algorithm):
    """The policy's loss has the KL to a second model in it, which itself learns from answers above its group's mean."""

    reads, without = ("answer",), ("grpo.scale", "grpo.multi_objective_aggregation")
    metrics: ClassVar = {
        name: Metric(f"twin/{name}", f"{name} of the second model", chart="Twin")
        for name in ("loss", "grad_norm", "lr")
    }

    def build(self, context):
        super().build(context)
        self.twin = context.actor.get_new_version(model=context.load_model(context.run.origin))
        self.twin_updater = context.make_updater(self.twin.scorer, context.config.optim)
        self.twin.scorer = self.twin_updater.scorer
        self.twin_loss = GRPOLoss(self.twin, self.grpo.model_copy(update={"kl": None}))
        self.reference = context.make_writer(self.twin.model, "ref_log_probs")

    def describe(self):
        return {"advantage": "1 above the mean of the group"}

    def group_advantages(self, rewards_NG):
        return (rewards_NG > rewards_NG.nanmean(1, keepdim=True)).double()

    def prepare(self, batches):
        answers = [answer for batch in batches if batch is not None for answer in batch.get("answer").tolist()]
        assert all(answer.isdecimal() for answer in answers)
        return super().prepare(batches)

    def train(self, batches, step):
        metrics = self.twin_updater.train(self.twin_loss, batches, step, family="twin")
        own = {metric.name for metric in self.metrics.values()}
        return {name: value for name, value in metrics.items() if name in own} | super().train(batches, step)

    def state_dict(self):
        return {"weights": self.twin.model.state_dict(), "optimizer": self.twin_updater.state_dict()}

    def load_state_dict(self, state):
        self.twin.model.load_state_dict(state["weights"])
        self.twin_updater.load_state_dict(state["optimizer"])
