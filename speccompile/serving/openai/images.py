# SPDX-License-Identifier: Apache-2.0
"""Images of chats: data URLs, decoded and prepared off the event loop. Nothing is fetched."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Sequence

from speccompile.errors import RuntimeFault
from speccompile.runtime.images import Image
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.serving.openai.errors import ApiError

MAX_IMAGES = 16  # of one request
_DATA_URL = re.compile(r"data:image/(?:png|jpeg|jpg|webp);base64,", re.IGNORECASE)
_PARAM = "messages"


def files_from_urls(urls: Sequence[str], engine: SpecEngine) -> list[bytes]:
    """Returns the files of a chat's images, in its order.

    Args:
        urls: data URLs of PNG, JPEG or WebP files in base64.

    Raises:
        ApiError: the bundle reads no images, there are too many, or one is no such URL.
    """
    if not urls:
        return []
    if engine.images is None:
        message = (
            "This model reads text alone: leave out `image_url`, or serve a bundle built with target.vision: true."
        )
        raise ApiError(400, message, param=_PARAM, code="no_vision")
    if len(urls) > MAX_IMAGES:
        message = f"`{_PARAM}`: got {len(urls)} images, expected at most {MAX_IMAGES}."
        raise ApiError(400, message, param=_PARAM, code="invalid_value")
    return [file_from_url(url) for url in urls]


async def read_images(files: Sequence[bytes], engine: SpecEngine) -> list[Image]:
    """Returns the images of a chat, decoded.

    Raises:
        ApiError: one cannot be decoded.
    """
    if not files:
        return []
    try:
        return await asyncio.to_thread(engine.read_images, files)
    except RuntimeFault as fault:
        raise error_from_images(fault) from fault


def file_from_url(url: str) -> bytes:
    """Returns the contents of a data URL.

    Raises:
        ApiError: it is none of an image in base64.
    """
    head = _DATA_URL.match(url)
    if head is None:
        is_remote = re.match(r"[a-z][a-z0-9+.-]*://", url, re.IGNORECASE) is not None
        got = "this server fetches nothing" if is_remote else "it is no data URL of an image in base64"
        message = f"`image_url`: {got}; send the image itself: data:image/png;base64,... (PNG, JPEG or WebP)."
        raise ApiError(400, message, param=_PARAM, code="unsupported_url" if is_remote else "invalid_value")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as fault:
        raise ApiError(400, f"`image_url`: not base64: {fault}.", param=_PARAM, code="invalid_value") from fault


def error_from_images(fault: RuntimeFault) -> ApiError:
    message = f"`{_PARAM}`: got {fault.got}; expected {fault.expected}. {fault.todo}"
    return ApiError(400, message, param=_PARAM, code="invalid_value")
