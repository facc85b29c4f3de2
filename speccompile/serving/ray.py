# SPDX-License-Identifier: Apache-2.0
"""A bundle as a Ray Serve application: replicas, autoscaling and streaming are Ray's, each replica is a server of ours.

serve run speccompile.serving.ray:build bundle=bundles/pycode num_replicas=2
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from ray import serve
from ray.serve import Application

from speccompile.runtime.engine import load
from speccompile.runtime.requests import Speculation
from speccompile.runtime.service import Service, ServiceOptions
from speccompile.serving.openai.app import make_app
from speccompile.serving.openai.server import OpenAIServer, ServerOptions, check_keys

DEPLOYMENT = "speccompile"


class Settings(BaseModel):
    """The arguments of `build`, as `serve run` and a Serve config file give them.

    `num_replicas` fixes their number; without it Ray keeps `target_ongoing_requests` a replica, between the bounds. Of
    `max_ongoing_requests` of a replica at once, those beyond the batch wait in its queue, more in Ray's proxy.
    """

    model_config = ConfigDict(extra="forbid")

    bundle: Path
    model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    max_request_bytes: int = Field(1 << 20, ge=1)
    body_timeout_s: float = Field(30, gt=0)
    speculation: Speculation = "auto"
    timeout_s: float | None = Field(None, gt=0)
    backend: str | None = None
    threads: int | None = Field(None, ge=1)

    num_replicas: int | None = Field(None, ge=1)
    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(4, ge=1)
    target_ongoing_requests: float = Field(8, gt=0)
    max_ongoing_requests: int = Field(64, ge=1)
    upscale_delay_s: float = Field(30, ge=0)
    downscale_delay_s: float = Field(600, ge=0)
    num_cpus: float = Field(1, ge=0)
    num_gpus: float = Field(0, ge=0)
    drain_s: float = Field(30, ge=0)

    @model_validator(mode="after")
    def _bounds_rise(self) -> Settings:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is above max_replicas")
        return self

    @field_validator("api_keys")
    @classmethod
    def _keys_are_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        check_keys(keys)
        return keys


class Replica:
    """One replica: a service in a process of its own, with the application that `speccompile serve` runs."""

    def __init__(self, settings: Settings) -> None:
        # A replica holds one request more than it decodes at most, so its own queue must not refuse any of them.
        options = ServiceOptions(
            max(256, settings.max_ongoing_requests), settings.timeout_s, speculation=settings.speculation
        )
        self._service = Service(load(settings.bundle, backend=settings.backend, threads=settings.threads), options)
        self._service.start()
        self._settings = settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        settings = self._settings
        name = settings.model_name or settings.bundle.resolve().name
        options = ServerOptions(name, settings.api_keys, settings.max_request_bytes, settings.body_timeout_s)
        return make_app(OpenAIServer(self._service, options), [replica_routes])

    def check_health(self) -> None:
        """Ray replaces a replica in which this raises, or does not return in time."""
        stats = self._service.stats()
        if not stats["is_open"]:
            raise RuntimeError(stats["fault"] or "the service was closed")

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.close()


def replica_routes(server: OpenAIServer) -> APIRouter:
    """Returns the route `/replica`: which one answered, and its counts."""
    router = APIRouter()

    @router.get("/replica")
    def replica() -> dict[str, Any]:
        context = serve.get_replica_context()
        return {"replica": context.replica_tag, "pid": os.getpid(), "stats": server.service.stats()}

    return router


def deployment_options(settings: Settings) -> dict[str, Any]:
    """Returns the deployment's options for Ray."""
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "max_ongoing_requests": settings.max_ongoing_requests,
        "graceful_shutdown_timeout_s": settings.drain_s,
        "ray_actor_options": {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
    }
    if settings.num_replicas is not None:
        return {**options, "num_replicas": settings.num_replicas}
    names = ("min_replicas", "max_replicas", "target_ongoing_requests", "upscale_delay_s", "downscale_delay_s")
    return {**options, "autoscaling_config": {name: getattr(settings, name) for name in names}}


def build(settings: Settings | Mapping[str, Any]) -> Application:
    """Returns the application, for `serve run` and `serve deploy`; all nodes need the path of `settings.bundle`."""
    given = settings if isinstance(settings, Settings) else Settings.model_validate(settings)
    placed = given.model_copy(update={"bundle": given.bundle.resolve()})
    deployment = serve.deployment(**deployment_options(placed))(serve.ingress()(Replica))
    return deployment.bind(placed)
