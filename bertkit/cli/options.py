"""Flags that several commands share, each documented once."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from bertkit.outputs import Written

Device = Annotated[
    str, Parameter(help="auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.")
]
Precision = Annotated[
    str,
    Parameter(help="fp32, bf16, int8 (CPUs only), or auto: bf16 if the device computes it fast."),
]
Column = Annotated[str, Parameter(help="The column of the text, in formats that have columns.")]
Pooling = Annotated[
    str,
    Parameter(
        help="cls, mean, pooler, mean-last-four, or auto: what the model's directory says, else "
        "mean."
    ),
]
VectorFormat = Annotated[
    str, Parameter(help="safetensors, parquet, npy, or auto for the ending of the file.")
]
VectorFile = Written("file", beside=".json")
"""A file of vectors; an index is written beside a .npy file."""
