"""Model directories, which transformers loads, and files of weights, written and read.

Weights are safetensors, or a legacy `pytorch_model.bin`: a pickle, which torch's restricted loader
turns into tensors without running code. Tensors are copied out of the files: overwriting a mapped
file would change the predictions of a model in use, and truncating it would kill the process.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bertkit.checkpoints.names import (
    BERTKIT,
    OWN_FIELDS,
    Family,
    choose_class,
    file_tensors,
    has_pooler,
    own_tensors,
)
from bertkit.errors import BertkitError
from bertkit.files import check_replaceable, new_folder, read_optional, write_json
from bertkit.model.encoder import Encoder, ModelConfig, check_vocabulary
from bertkit.model.heads import PretrainingModel, ReplacedTokenModel

if TYPE_CHECKING:
    from bertkit.tokenizer.wordpiece import Tokenizer


def save_model(
    directory: Path, model: nn.Module, tokenizer: Tokenizer, details: Mapping[str, Any]
) -> None:
    """Write a complete model directory, which replaces an older one, or, after any error, nothing.

    The model is unwrapped (not compiled or distributed) and has a `config`. The details are the
    content of `bertkit.json`; those of a tuned model have its "head", a key of `Family.classes`
    (by default that of the network), and its "labels" and transformers' "problem_type", which also
    go to `config.json`.
    """
    config = model.config
    assert isinstance(config, ModelConfig)
    check_vocabulary(config, tokenizer.size)
    check_replaceable(directory, "model")
    with new_folder(directory) as folder:
        family, architecture = saved_class(model, details)
        write_json(folder / "config.json", config_fields(model, details, tokenizer.pad_id))
        pooler = has_pooler(family, architecture)
        tensors = foreign_tensors(model, family, architecture, pooler=pooler)
        write_tensors(folder / "model.safetensors", tensors, format="pt")
        tokenizer.save(folder, config.max_position_embeddings)
        write_json(folder / "bertkit.json", dict(details))


def head_of(model: nn.Module, details: Mapping[str, Any]) -> str:
    """Return the head of a model, a key of `Family.classes`."""
    if hasattr(model, "classifier") or hasattr(model, "qa_outputs"):
        return str(details.get("head", getattr(model, "head", "sequence")))
    if isinstance(model, PretrainingModel):
        return "words" if model.nsp is None else "pairs"
    return "replaced" if hasattr(model, "rtd") else "encoder"


def saved_class(model: nn.Module, details: Mapping[str, Any]) -> tuple[Family, str]:
    """Return the family and transformers' class of a model, `BERTKIT` if transformers has none."""
    config = model.config
    assert isinstance(config, ModelConfig)
    family, architecture = choose_class(config, head_of(model, details))
    if details.get("pooling") == "pooler" and not has_pooler(family, architecture):
        return BERTKIT, "bertkit"  # transformers would leave the pooler out
    return family, architecture


def config_fields(model: nn.Module, details: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    """Return the content of `config.json` for a model and its `bertkit.json` details."""
    config = model.config
    assert isinstance(config, ModelConfig)
    family, architecture = saved_class(model, details)
    fields = {k: v for k, v in dataclasses.asdict(config).items() if k not in OWN_FIELDS}
    fields["hidden_act"] = {"gelu": "gelu", "gelu_tanh": "gelu_new"}[config.hidden_act]
    head = getattr(model, "classifier", getattr(model, "qa_outputs", None))
    if isinstance(head, nn.Linear):
        if problem := details.get("problem_type"):
            fields["problem_type"] = problem
        labels = details.get("labels") or [f"LABEL_{i}" for i in range(head.out_features)]
        if len(labels) != head.out_features:
            raise BertkitError(
                f"{len(labels)} label names for {head.out_features} classes; give one per class"
            )
        fields["id2label"] = {str(number): label for number, label in enumerate(labels)}
        fields["label2id"] = {label: number for number, label in enumerate(labels)}
    return {
        "architectures": [architecture],
        "model_type": family.model_type,
        "pad_token_id": pad_id,
        **fields,
        **family.write_config(config),
    }


def foreign_tensors(
    model: nn.Module, family: Family, architecture: str = "", *, pooler: bool = True
) -> dict[str, Tensor]:
    """Return a model's parameters by the names of a family and a class, in fp32 on the CPU."""
    bare = isinstance(model, Encoder)
    untrained = hasattr(model, "rtd") or getattr(model, "nsp", model) is None
    excluded = ["generator."]
    if untrained or not pooler:
        excluded.append("pooler." if bare else "encoder.pooler.")
    tensors = {
        f"encoder.{name}" if bare else name: tensor.detach().to("cpu", torch.float32)
        for name, tensor in model.state_dict().items()
        if not name.startswith(tuple(excluded))
    }
    return file_tensors(tensors, family, architecture, bare=bare)


def save_generator(
    directory: Path, model: ReplacedTokenModel, tokenizer: Tokenizer, details: Mapping[str, Any]
) -> None:
    """Write an ELECTRA's generator as a separate masked language model."""
    with torch.device("meta"):
        generator = PretrainingModel(model.generator.config, pairs=False)
    generator.encoder, generator.mlm = model.whole_generator()
    save_model(directory, generator, tokenizer, details)


WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""The files that may hold a model's weights, in order of preference."""
ENCODER_SIGN = "embeddings.word_embeddings.weight"
"""The end of the name of a tensor that every encoder has once."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write one safetensors file, with permissions like those of its folder."""
    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata or None)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), str(error), str(path)) from error  # such as a full disk
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets only the owner read


