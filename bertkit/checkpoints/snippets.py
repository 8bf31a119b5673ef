"""Code that uses a saved model, for its card: with bertkit, transformers, onnxruntime or torch.

Every snippet runs as it stands in the folder of the model. `on_hub` turns it into one that runs
anywhere once the model is on the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertkit.checkpoints.families import weight_head_names
from bertkit.files import read_object

HERE_LINE = 'model_name = "."  # this folder, or the name of the model on the hub'
FOLDER_LINE = 'folder = "."  # the folder of these files'
PIPELINES = {
    **dict.fromkeys(
        ("classification", "multi-label-classification", "regression"), "text-classification"
    ),
    "multiple-choice": "multiple-choice",
    "token-classification": "token-classification",
    "question-answering": "question-answering",
    "pretraining": "fill-mask",
    "words": "fill-mask",
    "causal": "text-generation",
    "replaced": "feature-extraction",
    "encoder": "feature-extraction",
    "embedding": "sentence-similarity",
}
"""Head -> the hub's name of the task."""
TUNED_HEADS = tuple(PIPELINES)[:6]
HEAD_OF_CLASS = {"pairs": "pretraining", "words": "words", "causal": "causal"}
HEAD_OF_CLASS |= {"replaced": "replaced", "encoder": "encoder"}


@dataclass(frozen=True, kw_only=True)
class SavedForm:
    """What the use of a saved model depends on."""

    head: str
    """A key of `PIPELINES`."""
    format: str = "model"
    """model, for a directory that bertkit reads, or a format of `bertkit export`."""
    family: str = "bert"
    """The `model_type` of config.json."""
    library: str = "bertkit"
    """The hub's name of the library that loads the whole model."""
    architecture: str = ""
    """transformers' class; "" if it has none."""
    pairs: bool = False
    """Whether a classifier reads two texts."""
    image: str = ""
    """The code of an image, for a model that reads one with every text."""
    max_length: int = 512
    """The most tokens of a sequence."""
    prompt: str = ""
    """The prompt before every text of an embedding model."""
    lowercase: bool = False
    """Whether an embedding model lowercases texts before they are tokenised."""

    @property
    def task(self) -> str:
        """The name of the task among the tags of a card."""
        return {"words": "masked-language-model", "causal": "language-model"}.get(
            self.head, self.head
        )


def saved_form(folder: Path) -> SavedForm:
    """Read how the model in a complete model directory is used.

    Raises:
        BertkitError: a file is damaged.
    """
    config = read_object(folder / "config.json")
    path = folder / "bertkit.json"
    details = read_object(path) if path.is_file() else {}
    family, names = str(config.get("model_type", "bert")), config.get("architectures")
    named = str(names[0]) if isinstance(names, list) and names else ""
    architecture = "" if family == "bertkit" else named
    own_head = bool(details.get("head"))
    if own_head:  # transformers loads only the encoder
        architecture = ""
    embeds = (folder / "modules.json").is_file()
    known: dict[str, Any] = {
        "family": family if family != "bertkit" else "",
        "library": "transformers" if architecture else "bertkit",
        "architecture": architecture,
        "pairs": bool(details.get("pairs")),
        "max_length": int(config.get("max_position_embeddings", 512)),
        "image": image_code(details.get("settings") or {}),
    }
    if embeds:
        return SavedForm(head="embedding", **{**known, "library": "sentence-transformers"})
    return SavedForm(head=head_of(details, named), **known)


def image_code(settings: Mapping[str, Any]) -> str:
    """Return the code of an image that a model with these settings reads; "" if it reads none."""
    if "image_width" not in settings:
        return ""
    if settings.get("image_size"):
        return "numpy.zeros((64, 64, 3), numpy.uint8)  # or the path of a picture"
    return f"[[0.0] * {settings['image_width']}]  # features, (vectors, width)"


def head_of(details: Mapping[str, Any], architecture: str) -> str:
    """Return the head of a model from its `bertkit.json` and the class in its `config.json`."""
    task = str(details.get("task"))
    if task in TUNED_HEADS:
        return task
    found = sorted(weight_head_names(architecture) & HEAD_OF_CLASS.keys())
    if found:
        return HEAD_OF_CLASS[found[0]]
    objectives = (details.get("recipe") or {}).get("objectives") or {}
    if str(objectives.get("token", "")).startswith("clm"):
        return "causal"
    if objectives and objectives.get("token") != "rtd":
        return "pretraining" if objectives.get("pair") in ("nsp", "sop") else "words"
    return "replaced" if objectives else "encoder"


