"""Metrics count what happened under documented names; the log tells each request in numbers, without its text."""

import re
from pathlib import Path


def test_metrics_count_what_happened(ask) -> None:
    async def body(found) -> None:
        await found.complete(prompt="The quick", max_tokens=7)
        await found.client.post("/v1/embeddings", json={"input": ["a model", "text"], "model": "bert"})
        text = (await found.client.get("/metrics")).text
        value = lambda name: float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)[1])  # noqa: E731
        assert value('throughline_generation_tokens_total{model="gpt"}') == 7
        assert value('throughline_inter_token_latency_seconds_count{model="gpt"}') == 6
        for name in ("time_to_first_token", "request_queue_time", "request_inference_time"):
            assert value(f'throughline_{name}_seconds_count{{model="gpt"}}') == 1
        assert value('throughline_batch_size_count{model="bert"}') == 2
        assert value('throughline_requests_total{endpoint="/v1/completions",status="200"}') == 1
        assert value('throughline_num_requests_waiting{model="gpt"}') == 0

    ask(body)


def test_counters_are_counters_and_every_metric_is_documented(ask) -> None:
    """Prometheus's own reader takes the page; what only grows is a counter, and the page of the book has each name."""
    from prometheus_client.parser import text_string_to_metric_families

    async def body(found) -> None:
        text = (await found.client.get("/metrics")).text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        documented = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
        for name, family in families.items():
            if not name.endswith("_created"):
                assert f"`{name}{'_total' if family.type == 'counter' else ''}" in documented, name
        grows = ("worker_restarts", "failed_requests", "spec_decode_draft_tokens", "watch_failures")
        assert {families[f"throughline_{name}"].type for name in grows} == {"counter"}
        gauges = {"num_requests_running": 0, "queue_limit": 5, "max_model_len": 160, "model_ready": 1}
        for name, value in (gauges | {"kv_cache_usage_perc": 0}).items():
            family = families[f"throughline_{name}"]
            by_model = {sample.labels["model"]: sample.value for sample in family.samples}
            assert family.type == "gauge" and by_model["gpt"] == value, name
        (build,) = families["throughline_build_info"].samples
        assert build.value == 1 and build.labels["version"]

    ask(body, queue=5)


def test_counters_go_on_when_a_model_is_replaced(ask) -> None:
    async def body(found) -> None:
        catalogue = found.server.catalogue
        found.remote().totals.restarts += 2
        source = catalogue.sources()["gpt"]
        catalogue._switch(await catalogue._open_beside(source, None))
        assert 'throughline_worker_restarts_total{model="gpt"} 2.0' in found.server.telemetry.page().decode()

    ask(body)


def test_a_refused_request_leaves_its_model_error_and_parameter_in_the_log(ask) -> None:
    """Whether its body cannot be read, a value is out of bounds, or the model does not answer the endpoint."""

    async def body(found) -> None:
        lines: list[dict] = []
        found.server.telemetry.log = lambda level, **fields: lines.append(fields | {"level": level})
        for fields in ({"temprature": 1}, {"max_tokens": 1000}, {"model": "bert"}, {"model": "absent"}):
            request = {"model": "gpt", "prompt": "a secret sentence"} | fields
            assert (await found.client.post("/v1/completions", json=request)).status_code in (400, 404)
        assert [line.get("model") for line in lines] == ["gpt", "gpt", "bert", None]
        assert [line.get("param") for line in lines[::2]] == ["temprature", "model"]
        assert lines[0]["error"] == "unknown field 'temprature'" and "context" in lines[1]["error"]
        assert all("secret" not in str(line) and line["level"] == "info" for line in lines)

    ask(body)


def test_the_access_log_has_numbers_and_no_text(ask) -> None:

    async def body(found) -> None:
        lines: list[dict] = []
        found.server.telemetry.log = lambda level, **fields: lines.append(fields)
        await found.complete(prompt="a secret sentence", max_tokens=3)
        (said,) = lines
        assert "secret" not in str(said) and said["generated_tokens"] == 3 and said["prompt_tokens"] > 3
        assert said["path"] == "/v1/completions" and said["status"] == 200 and said["id"].startswith("req-")
        assert 0 <= said["queue_ms"] <= said["first_ms"] <= said["ms"]

    ask(body)
