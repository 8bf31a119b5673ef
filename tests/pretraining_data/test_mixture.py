from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.checkpoints.pretrained import load_pretraining_model
from bertkit.cli.app import application
from bertkit.config import parse
from bertkit.console import Console
from bertkit.corpus.prepare import prepare
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import read_json
from bertkit.pretraining_data import sampler
from bertkit.pretraining_data.loader import BatchBuilder
from bertkit.pretraining_data.masking import MaskingOptions
from bertkit.pretraining_data.mixture import (
    MixedPosition,
    MixedStore,
    MixtureSampler,
    deal_examples,
    mix_stores,
    smoothed_shares,
    whole_parts,
)
from bertkit.pretraining_data.pairs import PairOptions
from bertkit.pretraining_data.sampler import START, ExampleSampler
from bertkit.text import TextSource
from bertkit.tokenizer.learn import LearnOptions, learn_from_files
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training import pretrain as module
from bertkit.training.data import HeldOut, start_record, training_examples
from bertkit.training.journal import read_journal
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import Logging, ModelSize, Phases, PretrainRecipe, Training
from tests.pretraining_data.test_stream import contents
from tests.tokenizer.test_learn import messages
from tests.training.test_pretrain import weights

LANGUAGES = {"es": 1.0, "fr": 1.0, "ru": 1.0, "zh_CN": 1.0, "ja": 0.5, "tr": 0.2}
"""Language -> how much of its text is there: Turkish is the small one."""
LENGTH = 48
OPTIONS = PairOptions(max_length=LENGTH)

TOY = PretrainRecipe(
    model=ModelSize(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64
    ),
    phases=Phases(lengths=(32, 48), steps=(14, 4), batch_sizes=(12, 8), max_predictions=(5, 7)),
    training=Training(learning_rate=1e-3, warmup_steps=5, accumulate=2),
    logging=Logging(log_every=4, evaluate_every=9, held_out_sequences=24, checkpoint_every=6),
)


@pytest.fixture(scope="module")
def languages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenStore]:
    """A store a language: documents of four messages, a vocabulary learned from all."""
    folder = tmp_path_factory.mktemp("languages")
    paths = []
    for language, share in LANGUAGES.items():
        texts = [" ".join(text.split()) for text in messages(language)]
        kept = texts[: int(share * len(texts))]
        documents = ["\n".join(kept[n : n + 4]) for n in range(0, len(kept), 4)]
        paths.append(folder / f"{language}.txt")
        paths[-1].write_text("\n\n".join(documents), encoding="utf-8")
    wanted = LearnOptions(smoothing=0.7, max_alphabet=1500)
    with Console() as console:
        tokenizer, _ = learn_from_files(TextSource.of(paths), 3500, wanted, console)
    sources = {path.stem: TextSource((str(path),), language="lines") for path in paths}
    return {
        name: prepare(source, tokenizer, folder / name, held_out=0.1)
        for name, source in sources.items()
    }


@pytest.fixture(scope="module")
def mixture(languages: dict[str, TokenStore]) -> MixedStore:
    return mix_stores(list(languages.values()), smoothing=0.7)


def members_of(store: MixedStore, shards: np.ndarray) -> np.ndarray:
    """The store that each shard belongs to."""
    return np.searchsorted(store.first_shards, shards, side="right") - 1


def sequence_of(store: MixedStore, count: int) -> np.ndarray:
    rows, _ = MixtureSampler(store, OPTIONS, 0).take(START, count)
    return members_of(store, rows["a_shard"])


# Shares, by numbers alone.


