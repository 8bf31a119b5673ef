"""New words are one token, and all that a model knew stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bertkit.checkpoints.extend import extend_vocabulary
from bertkit.checkpoints.pretrained import load_pretraining_model, read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.checkpoints.sentence_transformers import TextPooling, read_pooling
from bertkit.errors import BertkitError
from bertkit.files import read_json, write_json
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.model.outputs import ClassificationModel
from bertkit.pretraining_data.batch import Packed, pack
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from tests.networks import write_pooling

PIECES = [
    *SPECIAL_TOKENS, "the", "cell", "mito", "##cho", "##ndria", "##l", "##s", "l", "##in", "##e",
    "##n", "##d", "e", "en", "##zyme", ".",
]  # fmt: skip
OLD_TEXT = "the cells . the line , enzyme ."


@pytest.fixture
def small() -> Tokenizer:
    return Tokenizer.from_vocabulary(PIECES, lowercase=True)


def save(folder: Path, tokenizer: Tokenizer, kind: str = "pretraining") -> Path:
    """A random model with large weights."""
    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=tokenizer.size, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    details: dict[str, object] = {"task": kind}
    if kind == "pretraining":
        model: torch.nn.Module = PretrainingModel(config)
        torch.nn.init.normal_(model.mlm.bias)
    elif kind == "classification":
        model = ClassificationModel(config, 3)
        details["labels"] = ["a", "b", "c"]
    else:
        model = Encoder(config)
    save_model(folder, model, tokenizer, details)
    return folder


def batch(tokenizer: Tokenizer, *texts: str) -> Packed:
    encodings = [tokenizer.encode_pair(text) for text in texts]
    return pack([e.ids for e in encodings], [e.segment_ids for e in encodings])


def test_what_was_known_stays_equal(tmp_path: Path, small: Tokenizer) -> None:
    old = save(tmp_path / "old", small)
    made = extend_vocabulary(old, ["Mitochondrial", "lines"], tmp_path / "new")
    assert made == ["mitochondrial", "lines"]
    new, start = read_pretrained(tmp_path / "new"), read_pretrained(old)
    size = len(PIECES)
    assert new.config.vocab_size == new.tokenizer.size == size + 2
    assert new.tokenizer.encode("mitochondrial lines").ids == [size, size + 1]
    packed = batch(new.tokenizer, OLD_TEXT)
    assert torch.equal(batch(small, OLD_TEXT).ids, packed.ids)
    targets = torch.arange(len(packed.ids))
    before = load_pretraining_model(old)(packed, targets)
    after = load_pretraining_model(tmp_path / "new")(packed, targets)
    assert torch.equal(before.mlm_logits, after.mlm_logits[:, :size])
    assert torch.equal(before.nsp_logits, after.nsp_logits)
    assert new.tensors.keys() == start.tensors.keys()
    pieces = small.encode("mitochondrial").ids
    for name in ("encoder.word_embeddings.weight", "mlm.bias"):
        mean = start.tensors[name][pieces].mean(0)
        torch.testing.assert_close(new.tensors[name][size], mean)
    [record] = read_json(tmp_path / "new" / "bertkit.json")["extended"]
    assert record["words"] == made


@pytest.mark.parametrize("kind", ["classification", "features"])
def test_any_head(kind: str, tmp_path: Path, small: Tokenizer) -> None:
    old = save(tmp_path / "old", small, kind)
    extend_vocabulary(old, ["lines"], tmp_path / "new")
    start, new = read_pretrained(old), read_pretrained(tmp_path / "new")
    assert new.tensors.keys() == start.tensors.keys()
    config = read_json(tmp_path / "new" / "config.json")
    assert config["architectures"] == read_json(old / "config.json")["architectures"]


def test_words_of_a_file_and_words_that_cannot_be_added(tmp_path: Path, small: Tokenizer) -> None:
    old, words = save(tmp_path / "old", small), tmp_path / "words.txt"
    words.write_text("Mitochondrial\n\nlines\nthe\nco-enzyme\nlines\n")
    made = extend_vocabulary(old, words, tmp_path / "new")
    assert made == ["mitochondrial", "lines"]
    for refused in (["the"], ["co-enzyme", "a b"], ["x" * 500]):
        with pytest.raises(BertkitError, match="no word is new"):
            extend_vocabulary(old, refused, tmp_path / "none")


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path, small: Tokenizer) -> None:
    old = save(tmp_path / "old", small)
    with pytest.raises(BertkitError, match="is the model itself"):
        extend_vocabulary(old, ["lines"], old)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "config.json").write_text("keep")
    with pytest.raises(BertkitError, match="notes"):
        extend_vocabulary(old, ["lines"], tmp_path / "notes")
    assert (tmp_path / "notes" / "config.json").read_text() == "keep"


def test_how_texts_become_vectors_is_kept(tmp_path: Path, small: Tokenizer) -> None:
    old = save(tmp_path / "old", small, "features")
    wanted = TextPooling("cls", normalize=False, max_length=16, prompt="query: ")
    write_pooling(old, wanted, read_pretrained(old).config)
    modules = read_json(old / "modules.json")
    (old / "2_Dense").mkdir()
    write_json(old / "2_Dense" / "config.json", {"a": 1})
    extend_vocabulary(old, ["coenzyme"], tmp_path / "new")
    assert read_pooling(tmp_path / "new")[1] == wanted
    write_json(
        old / "modules.json",
        [*modules, {"name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}],
    )
    extend_vocabulary(old, ["coenzyme"], tmp_path / "newer")
    assert read_json(tmp_path / "newer" / "2_Dense" / "config.json") == {"a": 1}


def test_a_checkpoint_of_googles(data: Path, tmp_path: Path) -> None:
    start = read_pretrained(data / "tf-checkpoint")
    extend_vocabulary(data / "tf-checkpoint", ["qqq"], tmp_path / "new")
    new = read_pretrained(tmp_path / "new")
    assert new.tokenizer.encode("qqq").ids == [start.tokenizer.size]
    config = read_json(tmp_path / "new" / "config.json")
    assert config["architectures"] == ["BertForPreTraining"]
    model = load_pretraining_model(tmp_path / "new")
    assert model.config.vocab_size == start.config.vocab_size + 1
