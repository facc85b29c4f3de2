# SPDX-License-Identifier: Apache-2.0
"""General helpers that know nothing of decoding: files, JSON, the machine. Standard library only at import."""
