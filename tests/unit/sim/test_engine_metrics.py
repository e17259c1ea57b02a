"""The text of /metrics: numbers, buckets, and that what was observed is what is shown."""

from __future__ import annotations

import math

import pytest
from prometheus_client.utils import floatToGoString

from router.sim.engine_metrics import EngineMetrics, Histogram, Names, number, one_two_five
from router.sim.engine_model import EngineConfig, EngineModel, EngineRequest


@pytest.mark.parametrize(
    "value", [0, 1, 1.5, 34.0, 0.38095238095238093, 123456.0, 1234567.0, 1796061784.48, 1e15, 2.5e-07, 1e20]
)
def test_numbers_look_as_the_prometheus_client_writes_them(value: float) -> None:
    assert number(value) == floatToGoString(value)


def test_token_buckets_end_at_the_models_length() -> None:
    assert one_two_five(1024) == (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
    assert one_two_five(1) == (1.0,)


def test_a_value_on_a_bound_is_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    histogram.observe(2.0, 2)
    assert histogram.counts == [2, 4, 1]
    assert histogram.sum == 12.0


def test_sums_and_counts_of_requests_are_exact() -> None:
    model = EngineModel(EngineConfig())
    metrics = EngineMetrics(model, "m", 1000, 0.0, Names.NEW)
    now = 10.0
    for name, prompt, output in (("a", 100, 5), ("b", 50, 1)):
        model.submit(EngineRequest(name, prompt, output, arrived_at=now))
    while model.has_work:
        duration, outputs = model.step(now)
        now += duration
        for request, _, finish in outputs:
            if request.first_token_at == now:
                metrics.first_token(now - request.arrived_at)
            if finish is not None:
                metrics.finished(request, finish)
    values = dict(line.rsplit(" ", 1) for line in metrics.render().decode().splitlines() if line.startswith("vllm:"))

    def value(name: str) -> float:
        return float(values[f'vllm:{name}{{engine="0",model_name="m"}}'])

    assert value("request_prompt_tokens_sum") == value("prompt_tokens_total") == 150
    assert value("request_generation_tokens_sum") == value("generation_tokens_total") == 6
    assert value("inter_token_latency_seconds_count") == 4
    assert value("time_to_first_token_seconds_count") == 2
    assert math.isclose(value("time_to_first_token_seconds_sum"), 2 * (0.008 + 0.015))
    assert math.isclose(value("e2e_request_latency_seconds_sum"), now - 10.0 + 0.023)
    assert values['vllm:request_success_total{engine="0",finished_reason="length",model_name="m"}'] == "2.0"