@given(st.lists(st.integers(1, 10**11), min_size=1, max_size=9), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_smoothing_brings_shares_together(tokens: list[int], smoothing: float) -> None:
    shares = smoothed_shares(tokens, smoothing)
    assert sum(shares) == pytest.approx(1)
    for (n, m), (p, q) in zip(pairwise(tokens), pairwise(shares), strict=True):
        assert p / q == pytest.approx((n / m) ** smoothing)


def test_dealing_by_hand() -> None:
    # After 1, 2, ... sequences the shares of 1/4, 1/2, 1/4 ask for (.25 .5 .25), (.5 1 .5), ...
    chosen, counts = deal_examples(whole_parts([1.0, 2.0, 1.0]), [0, 0, 0], 8)
    assert chosen.tolist() == [1, 0, 2, 1, 1, 0, 2, 1]
    assert counts == [2, 4, 2]
    assert deal_examples(whole_parts([1.0, 1.0]), [0, 0], 4)[0].tolist() == [0, 1, 0, 1], (
        "ties to the first"
    )


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    st.integers(0, 400),
    st.integers(0, 400),
)
@settings(max_examples=80, deadline=None)
def test_no_store_leaves_its_share(shares: list[int], first: int, second: int) -> None:
    parts = whole_parts([float(share) for share in shares])
    exact = parts / parts.sum()
    chosen, counts = deal_examples(parts, [0] * len(parts), first + second)
    once, between = deal_examples(parts, [0] * len(parts), first)
    again, after = deal_examples(parts, between, second)
    assert np.concatenate([once, again]).tolist() == chosen.tolist(), "stopping changes nothing"
    assert after == counts
    behind = sum(1 / n for n in range(2, len(parts) + 1))
    taken = np.cumsum(chosen[:, None] == np.arange(len(parts)), axis=0)
    ahead = taken - exact * np.arange(1, len(chosen) + 1)[:, None]
    assert (ahead < 1 + 1e-9).all()
    assert (ahead > -behind - 1e-9).all()


def test_counting_stays_exact_after_long_runs() -> None:
    parts = whole_parts([0.7, 0.2, 0.1])
    begun = [7 * 10**9, 2 * 10**9, 10**9]
    chosen, after = deal_examples(parts, begun, 1000)
    assert [int(n) for n in np.bincount(chosen)] == [700, 200, 100]
    assert sum(after) == 10**10 + 1000


# The mixture as a store and as a table.


def test_mixture_looks_like_a_store(languages: dict[str, TokenStore], mixture: MixedStore) -> None:
    stores = list(languages.values())
    assert isinstance(mixture, TokenStore)
    for name in ("documents", "sentences", "tokens"):
        assert getattr(mixture, name) == sum(getattr(store, name) for store in stores)
    assert mixture.tokenizer_hash == stores[0].tokenizer_hash
    assert mixture.tokenizer.vocabulary == stores[0].tokenizer.vocabulary
    assert mixture.content_hash not in {store.content_hash for store in stores}
    found = [mixture.arrays(index) for index in range(len(mixture.shards))]
    expected = [store.arrays(index) for store in stores for index in range(len(store.shards))]
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(ours.tokens, theirs.tokens)
    tokens = [store.tokens for store in stores]
    assert mixture.shares == pytest.approx(smoothed_shares(tokens, 0.7), abs=1e-8)
    by_hand = sum(
        share * store.unigrams / store.unigrams.sum()
        for share, store in zip(mixture.shares, stores, strict=True)
    )
    assert mixture.unigrams == pytest.approx(by_hand)
    assert mixture.unigrams.sum() == pytest.approx(1)


def test_small_languages_are_seen_more_often_than_their_share(
    languages: dict[str, TokenStore], mixture: MixedStore
) -> None:
    seen = np.bincount(sequence_of(mixture, 3000), minlength=len(languages))
    tokens = np.array([store.tokens for store in languages.values()])
    shares = tokens / tokens.sum()
    assert np.abs(seen - 3000 * np.array(mixture.shares)).max() < 2
    named = dict(zip(languages, zip(seen / 3000, shares, strict=True), strict=True))
    smallest, largest = min(named, key=lambda n: named[n][1]), max(named, key=lambda n: named[n][1])
    assert smallest == "tr"
    assert named[smallest][0] > 1.2 * named[smallest][1]
    assert named[largest][0] < named[largest][1]
    plain = sequence_of(mix_stores(list(languages.values())), 3000)
    assert np.abs(np.bincount(plain) - 3000 * shares).max() < 2, "without smoothing: as they are"


def test_random_next_sentences_stay_in_their_store(mixture: MixedStore) -> None:
    rows, _ = MixtureSampler(mixture, OPTIONS, 0).take(START, 2000)
    members = members_of(mixture, rows["a_shard"])
    assert np.array_equal(members, members_of(mixture, rows["b_shard"]))
    assert 0.4 < rows["is_random"].mean() < 0.9
    names = {tuple(row[name] for name in ("epoch", "window", "row")) for row in rows}
    assert len(names) == len(rows), "no two examples draw the same masks"


