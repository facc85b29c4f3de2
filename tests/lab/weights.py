# SPDX-License-Identifier: Apache-2.0
"""Random weights of torch models that are large enough to matter."""


def randomize(model):
    """Draws matrices (0.3, for logits of order 1) and moves norms' weights and biases from what they begin with."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
