"""The optimizers, AdamW, BERT's original Adam and Muon, and checkpoints of a model in training.

Paper section A.2: Adam with beta1 0.9, beta2 0.999 and weight decay 0.01. Without bias
correction it follows Google's `optimization.py` where that goes beyond this text.

A run resumes from a checkpoint exactly where it stopped. None of its files is a pickle:

    checkpoints/step-00001234/model.safetensors
                              optimizer.safetensors
                              progress.json

`progress.json` holds the caller's progress, the SHA-256 of each other file, and that of itself. A
checkpoint appears under its name only when it is complete and flushed to disk. It is the only
record of the step that a run has reached.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.checkpoints.save import read_tensors, write_tensors
from bertkit.errors import BertkitError
from bertkit.files import (
    disk_errors,
    new_folder,
    read_object,
    sha256_file,
    temporary_name,
    write_json,
)
from bertkit.model.native.compiled import has_bf16

BETAS = (0.9, 0.999)
"""The decay rates of the two running averages."""
EPSILON = 1e-6
"""The constant added to the square root of the second average."""
PAST_BIAS_CORRECTION = 2.0**40
"""A step at which 1 - beta ** step is exactly 1; in float32, adding 1 does not change it."""
MUON_MOMENTUM = 0.95
"""The decay rate of Muon's running average of gradients, with which it also looks ahead."""
MUON_SCALE = 0.2
"""The root mean square of Muon's updates, in learning rates; AdamW's is usually 0.2 to 0.4."""


