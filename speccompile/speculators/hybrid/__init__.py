# SPDX-License-Identifier: Apache-2.0
"""Several drafters in one bundle: each step uses the one that is expected to bring the most tokens per millisecond."""
