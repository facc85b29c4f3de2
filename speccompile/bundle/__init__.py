# SPDX-License-Identifier: Apache-2.0
"""Everything that a build writes: atomic folders, cached stages, digests, tokenizers, the manifest and the report."""
