"""GLUE's rows, the order of labels by name, features; and every way in which data can be wrong."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from glue_data import VOCABULARY, rows_of, write_glue, write_vocabulary
from transformers import AutoTokenizer, BertConfig

from collabify.data.glue import TASKS, check_labels, encode, find_tasks, load_task
from collabify.data.labels import label_order, ordered_by_name
from collabify.data.splits import sample
from collabify.errors import CheckpointError, LabelError, OptionError


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    write_vocabulary(tmp_path / "tokenizer")
    return AutoTokenizer.from_pretrained(tmp_path / "tokenizer")


def config(names: tuple[str, ...] | list[str], **options: Any) -> Any:
    return BertConfig(
        id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}, **options
    )


def test_the_nine_tasks_are_those_of_glue() -> None:
    assert list(TASKS) == ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]
    assert [task.num_labels for task in TASKS.values()] == [2, 2, 2, 1, 2, 3, 2, 2, 2]
    assert TASKS["rte"].label_names == ("entailment", "not_entailment")
    assert TASKS["wnli"].label_names == ("not_entailment", "entailment")


def test_rows_are_read_from_a_folder(tmp_path: Path) -> None:
    data = write_glue(tmp_path, {"rte": {"validation": rows_of("rte", [0, 1, 1])}})
    rows = load_task("rte", data)
    assert list(rows["label"]) == [0, 1, 1]
    assert rows["sentence1"][1].startswith("one a")


def test_mnli_is_read_from_its_matched_split(tmp_path: Path) -> None:
    splits = {
        "validation_matched": rows_of("mnli", [2, 0]),
        "validation_mismatched": rows_of("mnli", [1]),
    }
    data = write_glue(tmp_path, {"mnli": splits})
    assert list(load_task("mnli", data)["label"]) == [2, 0]
    assert list(load_task("mnli", data, "validation_mismatched")["label"]) == [1]


def test_labels_in_another_order_are_put_into_the_tasks(tmp_path: Path) -> None:
    swapped = {"rte": ("Not-Entailment", "ENTAILMENT")}
    data = write_glue(tmp_path, {"rte": {"validation": rows_of("rte", [0, 1, 1])}}, swapped)
    assert list(load_task("rte", data)["label"]) == [1, 0, 0]


@pytest.mark.parametrize(
    ("task", "split", "message"),
    [
        ("cola2", None, "task='cola2' must be one of cola, sst2, mrpc, stsb, qqp, mnli"),
        ("qqp", None, "has no configuration 'qqp'. There are: rte"),
        ("rte", "test", "has no split 'test'. There are: validation, empty"),
        ("rte", "validation[:0]", "has no rows in its split"),
        ("rte", "empty", "has no rows in its split 'empty'"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(
    tmp_path: Path, task: str, split: str | None, message: str
) -> None:
    splits = {"validation": rows_of("rte", [0]), "empty": rows_of("rte", [])}
    data = write_glue(tmp_path, {"rte": splits})
    with pytest.raises(OptionError) as caught:
        load_task(task, data, split)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"nowhere' must be a data set's folder"):
        load_task("rte", str(tmp_path / "nowhere"))


def test_missing_columns_are_named_with_those_that_are_there(tmp_path: Path) -> None:
    rows = rows_of("rte", [0, 1])
    rows["premise"] = rows.pop("sentence1")
    data = write_glue(tmp_path, {"rte": {"validation": rows}})
    with pytest.raises(OptionError, match=r"has no column 'sentence1'. There are: .*premise"):
        load_task("rte", data)


def test_a_missing_text_is_refused_by_its_row(tmp_path: Path) -> None:
    rows = rows_of("rte", [0, 1])
    rows["sentence2"][1] = None
    data = write_glue(tmp_path, {"rte": {"validation": rows}})
    with pytest.raises(OptionError, match=r"Row 1 of .* has a NoneType in the column 'sentence2'"):
        load_task("rte", data)


@pytest.mark.parametrize("task", ["rte", "stsb"])
def test_hidden_labels_are_refused(tmp_path: Path, task: str) -> None:
    rows = rows_of(task, [1, -1], ["one", "one"])
    data = write_glue(tmp_path, {task: {"test": rows}})
    with pytest.raises(LabelError, match=r"Row 1 of .* has the label -1: its labels are hidden"):
        load_task(task, data, "test")


def test_hidden_labels_of_swapped_names_are_refused(tmp_path: Path) -> None:
    rows = rows_of("rte", [1, -1], ["one", "one"])
    swapped = {"rte": ("not_entailment", "entailment")}
    data = write_glue(tmp_path, {"rte": {"test": rows}}, swapped)
    with pytest.raises(LabelError, match="hidden"):
        load_task("rte", data, "test")


def test_labels_of_other_names_are_refused(tmp_path: Path) -> None:
    rows = rows_of("rte", [0, 1])
    data = write_glue(tmp_path, {"rte": {"validation": rows}}, {"rte": ("yes", "no")})
    with pytest.raises(LabelError, match=r"\(yes, no\) must be those of the task \(entailment, "):
        load_task("rte", data)


def test_classes_where_a_number_is_due_and_the_reverse_are_refused(tmp_path: Path) -> None:
    rows = {"rte": {"validation": rows_of("rte", [0, 1])}}
    data = write_glue(tmp_path / "a", rows, {"rte": None})
    with pytest.raises(LabelError, match="must be a class label or a whole number"):
        load_task("rte", data)
    rows = {"stsb": {"validation": rows_of("stsb", [0.5, float("nan")], ["one", "one"])}}
    with pytest.raises(LabelError, match=r"Row 1 of .* has the label nan; it must be a number"):
        load_task("stsb", write_glue(tmp_path / "b", rows))


def test_all_stands_for_the_tasks_that_the_data_have(tmp_path: Path) -> None:
    tasks = {name: {"validation": rows_of(name, [0, 1])} for name in ("wnli", "cola")}
    data = write_glue(tmp_path, tasks)
    assert [task.name for task in find_tasks(["all"], data)] == ["cola", "wnli"]
    assert [task.name for task in find_tasks(["rte", "cola", "rte"])] == ["cola", "rte"]
    assert [task.name for task in find_tasks(["all"])] == list(TASKS)


def test_no_task_and_data_without_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Give --task"):
        find_tasks([])
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(OptionError, match=r"has none of the tasks cola.* There are: default"):
        find_tasks(["all"], str(tmp_path))
    with pytest.raises(OptionError, match="must be a data set's folder"):
        find_tasks(["all"], str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (("entailment", "neutral", "contradiction"), (0, 1, 2)),
        (("CONTRADICTION", "Neutral", "entailment"), (2, 1, 0)),
        (("neutral", "contradiction", "entailment"), (2, 0, 1)),
        (("LABEL_0", "LABEL_1", "LABEL_2"), (0, 1, 2)),
        (("0", "1", "2"), (0, 1, 2)),
    ],
)
def test_the_order_of_labels_comes_from_names(
    names: tuple[str, ...], order: tuple[int, ...]
) -> None:
    rows = Dataset.from_dict({"label": [0, 1, 2]})
    assert check_labels("mnli", config(names), rows) == order
    assert ordered_by_name(TASKS["mnli"].label_names or (), config(names)) == (
        not names[0].startswith(("L", "0"))
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("good", "bad"), r"labels \(good, bad\) must be those of task 'rte'"),
        (("LABEL_1", "LABEL_0"), "must be those of task 'rte'"),
        (("entailment", "entailment"), "must be those of task 'rte'"),
        (("entailment", "neutral", "contradiction"), "has 3 labels .* and task 'rte' has 2"),
        (("LABEL_0",), r"has 1 label \(LABEL_0\) and task 'rte' has 2"),
    ],
)
def test_labels_of_another_task_are_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(LabelError, match=message):
        check_labels("rte", config(names), Dataset.from_dict({"label": [0, 1]}))


def test_numbers_are_names_where_both_sides_have_the_same() -> None:
    counted = [str(number) for number in range(12)]
    sorted_as_folders = sorted(counted)  # 0, 1, 10, 11, 2, ...
    order = label_order(sorted_as_folders, config(counted), "'digits'")
    assert [counted[output] for output in order] == sorted_as_folders
    assert ordered_by_name(sorted_as_folders, config(counted))
    order = label_order(counted, config(sorted_as_folders), "'digits'")
    assert [sorted_as_folders[output] for output in order] == counted
    assert label_order(counted, config(counted), "'digits'") == tuple(range(12))
    assert not ordered_by_name((), config(["LABEL_0"]))


def test_names_that_are_there_twice_decide_nothing() -> None:
    with pytest.raises(LabelError, match="in any order"):
        label_order(["crane", "crane", "owl"], config(["crane", "owl", "crane"]), "'birds'")
    assert label_order(["crane", "crane"], config(["Crane", "crane"]), "'birds'") == (0, 1)


def test_a_head_for_classes_cannot_predict_a_number_and_the_reverse() -> None:
    numbers = Dataset.from_dict({"label": [0.5]})
    assert check_labels("stsb", config(["LABEL_0"]), numbers) == ()
    with pytest.raises(LabelError, match="head has 2 labels and task 'stsb' predicts one number"):
        check_labels("stsb", config(["LABEL_0", "LABEL_1"]), numbers)


@pytest.mark.parametrize("label", [2, -2, None])
def test_labels_outside_of_the_head_are_refused(label: int | None) -> None:
    rows = Dataset.from_dict({"label": [0, label]})
    with pytest.raises(LabelError, match=f"Row 1 of .* label {label}; it must be between 0 and 1"):
        check_labels("rte", config(["LABEL_0", "LABEL_1"]), rows)


def test_features_are_pairs_as_the_tokenizer_joins_them(tmp_path: Path, tokenizer: Any) -> None:
    data = write_glue(tmp_path, {"rte": {"validation": rows_of("rte", [0, 1])}})
    rows = load_task("rte", data)
    made = encode(rows, "rte", tokenizer, config(["a", "b"], vocab_size=len(VOCABULARY)))
    words = ["[CLS]", "one", "a", "a", "a", "a", "a", "a", "a", "[SEP]", "b", "c", "[SEP]"]
    assert tokenizer.convert_ids_to_tokens(made[1]["input_ids"]) == words
    assert made[1]["token_type_ids"] == [0] * 10 + [1] * 3
    assert [feature["labels"] for feature in made] == [0, 1]
    assert len(made[0]["input_ids"]) == 6  # not padded


def test_features_may_carry_the_heads_own_labels(tmp_path: Path, tokenizer: Any) -> None:
    data = write_glue(tmp_path, {"rte": {"validation": rows_of("rte", [0, 1])}})
    rows, own = load_task("rte", data), config(["a", "b"], vocab_size=len(VOCABULARY))
    made = encode(rows, "rte", tokenizer, own, order=(1, 0), max_length=5)
    assert [feature["labels"] for feature in made] == [1, 0]
    assert [len(feature["input_ids"]) for feature in made] == [5, 5]


def test_too_short_sequences_and_foreign_tokenizers_are_refused(
    tmp_path: Path, tokenizer: Any
) -> None:
    data = write_glue(tmp_path, {"rte": {"validation": rows_of("rte", [0, 1])}})
    rows = load_task("rte", data)
    with pytest.raises(OptionError, match=r"max_length=4 must be at least 5 .* one of each text"):
        encode(rows, "rte", tokenizer, config(["a", "b"]), max_length=4)
    with pytest.raises(CheckpointError, match=r"Token id .* must be below 7"):
        encode(rows, "rte", tokenizer, config(["a", "b"], vocab_size=7))


def test_a_limit_draws_rows_and_keeps_their_order() -> None:
    rows = Dataset.from_dict({"label": list(range(100))})
    drawn = list(sample(rows, 10, 0)["label"])
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 10
    assert drawn != list(range(10))
    assert drawn == list(sample(rows, 10, 0)["label"]) != list(sample(rows, 10, 1)["label"])
    assert sample(rows, 100, 0) is rows is sample(rows, None, 0)
    with pytest.raises(OptionError, match="limit=0 must be at least 1"):
        sample(rows, 0, 0)
