# SPDX-License-Identifier: Apache-2.0
"""Words and shapes shared by all parts. numpy only."""
