"""Metrics of several models in one process."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from midstream.telemetry import Metrics


def test_each_family_is_exported_once_with_the_samples_of_all_models() -> None:
    whole = Metrics()
    for model, num_requests in (("a", 1), ("b", 2)):
        whole.of_model(model).counter("request_success", "Ended requests.").inc(num_requests)
    text = whole.render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("midstream:request_success", "vllm:request_success"):
        totals = {
            sample.labels["model_name"]: sample.value
            for sample in families[name].samples
            if sample.name.endswith("_total")
        }
        assert totals == {"a": 1.0, "b": 2.0}
    assert text.count("# TYPE midstream:request_success_total ") == 1
