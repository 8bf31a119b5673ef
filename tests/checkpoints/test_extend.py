"""New words are one piece, and all that a model knew stays as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bertkit.checkpoints.extend import (
    Extension,
    cut_into_tokens,
    extend_tensors,
    extend_tokenizer,
    write_extended,
)
from bertkit.checkpoints.pretrained import (
    PretrainedWeights,
    load_model,
    load_pretraining_model,
    read_pretrained,
)
from bertkit.checkpoints.save import save_model
from bertkit.checkpoints.sentence_transformers import TextPooling, read_pooling, write_pooling
from bertkit.cli.app import application as cli
from bertkit.cli.vocab import vocab_application
from bertkit.config import parse
from bertkit.errors import BertkitError
from bertkit.files import read_json, write_json
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.model.task_heads import ClassificationModel
from bertkit.pretraining_data.batch import Packed, pack
from bertkit.text.documents import TextCounts
from bertkit.tokenizer.learn import choose_domain_words
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from tests.conftest import load_encoder

PIECES = [
    *SPECIAL_TOKENS, "[unused0]", "[unused1]", "[unused2]", "the", "cell", "mito", "##cho",
    "##ndria", "##l", "##s", "l", "##in", "##e", "##n", "##d", "e", "en", "##zyme", ".",
]  # fmt: skip
OLD_TEXT = "the cells . the line , enzyme ."


def toy(vocabulary: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocabulary, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=64,
    )  # fmt: skip


@pytest.fixture
def small() -> Tokenizer:
    return Tokenizer.from_vocabulary(PIECES, lowercase=True)


def save(
    folder: Path, tokenizer: Tokenizer, kind: str = "both", rows: int = 0
) -> PretrainedWeights:
    """A random model with the given heads, saved and read."""
    torch.manual_seed(1)
    config = toy(rows or tokenizer.size)
    if kind == "both":
        model: torch.nn.Module = PretrainingModel(config)
        torch.nn.init.normal_(model.mlm.bias)
        save_model(folder, model, tokenizer, {"task": "pretraining", "steps": 7})
    elif kind == "classify":
        model = ClassificationModel(config, 3)
        save_model(folder, model, tokenizer, {"task": "classification", "labels": ["a", "b", "c"]})
    else:
        save_model(folder, Encoder(config), tokenizer, {})
    return read_pretrained(folder)


def extend(
    start: PretrainedWeights, out: Path, *words: str, place: str = "append", init: str = "mean"
) -> PretrainedWeights:
    counts = TextCounts()
    extension = extend_tokenizer(
        start.tokenizer, [(word, "list") for word in words], counts, place=place
    )
    write_extended(start, extension, out, place=place, init=init)
    return read_pretrained(out)


def batch(tokenizer: Tokenizer, *texts: str) -> Packed:
    encodings = [tokenizer.encode_pair(text) for text in texts]
    return pack([e.ids for e in encodings], [e.segment_ids for e in encodings])


@pytest.mark.parametrize("place", ["append", "unused"])
def test_what_was_known_stays_equal(tmp_path: Path, small: Tokenizer, place: str) -> None:
    start = save(tmp_path / "old", small)
    new = extend(start, tmp_path / "new", "Mitochondrial", "lines", "##zymes", place=place)
    size = len(PIECES) + (3 if place == "append" else 0)
    assert new.config.vocab_size == new.tokenizer.size == size
    ids = list(range(size - 3, size)) if place == "append" else [5, 6, 7]
    assert new.tokenizer.encode("mitochondrial lines").ids == ids[:2]
    assert new.tokenizer.encode("enzymes").tokens == ["en", "##zymes"]
    old_packed, packed = batch(small, OLD_TEXT), batch(new.tokenizer, OLD_TEXT)
    assert torch.equal(old_packed.ids, packed.ids)
    targets = torch.arange(len(packed.ids))
    before = load_pretraining_model(tmp_path / "old")(packed, targets)
    after = load_pretraining_model(tmp_path / "new")(packed, targets)
    same = [index for index in range(len(PIECES)) if index not in ids]
    assert torch.equal(before.mlm_logits[:, same], after.mlm_logits[:, same])
    assert before.nsp_logits is not None
    assert after.nsp_logits is not None
    assert torch.equal(before.nsp_logits, after.nsp_logits)
    assert new.tensors.keys() == start.tensors.keys()
    for name, tensor in start.tensors.items():
        if "word_embeddings" in name or name == "cls.predictions.bias":
            assert torch.equal(new.tensors[name][same], tensor[same])
        else:
            assert torch.equal(new.tensors[name], tensor)


def test_rows_are_the_means_of_the_pieces_before(tmp_path: Path, small: Tokenizer) -> None:
    start = save(tmp_path / "old", small)
    words = {"mitochondrial": ["mito", "##cho", "##ndria", "##l"], "lines": ["l", "##in", "##e",
             "##s"], "##zymes": ["##zyme", "##s"], "quark": ["[UNK]"]}  # fmt: skip
    new = extend(start, tmp_path / "new", *words)
    for row, (word, pieces) in enumerate(words.items(), start=len(PIECES)):
        assert new.tokenizer.vocabulary[row] == word
        before = [PIECES.index(piece) for piece in pieces]
        assert cut_into_tokens(word, small) == before
        for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
            expected = torch.stack([start.tensors[name][index] for index in before]).mean(0)
            torch.testing.assert_close(new.tensors[name][row], expected)
    # the network sees the mean: its logit for the word is the mean of those of the pieces
    model = load_pretraining_model(tmp_path / "new")
    logits = model(batch(small, OLD_TEXT), torch.arange(4)).mlm_logits
    mean = logits[:, [PIECES.index(piece) for piece in words["mitochondrial"]]].mean(1)
    torch.testing.assert_close(logits[:, len(PIECES)], mean)


def test_random_rows_are_the_same_each_time(tmp_path: Path, small: Tokenizer) -> None:
    start = save(tmp_path / "old", small)
    first = extend(start, tmp_path / "a", "lines", "cells", init="random", place="unused")
    again = extend(start, tmp_path / "b", "lines", "cells", init="random", place="unused")
    assert first.digest == again.digest
    rows = first.tensors["bert.embeddings.word_embeddings.weight"][5:7]
    assert 0 < rows.abs().max() <= 0.04
    assert not torch.equal(rows[0], rows[1])
    assert first.tensors["cls.predictions.bias"][5:7].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["both", "encoder", "classify"])
def test_any_heads(tmp_path: Path, small: Tokenizer, kind: str) -> None:
    start = save(tmp_path / "old", small, kind)
    extend(start, tmp_path / "new", "lines")
    config = read_json(tmp_path / "new" / "config.json")
    assert config == read_json(tmp_path / "old" / "config.json") | {"vocab_size": len(PIECES) + 1}
    transformers = pytest.importorskip("transformers")
    name = config["architectures"][0]
    other, report = getattr(transformers, name).from_pretrained(
        tmp_path / "new", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    inputs = tokenizer("the lines .", return_tensors="pt")
    mine = batch(Tokenizer.load(tmp_path / "new"), "the lines .")
    assert inputs["input_ids"][0].tolist() == mine.ids.tolist()
    assert len(PIECES) in mine.ids
    with torch.no_grad():
        theirs = other.eval()(**inputs, output_hidden_states=True).hidden_states[-1][0]
        ours = load_encoder(tmp_path / "new")(mine)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    if kind == "classify":
        loaded = load_model(tmp_path / "new", lambda c: ClassificationModel(c, 3))
        assert loaded.missing_keys == []
        assert read_json(tmp_path / "new" / "bertkit.json")["labels"] == ["a", "b", "c"]


def test_spare_rows_of_the_embeddings_are_used_first(tmp_path: Path, small: Tokenizer) -> None:
    start = save(tmp_path / "old", small, rows=len(PIECES) + 2)
    assert extend(start, tmp_path / "a", "lines").config.vocab_size == len(PIECES) + 2
    three = extend(start, tmp_path / "b", "lines", "cells", "linen")
    assert three.config.vocab_size == three.tokenizer.size == len(PIECES) + 3


def test_how_it_was_made_is_written_down(tmp_path: Path, small: Tokenizer) -> None:
    start = save(tmp_path / "old", small)
    once = extend(start, tmp_path / "a", "lines")
    extend(once, tmp_path / "b", "cells", place="unused", init="random")
    details = read_json(tmp_path / "b" / "bertkit.json")
    assert (details["task"], details["steps"]) == ("pretraining", 7)
    first, second = details["extended"]
    assert (first["words"], first["place"], first["init"]) == (["lines"], "append", "mean")
    assert (second["words"], second["place"], second["init"]) == (["cells"], "unused", "random")
    assert first["weights_and_vocabulary"] == start.digest
    assert once.tokenizer.size == read_pretrained(tmp_path / "b").tokenizer.size


def test_what_cannot_be_added_is_counted(small: Tokenizer) -> None:
    counts = TextCounts()
    words = [
        "Lines",
        "the",
        "lines",
        "",
        "two words",
        "co-enzyme",
        "x" * 201,
        "[CLS]",
        "##s",
        "##中",
    ]
    found = extend_tokenizer(small, [(w, f"f:{n}") for n, w in enumerate(words, 1)], counts)
    assert found.words == ["lines"]
    assert counts.skipped == {
        "word that is one token already, or listed twice": 3,
        "blank line": 1,
        "text that normalisation splits into several words": 3,
        "word of more than 200 characters": 1,
        "continuation token that is always a word by itself": 1,
    }
    assert counts.examples["blank line"] == "f:4"


def test_words_that_the_models_own_rules_change_are_counted() -> None:
    # by transformers' rules, unlike Google's, private-use characters vanish from a text
    tokenizer = Tokenizer.from_vocabulary(PIECES, lowercase=True, compat="hf")
    counts = TextCounts()
    words = [("enz\ue000yme", "f:1"), ("lines", "f:2"), ("##zymes", "f:3")]
    found = extend_tokenizer(tokenizer, words, counts)
    assert found.words == ["lines", "##zymes"]
    assert counts.skipped == {"word that the model's own tokenizer reads differently": 1}
    assert found.tokenizer.encode("lines").ids == [len(PIECES)]


def test_accents_are_counted_as_the_model_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An uncased model that keeps accents gets words with accents, not ones it will never see."""
    pieces = [*PIECES, "z", "##u", "##ü", "##g"]
    keeps = Tokenizer.from_vocabulary(pieces, lowercase=True, strip_accents=False)
    save(tmp_path / "old", keeps)
    text = tmp_path / "text.txt"
    text.write_text("Züge züge ZÜGE. " * 3)
    run(
        "extend", str(tmp_path / "old"), "--out", str(tmp_path / "new"), "--text", str(text),
        "--count", "1", "--processes", "1",
    )  # fmt: skip
    assert "1 of them new: züge" in " ".join(capsys.readouterr().err.split())
    assert Tokenizer.load(tmp_path / "new").encode("Züge").tokens == ["züge"]


