"""Model cards: what the hub reads, code that runs, and edits that are never lost."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bertkit.export.source import read_export_source
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load

from bertkit.checkpoints.card import (
    CARD,
    Card,
    Scored,
    is_edited,
    kept_card,
    model_index,
    network_text,
    on_hub,
    read_card,
    write_card,
)
from bertkit.checkpoints.publish import check_license
from bertkit.errors import BertkitError
from bertkit.export.export import write_export
from bertkit.model.encoder import ModelConfig
from tests.export.test_export import EVERY
from tests.markdown import blocks

PIPELINES = {
    "classify": "text-classification",
    "multi-label": "text-classification",
    "regress": "text-classification",
    "choose": "multiple-choice",
    "tag": "token-classification",
    "answer": "question-answering",
    "pretraining": "fill-mask",
    "left_to_right": "text-generation",
    "encoder": "feature-extraction",
    "embedding": "sentence-similarity",
}
"""Model -> the hub's task."""


def carded(models: Path, name: str, folder: Path, **metadata: Any) -> Path:
    """A copy of a model directory with a card."""
    shutil.copytree(models / name, folder)
    sections = {"Data": "Ten *rows*.\n\n```\n## no heading\n```", "Scores": "90%"}
    found = [Scored("mine", "dev", {"accuracy": 0.9, "f1/X": 0.5}, "org/set", "a")]
    given = {**metadata, "model-index": model_index("BERT", "text-classification", found)}
    card = Card(title=f"A model: {name}", summary="It is.", metadata=given, sections=sections)
    write_card(folder, card, replaced=folder)
    return folder


def run_snippets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the code of a card in its folder, which it calls "."; return the number of blocks."""
    monkeypatch.chdir(folder)
    found = blocks((folder / CARD).read_text(), "python")
    for block in found:
        exec(compile(block, f"{folder.name}/{CARD}", "exec"), {})
    return len(found)


def test_a_card_is_what_the_hub_reads(models: Path, tmp_path: Path) -> None:
    for name, pipeline in PIPELINES.items():
        folder = carded(models, name, tmp_path / name, license="mit", language=["de"])
        card = ModelCard.load(folder / CARD)
        assert card.data.pipeline_tag == pipeline
        assert card.data.license == "mit"
        assert card.data.language == ["de"]
        assert "bertkit" in card.data.tags
        [result] = card.data.eval_results
        assert (result.dataset_type, result.dataset_config) == ("org/set", "a")
        assert (result.metric_type, result.metric_value) == ("accuracy", 0.9)
        assert card.data.to_dict() == metadata_load(folder / CARD)


def test_a_card_counts_layers_and_heads() -> None:
    tokenizer = SimpleNamespace(lowercase=True, size=9)
    fields = ("num_hidden_layers", "num_attention_heads")
    for number, found in ((1, "1 layer with 1 attention head "), (2, "2 layers with 2 attention ")):
        config = replace(ModelConfig(vocab_size=9), **dict.fromkeys(fields, number))
        assert found in network_text(config, tokenizer)


def test_a_card_has_no_empty_fields_and_no_results_without_scores() -> None:
    assert model_index("BERT", "fill-mask", [Scored("mine", "dev", {})]) is None
    assert model_index("BERT", "fill-mask", [Scored("mine", "dev", {"threshold": 1.0})]) is None
    text = Card(title="T", summary="S", sections={"Data": ""}).text()
    assert "## Data" not in text


def test_values_cannot_break_the_metadata(tmp_path: Path) -> None:
    """Names of files and labels are the user's."""
    odd = 'a: "b"\n---\n# x {} é 😀 \x85'
    found = [Scored(odd, "dev", {odd: 0.5})]
    given = {"model-index": model_index(odd, "fill-mask", found), "language": ["no"]}
    (tmp_path / CARD).write_text(Card(title="T", summary="S", metadata=given).text())
    read = metadata_load(tmp_path / CARD)
    assert read is not None
    assert read["model-index"] == given["model-index"]
    assert read["language"] == ["no"], "and not False"


def test_a_card_is_read_back_and_the_same_model_has_the_same_card(
    models: Path, tmp_path: Path
) -> None:
    folder = carded(models, "classify", tmp_path / "a")
    first = (folder / CARD).read_bytes()
    card = read_card(folder)
    assert card is not None
    assert card.title == "A model: classify"
    assert card.sections["Data"].endswith("```\n## no heading\n```")
    write_card(folder, card, replaced=folder)
    assert (folder / CARD).read_bytes() == first
    assert carded(models, "classify", tmp_path / "b").joinpath(CARD).read_bytes() == first
    assert str(tmp_path) not in first.decode()


