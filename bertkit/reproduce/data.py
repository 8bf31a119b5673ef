"""Load the labelled data of the tables from one folder, reduced to the amounts of a scale.

`squad-sentences` is made here from SQuAD: given a question and a sentence of its paragraph, does
the sentence contain the answer? GLUE's QNLI is made from SQuAD in the same way (Wang et al. 2018,
section 3.2); this task stands in for it if the QNLI files are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertkit.datasets.benchmarks import DataFiles, official_paths
from bertkit.datasets.columns import TextColumns
from bertkit.datasets.conll import CONLL_SITE
from bertkit.datasets.examples import QuestionExample, TextExample
from bertkit.datasets.glue import GLUE, PLACE, find_file
from bertkit.datasets.squad import SQUAD_SITE
from bertkit.datasets.swag import SWAG_SITE
from bertkit.errors import BertkitError
from bertkit.pretraining_data.rng import DATA_SPLIT, keyed_rng
from bertkit.reproduce.paper import TaskScale
from bertkit.tasks.classification import Classification
from bertkit.tasks.data import TaskData, load_dataset
from bertkit.tasks.spec import spec_for
from bertkit.tasks.windows import WindowLengths
from bertkit.text.lines import TextCounts
from bertkit.text.sentences import split_sentences

LABELS = ("entailment", "not_entailment")


FOLDERS = {
    "squad-1.1": ("squad", "SQuAD"),
    "squad-2.0": ("squad", "SQuAD"),
    "swag": ("swag", "SWAG"),
    "conll-2003": ("conll2003", "conll-2003", "CoNLL-2003"),
}
"""Data set -> the names that its folder may have; the GLUE tasks are in `glue`."""

GLUE_SAMPLES = {
    "mnli": ("MNLI-10k", TextColumns(text="premise", pair="hypothesis")),
    "qqp": ("QQP-10k", TextColumns(text="question1", pair="question2")),
}
"""GLUE task -> the folder of a sample, in `glue`, that is read if the official files are missing,
and the columns of its `train.jsonl` and `dev.jsonl`. BabyLM's evaluation has such samples."""


def find_data_folder(task: str, data: Path) -> Path:
    """Return the folder that holds a task's official files."""
    names = FOLDERS.get(task, ("glue", "GLUE", "glue_data"))
    return next((data / name for name in names if (data / name).is_dir()), data)


