"""ONNX graphs of a model directory: plain, fused, and both quantized to int8.

The graphs come from transformers' own BERT. onnxruntime's optimizer finds its fusions in graphs
of the TorchScript exporter with `attn_implementation="eager"` only: it does not recognise what the
newer exporter writes.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bertkit.checkpoints.huggingface import load_config
from bertkit.export.onnx import silence as silence  # noqa: PLC0414 - others take it from here
from bertkit.files import write_atomic

GRAPHS = ("plain", "fused")
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def export(model: Path, head: str, folder: Path) -> dict[str, Path]:
    """Every graph of a model: "plain fp32", "fused fp32", "plain int8" and "fused int8".

    Args:
        model: a model directory.
        head: see `Workload`.
        folder: keeps the files; those that are there are not made again.

    Raises:
        RuntimeError: the optimizer of this version did not find the attention of every layer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        f"{graph} {precision}": folder / f"{head}-{graph}-{precision}.onnx"
        for precision in ("fp32", "int8")
        for graph in GRAPHS
    }
    makers: dict[str, Callable[[Path], object]] = {
        "plain fp32": lambda path: write_plain(model, head, path),
        "fused fp32": lambda path: write_fused(model, files["plain fp32"], path),
        "plain int8": lambda path: write_int8(files["plain fp32"], path),
        "fused int8": lambda path: write_int8(files["fused fp32"], path),
    }
    for name, path in files.items():
        if not path.is_file():
            with silence():
                write_atomic(path, makers[name])
    return files


class Logits(torch.nn.Module):
    """transformers' model with its inputs by place and one output, as an exporter wants it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, segments: torch.Tensor) -> Any:
        """Logits of a padded batch."""
        output = self.model(input_ids=ids, attention_mask=mask, token_type_ids=segments)
        return logits_of(output)


def write_plain(model: Path, head: str, path: Path) -> None:
    """Export with free numbers of sequences and tokens."""
    wrapped = Logits(their_model(model, head, "fp32", attention="eager")).eval()
    ids = torch.arange(32).view(2, 16) % load_config(model).vocab_size
    mask = (torch.arange(16) < torch.tensor([[16], [10]])).long()
    free = {0: "sequences", 1: "tokens"}
    torch.onnx.export(
        wrapped,
        (ids, mask, torch.zeros_like(ids)),
        str(path),
        input_names=list(INPUTS),
        output_names=["logits"],
        dynamic_axes={
            **dict.fromkeys(INPUTS, free),
            "logits": {0: "sequences"} if head == "classification" else free,
        },
        opset_version=17,
        dynamo=False,
    )


def write_fused(model: Path, plain: Path, path: Path) -> None:
    """Fuse, and check that all was found."""
    from onnxruntime.transformers import optimizer  # type: ignore[import-untyped]

    config = load_config(model)
    layers = config.num_hidden_layers
    fused = optimizer.optimize_model(
        str(plain),
        model_type="bert",
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        opt_level=0,
    )
    found = fused.get_fused_operator_statistics()
    wanted = {
        "EmbedLayerNormalization": 1,
        "Attention": layers,
        "BiasGelu": layers,
        "SkipLayerNormalization": 2 * layers,
    }
    if missing := {name: n for name, n in wanted.items() if found[name] != n}:
        raise RuntimeError(f"onnxruntime's optimizer fused {found}; {missing} were expected")
    fused.save_model_to_file(str(path))


def write_int8(source: Path, path: Path) -> None:
    """Quantize the matrix products: weights int8 per channel, inputs uint8 as they come."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic  # type: ignore[import-untyped]

    quantize_dynamic(
        str(source),
        str(path),
        op_types_to_quantize=["MatMul", "Attention"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        # shapes are not inferred through fused operators, so the type has to be told
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )


def fused_operators(path: Path) -> dict[str, int]:
    """How many operators of each fused kind a session runs once it has optimized a graph."""
    import onnx

    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "optimized.onnx"
        open_session(path, written)
        nodes = onnx.load(str(written)).graph.node
    kinds = Counter(node.op_type for node in nodes if node.domain.startswith("com.microsoft"))
    return dict(sorted(kinds.items()))


def open_session(path: Path, optimized: Path | None = None) -> Any:
    """A session with every optimization; it can write the graph that it made of the file."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    if optimized:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def their_model(folder: Path, head: str, precision: str, attention: str) -> Any:
    """Their network, in evaluation mode."""
    from transformers import BertForQuestionAnswering, BertForSequenceClassification
    from transformers.utils import logging as their_logging

    their_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    their_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    kind: Any = (
        BertForSequenceClassification if head == "classification" else BertForQuestionAnswering
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return kind.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()


def logits_of(output: Any) -> torch.Tensor:
    """(sequences, classes), or start and end together as (sequences, tokens, 2)."""
    if "logits" in output:
        return output.logits
    return torch.stack([output.start_logits, output.end_logits], dim=-1)
