"""Pairs and prompts of files become memory-mapped rows, once; what changes is tokenised again."""

import json
import multiprocessing
import shutil
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict

from llmrl.data import LLMData, LLMInput, PairwiseDataset, PromptData, TensorDictTokenizer, TokenizedDatasetLoader
from llmrl.data.llm.rlhf import PromptTensorDictTokenizer, create_infinite_iterator, get_dataloader
from llmrl.data.llm.rlhf.cache import open_or_build
from llmrl.errors import ConfigError, DataError, DeadlineError
from llmrl.testing import tiny_tokenizer
from llmrl.train.data.preferences import tokenize_pairs
from llmrl.train.settings.preferences import RewardConfig
from tests.support.processes import wait_until

datasets = pytest.importorskip("datasets")

PAIRS = [
    {"prompt": f"What is {i} + {i}?", "chosen": f"It is {2 * i}.", "rejected": f"It is {2 * i + 1}."} for i in range(10)
]
TEA, RAIN = "POST: tea was cold. TL;DR:", "POST: rain. TL;DR:"


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture
def options(tmp_path):
    """Arguments for the pairs of a file."""
    return {
        "dataset_name": write(tmp_path / "pairs.jsonl", PAIRS),
        "tokenizer": tiny_tokenizer(),
        "max_length": 40,
        "root_dir": tmp_path / "cache",
    }


def real(data, row: int) -> list[int]:
    return data.input_ids[row][data.attention_mask[row].bool()].tolist()


def answer(data: PromptData, row: int, tokenizer) -> str:
    return tokenizer.decode(data.labels[row][data.labels[row] != -100])


def folders(options) -> list[str]:
    return sorted(path.name for path in options["root_dir"].iterdir() if path.is_dir())


def test_pairs_are_the_conversations_that_reward_models_are_trained_on(options):
    pairs = PairwiseDataset.from_dataset("train", **options)
    config = RewardConfig(model="tiny", data={"path": str(options["dataset_name"])}, max_length=40)
    trained = tokenize_pairs(config, options["tokenizer"])
    for row, (ids, cut) in enumerate(zip(trained.ids, trained.num_chosen, strict=True)):
        assert real(pairs.chosen_data, row) == ids[:cut].tolist()
        assert real(pairs.rejected_data, row) == ids[cut:].tolist()
    assert isinstance(pairs.chosen_data.input_ids, MemoryMappedTensor)
    assert (pairs.shape, pairs.rejected_data.attention_mask.shape) == ((10,), (10, 40))


def test_prompts_end_where_the_answer_begins_and_labels_are_the_answer(options):
    data, tokenizer = PromptData.from_dataset("train", **options), options["tokenizer"]
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": PAIRS[3]["prompt"]}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert data.prompt_rindex[3] == len(asked) - 1
    prompt = data.mask_label(pad_token_id=7)
    assert real(prompt, 3) == asked  # the last token of the prompt included
    assert set(prompt.input_ids[3, len(asked) :].tolist()) == {7}
    assert (prompt.shape, prompt.labels) == ((10,), None)
    assert answer(data, 3, tokenizer) == "It is 6.<|im_end|>"
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}]
    write(options["dataset_name"], rows)
    assert answer(PromptData.from_dataset("train", **options), 0, tokenizer) == "Hello<|im_end|>"


def test_without_a_template_rows_are_the_texts_and_end(tmp_path, options):
    rows = [{"prompt": TEA, "label": " cold tea"}, {"prompt": RAIN, "label": "wet"}]
    tokenizer = options["tokenizer"]
    tokenizer.chat_template = None
    options["dataset_name"] = write(tmp_path / "tldr.jsonl", rows)
    data = PromptData.from_dataset("train", **options)
    end = tokenizer.eos_token
    assert tokenizer.decode(real(data, 0)) == TEA + " cold tea" + end
    assert tokenizer.decode(real(data, 1)) == RAIN + "\nwet" + end  # a line break where nothing is between
    assert answer(data, 1, tokenizer) == "wet" + end
    assert tokenizer.decode(real(data.mask_label(0), 0)) == TEA
    rows = [{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "completion": "a"}]
    options["dataset_name"] = write(tmp_path / "chat.jsonl", rows)
    with pytest.raises(DataError, match=r"chat.jsonl:1 is a .* \(system, user, assistant\).*tokenizer that has one"):
        PromptData.from_dataset("train", **options)