def load_task(task: str, data: Path, scale: TaskScale, positions: int) -> TaskData:
    """Load a task's data, with as many inputs as the scale asks for."""
    if missing := absent_files(task, data):
        raise BertkitError(missing)
    max_length = min(scale.max_length, positions)
    if task == "squad-sentences":
        found = squad_sentences(data, scale, positions)
    elif sample := find_sample(task, data):
        lengths = WindowLengths(max_length=max_length)
        columns = GLUE_SAMPLES[task][1]
        found = load_dataset("classification", sample, columns, lengths, positions)
        assert isinstance(found.task, Classification)
        found = replace(found, task=replace(found.task, metrics=GLUE[task].metrics))
    else:
        options: dict[str, Any] = {"max_length": max_length, "stride": scale.stride}
        if scale.context != "sentence":
            options["context"] = scale.context
        if task.startswith("squad") and 0 < positions < 128:
            options["max_question_length"] = max(8, positions // 4)
        files = DataFiles(data=find_data_folder(task, data))
        found = load_dataset(task, files, None, spec_for(task).make_windows(options), positions)
    some = some_documents if scale.context == "document" else sample_inputs
    dev = [(name, some(inputs, scale.dev, 1)) for name, inputs in found.dev]
    return replace(found, train=some(found.train, scale.train, 0), dev=dev, test=[])


def find_sample(task: str, data: Path) -> DataFiles | None:
    """Return the files of a task's sample, if they exist and the official folder does not."""
    if task not in GLUE_SAMPLES:
        return None
    folder = find_data_folder(task, data)
    train, dev = (folder / GLUE_SAMPLES[task][0] / f"{split}.jsonl" for split in ("train", "dev"))
    if (folder / GLUE[task].folder).exists() or not (train.is_file() and dev.is_file()):
        return None
    return DataFiles(train=str(train), dev=str(dev))


def absent_files(task: str, data: Path) -> str:
    """Return why a task's data cannot be loaded, or "" if all of its files exist."""
    if find_sample(task, data):
        return ""
    key = "squad-1.1" if task == "squad-sentences" else task
    folder = find_data_folder(key, data)
    if task in GLUE:
        try:
            for split in GLUE[task].files:
                if not split.startswith("test"):
                    find_file(task, GLUE[task], folder, split)
        except BertkitError:
            return f"the data folder has no {GLUE[task].folder}; get it from {PLACE}"
        return ""
    place = {"swag": SWAG_SITE, "conll-2003": CONLL_SITE}.get(key, SQUAD_SITE)
    paths = official_paths(key, DataFiles(data=folder))
    needed = [Path(path) for split, path in paths.items() if split != "test"]
    gone = [path.name for path in needed if not path.is_file()]
    if not gone:
        return ""
    return f"the data folder has no {key} ({', '.join(gone)}); get it from {place}"


def sample_inputs(inputs: Sequence[Any], count: int, row: int) -> Sequence[Any]:
    """Return `count` randomly chosen inputs in their original order.

    All inputs are returned if `count` is 0 or not below their number.
    """
    if not 0 < count < len(inputs):
        return inputs
    chosen = keyed_rng(0, DATA_SPLIT, epoch=1, row=row).permutation(len(inputs))[:count]
    return [inputs[i] for i in sorted(chosen.tolist())]


def some_documents(inputs: Sequence[Any], count: int, row: int) -> Sequence[Any]:
    """Return the inputs of random whole documents, at least `count` in total; 0 for all."""
    if not 0 < count < len(inputs):
        return inputs
    sizes = Counter(given.document for given in inputs)
    chosen: set[Any] = set()
    total = 0
    for document in keyed_rng(0, DATA_SPLIT, epoch=1, row=row).permutation(list(sizes)).tolist():
        if total >= count:
            break
        chosen.add(document)
        total += sizes[document]
    return [given for given in inputs if given.document in chosen]


def squad_sentences(data: Path, scale: TaskScale, positions: int) -> TaskData:
    """Make question-sentence pairs from SQuAD 1.1, from twice as many questions as are needed."""
    files = DataFiles(data=find_data_folder("squad-1.1", data))
    questions = load_dataset("squad-1.1", files)
    [(_, dev)] = questions.dev
    counts = questions.counts
    return TaskData(
        "squad-sentences",
        Classification(LABELS, ("accuracy",), min(scale.max_length or positions, positions)),
        sentence_pairs(sample_inputs(questions.train, 2 * scale.train, 2), 0, counts),
        [("dev", sentence_pairs(sample_inputs(dev, 2 * scale.dev, 3), 1, counts))],
        counts=counts,
        files=questions.files,
    )


def sentence_pairs(
    questions: Sequence[QuestionExample], row: int, counts: TextCounts
) -> list[TextExample]:
    """Pair each question with a sentence that has its answer or, half the time, with another one.

    The sentence is drawn at random from the paragraph. Questions are left out, and counted, if no
    sentence contains an answer in full or every sentence contains one.
    """
    coins, places = keyed_rng(0, DATA_SPLIT, epoch=2, row=row).random((2, len(questions)))
    split: dict[str, list[str]] = {}
    pairs = []
    for given, coin, place in zip(questions, coins, places, strict=True):
        if given.context not in split:
            split[given.context] = split_sentences(given.context)
        sentences, answers = split[given.context], given.answers or ()
        texts = {answer.text for answer in answers}
        holding = [s for s in sentences if any(text in s for text in texts)]
        others = [s for s in sentences if s not in holding]
        if not holding or not others:
            counts.note("question without a sentence to ask about", given.place)
            continue
        pool, label = (holding, LABELS[0]) if coin < 0.5 else (others, LABELS[1])
        drawn = pool[int(place * len(pool))]
        pairs.append(TextExample(given.id, given.question, drawn, label, given.place))
    if not pairs:
        raise BertkitError("SQuAD has no paragraph of two or more sentences; check the files")
    return pairs
