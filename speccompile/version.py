# SPDX-License-Identifier: Apache-2.0
"""The version of the package."""

VERSION = "0.1.0"
