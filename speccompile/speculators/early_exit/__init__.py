# SPDX-License-Identifier: Apache-2.0
"""Self-speculation: the target's own first layers and a small head draft."""
