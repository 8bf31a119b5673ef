"""The CUDA path without a GPU: every step and every task on CUDA tensors that have no values.

    python -m tests.tools.fake_cuda

A tensor of torch's FakeTensorMode has a shape, a dtype and a device. So every operation is checked
for those, and whatever would make the host wait for a GPU raises: `.item()`, `.tolist()`,
`nonzero`, a boolean mask, a tensor of the host among those of the GPU. Kernels are chosen and
autocast casts as on a GPU. In training nothing may be copied back; predictions copy their outputs.

The backward pass, for which torch needs a driver, is not checked, nor is the compiler. Any build of
torch will do.
"""

from __future__ import annotations

import itertools
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from bertkit.datasets.examples import (
    ChoiceExample,
    GoldAnswer,
    QuestionExample,
    TextExample,
    WordsExample,
)
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from bertkit.checkpoints.sentence_transformers import TextPooling
from bertkit.model import attention
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.heads import PretrainingModel, ReplacedTokenModel
from bertkit.model.pooling import POOLINGS
from bertkit.objectives import pretraining_objective, replaced_objective
from bertkit.predict.embeddings import Embedder
from bertkit.predict.features import Extraction, extract
from bertkit.predict.pretrained import Predictor
from bertkit.pretraining_data.batch import from_arrays
from bertkit.pretraining_data.loader import PretrainingBatch
from bertkit.tasks.classification import Classification, MultiLabelClassification
from bertkit.tasks.multiple_choice import MultipleChoice
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.regression import Regression
from bertkit.tasks.task import Task, make_batch, run_model
from bertkit.tasks.token_classification import TokenClassification
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from bertkit.training import step
from bertkit.training.device import PRECISIONS
from bertkit.training.optimizer import build_optimizer
from bertkit.training.step import LoopSettings, evaluate_batches, train_steps
from tests.conftest import WORDS

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
TOKENIZER = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, *WORDS], lowercase=True)
BASE = ModelConfig(
    vocab_size=TOKENIZER.size, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=256, max_position_embeddings=64,
)  # fmt: skip
NETWORKS: dict[str, ModelConfig] = {
    "mlm and nsp": BASE,
    "without dropout": replace(BASE, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0),
    "left to right": replace(BASE, direction="left_to_right"),
    "odd heads": replace(BASE, hidden_size=96, num_attention_heads=8),  # width 12 rules out flash
    "ALBERT": replace(BASE, share_layers=True, embedding_size=64),
}
Gpu = tuple[FakeTensorMode, "Machine"]
TEXT = " ".join(WORDS[:20])
TASKS: dict[str, tuple[Task, Any]] = {
    "classification": (Classification(("a", "b")), TextExample("", TEXT, None, "a", "")),
    "multi-label-classification": (
        MultiLabelClassification(("a", "b")), TextExample("", TEXT, "river", ("a", "b"), "")
    ),
    "regression": (Regression(), TextExample("", TEXT, "river", 0.5, "")),
    "multiple-choice": (MultipleChoice(), ChoiceExample("", TEXT, ("river", "winter"), 1, "")),
    "token-classification": (
        TokenClassification(("O", "B-X")), WordsExample("", ("a", "river"), ("O", "B-X"), 0, "")
    ),
    "question-answering": (
        QuestionAnswering(),
        QuestionExample("", "river", f"{TEXT} {TEXT}", (GoldAnswer("river", 0),), ""),
    ),
}  # fmt: skip
"""A task of every type with one of its examples."""


