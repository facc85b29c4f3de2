# SPDX-License-Identifier: Apache-2.0
"""What pays for a model on a machine: methods tried on prompts, or predicted from sizes and rates."""
