# SPDX-License-Identifier: Apache-2.0
import pytest
from prometheus_client.parser import text_string_to_metric_families

from speccompile.runtime.draft_report import DraftReport
from speccompile.runtime.service import ServiceOptions
from tests.serving.asgi_lab import get, post
from tests.serving.mock_service import serving


def scrape(app):
    """Returns {(sample, labels as a text): value}, and the types by family, as Prometheus would read them."""
    reply = get(app, "/metrics")
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(reply.body.decode()))
    assert all(family.documentation for family in families)
    samples = {(s.name, ",".join(s.labels.values())): s.value for family in families for s in family.samples}
    return samples, {family.name: family.type for family in families}


def test_counts_gauges_and_histograms():
    with serving(service_options=ServiceOptions(max_queue=5)) as (app, service, _):
        before, _ = scrape(app)
        assert before["speccompile_generated_tokens_total", ""] == 0
        for prompt in ("bcd", "dab"):
            assert post(app, "/v1/completions", {"prompt": prompt, "max_tokens": 20, "speculation": "on"}).status == 200
        samples, types = scrape(app)
        stats = service.stats()
    assert samples["speccompile_requests_total", ""] == 2
    assert samples["speccompile_generated_tokens_total", ""] == 40
    assert samples["speccompile_finished_outputs_total", "length"] == 2
    accepted, drafts = samples["speccompile_accepted_tokens_total", ""], samples["speccompile_draft_tokens_total", ""]
    assert 0 < accepted <= drafts
    assert samples["speccompile_acceptance_rate", ""] == accepted / drafts
    assert samples["speccompile_mean_acceptance_length", ""] == stats["mean_acceptance_length"] > 1
    assert samples["speccompile_tried_tokens_total", "1"] == stats["num_tried_by_position"][0]
    assert samples["speccompile_accepted_tokens_by_position_total", "1"] == stats["num_accepted_by_position"][0]
    told = stats["drafts"]  # all requests so far asked for drafts
    assert told["sentence"] == "drafts on: not yet compared with plain decoding"
    assert samples["speccompile_drafts_on", told["reason"]] == told["is_on"] == 1
    assert ("speccompile_draft_token_cost", "") not in samples  # not known yet
    for gauge in ("queued_outputs", "prefilling_outputs", "active_outputs"):
        assert samples[f"speccompile_{gauge}", ""] == 0 and types[f"speccompile_{gauge}"] == "gauge"
    for name in ("request_seconds", "time_to_first_token_seconds", "time_per_token_seconds", "queue_seconds"):
        assert types[f"speccompile_{name}"] == "histogram"
        assert samples[f"speccompile_{name}_count", ""] == 2
        assert samples[f"speccompile_{name}_bucket", "+Inf"] == 2
    raw = stats["histograms"]["request_ms"]
    assert samples["speccompile_request_seconds_sum", ""] == raw["sum"] / 1e3
    assert samples["speccompile_request_seconds_bucket", "0.005"] == sum(raw["counts"][:3])
    assert samples["speccompile_batch_size_bucket", "1"] == samples["speccompile_steps_total", ""]


def test_why_drafts_are_off_stands_beside_its_two_numbers(monkeypatch):
    report = DraftReport(False, "measured", 0.6, 0.31)
    with serving() as (app, service, _):
        monkeypatch.setattr(service, "draft_report", lambda: report)
        samples, types = scrape(app)
        assert service.stats()["drafts"] == report.json_from_report()
    assert report.sentence == "drafts off: a draft token costs 0.6 of a step here, 31 % are accepted"
    assert samples["speccompile_drafts_on", "measured"] == 0 and types["speccompile_drafts_on"] == "gauge"
    assert samples["speccompile_draft_token_cost", ""] == 0.6 and samples["speccompile_accepted_share", ""] == 0.31


def test_rates_of_synthetic_acceptance_are_metrics(monkeypatch):
    with serving() as (app, service, _):
        assert not any("synthetic" in name for name, _ in scrape(app)[0])
        monkeypatch.setattr(service._scheduler, "_marks", {"synthetic_acceptance": [0.8, 0.7]})
        samples, types = scrape(app)
    assert types["speccompile_synthetic_acceptance"] == "gauge"
    assert [samples["speccompile_synthetic_acceptance", str(n)] for n in (1, 2)] == [0.8, 0.7]


@pytest.mark.parametrize("speculation", ["on", "off"])
def test_what_a_service_was_started_with_is_a_reason(speculation):
    with serving(service_options=ServiceOptions(speculation=speculation)) as (app, service, _):
        samples, _ = scrape(app)
        assert service.stats()["drafts"]["sentence"] == f"drafts {speculation}: speculation is {speculation}"
    assert samples["speccompile_drafts_on", "asked for"] == (speculation == "on")
