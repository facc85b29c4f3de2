# SPDX-License-Identifier: Apache-2.0
"""Prophet: a small causal transformer that starts from the target's hidden state."""
