"""The public names, at the paths where people look for them."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

PUBLIC = {
    "llmrl": "ChatEnv DPOLoss DatasetChatEnv GRPOLoss History LLMCollector LazyStackStorage MCAdvantage ReplayBuffer "
    "RewardFunction SFTLoss ToolTransform TransformersWrapper vLLMWrapper",
    "llmrl.errors": "LLMRLError ConfigError DataError TemplateError ShapeError MissingKeyError MissingDependencyError "
    "WeightSyncError RolloutError DeadlineError CheckpointError",
    "llmrl.data.specs": "TensorSpec Binary Bounded BoundedContinuous BoundedDiscrete Categorical Choice Composite "
    "MultiCategorical MultiOneHot NonTensor OneHot Stacked StackedComposite Unbounded UnboundedContinuous "
    "UnboundedDiscrete check_no_exclusive_keys consolidate_spec contains_lazy_spec BinaryDiscreteTensorSpec "
    "BoundedTensorSpec CompositeSpec DiscreteTensorSpec LazyStackedCompositeSpec LazyStackedTensorSpec "
    "MultiDiscreteTensorSpec MultiOneHotDiscreteTensorSpec NonTensorSpec OneHotDiscreteTensorSpec "
    "UnboundedContinuousTensorSpec UnboundedDiscreteTensorSpec",
    "llmrl.data": "Composite Unbounded Bounded Categorical NonTensor ReplayBuffer TensorDictReplayBuffer ListStorage "
    "LazyStackStorage LazyMemmapStorage LazyTensorStorage RandomSampler SamplerWithoutReplacement RoundRobinWriter "
    "History AdaptiveKLController ConstantKLController "
    "LLMData LLMInput LLMOutput PairwiseDataset PromptData PromptTensorDictTokenizer RewardData RolloutFromModel "
    "TensorDictTokenizer TokenizedDatasetLoader create_infinite_iterator get_dataloader BinaryToDecimal HashToInt "
    "MCTSForest QueryModule RandomProjectionHash SipHash TensorDictMap TensorMap Tree",
    "llmrl.collectors.utils": "split_trajectories",
    "llmrl.data.datasets": "AtariDQNExperienceReplay BaseDatasetExperienceReplay D4RLExperienceReplay "
    "GenDGRLExperienceReplay MinariExperienceReplay OpenMLExperienceReplay OpenXExperienceReplay "
    "RobosetExperienceReplay VD4RLExperienceReplay",
    "llmrl.data.replay_buffers": "ReplayBuffer TensorDictReplayBuffer ListStorage LazyStackStorage LazyTensorStorage "
    "LazyMemmapStorage TensorStorage RandomSampler "
    "SamplerWithoutReplacement RoundRobinWriter",
    "llmrl.data.replay_buffers.checkpointers": "FlatStorageCheckpointer H5StorageCheckpointer ListStorageCheckpointer "
    "NestedStorageCheckpointer StorageCheckpointerBase StorageEnsembleCheckpointer TensorStorageCheckpointer",
    "llmrl.data.postprocs": "DensifyReward MultiStep",
    "llmrl.data.ted": "Flat2TED H5Combine H5Split Nested2TED TED2Flat TED2Nested",
    "llmrl.envs.transforms.rb_transforms": "MultiStepTransform NextStateReconstructor",
    "llmrl.envs.transforms.crop": "RandomCropTensorDict",
    "llmrl.data.replay_buffers.samplers": "RandomSampler SamplerWithoutReplacement SliceSampler "
    "SliceSamplerWithoutReplacement PrioritizedSampler PrioritizedSliceSampler SamplerEnsemble",
    "llmrl.data.replay_buffers.storages": "ListStorage LazyStackStorage LazyTensorStorage LazyMemmapStorage "
    "TensorStorage StorageEnsemble",
    "llmrl.data.replay_buffers.writers": "RoundRobinWriter TensorDictRoundRobinWriter TensorDictMaxValueWriter "
    "ImmutableDatasetWriter WriterEnsemble",
    "llmrl.data.replay_buffers.prioritized": "PrioritizedReplayBuffer TensorDictPrioritizedReplayBuffer",
    "llmrl.data.replay_buffers.ensemble": "ReplayBufferEnsemble",
    "llmrl.data.replay_buffers.proxy": "BufferProxy",
    "llmrl.data.replay_buffers.ray_buffer": "RayReplayBuffer",
    "llmrl.data.replay_buffers.remote": "RemoteBuffer RemoteTensorDictReplayBuffer",
    "llmrl.data.llm": "ContentBase History add_chat_template TopKRewardSelector ConstantKLController "
    "AdaptiveKLController "
    "LLMData LLMInput LLMOutput PairwiseDataset PromptData PromptTensorDictTokenizer RewardData RolloutFromModel "
    "TensorDictTokenizer TokenizedDatasetLoader create_infinite_iterator get_dataloader",
    "llmrl.data.llm.chat": "History add_chat_template",
    "llmrl.modules.llm": "Renderer LLMWrapperBase TransformersWrapper vLLMWrapper ChatHistory Text Tokens LogProbs "
    "LLMOnDevice make_vllm_worker stateless_init_process_group vLLMWorker "
    "Masks",
    "llmrl.modules.llm.engines": "Engine TransformersEngine VLLMEngine AsyncVLLMEngine SamplingParams Generation "
    "StopReason",
    "llmrl.modules.llm.log_probs": "token_logprobs TokenScorer TokenScores",
    "llmrl.envs.libs.gym": "GymEnv GymWrapper",
    "llmrl.envs.transforms": "CatTensors Compose DoubleToFloat ExcludeTransform InitTracker ObservationNorm "
    "RenameTransform Resize RewardSum SelectTransform StepCounter TensorDictPrimer ToTensorImage Transform "
    "TransformedEnv",
    "llmrl.envs.utils": "RandomPolicy check_env_specs make_composite_from_td step_mdp",
    "llmrl.modules": "GRUModule LSTMModule",
    "llmrl.envs": "EnvBase GymEnv GymWrapper SerialEnv ParallelEnv Transform "
    "Compose TransformedEnv StepCounter check_env_specs step_mdp",
    "llmrl.envs.llm": "ChatEnv DatasetChatEnv GSM8KEnv GSM8KRewardParser GSM8KPrepareQuestion make_gsm8k_env "
    "MATHEnv MATHRewardParser CountdownEnv CountdownRewardParser IFEvalEnv IfEvalScorer IFEvalScoreData TaskEnv "
    "LLMEnv LLMHashingEnv MLGymWrapper make_mlgym",
    "llmrl.envs.llm.answers": "AnswerParser find_blocks extract_tags last_boxed code_block normalize_answer "
    "reference_answer",
    "llmrl.envs.llm.ifeval": "IFEvalEnv IfEvalScorer IFEvalScoreData Instructions evaluate",
    "llmrl.envs.llm.rewards": "JudgeReward RewardModelScorer CodeReward",
    "llmrl.envs.llm.tool_calls": "CallFormat ParsedCall AnyFormat HermesFormat LlamaFormat FunctionFormat TaggedFormat "
    "MistralFormat DeepSeekFormat HarmonyFormat PatternFormat PythonFence call_format format_of_template",
    "llmrl.envs.llm.transforms": "DataLoadingPrimer PolicyVersion LengthPenalty OverlongShaping MaskTruncated "
    "ToolTransform UserTurn tool_metrics PythonInterpreter MCPToolTransform BrowserTransform "
    "RewardFunction load_reward make_rewards RetrieveLogProb RetrieveKL KLComputation KLRewardTransform "
    "AddThinkingPrompt TemplateTransform Tokenizer as_nested_tensor as_padded_tensor",
    "llmrl.objectives": "LossModule",
    "llmrl.objectives.llm": "GRPOLoss GRPOLossOutput SFTLoss SFTLossOutput MCAdvantage GroupQuota "
    "StepCounts count_step",
    "llmrl.collectors": "DataCollectorBase SyncDataCollector MultiSyncDataCollector MultiaSyncDataCollector "
    "aSyncDataCollector RandomPolicy WeightUpdaterBase VanillaWeightUpdater MultiProcessedWeightUpdater "
    "RayWeightUpdater",
    "llmrl.collectors.distributed": "DistributedDataCollector DistributedSyncDataCollector RPCDataCollector "
    "RayCollector submitit_delayed_launcher DistributedWeightUpdater RPCWeightUpdater",
    "llmrl.collectors.llm": "LLMCollector RayLLMCollector vLLMUpdater",
    "llmrl.collectors.llm.weight_update": "vLLMUpdater VLLMWeightSyncScheme VLLMWeightSender VLLMWeightReceiver",
    "llmrl.weight_update": "publish WeightTarget ModelTarget WeightGroups LazyWeight SyncProbe weight_groups "
    "merged_weights adapter_folder WeightSyncScheme MultiProcessWeightSyncScheme SharedMemWeightSyncScheme "
    "NoWeightSyncScheme WeightSender WeightReceiver TransportBackend MPTransport SharedMemTransport "
    "RayWeightSyncScheme RayModuleTransformScheme RPCWeightSyncScheme DistributedWeightSyncScheme "
    "RayModuleTransformSender RayModuleTransformReceiver RayTransport RayActorTransport RPCTransport "
    "DistributedTransport",
    "llmrl.modules.llm.backends.vllm": "LLMOnDevice make_vllm_worker stateless_init_process_group vLLMWorker",
    "llmrl.tools": "Tool FunctionTool ToolCall ToolResult ToolError ToolTimeout ToolRunner tool as_tool load_tool",
    "llmrl.tools.sandbox": "Sandbox InterpreterPool Execution Limits",
    "llmrl.testing": "tiny_tokenizer tiny_model ScriptedPolicy FakeEngine",
    "llmrl.loading": "load_object load_function",
    "llmrl.run.config": "load_config dump_config find_recipe Loaded",
    "llmrl.run.metrics": "MetricsLog read_metrics",
    "llmrl.run.rollout_log": "RolloutLog Rollout read_rollouts",
    "llmrl.run.run_dir": "RunDir",
    "llmrl.run.checkpoint": "CheckpointStore InterruptGuard latest_checkpoint",
    "llmrl.run.console": "StepDisplay print_plan print_conversations print_summary",
}
NAMES = [(module, name) for module, names in PUBLIC.items() for name in names.split()]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])
def test_a_public_name_imports_from_its_path_is_exported_and_explained(module, name):
    home = importlib.import_module(module)
    value = getattr(home, name)
    assert name in home.__all__
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert own, f"{name} needs a docstring of its own"
    assert value.__module__.startswith("llmrl.")


@pytest.mark.parametrize("module", PUBLIC)
def test_a_package_lists_its_names_and_no_module_in_it_has_the_name_of_one(module):
    home = importlib.import_module(module)
    assert set(home.__all__) <= set(dir(home))
    inside = {found.name for found in pkgutil.iter_modules(getattr(home, "__path__", []))}
    assert inside & set(home.__all__) <= {"publish"}  # a name that is imported at once


@pytest.mark.parametrize("module", PUBLIC)
def test_a_package_says_what_it_is_and_exports_only_what_it_has(module):
    home = importlib.import_module(module)
    assert home.__doc__
    assert sorted(set(home.__all__)) == sorted(home.__all__)
    assert [name for name in home.__all__ if not hasattr(home, name)] == []


SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.parametrize("script", sorted(SCRIPTS.rglob("*.py")), ids=lambda path: path.name)
def test_a_script_imports_what_there_is(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmrl"):
            home = importlib.import_module(node.module)
            missing = [name.name for name in node.names if not hasattr(home, name.name)]
            assert missing == [], f"line {node.lineno}, from {node.module}"
