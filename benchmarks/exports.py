"""The models of the inference benchmark: model directories, and their exports for the peers.

- onnxruntime: graphs of transformers' own BERT, plain and fused, and both quantized dynamically.
  onnxruntime's optimizer finds its fusions only in graphs of the TorchScript exporter with
  `attn_implementation="eager"`: it does not recognise what the newer exporter writes.
- ctranslate2: its converter's format, whose weights it quantizes as it loads them.
- OpenVINO: the plain graph, and the one that `nncf.quantize` makes of it.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers import INPUTS
from benchmarks.record import instructions, precisions
from bertkit.checkpoints.pretrained import PretrainedWeights, load_config
from bertkit.checkpoints.save import save_model
from bertkit.export.onnx import silence as silence  # noqa: PLC0414 - others take it from here
from bertkit.files import write_atomic
from bertkit.model.encoder import ModelConfig
from bertkit.model.native import possible_modes
from bertkit.model.outputs import ClassificationModel, SpanModel

CLASSES = 32
"""The classes of the head: so many random views of the pooled [CLS] tell how equal it is."""
CALIBRATION = 64
"""The number of inputs from which `nncf.quantize` takes the ranges of activations."""


def build_head(head: str, config: ModelConfig) -> ClassificationModel | SpanModel:
    """Build the network with a new head, one of those of `Workload.head`."""
    return ClassificationModel(config, CLASSES) if head == "classification" else SpanModel(config)


def write_model(folder: Path, start: PretrainedWeights, head: str) -> Path:
    """Write a model directory in `folder`: the start's encoder and a head drawn from seed 0."""
    path = folder / head
    if not (path / "model.safetensors").is_file():
        torch.manual_seed(0)
        loaded = start.build(lambda config: build_head(head, config), keep_head=False)
        save_model(path, loaded.model, start.tokenizer, {"task": head})
    return path


def processor_name(name: str) -> str:
    """Return the name of a results file, which tells processors with other instructions apart."""
    ending = instructions().lower()
    return name if ending == "avx512" else f"{name}-{ending}"


def fast_modes() -> list[str]:
    """Return the modes of bertkit that this processor has instructions for."""
    return [mode for mode in possible_modes() if mode == "int8" or mode in precisions()]


def export(model: Path, head: str, folder: Path) -> dict[str, Path]:
    """Export the graphs "plain fp32", "fused fp32", "plain int8" and "fused int8" for onnxruntime.

    Files that exist are not made again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{graph} {kind}" for kind in ("fp32", "int8") for graph in ("plain", "fused")]
    files = {name: folder / f"{head}-{name.replace(' ', '-')}.onnx" for name in names}
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


def made_folder(path: Path, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` fills unless it exists; it appears only once it is complete."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
            make(Path(temporary) / "made")
            (Path(temporary) / "made").rename(path)
    return path


def export_ctranslate2(model: Path, folder: Path) -> Path:
    """Export the encoder and pooler of a model directory for ctranslate2, in fp32."""

    def make(path: Path) -> None:
        from ctranslate2.converters import TransformersConverter  # type: ignore[import-not-found]

        with tempfile.TemporaryDirectory() as temporary:
            source = Path(shutil.copytree(model, Path(temporary) / "model"))
            config = json.loads((source / "config.json").read_text(encoding="utf-8"))
            config["position_embedding_type"] = "absolute"  # transformers 5 has no such field
            (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
            with silence(), redirect_stdout(StringIO()):
                TransformersConverter(str(source)).convert(str(path))

    return made_folder(folder / f"{model.name}-ctranslate2", make)


OPENVINO_TYPES = {"fp32": "f32", "bf16": "bf16"}
"""Precision -> its name in OpenVINO."""


def export_openvino(
    plain: Path, folder: Path, name: str, calibration: Sequence[dict[str, np.ndarray]]
) -> dict[str, Path]:
    """Export the graphs "fp32" and "int8 static" for OpenVINO; return their files.

    `plain` is the graph "plain fp32" of `export`. The ranges of activations are taken from
    `calibration`, inputs called `name`. Files that exist are not made again.
    """
    import openvino  # type: ignore[import-not-found]

    def make(path: Path, *, quantized: bool) -> None:
        with silence(), redirect_stdout(StringIO()):
            network = openvino.convert_model(str(plain))
            if quantized:
                import nncf  # type: ignore[import-not-found]

                logging.getLogger("nncf").setLevel(logging.ERROR)
                network = nncf.quantize(
                    network,
                    nncf.Dataset(calibration),
                    model_type=nncf.ModelType.TRANSFORMER,
                    subset_size=len(calibration),
                )
            path.mkdir()
            openvino.save_model(network, str(path / "graph.xml"), compress_to_fp16=False)

    exact, static = (folder / f"{plain.stem}-{name}-openvino-{kind}" for kind in ("fp32", "int8"))
    return {
        "fp32": made_folder(exact, partial(make, quantized=False)) / "graph.xml",
        "int8 static": made_folder(static, partial(make, quantized=True)) / "graph.xml",
    }


class Logits(torch.nn.Module):
    """A transformers model with positional inputs and one output, as an exporter wants it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, segments: torch.Tensor) -> Any:
        """Return the logits of a padded batch."""
        output = self.model(input_ids=ids, attention_mask=mask, token_type_ids=segments)
        return logits_of(output)


def write_plain(model: Path, head: str, path: Path) -> None:
    """Export a model to ONNX with any number of sequences and tokens."""
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
    """Fuse the operators of a graph, and check that all fusions were found."""
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
    counts = fused.get_fused_operator_statistics()
    wanted = {
        "EmbedLayerNormalization": 1,
        "Attention": layers,
        "BiasGelu": layers,
        "SkipLayerNormalization": 2 * layers,
    }
    if missing := {name: n for name, n in wanted.items() if counts[name] != n}:
        raise RuntimeError(f"onnxruntime's optimizer fused {counts}; {missing} were expected")
    fused.save_model_to_file(str(path))


def write_int8(source: Path, path: Path) -> None:
    """Quantize the matrix products: weights in 8 bits per channel, inputs to uint8 as they come."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic  # type: ignore[import-untyped]

    quantize_dynamic(
        str(source),
        str(path),
        op_types_to_quantize=["MatMul", "Attention"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        # shapes are not inferred through fused operators, so the type has to be given
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )


def their_model(folder: Path, head: str, precision: str, attention: str) -> Any:
    """Load the network of transformers, in evaluation mode."""
    from transformers import BertForQuestionAnswering, BertForSequenceClassification
    from transformers.utils import logging as their_logging

    their_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    their_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    kinds: dict[str, Any] = {
        "classification": BertForSequenceClassification,
        "question-answering": BertForQuestionAnswering,
    }
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return kinds[head].from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()


def logits_of(output: Any) -> torch.Tensor:
    """Return logits as (sequences, classes), or start and end logits as (sequences, tokens, 2)."""
    if "logits" in output:
        return output.logits
    return torch.stack([output.start_logits, output.end_logits], dim=-1)
