import pytest
import torch
from torch import Tensor

from bertkit.pretraining_data.batch import pack
from experiments.multimodal import vilbert
from experiments.multimodal.digits import BOXES, initial_encoder, scenes, train

pytestmark = pytest.mark.xdist_group("oracles")  # scikit-learn has the images
TEXTS = [[8, 9, 10], [7], [6, 6, 9, 10, 8]]


def network(width: int = 3) -> vilbert.ViLBERT:
    encoder, tokenizer = initial_encoder("")
    torch.manual_seed(1)
    return vilbert.ViLBERT(encoder, tokenizer, 2, width, BOXES).eval()


def images(seed: int = 0) -> Tensor:
    return torch.randn(3, len(BOXES), 3, generator=torch.Generator().manual_seed(seed))


def test_attention_between_streams_is_its_definition() -> None:
    own, other = pack([[0] * 3, [0], [0] * 5]), pack([[0] * 4, [0] * 2, [0]])
    query, key, value = torch.randn(9, 2, 4), torch.randn(7, 2, 4), torch.randn(7, 2, 4)
    found = vilbert.cross_attention(query, key, value, own, other, 0.0)
    wanted = []
    parts = (query.split(own.lengths), key.split(other.lengths), value.split(other.lengths))
    for q, k, v in zip(*parts, strict=True):
        weights = (torch.einsum("qhd,khd->hqk", q, k) / 2).softmax(-1)
        wanted.append(torch.einsum("hqk,khd->qhd", weights, v))
    assert torch.allclose(found, torch.cat(wanted), atol=1e-6)


def test_a_batch_does_not_change_a_pair_and_both_streams_matter() -> None:
    model = network()
    together = model(TEXTS, images())
    alone = [model([text], image[None]) for text, image in zip(TEXTS, images(), strict=True)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)
    assert not torch.allclose(together, model(TEXTS, images(1)), atol=1e-3)
    assert not torch.allclose(together, model([TEXTS[2], *TEXTS[:2]], images()), atol=1e-3)


def test_regions_have_no_order_but_their_boxes_have_places() -> None:
    model = network()
    turned = model(TEXTS, images().flip(1))
    assert not torch.allclose(model(TEXTS, images()), turned, atol=1e-3)
    model.boxes = BOXES.flip(0)
    assert torch.allclose(model(TEXTS, images()), turned, atol=1e-5)


def test_the_partner_differs_in_text_and_image() -> None:
    pictures = images()[[0, 0, 1]]
    assert vilbert.partners([[1], [2], [3]], pictures) == [2, 2, 0]
    assert vilbert.partners([[1], [2], [1]], pictures) == [0, 2, 1]
    assert vilbert.alignment_labels([0, 2, 1]).tolist() == [1, 1, 1, 1, 0, 0]


def test_masked_tokens_are_counted_and_never_special() -> None:
    _, tokenizer = initial_encoder("")
    texts = [[8 + position for position in range(length)] for length in (1, 5, 20)]
    for seed in range(5):
        torch.manual_seed(seed)
        shown, rows, targets = vilbert.mask_tokens(texts, tokenizer)
        assert len(rows) == 1 + 1 + 3
        whole = [0, *texts[0], 0, 0, *texts[1], 0, 0, *texts[2], 0]
        masked = [0, *shown[0], 0, 0, *shown[1], 0, 0, *shown[2], 0]
        assert [whole[row] for row in rows] == targets.tolist()
        changed = [row for row in range(len(whole)) if whole[row] != masked[row]]
        assert {*changed} <= {*rows.tolist()}


def test_the_mean_does_not_tell_a_masked_region() -> None:
    torch.manual_seed(0)
    pictures = torch.randn(6, 8, 3)
    shown, means, is_target = vilbert.mask_regions(pictures)
    assert is_target.sum(1).tolist() == [1] * 6
    assert torch.equal(shown[~is_target], pictures[~is_target])
    for picture, mean, target in zip(pictures, means, is_target, strict=True):
        assert torch.allclose(mean, picture[~target].mean(0), atol=1e-6)


def test_equal_scores_find_nothing() -> None:
    scores = torch.tensor([[3.0, 1, 2], [4, 4, 4], [1, 2, 0]])
    assert vilbert.recalls(scores) == pytest.approx([1 / 3, 1])
    assert vilbert.recalls(torch.zeros(10, 10)) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("objective", [vilbert.alignment_loss, vilbert.pretraining_loss])
def test_training_lowers_the_loss_of_either_objective(objective) -> None:
    model = network(64)
    data = scenes(model.tokenizer, 4, held_out=False)

    def loss_of(rows: list[int]) -> Tensor:
        return objective(model, [data.texts[row] for row in rows], data.images[rows])

    before = loss_of([0, 1, 2, 3]).item()
    train(model, loss_of, 4, epochs=40, seed=0)
    assert loss_of([0, 1, 2, 3]).item() < 0.9 * before
    assert vilbert.pair_scores(model, data).shape == (4, 4)


@pytest.mark.parametrize("experiment", ["questions", "retrieval", "pretraining"])
def test_the_command_prints_scores(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    vilbert.main([experiment, "--epochs", "2", "--seeds", "1", "--images", "6"])
    said = capsys.readouterr().out.splitlines()
    assert len(said) == (1 if experiment == "questions" else 4)
    assert all("%" in line for line in said)


def test_a_model_directory_is_where_training_begins(tmp_path) -> None:
    from bertkit.checkpoints.save import save_model

    encoder, tokenizer = initial_encoder("")
    with torch.no_grad():
        encoder.word_embeddings.weight[:] = 0.25
    save_model(tmp_path / "model", encoder, tokenizer, {"task": "encoder"})
    read, words = initial_encoder(str(tmp_path / "model"))
    assert bool((read.word_embeddings.weight == 0.25).all())
    assert words.size == tokenizer.size
