"""DDP and FSDP2 as bertkit uses them, in a process group of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.training import parallel
from bertkit.training.distributed import check_strategy
from bertkit.training.optimizer import clip_gradients
from bertkit.training.parallel import apply_ddp, apply_fsdp, gather_full, gradient_sync, shard_like

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=32, max_position_embeddings=16,
)  # fmt: skip


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_gradients_are_exchanged_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged: list[int] = []
    real = parallel.add_gradients

    def counted(bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        exchanged.append(bucket.buffer().numel())
        return real(bucket)

    monkeypatch.setattr(parallel, "add_gradients", counted)
    network = nn.Linear(3, 2)
    model = apply_ddp(network, torch.device("cpu"))
    for number in range(3):
        with gradient_sync(model, number == 2):
            model(torch.ones(1, 3)).sum().backward()
        assert sum(exchanged) == (0 if number < 2 else 3 * 2 + 2)
    assert network.weight.grad is not None
    torch.testing.assert_close(network.weight.grad, torch.full((2, 3), 3.0))


@pytest.mark.usefixtures("group")
def test_a_shared_out_model_has_the_same_names_and_values() -> None:
    torch.manual_seed(0)
    encoder = Encoder(CONFIG)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    apply_fsdp(encoder, torch.device("cpu"))
    gathered = gather_full(encoder.state_dict())
    assert gathered.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(gathered[name], value), name
    own = encoder.state_dict()["word_embeddings.weight"]
    again = shard_like(before["word_embeddings.weight"], own)
    assert torch.equal(again.full_tensor(), before["word_embeddings.weight"])  # type: ignore[attr-defined]
    for parameter in encoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(value.numel() for value in before.values())
    assert float(clip_gradients(encoder, 1.0)) == pytest.approx(count**0.5, rel=1e-5)


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(BertkitError, match=r"no strategy is called 'fdsp'.*fsdp"):
        check_strategy("fdsp")
