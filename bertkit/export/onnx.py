"""ONNX files: writing from a trace of the padded network, conversion to 8 bits, and running.

The number and the length of sequences are dynamic, the length up to the model's positions. The int8
file is made from the fp32 file: weights of matrix products and embeddings have 8 bits and a scale
per output; inputs of matrix products are quantized to 8 bits at run time.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertkit.errors import BertkitError
from bertkit.export.padded import PADDED_INPUTS, ExportSource, PaddedModel, is_token_output

ONNX_FILE = "model.onnx"
MAX_PROTOBUF_BYTES = 1_900_000_000
"""The maximum number of bytes of weights: a protocol buffer file is limited to 2 GB."""
QUIET = ("", "torch.onnx", "transformers")
"""Loggers to silence; "" is the root logger, which onnxruntime's quantizer uses."""


@contextmanager
def silence() -> Iterator[None]:
    """Suppress the exporters' warnings and log lines; their results are compared with the model."""
    # one by one: with `logging.disable`, torch would not notice that nobody reads its trace
    loggers = [logging.getLogger(name) for name in QUIET]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


def axes(head: str, name: str) -> list[str]:
    """Return the names of the dynamic dimensions of an input or output."""
    if head == "multiple-choice":
        return ["batch", "choices", "sequence"] if name in PADDED_INPUTS else ["batch", "choices"]
    tokens = name in PADDED_INPUTS or is_token_output(head, name)
    return ["batch", "sequence"] if tokens else ["batch"]


def trace(model: PaddedModel) -> Any:
    """Export the network as a program of torch's operators, with dynamic shapes."""
    dimensions = {
        "batch": torch.export.Dim("batch", max=1 << 20),
        "choices": torch.export.Dim("choices", max=1 << 10),
        "sequence": torch.export.Dim("sequence", max=model.config.max_position_embeddings),
    }
    names = axes(model.head, "input_ids")
    ids = torch.zeros((2, 3, 5) if len(names) == 3 else (2, 5), dtype=torch.int64)
    free = {axis: dimensions[name] for axis, name in enumerate(names)}
    shapes = dict.fromkeys(PADDED_INPUTS, free)
    arguments = (ids, torch.ones_like(ids), torch.zeros_like(ids))
    with silence(), torch.no_grad():
        return torch.export.export(model, arguments, dynamic_shapes=shapes)


def write_onnx(source: ExportSource, folder: Path, *, eight_bits: bool = False) -> None:
    """Write `model.onnx` in fp32 or with 8-bit weights."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise BertkitError(f"ONNX files need {name}; install bertkit with the extra 'onnx'")
    if not eight_bits:
        export_graph(source, folder / ONNX_FILE)
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic  # type: ignore[import-untyped]

    with tempfile.TemporaryDirectory(dir=folder) as scratch, silence():
        exact = Path(scratch) / ONNX_FILE
        export_graph(source, exact)
        quantize_dynamic(exact, folder / ONNX_FILE, per_channel=True, weight_type=QuantType.QInt8)


def export_graph(source: ExportSource, path: Path) -> None:
    """Write the fp32 graph, with readable names for its dynamic dimensions."""
    import onnx

    size = sum(tensor.nbytes for tensor in source.model.state_dict().values())
    if size > MAX_PROTOBUF_BYTES:
        raise BertkitError(
            f"{source.path} has {size / 1e9:.1f} GB of weights, but an ONNX file holds 2 GB"
        )
    model = source.padded()
    program = trace(model)
    with silence():
        torch.onnx.export(
            program,
            (),
            path,
            input_names=list(PADDED_INPUTS),
            output_names=list(model.outputs),
            external_data=False,
            verbose=False,
        )
    graph = onnx.load(path)
    del graph.graph.value_info[:]  # stale shapes, which make quantization fail
    for node in graph.graph.node:
        del node.metadata_props[:]  # where torch's code made it, with paths of this machine
    for value in (*graph.graph.input, *graph.graph.output):
        dimensions = value.type.tensor_type.shape.dim
        for axis, name in enumerate(axes(source.head, value.name)):
            dimensions[axis].dim_param = name
    onnx.save(graph, path)


def open_graph(path: Path) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return an ONNX file as a function, run by onnxruntime on as many threads as torch uses."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda arrays: dict(zip(names, session.run(names, arrays), strict=True))