def test_refusals(tmp_path: Path, small: Tokenizer) -> None:
    def vocabulary(*words: str, place: str = "append") -> Extension:
        return extend_tokenizer(small, [(w, "x") for w in words], TextCounts(), place=place)

    with pytest.raises(BertkitError, match=r"no word is new .*is one token already.*: 1\)"):
        vocabulary("the")
    with pytest.raises(BertkitError, match=r"\(text that .* splits into several words: 2\)"):
        vocabulary("co-enzyme", "a b")
    with pytest.raises(BertkitError, match=r"3 \[unused\] entries for 4 new words"):
        vocabulary("aa", "bb", "cc", "dd", place="unused")
    with pytest.raises(BertkitError, match="no placement is called 'apend'; did you mean 'append'"):
        vocabulary("aa", place="apend")
    start = save(tmp_path / "old", small)
    with pytest.raises(BertkitError, match="no initialisation is called 'men'"):
        extend_tensors(start.tensors, vocabulary("aa"), start.config, init="men")
    with pytest.raises(BertkitError, match="is the model itself"):
        write_extended(start, vocabulary("aa"), tmp_path / "old")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(BertkitError, match="is not a model directory"):
        write_extended(start, vocabulary("aa"), tmp_path / "notes")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"
    (tmp_path / "notes" / "config.json").write_text("{}")  # other things have one, too
    with pytest.raises(BertkitError, match="is not a model directory"):
        write_extended(start, vocabulary("aa"), tmp_path / "notes")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"


