# SPDX-License-Identifier: Apache-2.0
"""A service on a real bundle: the texts are the offline engine's, whatever other requests run beside them."""

import asyncio
import random

import pytest

import speccompile
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.requests import Request
from speccompile.runtime.service import ServiceOptions


@pytest.fixture(scope="module")
def service(pair):
    service = speccompile.load_service(pair, ServiceOptions(prefill_chunk=48), verify=False)
    service.start()
    yield service
    service.close()
    assert service.stats()["fault"] is None


def tokens_of(step_outputs):
    return [token for step_output in step_outputs for token in step_output.tokens]


async def take(service, request, most=None):
    """Returns the step outputs of a request; leaves the stream after `most` of them."""
    step_outputs = []
    async with service.stream(request) as stream:
        async for _, step_output in stream:
            step_outputs.append(step_output)
            if most is not None and len(step_outputs) >= most:
                break
    return step_outputs


def test_concurrent_greedy_texts_equal_transformers(service, golden):
    rows = golden[:24]

    async def everybody():
        params = [SamplingParams(max_new_tokens=20 + i) for i in range(len(rows))]
        wishes = ["on", "auto"] * 12  # what `auto` does depends on the machine
        asked = [Request(r["prompt_ids"], p, speculation=w) for r, p, w in zip(rows, params, wishes, strict=True)]
        return await asyncio.gather(*(service.generate(request) for request in asked))

    for i, (row, [completion]) in enumerate(zip(rows, asyncio.run(everybody()), strict=True)):
        assert completion.tokens == row["tokens"][: 20 + i]
        assert completion.text == service.engine.tokenizer.decode(completion.tokens)
        assert completion.stats["num_accepted"] <= completion.stats["num_draft_tokens"]
    assert service.stats()["num_accepted"] > 100


def test_sampled_texts_are_those_of_plain_decoding_alone(service, pair, golden):
    asked = [
        SamplingParams(max_new_tokens=24, temperature=0.7 + 0.1 * i, top_p=0.9, top_k=20 * (i % 2), seed=i)
        for i in range(6)
    ]

    async def everybody():
        requests = [Request(golden[i]["prompt_ids"], params) for i, params in enumerate(asked)]
        return await asyncio.gather(*(service.generate(request) for request in requests))

    together = asyncio.run(everybody())
    plain = speccompile.load(pair, verify=False).generate(
        [golden[i]["prompt_ids"] for i in range(len(asked))], asked, speculative=False, batch_size=1
    )
    assert [completion.tokens for [completion] in together] == [g.tokens for g in plain]


def test_a_chat_reads_its_new_turns_alone(service, golden):
    async def chat():
        said, shares = list(golden[30]["prompt_ids"]), []
        for turn in range(3):
            [answer] = await service.generate(Request(said, SamplingParams(max_new_tokens=16, ignore_eos=True)))
            shares.append(answer.stats["num_reused_tokens"])
            assert turn == 0 or shares[-1] == len(said) - 4  # the new tokens, and the last of the answer
            said += [*answer.tokens, 5 + turn, 9, 12]
        return said, shares

    said, shares = asyncio.run(chat())
    [anew] = asyncio.run(service.generate(Request(said[:-3][:-16], SamplingParams(max_new_tokens=16, ignore_eos=True))))
    assert shares[0] == 0 and anew.tokens == said[-19:-3]


def test_a_random_load_with_cancels_timeouts_and_wrong_requests_leaves_nothing(service, golden):
    before = service.stats()
    rng = random.Random(4)

    async def one(gate):
        row, num = rng.choice(golden[:40]), rng.randint(1, 14)
        kind = rng.choices(("whole", "left", "late", "wrong"), (14, 4, 1, 1))[0]
        params = SamplingParams(max_new_tokens=num)
        async with gate:
            if kind == "wrong":
                with pytest.raises(speccompile.errors.RuntimeFault):
                    await take(service, Request([10**9], params))
                return kind
            timeout = 0.02 if kind == "late" else None
            request = Request(row["prompt_ids"], params, timeout_s=timeout)
            step_outputs = await take(service, request, rng.randint(1, 3) if kind == "left" else None)
        got, reason = tokens_of(step_outputs), step_outputs[-1].finish_reason
        assert got == row["tokens"][: len(got)]
        if kind == "whole":
            assert len(got) == num and reason == "length"
        assert sum(step_output.finish_reason is not None for step_output in step_outputs) == (reason is not None)
        return kind

    async def everybody():
        gate = asyncio.Semaphore(20)
        return await asyncio.gather(*(one(gate) for _ in range(120)))

    kinds = asyncio.run(everybody())
    while (stats := service.stats())["num_active"] or stats["num_queued"] or stats["num_prefilling"]:
        pass  # cancelled ones leave between two steps
    assert set(kinds) == {"whole", "left", "late", "wrong"}
    ended = sum(stats["num_finished"].values()) - sum(before["num_finished"].values())
    assert ended == len(kinds) - kinds.count("wrong") == stats["num_requests"] - before["num_requests"]
    assert stats["num_prefix_hits"] > before["num_prefix_hits"] and stats["num_kept"] <= stats["num_slots"]
