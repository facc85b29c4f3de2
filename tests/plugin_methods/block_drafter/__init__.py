# SPDX-License-Identifier: Apache-2.0
"""A method that the package does not know: a drafter that gives a block of tokens in one run of its graph."""