def snippets(form: SavedForm) -> str:
    """Return Markdown with the code that uses a model, a block for each library."""
    if form.format.startswith("onnx"):
        return onnx_snippet(form)
    if form.format == "torch-export":
        return f"With torch alone:\n\n{fence(PROGRAM)}"
    if form.format == "tensorflow":
        return f"{GOOGLE}\n\n{fence(GOOGLE_CODE)}"
    parts = [f"With bertkit:\n\n{fence(bertkit_code(form))}"]
    if form.head == "embedding":
        parts.append(f"With sentence-transformers:\n\n{fence(SENTENCE_TRANSFORMERS)}")
    elif code := THEIRS.get(form.head if form.architecture else ""):
        words = code.replace("CLASS", form.architecture).replace("INPUT", their_input(form))
        parts.append(f"With transformers:\n\n{fence(words)}")
    return "\n\n".join(parts)


def fence(code: str) -> str:
    """Return a block of Python in Markdown."""
    return f"```python\n{code.strip()}\n```"


def on_hub(text: str, name: str) -> str:
    """Return a card whose snippets load the model from the hub under its name there."""
    download = f'folder = snapshot_download("{name}")'
    text = text.replace(FOLDER_LINE, f"from huggingface_hub import snapshot_download\n\n{download}")
    return text.replace(HERE_LINE, f'model_name = "{name}"')


def bertkit_code(form: SavedForm) -> str:
    """Return the snippet for bertkit."""
    call = CALLS[form.head]
    if form.pairs and form.head in TUNED_HEADS[:3]:
        call = call.replace(ONE_TEXT, TWO_TEXTS)
    if form.image:
        last = CHOICES if form.head == "multiple-choice" else ONE_TEXT
        call = f"image = {form.image}\n{call.replace(last, f'{last}, image')}"
        call = f"import numpy\n\n{call}" if "numpy" in form.image else call
    loader = "load_embedder" if form.head in ("replaced", "encoder") else "load"
    return f"from bertkit import {loader}\n\n{HERE_LINE}\nmodel = {loader}(model_name)\n{call}"


def their_input(form: SavedForm) -> str:
    """Return the input of transformers' pipeline for a text, or a pair of texts."""
    pair = '{"text": "The sailor is in the garden.", "text_pair": "The garden is empty."}'
    return pair if form.pairs else ONE_TEXT


ONE_TEXT = '"The sailor is in the garden."'
TWO_TEXTS = '"The sailor is in the garden.", "The garden is empty."'
CHOICES = '["The garden is empty.", "The sailor rests."]'
QUESTION_TEXTS = '"Where is the sailor?", "The sailor is in the garden."'
HIDDEN = f"print(model.hidden([{ONE_TEXT}])[0].shape)  # (tokens, width)"
FILL = 'for found in model.fill_mask("The [MASK] is in the garden.")[0]:\n'
FILL += "    print(found.token, found.probability)"
CALLS = {
    "classification": f"found = model({ONE_TEXT})\nprint(found.label, found.probabilities)",
    "multi-label-classification": f"found = model({ONE_TEXT})\n"
    "print(found.labels, found.probabilities)",
    "regression": f"print(model({ONE_TEXT}).value)",
    "multiple-choice": f"found = model({ONE_TEXT}, {CHOICES})\n"
    "print(found.text, found.probability)",
    "token-classification": f"found = model({ONE_TEXT})\n"
    "print([(word.word, word.tag) for word in found.words])\n"
    "print([(entity.type, entity.text) for entity in found.entities])",
    "question-answering": f"found = model({QUESTION_TEXTS})\n"
    "print(found.answer, found.start, found.end, found.probability)",
    "pretraining": FILL,
    "words": FILL,
    "causal": HIDDEN,
    **dict.fromkeys(
        ("replaced", "encoder", "embedding"),
        f"print(model.encode([{TWO_TEXTS}]).shape)  # (texts, width)",
    ),
}
"""Head -> the lines that follow `model = load(model_name)`."""