def test_any_place_can_be_sought(mixture: MixedStore) -> None:
    whole, end = MixtureSampler(mixture, OPTIONS, 3).take(START, 2500)
    assert max(place.epoch for place in end.places) > min(place.epoch for place in end.places)
    assert sum(end.counts) == 2500
    for made in (1, 999, 2499):
        _, place = MixtureSampler(mixture, OPTIONS, 3).take(START, made)
        kept = tuple(json.loads(json.dumps(list(place))))  # as a checkpoint holds it
        rest, after = MixtureSampler(mixture, OPTIONS, 3).take(kept, 2500 - made)
        assert np.array_equal(rest, whole[made:])
        assert after == end


def test_mixture_of_one_store_is_the_store(store: TokenStore) -> None:
    ours, ourselves = MixtureSampler(mix_stores([store]), OPTIONS, 5).take(START, 700)
    theirs, place = ExampleSampler(store, OPTIONS, 5).take(START, 700)
    assert np.array_equal(ours, theirs)
    assert ourselves == MixedPosition([place], [700])


def test_copies_of_one_store_draw_their_own_pairs_and_masks(store: TokenStore) -> None:
    twice = mix_stores([store, TokenStore(store.folder)], weights=[1.0, 1.0])
    rows, _ = MixtureSampler(twice, OPTIONS, 0).take(START, 400)
    first, second = rows[0::2].copy(), rows[1::2].copy()
    assert set(first["a_shard"]) & set(second["a_shard"]) == set()
    second["a_shard"] -= len(store.shards)
    spans = ["a_shard", "a_start", "a_length", "b_start", "b_length"]
    both = {tuple(row[spans].tolist()) for row in first} & {
        tuple(row[spans].tolist()) for row in second
    }
    assert len(both) < 20
    builder = BatchBuilder(twice, MaskingOptions(), 7, 0)
    twin = first[:1].copy()
    twin["window"] = second["window"][0]
    assert contents([builder[first[:1]]]) != contents([builder[twin]])


# Mistakes.


def test_other_tokenizers_are_refused(languages: dict[str, TokenStore], store: TokenStore) -> None:
    with pytest.raises(BertkitError, match="another tokenizer than") as caught:
        mix_stores([languages["es"], store])
    for folder in (languages["es"].folder, store.folder):
        assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"weights": [1.0]}, "there are 1 weights for 2 stores"),
        ({"weights": [1.0, 2.0, 3.0]}, "there are 3 weights for 2 stores"),
        ({"weights": [1.0, 0.0]}, "is 0; it must be above 0"),
        ({"weights": [1.0, math.nan]}, "is nan; it must be above 0"),
        ({"weights": [1.0, 2.0], "smoothing": 0.7}, "either smoothing or weights"),
        ({"smoothing": 1.01}, "smoothing is 1.01; it must be between 0"),
        ({"smoothing": -0.1}, "smoothing is -0.1"),
        ({"smoothing": math.nan}, "smoothing is nan"),
    ],
)
def test_impossible_shares_are_refused(
    languages: dict[str, TokenStore], wanted: dict[str, Any], message: str
) -> None:
    with pytest.raises(BertkitError, match=message):
        mix_stores([languages["es"], languages["fr"]], **wanted)


