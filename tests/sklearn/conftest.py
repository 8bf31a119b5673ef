"""The small model of fine-tuning."""

from tests.finetuning.conftest import pretrained  # noqa: F401