class Machine(TorchDispatchMode):
    """A host whose tensors have values, and a GPU whose tensors have none.

    Operations on the host alone are computed. Those with a tensor of the GPU, or one copied back
    from it, go on to FakeTensorMode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies_back = 0
        """The number of copies from the GPU to the host."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        """Run an operator."""
        options = dict(options or {})
        if "pin_memory" in options:
            options["pin_memory"] = False
        given = tree_leaves((arguments, options))
        tensors = [one for one in given if isinstance(one, Tensor)]
        wanted = [one for one in given if isinstance(one, torch.device)]
        if CUDA not in wanted and not any(isinstance(one, FakeTensor) for one in tensors):
            with _disable_current_modes():
                return operator(*arguments, **options)
        packet = operator.overloadpacket
        moves = packet in (aten.to, aten._to_copy)
        if moves and tensors[0].device != CUDA:  # FakeTensorMode would move the values along
            dtypes = [one for one in given if isinstance(one, torch.dtype)]
            dtype = dtypes[0] if dtypes else tensors[0].dtype
            return torch.empty(tensors[0].shape, dtype=dtype, device=CUDA)
        result = operator(*arguments, **options)
        if moves or packet is aten.copy_:
            self.copies_back += tensors[-1].device == CUDA != result.device
        return result


def read(tensor: Tensor) -> np.ndarray:
    """Stand for `numpy` of an output that has been copied to the host: zeros."""
    if tensor.device == CUDA:
        raise RuntimeError("the values of a CUDA tensor are read")
    return np.zeros(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def take(tensor: Tensor, key: Any) -> Tensor:
    """Stand for `tensor[key]`, which in torch asks the driver."""
    found, indices = tensor, []
    for one in key if isinstance(key, tuple) else (key,):
        place = len(indices)
        if isinstance(one, int):
            found = aten.select(found, place, one)
            continue
        if one is None:
            found = aten.unsqueeze(found, place)
        elif isinstance(one, slice):
            found = aten.slice(found, place, one.start, one.stop, one.step or 1)
        indices.append(one if isinstance(one, Tensor) else None)
    if any(one is not None for one in indices):
        found = aten.index(found, indices)
    return found


def put(tensor: Tensor, key: Any, value: Any) -> None:
    """Stand for `tensor[key] = value`; see `take`."""
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    if isinstance(key, Tensor):
        aten.index_put_(tensor, [key], value)
    else:
        aten.copy_(take(tensor, key), value)


def make(data: Any, *, dtype: Any = None, device: Any = None, real: Any = torch.tensor) -> Tensor:
    """Stand for `torch.tensor`, which in torch asks the driver."""
    host: Tensor = real(data, dtype=dtype)
    return host if device is None else host.to(device)


CONSTANTS = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "is_bf16_supported": True,
    "get_device_capability": (9, 0),
    "get_device_name": "a GPU without values",
    "is_current_stream_capturing": False,
    "_is_in_bad_fork": False,
    **dict.fromkeys(("_lazy_init", "manual_seed_all", "set_device", "synchronize")),
}
"""Function of `torch.cuda` -> what it returns."""


@contextmanager
def fake_gpu() -> Iterator[Gpu]:
    """Make torch behave as if there was a GPU, whose tensors have no values."""
    fakes, machine = FakeTensorMode(allow_non_fake_inputs=True), Machine()
    torch._C._ensureCUDADeviceGuardSet()  # without a driver: streams and guards that do nothing
    with torch.device("meta"):
        torch.empty(0)  # torch then remembers which functions make tensors, before `make` is one
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CONSTANTS.items():
            patch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
        for name in ("Event", "Stream", "current_stream", "stream"):
            patch.setattr(torch.cuda, name, MagicMock())
        patch.setattr(fake_tensor, "init_gpu_context", lambda *_: None)
        patch.setattr(Tensor, "pin_memory", lambda tensor, *_: tensor)
        patch.setattr(Tensor, "backward", lambda *_: None)
        patch.setattr(nn.Module, "to", convert)
        patch.setattr(FakeTensor, "tolist", lambda tensor: read(tensor).tolist())
        patch.setattr(FakeTensor, "numpy", read, raising=False)
        patch.setattr(torch, "tensor", make)
        patch.setattr(FakeTensor, "__getitem__", take)
        patch.setattr(FakeTensor, "__setitem__", put)
        patch.setattr(FakeTensor, "contiguous", lambda one, **_: aten.clone(one), raising=False)
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=False), fakes, machine:
            yield fakes, machine


def change_weights(network: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Replace every parameter; a shared one stays shared."""
    made: dict[int, nn.Parameter] = {}
    for module in network.modules():
        for name, value in module._parameters.items():
            if value is not None and id(value) not in made:
                made[id(value)] = nn.Parameter(change(value.detach()), requires_grad=False)
            module._parameters[name] = None if value is None else made[id(value)]
    return network


def convert(network: nn.Module, *to: Any) -> nn.Module:
    """Stand for `Module.to`."""
    return change_weights(network, lambda weight: weight.to(*to))


def on_gpu(build: Callable[[], Any], gpu: Gpu) -> Any:
    """Build a network on the meta device and give it weights without values on the GPU."""
    with torch.device("meta"):
        network = build()
    return change_weights(network, lambda weight: FakeTensor(gpu[0], weight, CUDA))


def settings(precision: str) -> LoopSettings:
    """Return the settings of a training loop on the GPU."""
    return LoopSettings(
        device=CUDA,
        precision=precision,
        seed=0,
        max_gradient_norm=1.0,
        learning_rate=lambda _: 1e-4,
    )


