"""schemathesis: requests drawn from the description, and answers held against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks

from bertkit.serve.app import make_app
from bertkit.serve.limits import Limits
from bertkit.serve.metrics import Metrics
from bertkit.serve.models import load_models
from bertkit.serve.service import Service

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]

PLAIN = ("/v1/classify", "/v1/regress", "/v1/choose")
"""Every body of the declared form is answered here."""


@pytest.fixture(scope="module")
def described(models: Path) -> Iterator[Any]:
    """The description of a server with a model for each route, so that no name need be drawn."""
    names = ("classify", "regress", "choose", "tag", "answer", "pretrained")
    metrics, limits = Metrics(), Limits(max_queue_tokens=4096)
    folders = [str(models / name) for name in names]
    served = load_models(folders, limits, metrics, precision="fp32", device="cpu")
    serving = Service(served, limits, metrics)
    yield schemathesis.openapi.from_asgi("/openapi.json", make_app(serving))
    serving.close()


@pytest.mark.slow
def test_answers_are_as_described(described: Any) -> None:
    operations = [found.ok() for found in described.get_all_operations()]
    assert len(operations) == 16
    statuses: Counter[tuple[str, int]] = Counter()
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    for operation, mode in product(operations, modes):
        if mode == GenerationMode.NEGATIVE and not operation.body:
            continue

        @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            right = case.meta.generation.mode == GenerationMode.POSITIVE
            if right and isinstance(case.body, dict):  # each route has one model, or any does
                case.body.pop("model", None)
            answer = case.call()
            statuses[case.operation.path, answer.status_code] += 1
            if right and case.operation.path in PLAIN:
                assert answer.status_code == 200, answer.text
            case.validate_response(answer, checks=CHECKS)

        ask()
    for route in ("classify", "tag", "answer", "embeddings", "tokens"):
        assert statuses[f"/v1/{route}", 422], statuses
    assert not [key for key in statuses if key[1] >= 500]
    for route in (*PLAIN, "/v1/models", "/health", "/ready", "/metrics"):
        assert statuses[route, 200], statuses
