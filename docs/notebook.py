"""The executed notebook `notebook.ipynb`, made from the cells below.

python -m docs.notebook    execute the cells and write the notebook; a test compares the cells
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from benchmarks.record import start_model

PAGE = Path(__file__).with_name("notebook.ipynb")
CELLS = [
    """# bertkit in a notebook

`MODEL` is any BERT: a name on the Hugging Face hub such as
`sentence-transformers/all-MiniLM-L6-v2`, with which the cells below were run, or a model directory.
""",
    """import pandas as pd

import bertkit

messages = pd.DataFrame(
    [
        ("My parcel has not arrived", "delivery"),
        ("The courier left it at the wrong door", "delivery"),
        ("When will my order be here?", "delivery"),
        ("The package is still on its way", "delivery"),
        ("I was charged twice", "payment"),
        ("My card was refused", "payment"),
        ("How do I get my money back?", "payment"),
        ("Can I pay by bank transfer?", "payment"),
    ],
    columns=["text", "label"],
)
SHORT = bertkit.FinetuneSettings(grid=bertkit.Grid(learning_rate=(3e-4,), epochs=(6,)))
bertkit.model_info("MODEL")["network"]""",
    """A table is training data as it is. One message is set apart as dev data, and settings that
are not given, such as the batch size, are chosen.""",
    """run = bertkit.finetune(
    "classification", "MODEL", "runs/messages", train=messages, settings=SHORT
)
run.settings""",
    "A model takes one text or many, and a prediction shows its probabilities.",
    """model = bertkit.load("runs/messages")
model("Nobody rang my bell")""",
    """new = pd.DataFrame({"text": ["Do you take cheques?", "Where is the van?", "Too expensive!"]})
bertkit.to_frame(model(new))""",
    """In scikit-learn, a model is an estimator or a transformer of texts. The new texts share
hardly a word with the messages, so a bag of words can only guess.""",
    """from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from bertkit.sklearn import BertEmbedder

for features in (TfidfVectorizer(), BertEmbedder("MODEL")):
    pipeline = make_pipeline(features, LogisticRegression())
    pipeline.fit(messages["text"], messages["label"])
    print(type(features).__name__, list(pipeline.predict(new["text"])))""",
    "A tagger learns from lists of words and tags. Its prediction shows the entities in the text.",
    """towns = [
    ("Ada lives in Riga", "B-PER O O B-LOC"),
    ("Kim moved to Oslo", "B-PER O O B-LOC"),
    ("Is Turin far from Rome", "O B-LOC O O B-LOC"),
    ("Noor met Ravi in Cairo", "B-PER O B-PER O B-LOC"),
]
rows = [{"tokens": text.split(), "ner_tags": tags.split()} for text, tags in towns]
data = {"train": rows, "dev": rows}  # too few to set any apart
bertkit.finetune("token-classification", "MODEL", "runs/towns", **data, settings=SHORT)
bertkit.load("runs/towns")("Lena flew from Lima to Quito.")""",
]
"""Text and code in turn, except for two code cells in a row; text has no code in it."""


def is_text(cell: str) -> bool:
    """Whether a cell is Markdown."""
    return cell[0] == "#" or (cell[0].isupper() and " " in cell.split("\n", maxsplit=1)[0][:12])


def build() -> Any:
    """The notebook without outputs."""
    cells = [
        new_markdown_cell(cell.strip(), id=f"cell-{number}")
        if is_text(cell)
        else new_code_cell(cell, id=f"cell-{number}")
        for number, cell in enumerate(CELLS)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def main() -> None:
    """Execute the cells in an empty folder and write the notebook."""
    notebook = build()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "MODEL").symlink_to(start_model())
        os.environ["PYTHONWARNINGS"] = "ignore"  # about packages for widgets, which are not needed
        os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
        NotebookClient(notebook, resources={"metadata": {"path": folder}}, timeout=900).execute()
    for cell in notebook.cells:
        cell.metadata.clear()  # the times of the execution
    nbformat.write(notebook, PAGE)


if __name__ == "__main__":
    main()
