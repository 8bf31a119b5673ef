"""The contestants of `benchmarks.gpu`: each function here sets up one of them.

A contestant is a function of a batch on the host; its time includes the copy to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from bertkit.pretraining_data.buckets import round_packed, shape_above

from benchmarks.gpu_batches import Both
from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.objectives import pretraining_objective
from bertkit.pretraining_data.batch import Packed, from_arrays
from bertkit.training.device import autocast
from bertkit.training.optimizer import build_optimizer
from bertkit.training.parallel import compile_layers
from bertkit.training.step import LoopSettings, train_steps

Update = Callable[[Both], None]

SIZES = {
    "base": ModelConfig(vocab_size=30522),
    "large": ModelConfig(
        vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
        intermediate_size=4096,
    ),
    "tiny": ModelConfig(
        vocab_size=3000, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=512,
    ),
}  # fmt: skip


def their_config(config: ModelConfig) -> Any:
    """The same sizes for transformers, with its fastest attention."""
    import transformers

    fields = {name: value for name, value in vars(config).items() if name != "hidden_act"}
    kind: Any = transformers.BertConfig
    return kind(**fields, hidden_act="gelu", attn_implementation="sdpa")


def for_cuda(device: torch.device, what: str) -> None:
    """Leave a contestant out on a CPU."""
    if device.type != "cuda":
        raise BertkitError(f"{what} is for CUDA devices, not for {device}")


def their_training(config: ModelConfig, device: torch.device, *, compiled: bool) -> Update:
    """Their BertForPreTraining on padded batches, in its users' loop."""
    from transformers import BertForPreTraining

    with device:
        model = BertForPreTraining(their_config(config)).train()
    if compiled:
        for_cuda(device, "the compiled padded network")
        for layer in model.bert.encoder.layer:
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update(batch: Both) -> None:
        tensors = {name: value.to(device) for name, value in batch.padded.items()}
        with autocast(device, "bf16"):
            loss = model(**tensors).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def own_loop(
    config: ModelConfig, device: torch.device, *, compiled: bool = False
) -> Callable[[Any], Iterator[Any]]:
    """Bertkit's training: a function of steps that yields a record after each."""
    with device:
        model = PretrainingModel(config).train()
    objective: Any = pretraining_objective
    if compiled:
        objective = compile_layers(model.encoder, objective, device)
    optimizer = build_optimizer(model, learning_rate=1e-4)
    settings = LoopSettings(
        device=device, precision="bf16", seed=0, max_gradient_norm=1.0,
        learning_rate=lambda step: 1e-4,
    )  # fmt: skip
    return lambda steps: train_steps(model, optimizer, objective, steps, settings)


def own_training(config: ModelConfig, device: torch.device, *, compiled: bool) -> Update:
    """One update through bertkit's own loop."""
    loop = own_loop(config, device, compiled=compiled)

    def update(batch: Both) -> None:
        for _ in loop([([batch.packed], None)]):
            pass

    return update


def their_inference(config: ModelConfig, device: torch.device) -> Update:
    """Their BertModel in bf16: all hidden states of a padded batch."""
    from transformers import BertModel

    with device:
        model: Any = BertModel(their_config(config))
    model = model.to(torch.bfloat16).eval()

    @torch.inference_mode()
    def update(batch: Both) -> None:
        names = ("input_ids", "token_type_ids", "attention_mask")
        model(**{name: batch.padded[name].to(device) for name in names})

    return update


def own_encoder(config: ModelConfig, device: torch.device) -> Encoder:
    """Bertkit's encoder in bf16."""
    with device:
        return Encoder(config).to(torch.bfloat16).eval()


def own_inference(config: ModelConfig, device: torch.device, *, compiled: bool) -> Update:
    """Bertkit's encoder: all hidden states of a packed batch."""
    encoder = own_encoder(config, device)
    if compiled:
        for_cuda(device, "the compiled encoder")
        for layer in encoder.layers:
            layer.compile(dynamic=False)

    @torch.inference_mode()
    def update(batch: Both) -> None:
        packed = batch.packed.packed.to(device)
        encoder(rounded(packed, config) if compiled else packed)

    return update