def test_how_texts_become_vectors_is_kept(tmp_path: Path, small: Tokenizer) -> None:
    start = save(tmp_path / "old", small, "encoder")
    wanted = TextPooling("cls", normalize=False, max_length=16, prompt="query: ")
    write_pooling(start.path, wanted, start.config)
    extend(start, tmp_path / "new", "coenzyme")
    assert read_pooling(tmp_path / "new")[1] == read_pooling(tmp_path / "old")[1] == wanted
    # version 6 of sentence-transformers writes the length to the tokenizer's file alone
    write_json(start.path / "sentence_bert_config.json", {"transformer_task": "feature-extraction"})
    tokenizer = start.path / "tokenizer_config.json"
    write_json(tokenizer, read_json(tokenizer) | {"model_max_length": 16})
    extend(start, tmp_path / "newer", "coenzyme")
    assert read_pooling(tmp_path / "newer")[1] == read_pooling(tmp_path / "old")[1] == wanted


def test_where_the_model_is_from_is_recorded(tmp_path: Path, small: Tokenizer) -> None:
    commit = "0123456789" * 4
    folders = {
        "run": tmp_path / "run" / "model",
        f"org/name@{commit}": tmp_path / f"models--org--name/snapshots/{commit}",
    }
    for number, (name, folder) in enumerate(folders.items()):
        extend(save(folder, small), tmp_path / str(number), "coenzyme")
        [made] = read_json(tmp_path / str(number) / "bertkit.json")["extended"]
        assert made["from"] == name