def test_splits_of_a_file_are_disjoint_and_those_of_a_folder_are_its_files(tmp_path, options):
    parts = [PromptData.from_dataset(split, **options, valid_size=3) for split in ("train", "valid")]
    rows = [tuple(part.input_ids[i].tolist()) for part in parts for i in range(len(part))]
    assert [len(part) for part in parts] == [7, 3]
    assert len(set(rows)) == 10
    with pytest.raises(DataError, match=r"has no splits: got split='valid'.*valid_size=N"):
        PromptData.from_dataset("valid", **options)
    with pytest.raises(DataError, match=r"valid_size .*got 10 of the 10"):
        PromptData.from_dataset("train", **options, valid_size=10)
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", PAIRS[:4])
    write(folder / "validation.jsonl", PAIRS[4:6])
    options |= {"dataset_name": folder}
    assert len(PromptData.from_dataset("train", **options)) == 4
    assert len(PromptData.from_dataset("valid", **options)) == 2, "as the hub reads names of files"
    with pytest.raises(DataError, match=r"split 'tests'.*train.jsonl, validation.jsonl"):
        PromptData.from_dataset("tests", **options)


def test_rows_are_tokenised_once_and_again_when_something_changes(options):
    first = PairwiseDataset.from_dataset("train", **options)
    written = {path: path.stat().st_mtime_ns for path in options["root_dir"].rglob("*.memmap")}
    again = PairwiseDataset.from_dataset("train", **options | {"tokenizer": tiny_tokenizer()})
    assert torch.equal(first.chosen_data.input_ids, again.chosen_data.input_ids)
    assert written == {path: path.stat().st_mtime_ns for path in options["root_dir"].rglob("*.memmap")}

    options["tokenizer"](["a", "b c"], padding="max_length", max_length=9, truncation=True)  # leaves it as it is
    PairwiseDataset.from_dataset("train", **options)
    assert len(folders(options)) == 1
    other = tiny_tokenizer(vocab_size=400)
    changed = PairwiseDataset.from_dataset("train", **options | {"tokenizer": other})
    assert other.decode(real(changed.chosen_data, 2)).count("It is 4.") == 1
    PairwiseDataset.from_dataset("train", **options, chosen_column="rejected", rejected_column="chosen")
    assert len(folders(options)) == 3
    write(options["dataset_name"], PAIRS[:5])
    assert len(PairwiseDataset.from_dataset("train", **options)) == 5


def test_files_of_another_recipe_or_cut_short_are_built_again(options):
    first = PairwiseDataset.from_dataset("train", **options).chosen_data.input_ids.clone()
    (folder,) = (options["root_dir"] / name for name in folders(options))
    column = next(folder.rglob("chosen_data.input_ids.memmap"))
    column.write_bytes(column.read_bytes()[:-8])
    assert torch.equal(PairwiseDataset.from_dataset("train", **options).chosen_data.input_ids, first)
    PairwiseDataset.from_dataset("train", **options | {"tokenizer": tiny_tokenizer(vocab_size=400)})
    other = next(options["root_dir"] / name for name in folders(options) if name != folder.name)
    shutil.rmtree(folder)
    shutil.copytree(other, folder)  # tokenised by another tokenizer
    assert torch.equal(PairwiseDataset.from_dataset("train", **options).chosen_data.input_ids, first)