def rounded(packed: Packed, config: ModelConfig) -> Packed:
    """A batch rounded up in the usual grid."""
    sizes = len(packed.ids), len(packed.cu_seqlens) - 1, packed.max_seqlen
    return round_packed(packed, shape_above(*sizes, config.max_position_embeddings))


class GraphEncoder:
    """An encoder recorded as one CUDA graph, for batches of one shape: no launch is paid for.

    Args:
        encoder: on a CUDA device, in evaluation mode.
        example: rounded; later batches need its shape. Its tensors become the graph's input.
    """

    def __init__(self, encoder: Encoder, example: Packed) -> None:
        self.input = example
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are chosen and memory is found before recording
            for _ in range(2):
                encoder(example)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = encoder(example)

    def __call__(self, packed: Packed) -> torch.Tensor:
        """The hidden states; the next call overwrites them."""
        for name in ("ids", "segment_ids", "position_ids", "cu_seqlens"):
            getattr(self.input, name).copy_(getattr(packed, name))
        self.graph.replay()
        return self.output


def graph_inference(config: ModelConfig, device: torch.device) -> Update:
    """Bertkit's encoder replayed as a CUDA graph."""
    for_cuda(device, "a CUDA graph")
    encoder = own_encoder(config, device)
    recorded: list[GraphEncoder] = []

    @torch.inference_mode()
    def update(batch: Both) -> None:
        packed = rounded(batch.packed.packed.to(device), config)
        if not recorded:
            recorded.append(GraphEncoder(encoder, packed))
        recorded[0](packed)

    return update


def full_length(update: Update) -> Update:
    """What padding costs, where transformers is not installed: all sequences of full length.

    The targets and labels stay those of the batch.
    """

    def longer(batch: Both) -> None:
        ids = batch.padded["input_ids"].flatten().numpy()
        lengths = np.full(*batch.padded["input_ids"].shape)
        packed = from_arrays(ids, np.zeros_like(ids), lengths)
        update(batch._replace(packed=replace(batch.packed, packed=packed)))

    return longer


Builders = dict[str, Callable[[], Update]]


def training_contestants(config: ModelConfig, device: torch.device) -> tuple[Builders, Builders]:
    """Name → what sets it up: those that run as they are written, and those that are compiled."""
    varlen = replace(config, attention_probs_dropout_prob=0.0)
    eager: Builders = {
        "padded": lambda: their_training(config, device, compiled=False),
        "packed": lambda: own_training(config, device, compiled=False),
        "packed, no attention dropout": lambda: own_training(varlen, device, compiled=False),
    }
    compiled: Builders = {
        "packed, compiled": lambda: own_training(config, device, compiled=True),
        "packed, no attention dropout, compiled": lambda: own_training(
            varlen, device, compiled=True
        ),
    }
    if find_spec("transformers") is None:
        eager["padded"] = lambda: full_length(own_training(config, device, compiled=False))
    elif config.num_hidden_layers <= 12:  # compiling takes time, and the large one takes longer
        compiled["padded, compiled"] = lambda: their_training(config, device, compiled=True)
    return eager, compiled


def inference_contestants(config: ModelConfig, device: torch.device) -> tuple[Builders, Builders]:
    """See `training_contestants`; a recorded graph counts as compiled."""
    eager: Builders = {
        "padded": lambda: their_inference(config, device),
        "packed": lambda: own_inference(config, device, compiled=False),
    }
    if find_spec("transformers") is None:
        eager["padded"] = lambda: full_length(own_inference(config, device, compiled=False))
    return eager, {
        "packed, CUDA graph": lambda: graph_inference(config, device),
        "packed, compiled": lambda: own_inference(config, device, compiled=True),
    }