PIPELINE = f"from transformers import pipeline\n\n{HERE_LINE}\n"
LOADED = f"""
import torch
from transformers import AutoTokenizer, CLASS

{HERE_LINE}
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = CLASS.from_pretrained(model_name).eval()
"""
STATES = f"""{LOADED}
with torch.inference_mode():
    outputs = model(**tokenizer({ONE_TEXT}, return_tensors="pt"))
"""
THEIRS = {
    **dict.fromkeys(
        ("classification", "multi-label-classification"),
        f'{PIPELINE}classify = pipeline("text-classification", model=model_name)\n'
        "print(classify(INPUT, top_k=None))",
    ),
    "regression": f'{PIPELINE}score = pipeline("text-classification", model=model_name)\n'
    'print(score(INPUT, function_to_apply="none"))',
    "token-classification": PIPELINE
    + 'tag = pipeline("token-classification", model=model_name, aggregation_strategy="first")\n'
    + f"print(tag({ONE_TEXT}))",
    "multiple-choice": f"""{LOADED}
text, choices = {ONE_TEXT}, {CHOICES}
inputs = tokenizer([text] * len(choices), choices, return_tensors="pt", padding=True)
with torch.inference_mode():
    logits = model(**{{name: rows[None] for name, rows in inputs.items()}}).logits[0]
print(choices[logits.argmax()], logits.softmax(0).tolist())
""",
    "question-answering": f"""{LOADED}
question, context = {QUESTION_TEXTS}
inputs = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
offsets, inside = inputs.pop("offset_mapping")[0], inputs["token_type_ids"][0] == 1
with torch.inference_mode():
    outputs = model(**inputs)
spans = outputs.start_logits[0][:, None] + outputs.end_logits[0][None]
spans = spans.masked_fill(~(inside[:, None] & inside[None]).triu(), float("-inf"))
spans[-1] = float("-inf")  # the last [SEP]
start, end = divmod(spans.argmax().item(), len(inside))
print(context[offsets[start][0] : offsets[end][1]])
""",
    "pretraining": f'{PIPELINE}fill = pipeline("fill-mask", model=model_name)\n'
    'for found in fill("The [MASK] is in the garden."):\n'
    '    print(found["token_str"], found["score"])',
    "causal": f"{STATES}print(outputs.logits.shape)  # (texts, tokens, vocabulary)",
    "replaced": f"{STATES}print(outputs.logits.sigmoid())  # probability that a token was replaced",
    "encoder": f"{STATES}print(outputs.last_hidden_state.shape)  # (texts, tokens, width)",
}
"""Head -> the snippet for transformers."""
THEIRS["words"] = THEIRS["pretraining"]
SENTENCE_TRANSFORMERS = f"""
from sentence_transformers import SentenceTransformer

{HERE_LINE}
model = SentenceTransformer(model_name)
print(model.encode([{TWO_TEXTS}]).shape)  # (texts, width)
"""
PROGRAM = f"""
import torch

{FOLDER_LINE}
model = torch.export.load(f"{{folder}}/model.pt2").module()
ids = torch.tensor([[2, 4, 5, 3]])  # token ids of the original model's tokenizer
outputs = model(ids, torch.ones_like(ids), torch.zeros_like(ids))  # ids, mask, segments
print([output.shape for output in outputs])
"""
GOOGLE = (
    "The scripts of google-research/bert take these files: `--init_checkpoint bert_model.ckpt`, "
    "`--bert_config_file bert_config.json` and `--vocab_file vocab.txt`. bertkit initialises a "
    "fine-tuning from them (`bertkit finetune --model FOLDER`), and reads them in Python:"
)
GOOGLE_CODE = f"""
from pathlib import Path

from bertkit.checkpoints.pretrained import read_pretrained

{FOLDER_LINE}
weights = read_pretrained(Path(folder))
print(weights.config, len(weights.tensors))
"""