def test_an_edited_card_is_kept(models: Path, tmp_path: Path) -> None:
    source, out = read_export_source(models / "classify"), tmp_path / "out"
    write_export(source, "huggingface", out)
    assert not is_edited(out / CARD)
    assert not kept_card(out)
    own = (out / CARD).read_text().replace("# BERT", "# My model")
    (out / CARD).write_text(own)
    assert is_edited(out / CARD)
    write_export(source, "tensorflow", out)
    assert (out / CARD).read_text() == own
    assert str(out / CARD) in kept_card(out)
    (out / CARD).unlink()
    write_export(source, "tensorflow", out)
    assert "google-research/bert" in (out / CARD).read_text()


def test_cards_of_others_are_never_a_reason_to_fail(models: Path, tmp_path: Path) -> None:
    broken = ["a: [", "x", "tags: x", "tags: [1]", "1: 2", "eval_results: x", "model_name: 1"]
    broken += ["tags: [bertkit]\nmodel-index: [x]", "tags: [bertkit]\nmodel-index:\n- a: 1"]
    texts = [*(f"---\n{one}\n---\n# Theirs\n" for one in broken), "", "# Theirs", "---\n"]
    for number, text in enumerate(texts):
        folder = tmp_path / str(number)
        shutil.copytree(models / "classify", folder)
        (folder / CARD).write_text(text)
        write_export(read_export_source(folder), "huggingface", tmp_path / f"out-{number}")
        assert metadata_load(tmp_path / f"out-{number}" / CARD)
    theirs = "---\nlicense: mit\nlanguage: de\ntags: [theirs]\n---\n# Theirs\n\n## Scores\n\n99%\n"
    folder = tmp_path / "theirs"
    shutil.copytree(models / "classify", folder)
    (folder / CARD).write_text(theirs)
    write_export(read_export_source(folder), "huggingface", tmp_path / "out")
    found = metadata_load(tmp_path / "out" / CARD)
    assert found is not None
    assert (found["license"], found["language"]) == ("mit", "de")
    assert "99%" not in (tmp_path / "out" / CARD).read_text()


def test_an_export_continues_the_card_of_its_model(models: Path, tmp_path: Path) -> None:
    source = carded(models, "classify", tmp_path / "model", license="mit")
    write_export(read_export_source(source), "tensorflow", tmp_path / "exact")
    card = ModelCard.load(tmp_path / "exact" / CARD)
    assert card.data.license == "mit"
    assert card.data.eval_results
    assert "Ten *rows*." in card.text
    write_export(read_export_source(source, head="encoder"), "huggingface", tmp_path / "head")
    card = ModelCard.load(tmp_path / "head" / CARD)
    assert card.data.eval_results is None, "another head has not these scores"
    assert card.data.pipeline_tag == "feature-extraction"
    assert "90%" not in card.text


def test_an_export_of_an_export_has_its_own_check(models: Path, tmp_path: Path) -> None:
    source = carded(models, "classify", tmp_path / "model")
    write_export(read_export_source(source), "huggingface", tmp_path / "first")
    write_export(read_export_source(tmp_path / "first"), "tensorflow", tmp_path / "second")
    first, second = (
        ModelCard.load(tmp_path / name / CARD).text.partition("## Export")[2].partition("##")[0]
        for name in ("first", "second")
    )
    assert "transformers" in first
    assert "transformers" not in second
    assert second.strip()


def test_a_model_of_the_hub_is_named_with_its_commit(models: Path, tmp_path: Path) -> None:
    commit = "0123456789" * 4
    folder = tmp_path / f"models--org--name/snapshots/{commit}"
    shutil.copytree(models / "classify", folder)
    write_export(read_export_source(folder), "huggingface", tmp_path / "out")
    text = (tmp_path / "out" / CARD).read_text()
    assert ModelCard(text).data.base_model == "org/name"
    assert commit in text


def test_licenses_are_identifiers() -> None:
    check_license("cc-by-4.0")
    for name in ("", "My License", "-mit", "mit\nx: y"):
        with pytest.raises(BertkitError) as caught:
            check_license(name)
        assert caught.value.code == "license"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EVERY)
def test_the_code_of_a_model_directory_runs(
    name: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = carded(models, name, tmp_path / "model")
    theirs = json.loads((folder / "config.json").read_text())["model_type"] != "bertkit"
    assert run_snippets(folder, monkeypatch) == (2 if theirs else 1)
    assert ModelCard.load(folder / CARD).data.library_name == (
        "bertkit" if not theirs
        else "sentence-transformers" if name == "embedding"
        else "transformers"
    )  # fmt: skip


def test_the_code_of_a_google_checkpoint_runs(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_export(read_export_source(models / "classify"), "tensorflow", tmp_path / "out")
    assert run_snippets(tmp_path / "out", monkeypatch) == 1


def test_on_the_hub_the_code_names_the_model(models: Path, tmp_path: Path) -> None:
    text = on_hub((carded(models, "classify", tmp_path / "a") / CARD).read_text(), "org/name")
    assert text.count('model_name = "org/name"') == 2
    write_export(read_export_source(models / "classify"), "tensorflow", tmp_path / "b")
    text = on_hub((tmp_path / "b" / CARD).read_text(), "org/name")
    assert 'snapshot_download("org/name")' in text
