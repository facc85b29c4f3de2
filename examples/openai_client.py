#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""OpenAI's client against `speccompile serve`: a streamed completion, and how many of its tokens were drafts.

python examples/openai_client.py "def add(a, b):" [--url http://127.0.0.1:8000/v1] [--max-tokens 64]

Needs: pip install openai
"""

from __future__ import annotations

import argparse

from openai import APIConnectionError, OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--api-key", default="none", help="as the server asks for it")
    args = parser.parse_args()

    client = OpenAI(base_url=args.url, api_key=args.api_key)
    try:
        model = client.models.list().data[0]  # adapters follow
    except APIConnectionError:
        raise SystemExit(f"no server answers at {args.url}; start a server: speccompile serve bundles/pycode") from None
    print(args.prompt, end="", flush=True)
    chunks = client.completions.create(
        model=model.id,
        prompt=args.prompt,
        max_tokens=args.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.text, end="", flush=True)
        if chunk.usage is not None:
            drafts = chunk.usage.completion_tokens_details
            print(f"\n--- {chunk.usage.completion_tokens} tokens, {drafts.accepted_prediction_tokens} of them drafts")


if __name__ == "__main__":
    main()