def test_empty_store_is_refused(store: TokenStore, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("river.\nstone.\n\nbridge.\nwinter.\n")
    folder = tmp_path / "s"
    prepare([str(tmp_path / "text.txt")], tokenizer, folder, held_out=0)
    splits = [TokenStore(path, "held_out") for path in (store.folder, folder)]
    with pytest.raises(BertkitError, match=f"{folder} has no held_out documents; leave it out"):
        mix_stores(splits)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--store", "ES", "FR", "--text", "x.txt"], "either --store STORE or --text PATHS"),
        (["--store", "ES", "--smoothing", "0.7"], "need several stores"),
        (["--store", "ES", "--weights", "1"], "need several stores"),
        (["--text", "x.txt", "--smoothing", "0.7"], "need several stores"),
        (["--store", "ES", "FR", "--weights", "1", "2", "3"], "there are 3 weights for 2 stores"),
        (["--store", "ES", "FR", "--smoothing", "2"], "smoothing is 2.0"),
        (["--store", "ES", "nowhere"], "nowhere is not a token store"),
    ],
)
def test_wrong_flags_are_refused(
    languages: dict[str, TokenStore], tmp_path: Path, flags: list[str], message: str
) -> None:
    folders = {"ES": str(languages["es"].folder), "FR": str(languages["fr"].folder)}
    given = [folders.get(flag, flag) for flag in flags]
    with pytest.raises(BertkitError, match=message):
        parse(application(), ["pretrain", "tiny", *given, "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


# Pre-training on it.


@pytest.fixture(scope="module")
def finished(mixture: MixedStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("mixed") / "run"
    assert pretrain(TOY, mixture, run) is None
    return run


def stopped_after(updates: int) -> Callable[..., Any]:
    """The training loop, but for a signal after so many updates."""
    real = module.train_steps

    def steps(*arguments: Any, **options: Any) -> Any:
        for number, record in enumerate(real(*arguments, **options), start=1):
            if number == updates:
                signal.raise_signal(signal.SIGTERM)
            yield record

    return steps


@pytest.mark.slow
def test_run_over_a_mixture_is_recorded(
    finished: Path, mixture: MixedStore, languages: dict[str, TokenStore]
) -> None:
    claims = read_json(finished / "recipe.json")
    folders = [str(store.folder) for store in languages.values()]
    assert claims["stores"] == folders
    assert claims["shares"] == mixture.shares
    assert claims["corpora"] == [store.content_hash for store in languages.values()]
    records = read_journal(finished / "journal.jsonl")
    members = records[0]["mixture"]
    assert [member["store"] for member in members] == folders
    assert [member["tokens"] for member in members] == [s.tokens for s in languages.values()]
    assert sum(member["token_share"] for member in members) == pytest.approx(1)
    assert [member["share"] for member in members] == mixture.shares
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    assert [record["step"] for record in evaluations] == [9, 18]
    details = read_json(finished / "model" / "bertkit.json")
    assert [corpus["share"] for corpus in details["corpora"]] == mixture.shares
    assert str(mixture.stores[0].folder.parent) not in str(details)  # no path is published
    assert load_pretraining_model(finished / "model").encoder is not None

    steps, size = TOY.phases.steps[1], TOY.phases.batch_sizes[1]
    kept = read_json(finished / "checkpoints" / "step-00000018" / "progress.json")
    _, counts = kept["progress"]["position"]
    assert counts == deal_examples(mixture.parts, [0] * len(folders), steps * size)[1]


def test_stopped_run_ends_with_the_same_bytes(
    finished: Path, mixture: MixedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "train_steps", stopped_after(7))  # between checkpoints
    assert pretrain(TOY, mixture, tmp_path) == signal.SIGTERM
    monkeypatch.undo()
    assert pretrain(TOY, mixture, tmp_path) is None
    assert weights(tmp_path) == weights(finished)


def test_other_mixtures_in_the_same_folder_are_refused(
    finished: Path, languages: dict[str, TokenStore], tmp_path: Path
) -> None:
    stores = list(languages.values())
    others = [
        mix_stores(stores, smoothing=0.5),
        mix_stores(stores[1:], smoothing=0.7),
        mix_stores([*stores[1:], stores[0]], smoothing=0.7),
        stores[0],
    ]
    for other in others:
        with pytest.raises(BertkitError, match="other settings"):
            pretrain(TOY, other, finished)
    shutil.copytree(stores[0].folder, tmp_path / "moved")
    moved = mix_stores([TokenStore(tmp_path / "moved"), *stores[1:]], smoothing=0.7)
    assert pretrain(TOY, moved, finished) is None, "a store may move"


@pytest.mark.slow
def test_command_line_makes_the_same_run(
    finished: Path,
    languages: dict[str, TokenStore],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run, folders = tmp_path / "run", [str(store.folder) for store in languages.values()]
    fields = {
        "model": ["hidden_size", "num_hidden_layers", "num_attention_heads"],
        "phases": ["lengths", "steps", "batch_sizes", "max_predictions"],
        "training": ["learning_rate", "warmup_steps", "accumulate"],
        "logging": ["log_every", "evaluate_every", "held_out_sequences", "checkpoint_every"],
    }
    fields["model"].append("max_position_embeddings")
    lines = []
    for table, names in fields.items():
        values = {name: getattr(getattr(TOY, table), name) for name in names}
        lines += [f"[{table}]", *(f"{n} = {json.dumps(value)}" for n, value in values.items())]
    recipe = tmp_path / "toy.toml"
    recipe.write_text("\n".join(lines))
    flags = ["--store", *folders, "--smoothing", "0.7", "--out", str(run)]
    assert parse(application(), ["pretrain", str(recipe), *flags]) == 0
    assert weights(run) == weights(finished)
    shown = " ".join(capfd.readouterr().err.split())
    tokens = languages["tr"].tokens
    total = sum(store.tokens for store in languages.values())
    assert f"{folders[-1]}: {tokens:,} tokens, {tokens / total:.2%} of all; " in shown
    assert (run / "report.html").is_file()


def test_held_out_examples_have_the_shares(
    mixture: MixedStore, languages: dict[str, TokenStore]
) -> None:
    evaluated = HeldOut(TOY, mixture)
    held_out = evaluated.store
    assert isinstance(held_out, MixedStore)
    assert held_out.split == "held_out"
    rows = MixtureSampler(held_out, OPTIONS, 0).first(60)
    seen = np.bincount(members_of(held_out, rows["a_shard"]), minlength=len(languages))
    assert np.abs(seen - 60 * np.array(held_out.shares)).max() < 2
    first, second = (list(evaluated.batches(0)) for _ in range(2))
    assert contents(first) == contents(second)
    assert sum(len(batch.next_labels) for batch in first) == 24
    table, _ = training_examples(TOY, mixture, 0)
    assert isinstance(table, MixtureSampler)
    assert len(table.first()) == sum(len(member.window_rows(0, 0)) for member in table.tables)
    assert np.array_equal(table.first(9), table.first()[:9])


def test_statistics_leave_no_window_to_be_planned(
    mixture: MixedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[sampler.Prefetch] = []

    class Noted(sampler.Prefetch):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            begun.append(self)

    monkeypatch.setattr(sampler, "Prefetch", Noted)
    start_record(TOY, mixture)
    HeldOut(TOY, mixture).rows(0)
    assert begun
    assert all(one.stop.is_set() for one in begun)
    begun.clear()
    examples, _ = training_examples(TOY, mixture, 0)
    start_record(TOY, mixture, examples)
    assert not all(one.stop.is_set() for one in begun), "the caller goes on with them"
    examples.close()


@pytest.mark.slow
def test_store_without_held_out_documents_is_named(store: TokenStore, tmp_path: Path) -> None:
    text = str(store.folder.parent / "corpus.txt")
    other = prepare([text], store.tokenizer, tmp_path / "bare", held_out=0)
    both = mix_stores([store, other], weights=[1.0, 3.0])
    held_out = HeldOut(TOY, both).store
    assert isinstance(held_out, MixedStore)
    assert [member.folder for member in held_out.stores] == [store.folder]
    assert held_out.shares == [1.0]
    phases = Phases(lengths=(32,), steps=(6,), batch_sizes=(8,), max_predictions=(5,))
    recipe = replace(TOY, phases=phases)
    pretrain(recipe, both, tmp_path / "run")
    records = read_journal(tmp_path / "run" / "journal.jsonl")
    notes = [record["message"] for record in records if record["kind"] == "note"]
    assert any(f"no evaluation on: {other.folder}" in note for note in notes)
    assert [record for record in records if record["kind"] == "evaluation"]
    assert HeldOut(TOY, mix_stores([other, other])).store is None


def test_damaged_shard_is_named_by_its_own_store(
    languages: dict[str, TokenStore], tmp_path: Path
) -> None:
    copy = tmp_path / "fr"
    shutil.copytree(languages["fr"].folder, copy)
    (shard,) = copy.glob("train-*.tokens.npy")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    broken = mix_stores([languages["es"], TokenStore(copy)])
    with pytest.raises(BertkitError, match=f"{shard} is corrupt"):
        pretrain(TOY, broken, tmp_path / "run")