RUNTIME = f"""
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

{FOLDER_LINE}
tokenizer = Tokenizer.from_file(f"{{folder}}/tokenizer.json")
tokenizer.enable_truncation(LENGTH)
session = onnxruntime.InferenceSession(f"{{folder}}/model.onnx")


def run(*texts):
    encoded = tokenizer.encode(*texts)
    rows = [encoded.ids, encoded.attention_mask, encoded.type_ids]
    names = ["input_ids", "attention_mask", "token_type_ids"]
    inputs = {{name: np.array([row]) for name, row in zip(names, rows)}}
    return encoded, session.run(None, inputs)


"""
CONFIG = """
with open(f"{folder}/config.json", encoding="utf-8") as file:
    labels = json.load(file)["id2label"]
"""
BEST = """
mask = encoded.ids.index(tokenizer.token_to_id("[MASK]"))
for best in outputs[0][0, mask].argsort()[:-6:-1]:
    print(tokenizer.id_to_token(int(best)))
"""
MASKED = f'encoded, outputs = run("The [MASK] is in the garden."){BEST}'
RUNS = {
    "classification": f"""_, [logits] = run(TEXTS)
{CONFIG}powers = np.exp(logits[0] - logits[0].max())
for number, probability in enumerate(powers / powers.sum()):
    print(labels[str(number)], probability)""",
    "multi-label-classification": f"""_, [logits] = run(TEXTS)
{CONFIG}for number, logit in enumerate(logits[0]):
    print(labels[str(number)], 1 / (1 + np.exp(-logit)))""",
    "regression": "_, [logits] = run(TEXTS)\nprint(logits[0, 0])",
    "token-classification": f"""encoded, [logits] = run(TEXTS)
{CONFIG}for token, word, row in zip(encoded.tokens, encoded.word_ids, logits[0]):
    if word is not None and not token.startswith("##"):  # the first token of a word counts
        print(token, labels[str(row.argmax())])""",
    "question-answering": f"""question, context = {QUESTION_TEXTS}
encoded, [starts, ends] = run(question, context)
inside = np.array([part == 1 for part in encoded.sequence_ids])
spans = starts[0][:, None] + ends[0][None]
spans = np.where(np.triu(inside[:, None] & inside[None]), spans, -np.inf)
start, end = divmod(int(spans.argmax()), len(inside))
print(context[encoded.offsets[start][0] : encoded.offsets[end][1]])""",
    "pretraining": MASKED,
    "words": MASKED,
    "causal": "_, [logits] = run(TEXTS)\nprint(logits.shape)  # (texts, tokens, vocabulary)",
    "replaced": "_, [logits] = run(TEXTS)\n"
    "print(1 / (1 + np.exp(-logits)))  # probability that a token was replaced",
    "encoder": "_, outputs = run(TEXTS)\nprint(outputs[0].shape)  # (texts, tokens, width)",
    "embedding": "_, [vectors] = run(TEXTS)\nprint(vectors.shape)  # (texts, width)",
}
"""Head -> what follows the function `run`."""
CHOOSE = f"""
text, choices = {ONE_TEXT}, {CHOICES}
tokenizer.enable_padding()
encoded = tokenizer.encode_batch([(text, choice) for choice in choices])
inputs = {{
    "input_ids": np.array([[one.ids for one in encoded]]),
    "attention_mask": np.array([[one.attention_mask for one in encoded]]),
    "token_type_ids": np.array([[one.type_ids for one in encoded]]),
}}
[logits] = session.run(None, inputs)
print(choices[logits[0].argmax()])
"""


def onnx_snippet(form: SavedForm) -> str:
    """Return Markdown with the code for plain onnxruntime and the tokenizers library."""
    start = RUNTIME.replace("LENGTH", str(form.max_length))
    if form.head == "multiple-choice":
        code = start[: start.index("\n\ndef run")] + CHOOSE
    else:
        texts = TWO_TEXTS if form.pairs else ONE_TEXT
        if form.head == "embedding" and form.lowercase:
            texts += ".lower()"
        if form.head == "embedding" and form.prompt:
            texts = f"{form.prompt!r} + {texts}"
        run = RUNS[form.head].replace("TEXTS", texts)
        code = f"import json\n\n{start.lstrip()}{run}" if CONFIG in run else start + run
    note = (
        "With onnxruntime and the tokenizers library, without bertkit or torch. This code cuts "
        "inputs that are longer than the model reads; bertkit reads them in windows."
    )
    return f"{note}\n\n{fence(code)}"
