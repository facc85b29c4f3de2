# SPDX-License-Identifier: Apache-2.0
"""The server in the process: chats over a service of any engine, and OpenAI's client for its application."""

import asyncio
from contextlib import contextmanager

from speccompile.runtime.service import Service
from speccompile.serving.openai.app import make_app
from speccompile.serving.openai.server import OpenAIServer, ServerOptions


@contextmanager
def chat_server(engine, template, options=None, service_options=None):
    """Yields (application, server) over a started service; a chat is what the template makes of it."""
    service = Service(engine, service_options)
    server = OpenAIServer(service, options or ServerOptions("mock"))
    server.template = template
    service.start()
    try:
        yield make_app(server), server
    finally:
        service.close()


def ask_openai(app, route, **fields):
    """Returns the answer of OpenAI's client, or the parts of a stream.

    Args:
        route: of the client, as in `chat.completions` or `responses`.
    """
    import httpx
    import openai

    async def run():
        async with (
            httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http,
            openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0) as client,
        ):
            create = client
            for name in (*route.split("."), "create"):
                create = getattr(create, name)
            answer = await create(**fields)
            return [part async for part in answer] if fields.get("stream") else answer

    return asyncio.run(run())
