"""ONNX files and torch's own exported programs, from one trace of the padded network.

Number and length of sequences are free, the latter up to the model's positions. The int8 file is
made of the other: weights of matrix products and embeddings in 8 bits with a scale for each output,
inputs of products in 8 bits as they come.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertkit.errors import BertkitError
from bertkit.export.padded import PADDED_INPUTS, PaddedModel, is_token_output
from bertkit.export.source import ExportSource
from bertkit.export.verify import Arrays, Opened

ONNX_FILE = "model.onnx"
PROGRAM_FILE = "model.pt2"
MAX_PROTOBUF_BYTES = 1_900_000_000
"""A file of protocol buffers holds no more than 2 GB."""


QUIET = ("", "torch.onnx", "transformers")
"""Loggers; "" is the root, where onnxruntime's quantizer speaks."""


@contextmanager
def silence() -> Iterator[None]:
    """No warnings and log lines of the exporters: what they made is compared with the model.

    Levels are raised one by one: `logging.disable` would keep torch's tracing from noticing that
    nobody reads its trace, and it would go on writing one.
    """
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
    """What the free dimensions of an input or output are called."""
    if head == "multiple-choice":
        return ["batch", "choices", "sequence"] if name in PADDED_INPUTS else ["batch", "choices"]
    tokens = name in PADDED_INPUTS or is_token_output(head, name)
    return ["batch", "sequence"] if tokens else ["batch"]


def trace(model: PaddedModel) -> Any:
    """The network as a program of torch's operators."""
    dimensions = {
        "batch": torch.export.Dim("batch", max=1 << 20),
        "choices": torch.export.Dim("choices", max=1 << 10),
        "sequence": torch.export.Dim("sequence", max=model.config.max_position_embeddings),
    }
    names = axes(model.head, "input_ids")
    ids = torch.zeros((2, 3, 5) if len(names) == 3 else (2, 5), dtype=torch.int64)
    free = {place: dimensions[name] for place, name in enumerate(names)}
    shapes = dict.fromkeys(PADDED_INPUTS, free)
    arguments = (ids, torch.ones_like(ids), torch.zeros_like(ids))
    with silence(), torch.no_grad():
        return torch.export.export(model, arguments, dynamic_shapes=shapes)


def write_program(source: ExportSource, folder: Path) -> Opened:
    """Write `model.pt2`, for `torch.export.load`.

    Raises:
        BertkitError: the model has no padded form.
    """
    program, names = trace(source.padded()), source.outputs
    program.example_inputs = None  # they would be pickled; a file of plain numbers stays one
    with silence():
        torch.export.save(program, folder / PROGRAM_FILE)
        module = torch.export.load(folder / PROGRAM_FILE).module()

    @torch.inference_mode()
    def run(arrays: Arrays) -> Arrays:
        outputs = module(*(torch.from_numpy(arrays[name]) for name in PADDED_INPUTS))
        return dict(zip(names, (tensor.numpy() for tensor in outputs), strict=True))

    return Opened(("torch",), run)


def write_onnx(source: ExportSource, folder: Path) -> Opened:
    """Write `model.onnx` in fp32.

    Raises:
        BertkitError: the model has no padded form or is too large, or a library is missing.
    """
    export_graph(source, folder / ONNX_FILE)
    return open_graph(folder / ONNX_FILE)


def write_onnx_int8(source: ExportSource, folder: Path) -> Opened:
    """Write `model.onnx` in 8 bits.

    Raises:
        BertkitError: see `write_onnx`.
    """
    check_libraries()
    from onnxruntime.quantization import QuantType, quantize_dynamic  # type: ignore[import-untyped]

    with tempfile.TemporaryDirectory(dir=folder) as scratch, silence():
        exact = Path(scratch) / ONNX_FILE
        export_graph(source, exact)
        quantize_dynamic(exact, folder / ONNX_FILE, per_channel=True, weight_type=QuantType.QInt8)
    return open_graph(folder / ONNX_FILE)


def check_libraries() -> None:
    """Refuse where a library of the `onnx` extra is missing.

    Raises:
        BertkitError: says how to install it.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise BertkitError(f"ONNX files need {name}; install bertkit with the extra 'onnx'")


def export_graph(source: ExportSource, path: Path) -> None:
    """Write the fp32 graph with readable names of its dimensions."""
    check_libraries()
    import onnx

    size = sum(tensor.nbytes for tensor in source.model.state_dict().values())
    if size > MAX_PROTOBUF_BYTES:
        raise BertkitError(
            f"{source.path} has {size / 1e9:.1f} GB of weights and an ONNX file holds 2; choose "
            "--to torch-export"
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
    del graph.graph.value_info[:]  # stale shapes, over which quantizing stumbles
    for value in (*graph.graph.input, *graph.graph.output):
        dimensions = value.type.tensor_type.shape.dim
        for place, name in enumerate(axes(source.head, value.name)):
            dimensions[place].dim_param = name
    onnx.save(graph, path)


def open_graph(path: Path) -> Opened:
    """An ONNX file in onnxruntime, as it is, on the CPU and on as many threads as torch uses."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(arrays: Arrays) -> Arrays:
        found: list[np.ndarray] = session.run(names, arrays)
        return dict(zip(names, found, strict=True))

    return Opened(("onnxruntime",), run)


def graph_facts(path: Path) -> dict[str, Any]:
    """What the manifest says of an ONNX file: opset, inputs and outputs."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    opsets = [one.version for one in model.opset_import if not one.domain]
    facts: dict[str, Any] = {"opset": max(opsets)}
    for field in ("input", "output"):
        facts[f"{field}s"] = {
            value.name: {
                "type": onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name,
                "shape": [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim],
            }
            for value in getattr(model.graph, field)
        }
    return facts
