"""`export_model`: write an ONNX file, and keep it only if it computes what the model computes.

The file is run by onnxruntime on built-in sequences, and its outputs are compared with bertkit's
packed computation in fp32. `export.json` records the differences, the versions and the settings.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertkit.checkpoints.pretrained import hub_commit
from bertkit.checkpoints.save import config_fields
from bertkit.errors import BertkitError, check_known
from bertkit.export.onnx import ONNX_FILE, open_graph, write_onnx
from bertkit.export.padded import (
    PADDED_INPUTS,
    ExportSource,
    is_token_output,
    read_export_source,
)
from bertkit.files import check_output, check_replaceable, new_folder, write_json
from bertkit.model.outputs import SUMMARIES, summary_vectors, token_weights, weighted_vectors
from bertkit.pretraining_data.batch import Packed, pack
from bertkit.progress import Console, console_or_new

Arrays = dict[str, np.ndarray]
FORMATS = ("onnx", "onnx-int8")
MANIFEST = "export.json"
LIBRARIES = ("bertkit", "torch", "onnx", "onnxscript", "onnxruntime")
MAX_ERROR = 1e-4
"""The largest difference of an fp32 output, multiplied by the largest value if that is above 1."""
BATCH_SEQUENCES = 3
"""The sequences of a batch of the comparison: few, as logits over a vocabulary are large."""
SENTENCES = (
    "The river rose in the night, and by morning the old bridge was gone.",
    "Who built it?",
    "Nobody in the village could say who had built it, or when.",
    "In 1903 (or so the letter said) a mason named Ada Varga asked 240 crowns for the work.",
    "It rained.",
    "El puente nuevo es más ancho; todos lo cruzan sin pensar en el río.",
    "Die alte Brücke hielt über hundert Jahre.",
    "Numbers: 3.14159, 1,000,000 and -7 %.",
)


def export_model(
    model: Path | str,
    out: Path | str,
    to: str = "onnx",
    *,
    head: str = "auto",
    pooling: str = "auto",
    normalize: bool | None = None,
    max_error: float | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Write a model as an ONNX file with its tokenizer, after comparing its outputs with bertkit's.

    Args:
        model: a model directory, a run, a Google checkpoint or a model of the hub.
        out: the folder to write; an earlier export there is replaced.
        to: "onnx" (fp32) or "onnx-int8" (8-bit weights).
        head: "auto" for the model's own head, "encoder" or "embedding".
        pooling: the pooling of embeddings; see `bertkit.load_embedder`.
        normalize: whether embeddings are divided by their length; None for the model's setting.
        max_error: the largest allowed difference of an output, multiplied by the largest value if
            that is above 1; None for 0.0001, or no bound for onnx-int8.
        console: the console for messages; None for a new one.

    Returns:
        The content of export.json: format, head, settings, versions, and the check of each output.

    Raises:
        BertkitError: there is no model, it has no ONNX form, a library is missing, the outputs
            differ too much, or `out` holds something other than an export. Nothing is written then.
    """
    check_known("format", to, FORMATS)
    if max_error is not None and not math.isfinite(max_error):
        raise BertkitError(f"--max-error must be a finite number, not {max_error}", code="number")
    out = check_output(out, folder=True)
    source = read_export_source(model, head=head, pooling=pooling, normalize=normalize)
    if source.path.resolve().is_relative_to(out.resolve()):
        raise BertkitError(f"{out} contains the model to export; choose another folder")
    check_replaceable(out, "export")
    bound = max_error if max_error is not None else MAX_ERROR if to == "onnx" else None
    with console_or_new(console) as shown:
        with new_folder(out) as folder:
            write_onnx(source, folder, eight_bits=to == "onnx-int8")
            manifest = write_companions(source, to, folder)
            manifest["check"] = compare_outputs(source, open_graph(folder / ONNX_FILE), bound)
            write_json(folder / MANIFEST, manifest)
        shown.say(*describe_export(out, manifest))
    return manifest


