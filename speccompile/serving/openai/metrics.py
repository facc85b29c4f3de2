# SPDX-License-Identifier: Apache-2.0
"""A service's counts, gauges and histograms for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from speccompile.runtime.service import Service

PREFIX = "speccompile_"

# Key of `Service.stats()`: (name after the prefix, help). Prometheus appends _total to counters.
COUNTERS: Mapping[str, tuple[str, str]] = {
    "num_requests": ("requests", "Requests that were taken."),
    "num_busy": ("requests_refused_busy", "Requests refused because the queue was full."),
    "num_tokens": ("generated_tokens", "Tokens given to clients."),
    "num_prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "num_prefill_tokens": ("prefill_tokens", "Prompt tokens that the target read."),
    "num_reused_tokens": ("reused_prompt_tokens", "Prompt tokens that were in a cache already."),
    "num_prefix_hits": ("prefix_hits", "Prompts whose beginning was in a cache already."),
    "num_draft_tokens": ("draft_tokens", "Draft tokens that were scored."),
    "num_accepted": ("accepted_tokens", "Draft tokens that were kept."),
    "num_steps": ("steps", "Target steps, whatever the batch."),
    "num_slot_steps": ("sequence_steps", "Target steps, counted for each sequence of the batch."),
    "num_engine_faults": ("engine_faults", "Steps in which the engine failed."),
}
GAUGES: Mapping[str, tuple[str, str]] = {
    "num_queued": ("queued_outputs", "Outputs that wait for a slot."),
    "num_prefilling": ("prefilling_outputs", "Outputs whose prompt is being read."),
    "num_active": ("active_outputs", "Outputs in the batch."),
    "num_slots": ("slots", "Sequences that are decoded at once, at most."),
    "mean_acceptance_length": ("mean_acceptance_length", "Tokens a step of a sequence: 1 + accepted / steps."),
}
# Key of its histograms: (name, help, values of it in one of the metric's unit).
HISTOGRAMS: Mapping[str, tuple[str, str, float]] = {
    "batch": ("batch_size", "Sequences in a step.", 1.0),
    "queue_ms": ("queue_seconds", "From submission to the start of the prompt.", 1e3),
    "time_to_first_token_ms": ("time_to_first_token_seconds", "From submission to the first tokens.", 1e3),
    "time_per_token_ms": ("time_per_token_seconds", "Of an output, its first step left out.", 1e3),
    "request_ms": ("request_seconds", "From submission to the last token.", 1e3),
    "step_ms": ("step_seconds", "Of a target step with its drafting.", 1e3),
}


class ServiceCollector(Collector):
    """Collects the service's counts when Prometheus asks, with vLLM's names too if `vllm_model` is a `model_name`."""

    def __init__(self, service: Service, vllm_model: str | None = None) -> None:
        self._service, self._vllm_model = service, vllm_model

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics, from one snapshot."""
        stats = self._service.stats()
        for key, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, stats[key])
        for key, (name, text) in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, stats[key])
        drafts = stats["num_draft_tokens"]
        rate = stats["num_accepted"] / drafts if drafts else 0.0
        yield GaugeMetricFamily(PREFIX + "acceptance_rate", "Accepted / draft tokens since the start.", rate)
        yield from _drafts(stats["drafts"])
        if "synthetic_acceptance" in stats:
            text = "Rates at which draws keep drafts in the target's place: texts are not the target's."
            family = GaugeMetricFamily(PREFIX + "synthetic_acceptance", text, labels=["position"])
            for position, rate in enumerate(stats["synthetic_acceptance"], 1):
                family.add_metric([str(position)], rate)
            yield family
        finished = CounterMetricFamily(
            PREFIX + "finished_outputs", "Outputs by the reason of their end.", labels=["reason"]
        )
        for reason, count in sorted(stats["num_finished"].items()):
            finished.add_metric([reason], count)
        yield finished
        yield _by_position("tried_tokens", "Drafts whose parent was kept, by depth.", stats["num_tried_by_position"])
        kept = stats["num_accepted_by_position"]
        yield _by_position("accepted_tokens_by_position", "Drafts that were kept, by depth.", kept)
        if self._vllm_model is not None:
            yield from _vllm_counters(stats, self._vllm_model)
        for key, (name, text, per_unit) in HISTOGRAMS.items():
            yield _histogram(name, text, stats["histograms"][key], per_unit)


def _drafts(report: Mapping[str, Any]) -> Iterator[Metric]:
    is_on = GaugeMetricFamily(
        PREFIX + "drafts_on", "Whether steps draft now, and why: asked, measured or expected times.", labels=["reason"]
    )
    is_on.add_metric([report["reason"]], float(report["is_on"]))
    yield is_on
    for key, text in (
        ("draft_token_cost", "Plain steps that a draft token takes here, drafting and scoring."),
        ("accepted_share", "Share of draft tokens that are accepted, as it decides whether to draft."),
    ):
        if report[key] is not None:
            yield GaugeMetricFamily(PREFIX + key, text, report[key])


def _vllm_counters(stats: Mapping[str, Any], model: str) -> Iterator[Metric]:
    """Yields the counts that tools for vLLM read; drafts count when their output has ended."""
    tried, kept = stats["num_tried_by_position"], stats["num_accepted_by_position"]
    counts = (
        ("num_drafts", "Steps of a sequence that drafted.", tried[0] if tried else 0),
        ("num_draft_tokens", "Draft tokens that were scored.", stats["num_draft_tokens"]),
        ("num_accepted_tokens", "Draft tokens that were kept.", stats["num_accepted"]),
    )
    for name, text, count in counts:
        family = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=["model_name", "engine"])
        family.add_metric([model, "0"], count)
        yield family
    name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts that were kept, by position."
    family = CounterMetricFamily(name, text, labels=["model_name", "engine", "position"])
    for position, count in enumerate(kept):
        family.add_metric([model, "0", str(position)], count)
    yield family


def _by_position(name: str, text: str, counts: Sequence[int]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=["position"])
    for position, count in enumerate(counts, 1):
        family.add_metric([str(position)], count)
    return family


def _histogram(name: str, text: str, raw: Mapping[str, Any], per_unit: float) -> HistogramMetricFamily:
    total, buckets = 0, []
    bounds = [f"{bound / per_unit:g}" for bound in raw["bounds"]] + ["+Inf"]
    for bound, count in zip(bounds, raw["counts"], strict=True):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=raw["sum"] / per_unit)


class Metrics:
    """A registry of its own, so that two servers in a process do not mix."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, service: Service, vllm_model: str | None = None) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(ServiceCollector(service, vllm_model))

    def text(self) -> bytes:
        return generate_latest(self._registry)