def example_batch(config: ModelConfig) -> PretrainingBatch:
    """Return a batch of sequences of different lengths on the host."""
    generator = np.random.default_rng(0)
    lengths = np.array([64, 40, 17, 9, 5])
    tokens = int(lengths.sum())
    targets = np.sort(generator.choice(tokens, tokens // 7, replace=False))
    packed = from_arrays(
        generator.integers(0, config.vocab_size, tokens), np.zeros(tokens, np.int64), lengths
    )
    labels = torch.zeros(len(lengths), dtype=torch.int64)
    return PretrainingBatch(
        packed, torch.from_numpy(targets), packed.ids[torch.from_numpy(targets)], labels
    )


def train(
    build: Callable[[], nn.Module], objective: Any, batch: Any, gpu: Gpu, precision: str
) -> None:
    """Make an update of two micro-batches, with gradients of any value, and evaluate.

    An evaluation reads its means once, at its end, which is left out.
    """
    network = on_gpu(build, gpu).train().requires_grad_()
    optimizer = build_optimizer(network, learning_rate=1e-4)
    network.requires_grad_(False)
    for parameter in network.parameters():
        parameter.grad = torch.empty_like(parameter)
    steps = [([batch, batch], None)]
    [made] = train_steps(network, optimizer, objective, steps, settings(precision))
    places = {one.device for own in optimizer.state.values() for one in own.values()}
    places |= {sums.value.device for sums in made.sums.values()}
    assert places == {CUDA}, places
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "mean_losses", lambda *_: {})
        evaluate_batches(network, objective, [batch], settings(precision))
    assert not gpu[1].copies_back, f"{gpu[1].copies_back} copies back to the host"


def predict(task: Task, items: Any, gpu: Gpu, precision: str) -> None:
    """Run a tuned network on a batch."""
    run_model(on_gpu(lambda: task.build(BASE), gpu), items, CUDA, precision=precision)


def embed(pooling: str, gpu: Gpu, precision: str) -> None:
    """Compute text embeddings."""
    deep = replace(BASE, num_hidden_layers=4)
    encoder = on_gpu(lambda: Encoder(deep), gpu)
    Embedder(encoder, TOKENIZER, TextPooling(pooling), CUDA, precision).encode([TEXT, "river"])


def features(layers: str, gpu: Gpu, precision: str) -> None:
    """Extract hidden states."""
    encoder = on_gpu(lambda: Encoder(replace(BASE, num_hidden_layers=4)), gpu)
    list(
        extract(
            encoder, TOKENIZER, [TEXT], Extraction(layers=layers), device=CUDA, precision=precision
        )
    )


def pretrained(gpu: Gpu, precision: str) -> None:
    """Fill masks, compare pairs and score sentences."""
    predictor = Predictor(on_gpu(lambda: PretrainingModel(BASE), gpu), TOKENIZER, CUDA, precision)
    predictor.fill_mask(f"{TEXT} [MASK]")
    predictor.next_sentence(TEXT, "river")
    predictor.hidden([TEXT, "river"])
    predictor.score([TEXT, "river"])


Case = Callable[[Gpu, str], None]


def network_cases() -> Iterator[tuple[str, Case]]:
    """Yield the training of every pre-training network."""
    batch = example_batch(BASE)
    every = {name: partial(PretrainingModel, config) for name, config in NETWORKS.items()}
    every["ELECTRA"] = partial(ReplacedTokenModel, BASE, 1 / 2)  # type: ignore[arg-type]
    for name, build in every.items():
        objective: Any = replaced_objective if name == "ELECTRA" else pretraining_objective
        yield f"train {name}", partial(train, build, objective, batch)


def tuning_cases() -> Iterator[tuple[str, Case]]:
    """Yield the fine-tuning of every task type."""
    for name, (task, example) in TASKS.items():
        build, items = partial(task.build, BASE), task.items([example] * 3, TOKENIZER)
        batch = make_batch([part for item in items.items for part in item.parts], task.targets)
        yield f"fine-tune {name}", partial(train, build, task.objective, batch)


def prediction_cases() -> Iterator[tuple[str, Case]]:
    """Yield what tuned and pre-trained networks compute."""
    for name, (task, example) in TASKS.items():
        yield f"predict {name}", partial(predict, task, task.items([example] * 3, TOKENIZER))
    for pooling in POOLINGS:
        yield f"embed {pooling}", partial(embed, pooling)
    for layers in ("last", "concat-last-four"):
        yield f"features {layers}", partial(features, layers)
    yield "masks, pairs and sentences", pretrained


def reason(error: Exception) -> str:
    """Return the last place in bertkit that an error went through, and its message."""
    frames = traceback.extract_tb(error.__traceback__)
    place = [frame for frame in frames if "bertkit/" in frame.filename] or frames
    first = (str(error).splitlines() or [""])[0]
    return f"{place[-1].filename}:{place[-1].lineno}: {type(error).__name__} {first}"


def run_cases(say: Callable[[str], None], precisions: Sequence[str] = PRECISIONS) -> int:
    """Run every case in some precisions; return how many failed."""
    every = [*itertools.product((*network_cases(), *tuning_cases()), precisions)]
    every += itertools.product(prediction_cases(), {"fp32", "bf16"} & {*precisions})
    failed = 0
    for (name, case), precision in every:
        used: set[str] = set()
        with pytest.MonkeyPatch.context() as patch:
            for kernel, function in attention.KERNELS.items():
                patch.setitem(attention.KERNELS, kernel, partial(note, used, kernel, function))
            try:
                with fake_gpu() as gpu:
                    case(gpu, precision)
                line = f"ok    {name}, {precision}, {' and '.join(sorted(used))} attention"
            except Exception as error:
                failed += 1
                line = f"FAIL  {name}, {precision}: {reason(error)}"
        say(line)
    return failed


def note(
    used: set[str], kernel: str, function: Callable[..., Any], *given: Any, **named: Any
) -> Any:
    """Run an attention kernel and note its name."""
    used.add(kernel)
    return function(*given, **named)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sys.exit(min(1, run_cases(lambda line: print(line, flush=True))))