class AdamW:
    """AdamW (Loshchilov and Hutter 2019), or the Adam that BERT was trained with, fused by torch.

    With gradient g, learning rate r and weight decay d, an update of a parameter p is

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p = p - r * (m' / (sqrt(v') + epsilon) + d * p)

    where m' and v' are m and v, corrected for their start at zero: divided by 1 - beta ** step.
    BERT was trained without that correction: its first update is 3.2 learning rates instead of 1.
    There every parameter starts at a step so late that the corrections are 1.

    `torch.optim.AdamW` computes the same numbers by the same kernel, but the first one that a
    process makes imports torch's compiler, which takes seconds.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, learning_rate: float, bias_correction: bool
    ) -> None:
        self.param_groups = [{**group, "lr": learning_rate} for group in groups]
        self.bias_correction = bias_correction
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                if parameter not in self.state:
                    self.state[parameter] = self.initial_state(parameter)
            if trained:
                self.update(trained, group)

    def update(self, trained: list[Any], group: dict[str, Any]) -> None:
        """Update parameters of one group, which all have a gradient and a state."""
        steps, averages, squares = (
            [self.state[parameter][name] for parameter in trained]
            for name in ("step", "exp_avg", "exp_avg_sq")
        )
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            *(trained, [parameter.grad for parameter in trained], averages, squares, [], steps),
            lr=group["lr"],
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=group["weight_decay"],
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update: zero averages and a step."""
        first = 0.0 if self.bias_correction else PAST_BIAS_CORRECTION
        return {
            "step": torch.tensor(first, dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class Muon(AdamW):
    """Muon (Jordan et al. 2024) for the weight matrices of the layers, AdamW for everything else.

    With gradient g, learning rate r and weight decay d, an update of a matrix p of m x n is

        b = 0.95 * b + 0.05 * g
        p = (1 - r * d) * p - r * s * sqrt(max(m, n)) * orthogonal(0.95 * b + 0.05 * g)

    where `orthogonal` sets all singular values to about 1 (see `orthogonalize`), so that a step
    moves the matrix in every direction that the gradient has, not only in the strongest ones. The
    factor s * sqrt(max(m, n)) makes the root mean square of an update s times the learning rate,
    whatever the shape, as Liu et al. (2025) propose: one learning rate serves both optimizers.

    The query, key and value weights of a layer are one parameter here, but three matrices.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        self.parts: dict[Tensor, int] = {
            parameter: 3 if "query_key_value" in name else 1
            for group in groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
            if is_layer_matrix(name, parameter)
        }
        """Each parameter that Muon updates -> the number of matrices stacked in it."""
        split = [
            {"params": params, "weight_decay": group["weight_decay"]}
            for group in groups
            for by_muon in (False, True)
            if (params := [p for p in group["params"] if (p in self.parts) == by_muon])
        ]
        super().__init__(split, **options)

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update: zero averages."""
        if parameter not in self.parts:
            return super().initial_state(parameter)
        return {"momentum": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    def update(self, trained: list[Any], group: dict[str, Any]) -> None:
        """Update parameters of one group; matrices of the same shape are orthogonalized at once."""
        if trained[0] not in self.parts:
            super().update(trained, group)
            return
        shapes: dict[torch.Size, list[tuple[Tensor, ...]]] = {}
        for weight in trained:
            stacked = (weight.detach(), weight.grad, self.state[weight]["momentum"])
            chunks = [tensor.chunk(self.parts[weight]) for tensor in stacked]
            shapes.setdefault(chunks[0][0].shape, []).extend(zip(*chunks, strict=True))
        for shape, parts in shapes.items():
            weights, gradients, momenta = ([part[i] for part in parts] for i in range(3))
            torch._foreach_lerp_(momenta, gradients, 1 - MUON_MOMENTUM)
            ahead = torch.stack(torch._foreach_lerp(gradients, momenta, MUON_MOMENTUM))
            # In bf16 where that is fast, because rounding matters little.
            dtype = torch.bfloat16 if ahead.is_cuda or has_bf16() else ahead.dtype
            moves = orthogonalize(ahead.to(dtype)).to(ahead.dtype).unbind()
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            rate = group["lr"] * MUON_SCALE * math.sqrt(max(shape))
            torch._foreach_add_(weights, moves, alpha=-rate)


def is_layer_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a weight matrix between hidden states, which Muon updates."""
    return parameter.ndim == 2 and (".layers." in name or name.endswith("mlm.dense.weight"))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace the singular values of (n, rows, columns) matrices by values between 0.7 and 1.2.

    This is Muon's Newton-Schulz iteration with a fifth-order polynomial.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.mT if is_tall else x


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Divide the trained parameters into weights, which decay, and biases and LayerNorms."""
    groups: list[dict[str, Any]] = [
        {"params": [], "names": [], "weight_decay": weight_decay},
        {"params": [], "names": [], "weight_decay": 0.0},
    ]
    normalised = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in trainable_parameters(model):
        last = name.rpartition(".")[2]
        exempt = id(parameter) in normalised or last.startswith("bias") or last.endswith("_bias")
        groups[exempt]["params"].append(parameter)
        groups[exempt]["names"].append(name)
    return groups


def trainable_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the name and value of each parameter that is trained, tied ones once."""
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)


def build_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    optimizer: str = "adamw",
) -> AdamW:
    """Build "adamw" or "muon" for a model that is on the device that it is trained on."""
    groups = parameter_groups(model, weight_decay)
    if not any(group["params"] for group in groups):
        raise BertkitError("the model has no parameter to train; unfreeze some of them")
    kind = Muon if optimizer == "muon" else AdamW
    return kind(groups, learning_rate=learning_rate, bias_correction=bias_correction)


def clip_gradients(model: nn.Module, maximum: float) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `maximum`; return the norm before.

    It is a tensor, because reading it would make the host wait for a GPU.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if norm.is_cuda or not norm + 1e-6 <= maximum:  # on a CPU it is free to see that nothing is due
        nn.utils.clip_grads_with_norm_(parameters, maximum, norm)
    return norm


# Checkpoints --------------------------------------------------------------------------------------

FORMAT_VERSION = 1
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back, on the CPU."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    """Tensors by file stem ("model", "optimizer") and name."""
    progress: dict[str, Any]
    """The progress that was passed to `save_checkpoint`."""


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    progress: Mapping[str, Any],
    keep: int = 2,
) -> Path:
    """Write `folder`/step-NNNNNNNN, then remove all but the newest `keep` checkpoints.

    Those of a later step, before which training resumed because they were damaged, are removed,
    too. The tensors are those of each file, by its stem; the progress is any JSON value.
    """
    path = folder / f"step-{step:08d}"
    with new_folder(path) as temporary:
        for name, values in tensors.items():
            write_tensors(temporary / f"{name}.safetensors", values)
        written = sorted(temporary.iterdir())
        files = {file.name: {"sha256": sha256_file(file)} for file in written}
        content = {"format": FORMAT_VERSION, "step": step, "files": files, "progress": progress}
        write_json(temporary / PROGRESS, {**content, "sha256": digest(content)})
    prune(folder, step, keep)
    return path


def digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a value as compact JSON with sorted keys; it survives a round trip."""
    plain = json.loads(json.dumps(content))  # numeric keys become strings and are sorted as such
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of each checkpoint in a folder, newest first; it may be missing."""
    named = [(re.fullmatch(r"step-(\d{8,})", path.name), path) for path in folder.glob("step-*")]
    return sorted([(int(match[1]), path) for match, path in named if match], reverse=True)


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`, and remains of killed saves."""
    known = checkpoints(folder)
    retained = [path for number, path in known if number <= step][:keep]
    with disk_errors(folder):
        for _, path in known:
            if path not in retained:  # rename first, so that a kill leaves no incomplete checkpoint
                path.rename(temporary_name(path))
    for leftover in folder.glob(".step-*.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def load_latest(folder: Path, warn: Callable[[str], None], keep: int = 2) -> Checkpoint | None:
    """Read the newest complete checkpoint, or return None if there is no checkpoint.

    A damaged one is skipped, with a line passed to `warn`; if all are damaged, that is an error.
    """
    known = checkpoints(folder)
    for step, path in known:
        try:
            latest = load_checkpoint(path, step)
        except BertkitError as error:
            warn(f"skipping checkpoint {path}: {error}")
            continue
        # damaged ones stay until the next save
        prune(folder, known[0][0], keep if path == known[0][1] else len(known))
        return latest
    if known:
        raise BertkitError(
            f"no checkpoint in {folder} is intact ({len(known)} were read); remove that folder to "
            "start again from the beginning"
        )
    return None


def load_checkpoint(path: Path, step: int) -> Checkpoint:
    """Read one checkpoint and verify its files; an error names the file that is damaged."""
    content = read_object(path / PROGRESS)
    sealed = digest({key: value for key, value in content.items() if key != "sha256"})
    if content.get("sha256") != sealed or content.get("step") != step:
        raise BertkitError(f"{PROGRESS} is damaged (its checksum or its step is wrong)")
    if (version := content.get("format")) != FORMAT_VERSION:
        raise BertkitError(
            f"{PROGRESS} has format {version!r:.60} and this bertkit reads {FORMAT_VERSION}; "
            "use the version that wrote it"
        )
    tensors = {}
    for name, expected in content["files"].items():
        if not re.fullmatch(r"[\w-]+\.safetensors", name):
            raise BertkitError(f"{PROGRESS} names {name!r:.60}, which is not a file next to it")
        try:
            if sha256_file(path / name) != expected["sha256"]:
                raise BertkitError(f"{name} is damaged (its checksum is wrong)")
        except OSError as error:
            raise BertkitError(f"{name} cannot be read ({error.strerror})") from error
        tensors[Path(name).stem] = read_tensors(path / name)
    return Checkpoint(path, step, tensors, content["progress"])


def save_training(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: AdamW,
    progress: Mapping[str, Any],
    keep: int = 2,
) -> dict[str, Any]:
    """Save a model in training and its optimizer; return the journal's record of it."""
    started = time.perf_counter()
    tensors = {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
    path = save_checkpoint(folder, step, tensors, progress, keep)
    return {
        "kind": "checkpoint",
        "step": step,
        "path": f"{folder.name}/{path.name}",
        "seconds": time.perf_counter() - started,
    }


def restore_training(checkpoint: Checkpoint, model: nn.Module, optimizer: AdamW) -> None:
    """Copy a checkpoint into a model and its optimizer; the inverse of `save_training`."""
    if checkpoint.tensors.keys() != {"model", "optimizer"}:
        raise BertkitError(f"{checkpoint.path} is not a checkpoint of such a run; remove it")
    restore_model(model, checkpoint.tensors["model"])
    restore_optimizer(model, optimizer, checkpoint.tensors["optimizer"])


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, a tied one once, under its first name.

    The tensors share memory with the model.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value.detach()
    return tensors


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved values into a model exactly; the inverse of `model_tensors`."""
    current = model_tensors(model)
    check_tensors("model", current, tensors)
    for name, value in current.items():
        value.copy_(tensors[name])


def optimizer_tensors(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """Return an optimizer's state as "exp_avg.NAME", "exp_avg_sq.NAME" and "step.NAME".

    Muon's matrices have "momentum.NAME" instead. A parameter that never had a gradient is saved
    with its initial state, so that a missing tensor is always an error.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainable_parameters(model):
        state = optimizer.state.get(parameter) or optimizer.initial_state(parameter)
        tensors |= {f"{moment}.{name}": value for moment, value in state.items()}
    return tensors


def restore_optimizer(model: nn.Module, optimizer: AdamW, tensors: Mapping[str, Tensor]) -> None:
    """Restore an optimizer's saved state exactly; the inverse of `optimizer_tensors`."""
    fresh = {
        name: optimizer.initial_state(parameter) for name, parameter in trainable_parameters(model)
    }
    expected = {f"{key}.{n}": value for n, state in fresh.items() for key, value in state.items()}
    check_tensors("optimizer", expected, tensors)
    original = not optimizer.bias_correction
    steps = [name for name in expected if name.startswith("step.")]
    if any((tensors[name] >= PAST_BIAS_CORRECTION) != original for name in steps):
        raise BertkitError(
            f"the optimizer checkpoint was made {'with' if original else 'without'} bias "
            f"correction, but this run is {'without' if original else 'with'} it; "
            "resume with the recipe this checkpoint was made with"
        )
    for name, value in expected.items():
        value.copy_(tensors[name])
    for name, parameter in trainable_parameters(model):
        optimizer.state[parameter] = fresh[name]


def check_tensors(owner: str, expected: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raise a BertkitError unless both have the same names, shapes and types."""
    different = expected.keys() ^ saved.keys() or {
        name
        for name, value in expected.items()
        if (value.shape, value.dtype) != (saved[name].shape, saved[name].dtype)
    }
    if different:
        raise BertkitError(
            f"the {owner} checkpoint does not fit: {min(different)} is missing, unexpected or of "
            "another shape; resume with the recipe this checkpoint was made with"
        )
