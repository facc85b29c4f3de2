# SPDX-License-Identifier: Apache-2.0
"""An HTTP server with the interface of OpenAI's completions and chat completions."""