def test_every_module_is_kept_also_of_one_class(tmp_path: Path, small: Tokenizer) -> None:
    start = save(tmp_path / "old", small, "encoder")
    write_pooling(start.path, TextPooling("cls"), start.config)
    modules = read_json(start.path / "modules.json")
    for name in ("2_Dense", "3_Dense"):
        (start.path / name).mkdir()
        write_json(start.path / name / "config.json", {"name": name})
        modules.append({"name": name, "path": name, "type": "sentence_transformers.models.Dense"})
    write_json(start.path / "modules.json", modules)
    extend(start, tmp_path / "new", "coenzyme")
    assert read_json(tmp_path / "new" / "modules.json") == modules
    for name in ("2_Dense", "3_Dense"):
        assert read_json(tmp_path / "new" / name / "config.json") == {"name": name}
    (tmp_path / "secret").mkdir()
    modules[-2]["path"] = "../secret"  # the last of its class is inside
    write_json(start.path / "modules.json", modules)
    with pytest.raises(BertkitError, match="is not inside the directory"):
        extend(start, tmp_path / "newer", "coenzyme")


def test_words_are_chosen_by_the_pieces_they_save(small: Tokenizer) -> None:
    counts = {"mitochondrial": 2, "lines": 2, "cells": 7, "the": 99, "quark": 50, "linen": 2}
    # 2 x 3, 2 x 3, 7 x 1, one piece, [UNK], 2 x 3 saved pieces
    found = [("cells", 7), ("linen", 6), ("lines", 6), ("mitochondrial", 6)]
    assert choose_domain_words(small, counts, 10) == found
    assert choose_domain_words(small, dict(reversed(counts.items())), 2) == found[:2]
    with pytest.raises(BertkitError, match="at least 1"):
        choose_domain_words(small, counts, 0)


def test_a_vocabulary_of_googles_keeps_its_size(data: Path, tmp_path: Path) -> None:
    path = data / "vocab" / "bert-base-uncased-vocab.txt"
    tokenizer = Tokenizer.load(path)
    start = save(tmp_path / "old", tokenizer, "encoder")
    words = ["Phosphorylases", "transcriptome", "immunoglobulins"]
    assert all(len(tokenizer.encode(word).ids) > 1 for word in words)
    new = extend(start, tmp_path / "new", *words, place="unused")
    assert new.tokenizer.size == new.config.vocab_size == 30522
    assert new.tokenizer.encode(" ".join(words)).ids == [1, 2, 3]
    text = "The quick brown fox jumps over unbelievably lazy dogs, don't you think?"
    assert new.tokenizer.encode(text) == tokenizer.encode(text)
    packed = batch(tokenizer, text)
    before, after = load_encoder(tmp_path / "old")(packed), load_encoder(tmp_path / "new")(packed)
    assert torch.equal(before, after)