def read_weights(directory: Path, family: Family) -> dict[str, Tensor]:
    """Read all weights of a directory as finite fp32, by bertkit's names."""
    path = next((p for name in WEIGHT_FILES if (p := directory / name).is_file()), None)
    if path is None:
        raise no_model(directory, f"neither {' nor '.join(WEIGHT_FILES)}")
    # older files store the positions 0, 1, 2, ...
    skipped = "embeddings.position_ids"
    read = {n: t for n, t in read_tensors(path).items() if not n.endswith(skipped)}
    encoders = {name.removesuffix(ENCODER_SIGN) for name in read if name.endswith(ENCODER_SIGN)}
    if len(encoders) > 1:
        raise BertkitError(
            f"{path} holds {len(encoders)} encoders ({shown_names(sorted(encoders))}); save the "
            "state_dict() of one"
        )
    prefix = next(iter(encoders), "").removesuffix(family.prefix)  # of a wrapped model: "module."
    content = {name.removeprefix(prefix): tensor for name, tensor in read.items()}
    if any("lora_" in name for name in content):
        raise no_model(directory, "an adapter that is not merged")
    for name, tensor in content.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise BertkitError(f"{directory}: {name} is not a floating-point tensor; remake it")
        content[name] = finite_weights(tensor, name, directory)
    return own_tensors(content, family, directory)


def no_model(folder: Path, what: str) -> BertkitError:
    """Return the error for a folder without a whole model, which may hold an adapter for one."""
    config = read_optional(folder / "adapter_config.json")
    if not config and "adapter" not in what:
        return BertkitError(f"{folder} holds no model: {what}; check the path")
    base = config.get("base_model_name_or_path") or "a model"
    return BertkitError(
        f"{folder} holds an adapter (LoRA or PEFT) of {base}; with peft, merge it by "
        "merge_and_unload(), then save_pretrained(), and give that folder",
        code="adapter",
    )


def finite_weights(tensor: Tensor, name: str, source: object) -> Tensor:
    """Return a tensor in fp32; a BertkitError if it has NaN or infinity, as predictions would."""
    weights = tensor.float()
    if weights.numel() and not all(math.isfinite(end.item()) for end in weights.aminmax()):
        raise BertkitError(
            f"{source}: {name} has NaN or infinite numbers; its training diverged or the file is "
            "damaged, so take another checkpoint or copy it again"
        )
    return weights


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of one file into memory; an error is a BertkitError that names the file."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
            return {name: copied_tensor(path, name) for name in names}
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise BertkitError(f"{path} is missing; copy it again") from None
    except OSError as error:
        raise BertkitError(f"cannot read {path}: {error.strerror or error}") from None
    except pickle.UnpicklingError:
        raise BertkitError(
            f"{path} holds Python objects, which bertkit does not run, or is damaged; save the "
            "model's state_dict() as safetensors, or copy the file again"
        ) from None
    except Exception as error:  # each format raises other types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BertkitError(f"{path} is damaged ({reason}); copy it again") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise BertkitError(f"{path} holds no named tensors; it is not a model file")
    return content


def copied_tensor(path: Path, name: str) -> Tensor:
    """Copy one tensor into memory; its part of the file is mapped only during the copy."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name).clone()


def shown_names(names: Iterable[str]) -> str:
    """Format the first names of a list, and how many more there are."""
    first, *rest = [*names] or ["none"]
    shown = ", ".join([first, *rest[:2]])
    return f"{shown} and {len(rest) - 2} more" if len(rest) > 2 else shown
