import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from experiments.multimodal import mmbt
from experiments.multimodal.digits import (
    ANSWERS,
    BOXES,
    QUESTIONS,
    as_patches,
    initial_encoder,
    load_digits,
    questions,
    scenes,
    train,
)

pytestmark = pytest.mark.xdist_group("oracles")  # scikit-learn has the images
TEXTS = [[8, 9, 10], [7], [6, 6, 9, 10, 8]]


def network(side: int = 2) -> mmbt.MMBT:
    encoder, tokenizer = initial_encoder("")
    torch.manual_seed(1)
    return mmbt.MMBT(encoder, tokenizer, len(ANSWERS), 3, side).eval()


def images(seed: int = 0) -> Tensor:
    return torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(seed))


def test_the_vectors_of_an_image_take_the_place_of_tokens_after_cls() -> None:
    model = network()
    tokenizer, encoder = model.tokenizer, model.encoder
    seen: list[Tensor] = []
    encoder.embedding_norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(TEXTS[:1], images()[:1])
    words = encoder.word_embeddings(torch.tensor([tokenizer.cls_id, tokenizer.sep_id, *TEXTS[0]]))
    places = torch.arange(4)
    vectors = model.projection(images()[0]) + model.rows(places // 2) + model.columns(places % 2)
    wanted = torch.cat([words[:1], vectors, words[1:], words[1:2]])
    wanted = wanted + encoder.position_embeddings.weight[:10]
    wanted = wanted + encoder.segment_embeddings.weight[[0] * 6 + [1] * 4]
    assert torch.allclose(seen[0], wanted, atol=1e-6)


def test_a_batch_does_not_change_a_pair_and_both_parts_matter() -> None:
    model = network()
    together = model(TEXTS, images())
    alone = [model([text], image[None]) for text, image in zip(TEXTS, images(), strict=True)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)
    assert not torch.allclose(together, model(TEXTS, images(1)), atol=1e-3)
    assert not torch.allclose(together, model([TEXTS[2]] * 3, images())[:3], atol=1e-3)


def test_without_images_it_is_the_encoder_alone() -> None:
    model = network()
    packed = model.pack(TEXTS, 0)
    cls = model.encoder(packed, packed.first_tokens)
    assert torch.equal(model(TEXTS, None), model.classifier(model.encoder.pool(cls)))


def test_patches_are_squares_of_pixels_in_reading_order() -> None:
    picture = np.arange(64).reshape(1, 8, 8)
    found = as_patches(picture, 2)
    assert found.shape == (1, 16, 4)
    assert found[0, 0].tolist() == [0, 1, 8, 9]
    assert found[0, 5].tolist() == [18, 19, 26, 27]


def test_each_answer_is_right_for_its_digit_and_no_image_is_in_both_splits() -> None:
    _, tokenizer = initial_encoder("")
    data = questions(tokenizer, lambda found: found, held_out=True, most=9)
    _, digits = load_digits(held_out=True)
    asked = [(digit, question) for digit in digits[:9].tolist() for question in QUESTIONS]
    for label, (digit, question) in zip(data.labels.tolist(), asked, strict=True):
        answer, other, true = QUESTIONS[question]
        assert ANSWERS[label] == (answer if digit in true else other)
    assert data.images.shape == (27, 8, 8)
    assert len(load_digits(held_out=False)[1]) + len(digits) == 1797


def test_held_out_scenes_have_each_caption_once() -> None:
    _, tokenizer = initial_encoder("")
    data = scenes(tokenizer, 100, held_out=True)
    assert len({tuple(text) for text in data.texts}) == 100
    assert data.images.shape == (100, len(BOXES), 64)


@pytest.mark.slow
def test_training_fits_questions_with_images() -> None:
    model = network(side=0)
    data = questions(model.tokenizer, lambda found: found[..., :3], held_out=False, most=4)

    def loss_of(rows: list[int]) -> Tensor:
        logits = model([data.texts[row] for row in rows], data.images[rows])
        return cross_entropy(logits, data.labels[rows])

    before = loss_of([*range(len(data))]).item()
    train(model, loss_of, len(data), epochs=25, seed=0)
    assert loss_of([*range(len(data))]).item() < 0.8 * before


@pytest.mark.slow
def test_the_command_prints_the_accuracy_of_each_contestant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mmbt.main(["--epochs", "1", "--seeds", "1", "--images", "2"])
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(":")[0] for line in said] == [*mmbt.CONTESTANTS]