BAD = [
    ({**PAIRS[1], "chosen": "same", "rejected": "same"}, "answers of a pair must differ: in .*bad.jsonl:2"),
    ({**PAIRS[1], "chosen": ""}, "'chosen' must end with an answer of the assistant: .*bad.jsonl:2"),
    (
        {**PAIRS[1], "rejected": None},
        r"column 'rejected' is empty in .*bad.jsonl:2: its columns are prompt, chosen, rejected\.$",
    ),
    ({"prompt": "p", "chosen": "c"}, r"column 'rejected' is missing in .*bad.jsonl:2"),
    ({**PAIRS[1], "prompt": "word " * 60}, "max_length = 40 tokens.*bad.jsonl:2 has .* before the answer"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_row_that_cannot_be_used_is_named_or_left_out_and_counted(tmp_path, options, row, message):
    options["dataset_name"] = write(tmp_path / "bad.jsonl", [PAIRS[0], row, *PAIRS[2:]])
    with pytest.raises(DataError, match=message):
        PairwiseDataset.from_dataset("train", **options)
    assert folders(options) == [] or not any(p.suffix == ".memmap" for p in options["root_dir"].rglob("*"))
    for _ in range(2):  # also where it was tokenised before
        with pytest.warns(UserWarning, match="1 of 10 rows are left out") as caught:
            kept = PairwiseDataset.from_dataset("train", **options, unusable="drop")
        assert caught[0].filename == __file__
    assert len(kept) == 9
    options["dataset_name"] = write(tmp_path / "only.jsonl", [row])
    with pytest.raises(DataError, match=r"no row is left.*only.jsonl:1"):
        PairwiseDataset.from_dataset("train", **options, unusable="drop")


def test_broken_files_and_unknown_names_are_explained(tmp_path, options):
    options["dataset_name"].write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "cho')
    for change, message in (
        ({}, r"pairs.jsonl, line 2 must be JSON"),
        ({"dataset_name": tmp_path / "pair.jsonl"}, r"must exist: .*pair.jsonl.*Did you mean 'pairs.jsonl'"),
        ({"dataset_name": "CarperAI/openai_summarize_tdlr"}, r"hub .*mean 'CarperAI/openai_summarize_tldr'"),
        ({"tokenizer": "no/such"}, r"'no/such' cannot be loaded; pass tokenizer="),
    ):
        with pytest.raises(DataError, match=message):
            PairwiseDataset.from_dataset("train", **options | change)
    with pytest.raises(ConfigError, match="num_workers has no effect"):
        PairwiseDataset.from_dataset("train", **options, num_workers=4)
    write(options["dataset_name"], PAIRS)
    with pytest.raises(TypeError, match="no_column"):
        PairwiseDataset.from_dataset("train", **options, no_column="a")


def start(root: Path, seconds: float):
    """A process that builds 2048 rows, which takes so long."""
    context = multiprocessing.get_context("fork")
    said = context.Queue()

    def blocks():
        said.put("building")
        time.sleep(seconds)
        for start in range(4):
            yield 512, {"a": torch.arange(512) + 512 * start}

    process = context.Process(target=lambda: said.put(len(open_or_build(root, "x", {"of": 1}, blocks))))
    process.start()
    return process, said


def never():
    raise AssertionError("it must not be built here")


def test_one_of_two_processes_builds(tmp_path):
    started = [start(tmp_path, 0.3) for _ in range(2)]
    words = []

    def both_have_opened():
        words.extend(said.get(timeout=60) for _, said in started if not said.empty())
        return words.count(2048) == 2

    wait_until(both_have_opened)
    assert words.count("building") == 1
    for process, _ in started:
        process.join(60)
    assert open_or_build(tmp_path, "x", {"of": 1}, never)["a"].tolist() == list(range(2048))


def test_a_build_that_is_killed_is_begun_again_and_one_that_hangs_is_named(tmp_path):
    process, said = start(tmp_path, 600)
    assert said.get(timeout=60) == "building"  # it holds the lock
    with pytest.raises(DeadlineError, match="another process builds it"):
        open_or_build(tmp_path, "x", {"of": 1}, never, timeout_s=0.2)
    process.kill()
    process.join(60)
    rebuilt = open_or_build(tmp_path, "x", {"of": 1}, lambda: [(2, {"a": torch.tensor([4, 5])})])
    assert rebuilt["a"].tolist() == [4, 5]


def test_tokenizers_do_what_the_tokenizer_does():
    tokenizer, texts = tiny_tokenizer(), ["I am a little worried", "2 + 2?"]
    for cut in ({"max_length": 4}, {"max_length": 30}):
        expected = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt", **cut)
        found = TensorDictTokenizer(tokenizer, **cut)({"text": texts})
        assert torch.equal(found["input_ids"], expected["input_ids"])
        assert torch.equal(found["attention_mask"], expected["attention_mask"])
    assert TensorDictTokenizer(tokenizer, 12)({"text": texts[0]}).shape == ()
    lists = TensorDictTokenizer(tokenizer, 30, padding=False, return_tensordict=False)({"text": texts})
    assert lists["input_ids"] == tokenizer(texts)["input_ids"]
    assert TensorDictTokenizer(tokenizer, 30)({"text": []})["input_ids"].shape == (0, 30)
    with pytest.raises(DataError, match="column 'text' must hold text: row 2 has 7"):
        TensorDictTokenizer(tokenizer, 4)({"text": ["a", 7]})
    with pytest.raises(ConfigError, match="different lengths need padding"):
        TensorDictTokenizer(tokenizer, 30, padding=False)({"text": texts})
    tokenizer.pad_token = None
    assert TensorDictTokenizer(tokenizer, 30)({"text": texts})["input_ids"][0, -1] == tokenizer.eos_token_id
    assert tokenizer.pad_token is None


def keep_three(dataset):
    return dataset.select(range(3))


def test_a_loader_applies_the_hook_once_and_keeps_any_columns(tmp_path, options):
    class Counting(PromptTensorDictTokenizer):
        calls = 0

        def __call__(self, sample):
            Counting.calls += 1
            return super().__call__(sample)

    rows = [{**row, "label": " 4"} for row in PAIRS]
    arguments = ("train", 30, write(tmp_path / "labels.jsonl", rows), Counting, keep_three, options["root_dir"])
    for _ in range(2):
        loaded = TokenizedDatasetLoader(*arguments, tokenizer=options["tokenizer"]).load()
    assert (Counting.calls, loaded.shape) == (1, (3,))
    assert set(loaded.keys()) == {"input_ids", "attention_mask", "prompt_rindex", "valid_sample"}
    assert loaded["valid_sample"].dtype == torch.bool
    del options["max_length"]
    with pytest.raises(DataError, match="column 'label' is missing"):
        TokenizedDatasetLoader("train", 30, tokenizer_fn=Counting, **options).load()


def test_columns_become_a_memory_mapped_tensordict_without_the_masked_rows(tmp_path):
    columns = {"ids": [[1, 2], [3, 4], [5, 6]], "score": [0.5, 1.0, 1.5], "valid": [True, False, True]}
    write = TokenizedDatasetLoader.dataset_to_tensordict
    made = write(datasets.Dataset.from_dict(columns), tmp_path / "a", ("some", "place"), valid_mask_key="valid")
    assert (made["some", "place"].batch_size, made.is_memmap()) == ((2,), True)
    read = TensorDict.load_memmap(tmp_path / "a")["some", "place"]
    assert (read["ids"].tolist(), read["score"].tolist()) == ([[1, 2], [5, 6]], [0.5, 1.5])
    nested = TensorDict({"x": {"ids": torch.ones(2, 3)}, "rest": torch.zeros(2)}, batch_size=[2])
    made = write(nested, tmp_path / "b", features=[("x", "ids")], batch_dims=2)
    assert (list(made.keys(True, True)), made.batch_size) == ([("x", "ids")], (2, 3))
    with pytest.raises(DataError, match="column 'text' must be numbers of one shape"):
        write(datasets.Dataset.from_dict({"text": ["a", "b"]}), tmp_path / "c")


def test_batches_hold_every_row_once_and_the_last_one_what_is_left(options):
    del options["max_length"]
    loader = get_dataloader(4, 40, PairwiseDataset, "cpu", infinite=False, **options)
    for _ in range(2):
        batches = list(loader)
        assert [type(batch) for batch in batches] == [PairwiseDataset] * 3
        assert [len(batch) for batch in batches] == [4, 4, 2]
        rows = {tuple(ids) for batch in batches for ids in batch.chosen_data.input_ids.tolist()}
        assert len(rows) == 10
    whole = PairwiseDataset.from_dataset("train", max_length=40, **options)
    batches[0].chosen_data.input_ids.zero_()  # a batch is a copy
    assert whole.chosen_data.input_ids.ne(0).any(-1).all()
    endless = get_dataloader(4, 40, PromptData, torch.device("cpu"), prefetch=2, **options)
    assert [len(batch) for batch in islice(endless, 5)] == [4, 4, 2, 4, 4]


def test_containers_index_their_lists_by_row():
    """Regression: a value too many, or a field that was given twice, was dropped without an error."""
    data = LLMData(tokens=torch.zeros(2, 3), text=["a", "b"], token_list=[[1], [2, 3]], batch_size=[2])
    assert (data[1].text, list(data[1].token_list), data.logits) == ("b", [2, 3], None)
    assert torch.cat([data, data])[2:].text == ["a", "b"]
    with pytest.raises(TypeError, match="5 positional arguments but 6"):
        LLMInput(torch.zeros(2, 3), None, None, None, "too many", batch_size=[2])
    with pytest.raises(ValueError, match="tokens is already set"):
        LLMInput(torch.zeros(2, 3), tokens=torch.zeros(2, 3), batch_size=[2])


def test_a_saved_dataset_is_read_by_its_splits(tmp_path, options):
    import datasets

    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(PAIRS[:6])})
    saved.save_to_disk(str(tmp_path / "saved"))
    options |= {"dataset_name": tmp_path / "saved"}
    assert len(PairwiseDataset.from_dataset("train", **options, from_disk=True)) == 6
    with pytest.raises(DataError, match=r"must have the split 'tain'.*Did you mean 'train'"):
        PairwiseDataset.from_dataset("tain", **options, from_disk=True)
    assert len(PairwiseDataset.from_dataset("train", **options)) == 6, "also without from_disk"


def test_a_full_disk_leaves_nothing(tmp_path, largest_file):
    message = r"tokenised rows cannot be written: .*root_dir chooses another disk"
    with largest_file(4096), pytest.raises(DataError, match=message):
        open_or_build(tmp_path, "x", {"of": 1}, lambda: [(1024, {"a": torch.arange(1024)})])
    assert list(tmp_path.rglob("*.memmap")) == []


def test_an_infinite_iterator_raises_where_a_pass_is_empty():
    with pytest.raises(DataError, match="pass 1 did not: it is empty"):
        next(create_infinite_iterator([]))
    with pytest.raises(DataError, match="pass 2 did not: it gives one pass only"):
        list(islice(create_infinite_iterator(i for i in range(2)), 3))