def test_a_checkpoint_of_googles(data: Path, tmp_path: Path) -> None:
    start = read_pretrained(data / "tf-checkpoint")
    new = extend(start, tmp_path / "new", "qqq")
    assert new.tokenizer.encode("qqq").ids == [start.tokenizer.size]
    described = read_json(tmp_path / "new" / "config.json")
    assert described["architectures"] == ["BertForPreTraining"]
    assert described["pad_token_id"] == new.tokenizer.pad_id
    model = load_pretraining_model(tmp_path / "new")
    assert model.config.vocab_size == start.config.vocab_size + 1


def run(*arguments: str) -> None:
    app = cli()
    if "vocab" not in set(app):
        app.command(vocab_application, name="vocab")
    parse(app, ["vocab", *arguments])


def test_the_verb(tmp_path: Path, small: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "old", small)
    (tmp_path / "words.txt").write_text("Mitochondrial\n\nlines\nthe\n")
    run(
        "extend", str(tmp_path / "old"), "--out", str(tmp_path / "new"),
        "--words", str(tmp_path / "words.txt"),
    )  # fmt: skip
    shown = capsys.readouterr().err
    assert "26 tokens, 2 of them new: mitochondrial, lines" in shown
    assert "blank line: 1 (first: " in shown
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("the cells . " * 5)
    two.write_text("lines " * 4 + "mitochondrial quark")
    run(
        "extend", str(tmp_path / "old"), "--out", str(tmp_path / "text"), "--text", str(one),
        str(two), "--count", "2", "--place", "unused", "--processes", "1",
    )  # fmt: skip
    shown = " ".join(capsys.readouterr().err.split())
    assert "21 words in 41 tokens, 1 words [UNK]" in shown
    assert "2 words with at least 2 occurrences would save 17 tokens" in shown
    assert Tokenizer.load(tmp_path / "text").vocabulary[5:8] == ["lines", "cells", "[unused2]"]
    report = tmp_path / "report.json"
    run("measure", str(tmp_path / "text"), str(one), str(two), "--json", str(report))
    shown = capsys.readouterr().out
    assert "fertility" in shown
    assert "quark (1)" in shown
    found = json.loads(report.read_text())
    assert (found["documents"], found["words"], found["tokens"]) == (2, 21, 24)
    assert found["fertility"] == pytest.approx(24 / 21)


def test_the_verb_wants_one_kind_of_words(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "new"))
    for given in ((), ("--words", "w", "--text", "t", "--count", "3"), ("--text", "t")):
        with pytest.raises(BertkitError, match="either --words FILE or --text PATHS with --count"):
            run("extend", str(tmp_path), *out, *given)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--count", "0"), "--count must be at least 1"),
        (
            ("--count", "1", "--place", "apend"),
            "no placement is called 'apend'; did you mean 'append'",
        ),
        (
            ("--count", "1", "--init", "men"),
            "no initialisation is called 'men'; did you mean 'mean'",
        ),
        (("--count", "1", "--out", "old"), "is also an input"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_the_verb_refuses_before_it_reads_text(
    tmp_path: Path, small: Tokenizer, flags: tuple[str, ...], said: str
) -> None:
    save(tmp_path / "old", small)
    given = [str(tmp_path / flag) if flag == "old" else flag for flag in flags]
    out = [] if "--out" in given else ["--out", str(tmp_path / "new")]
    with pytest.raises(BertkitError, match=said):
        run("extend", str(tmp_path / "old"), "--text", str(tmp_path / "absent.txt"), *given, *out)


def test_weights_in_16_bits_come_out_as_fp32(tmp_path: Path, small: Tokenizer) -> None:
    start = save(tmp_path / "old", small)
    config = read_json(tmp_path / "old" / "config.json")
    write_json(tmp_path / "old" / "config.json", config | {"dtype": "bfloat16"})
    extend(start, tmp_path / "new", "lines")
    assert read_json(tmp_path / "new" / "config.json")["dtype"] == "float32"