def write_companions(source: ExportSource, to: str, folder: Path) -> dict[str, Any]:
    """Write tokenizer and `config.json` beside the graph, and return the manifest without check."""
    source.tokenizer.save(folder, source.max_length)
    config = config_fields(source.model, source.details, source.tokenizer.pad_id)
    write_json(folder / "config.json", config)
    settings = {name: source.details.get(name) for name in ("labels", "settings")}
    if source.pooling is not None:
        left_out = ("max_length", "modules")
        settings = {n: v for n, v in vars(source.pooling).items() if n not in left_out}
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    versions["python"] = platform.python_version()
    return {
        "format": to,
        "head": source.head,
        "start": hub_commit(source.path),
        "versions": versions,
        **{name: value for name, value in settings.items() if value is not None},
        "max_length": source.max_length,
    }


def check_batches(source: ExportSource) -> Iterator[Packed]:
    """Yield batches of short texts, pairs and sequences of the model's maximum length."""
    tokenizer, room = source.tokenizer, source.max_length - 3
    texts = tokenizer.encode_batch(SENTENCES)
    every = [token for text in texts for token in text] or [tokenizer.unk_id]
    whole = (every * (2 + room // len(every)))[: room + 1]
    alone = [text[: room + 1] for text in (*texts, whole)]
    cls, sep = [tokenizer.cls_id], [tokenizer.sep_id]
    rows = [(cls + text + sep, [0] * (len(text) + 2)) for text in alone]
    if source.config.type_vocab_size > 1:
        pairs = [(a[: room // 2], b[: room // 2]) for a, b in pairwise(texts)]
        pairs.append((whole[: room // 3], whole[room // 3 : room]))
        rows += [
            (cls + a + sep + b + sep, [0] * (len(a) + 2) + [1] * (len(b) + 1)) for a, b in pairs
        ]
    rows = rows[: len(rows) // BATCH_SEQUENCES * BATCH_SEQUENCES]  # whole groups of choices
    for first in range(0, len(rows), BATCH_SEQUENCES):
        ids, segments = zip(*rows[first : first + BATCH_SEQUENCES], strict=True)
        yield pack(ids, segments)


def compare_outputs(
    source: ExportSource, run: Callable[[Arrays], Arrays], bound: float | None
) -> dict[str, Any]:
    """Compare the outputs of the file with bertkit's, and return the differences.

    For logits the agreement is the fraction of equal best classes, for vectors the least cosine.
    """
    outputs: dict[str, dict[str, float]] = {}
    sequences = tokens = 0
    for packed in check_batches(source):
        sequences, tokens = sequences + len(packed.lengths), tokens + len(packed.ids)
        arrays = padded_arrays(packed, source.head)
        exported = run(arrays)
        for name, expected in packed_outputs(source, packed).items():
            actual = exported[name]
            if is_token_output(source.head, name):
                actual = actual[arrays["attention_mask"].astype(bool)]
            if actual.shape != expected.shape or not np.isfinite([expected, actual]).all():
                raise BertkitError(
                    f"{name} has NaN or infinity, in the model or the export; export another model"
                )
            key = "same_best" if name.endswith("logits") else "least_cosine"
            worst = outputs.setdefault(name, {"max_error": 0.0, "largest": 0.0, key: 1.0})
            worst["max_error"] = max(worst["max_error"], float(np.abs(actual - expected).max()))
            worst["largest"] = max(worst["largest"], float(np.abs(expected).max()))
            worst[key] = min(worst[key], agreement(name, expected, actual))
    for name, measured in outputs.items():
        if bound is not None and measured["max_error"] > bound * max(1.0, measured["largest"]):
            raise BertkitError(
                f"{name} differs from bertkit's by up to {measured['max_error']:.2g} (for values "
                f"up to {measured['largest']:.2g}), but the bound is {bound:g}; choose another "
                "format or --max-error"
            )
    return {"sequences": sequences, "tokens": tokens, "bound": bound, "outputs": outputs}


def agreement(name: str, expected: np.ndarray, actual: np.ndarray) -> float:
    """Return the fraction of equal best classes of logits, or the cosine of other outputs."""
    if name.endswith("logits"):
        return float(np.mean(expected.argmax(-1) == actual.argmax(-1)))
    norms = np.linalg.norm(expected) * np.linalg.norm(actual)
    return float(np.vdot(expected, actual) / max(1e-12, norms))


def padded_arrays(packed: Packed, head: str) -> Arrays:
    """Return padded inputs, (sequences, length); (1, choices, length) for "multiple-choice"."""
    shape = len(packed.lengths), packed.max_seqlen
    rows, columns = packed.owners, packed.position_ids
    values = (packed.ids, torch.ones_like(packed.ids), packed.segment_ids)
    arrays = {}
    for name, flat in zip(PADDED_INPUTS, values, strict=True):
        padded = torch.zeros(shape, dtype=torch.int64)
        padded[rows, columns] = flat
        arrays[name] = padded.numpy()[None] if head == "multiple-choice" else padded.numpy()
    return arrays


@torch.inference_mode()
def packed_outputs(source: ExportSource, packed: Packed) -> Arrays:
    """Return bertkit's outputs by name: a row for each token, or for each sequence."""
    model, encoder, head = source.model, source.encoder, source.head
    if source.task is not None:
        logits = model(packed)
        if head == "question-answering":
            names = ("start_logits", "end_logits")
            return {n: t.numpy() for n, t in zip(names, logits.unbind(-1), strict=True)}
        return {"logits": (logits.view(1, -1) if head == "multiple-choice" else logits).numpy()}
    if head == "embedding":
        return {"sentence_embedding": embedded(source, packed).numpy()}
    hidden = encoder(packed)
    pooled = encoder.pool(hidden[packed.first_tokens.long()])
    outputs: dict[str, Callable[[], Tensor]] = {
        "last_hidden_state": lambda: hidden,
        "pooler_output": lambda: pooled,
        "prediction_logits": lambda: model.mlm(hidden, encoder.word_embeddings),
        "seq_relationship_logits": lambda: model.nsp(pooled),
        "logits": lambda: model.mlm(hidden, encoder.word_embeddings),
    }
    return {name: outputs[name]().numpy() for name in source.outputs}


def embedded(source: ExportSource, packed: Packed) -> Tensor:
    """Return (sequences, width) vectors, as `bertkit.predict.embeddings` does for short texts."""
    assert source.pooling is not None
    pooling = source.pooling.pooling
    if pooling in SUMMARIES:
        vectors = summary_vectors(source.encoder, packed, pooling)
    else:
        tokens = torch.tensor(packed.lengths, dtype=torch.float32)[packed.owners]
        facts = torch.ones_like(tokens), packed.position_ids, tokens, source.config.direction
        weights = [token_weights(mode, *facts) for mode in pooling.split("+")]
        vectors = weighted_vectors(source.encoder, packed, pooling, torch.stack(weights, dim=1))
    vectors = torch.nn.Sequential(*source.pooling.modules)(vectors)
    return torch.nn.functional.normalize(vectors) if source.pooling.normalize else vectors


def describe_export(out: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Summarize a manifest in a few lines."""
    size = sum(path.stat().st_size for path in out.iterdir())
    lines = [f"{out}: {manifest['format']}, head {manifest['head']}, {size / 1e6:,.1f} MB"]
    for name, difference in manifest["check"]["outputs"].items():
        key = "same_best" if "same_best" in difference else "least_cosine"
        lines.append(
            f"{name}: differs by at most {difference['max_error']:.1g}, for values up to "
            f"{difference['largest']:.2g}; {key.replace('_', ' ')} {difference[key]:.4f}"
        )
    return lines
