# SPDX-License-Identifier: Apache-2.0
"""Which layers of the target an EAGLE-3 drafter reads: both ways of counting, defaults, refusals."""

import json
from pathlib import Path

import pytest

from speccompile.errors import CheckpointError, RecipeError
from speccompile.speculators.eagle3.checkpoint import layers_from_config, layers_of_target
from speccompile.speculators.eagle3.config import Eagle3Config, Eagle3Training

RULE_CASES = [
    ({}, 32, (1, 15, 28)),
    ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, 32, (1, 15, 28)),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, 32, (1, 15, 28)),
    ({"eagle_aux_hidden_state_layer_ids": [24, 30, 36]}, 36, (23, 29, 35)),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}, "target_layer_ids": []}, 32, (1, 15, 28)),
    ({"target_layer_ids": [], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 9, 5]}}, 32, (2, 8, 4)),
]


@pytest.mark.parametrize(("config", "num_layers", "layers"), RULE_CASES)
def test_layers_are_read_in_either_way_of_counting(tmp_path, config, num_layers, layers):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert layers_of_target(str(tmp_path), None, None, num_layers, "checkpoint") == layers
    assert layers_of_target(str(tmp_path), None, (3, 0, 5), num_layers, "checkpoint") == (3, 0, 5)


REFUSED_LAYERS = [
    ({"eagle_aux_hidden_state_layer_ids": [2, 16, 33]}, None, CheckpointError, "the stream after layer 32"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 16, 29]}, None, CheckpointError, "different numbers from 1 on"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 2, 29]}, None, CheckpointError, "different numbers from 1 on"),
    ({}, (1, 2, 32), RecipeError, r"speculator\.layers: got \[1, 2, 32\]; expected 3 different layers"),
]


@pytest.mark.parametrize(("config", "asked", "error", "message"), REFUSED_LAYERS)
def test_layers_that_cannot_be_are_refused(tmp_path, config, asked, error, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        layers_of_target(str(tmp_path), None, asked, 32, "checkpoint")


def test_too_few_layers_are_refused_but_for_random_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match="a target of 4 layers; expected 7 layers or more"):
        layers_of_target(str(tmp_path), None, None, 4, "checkpoint")
    assert layers_of_target(str(tmp_path), None, None, 4, "random") == (0, 2, 3)


@pytest.mark.export
@pytest.mark.parametrize("layers", [(0, 2, 4), (1, 2, 3), (2, 0, 4)])
def test_a_drafter_is_built_for_the_layers_that_it_was_trained_on(layers):
    torch = pytest.importorskip("torch")
    from speccompile.speculators.eagle3.trainer import config_from_training
    from speccompile.training_contract import TargetParts

    table = torch.zeros(40, 16)
    parts = TargetParts({"num_hidden_layers": 6, "num_attention_heads": 4}, Path(), table, table, torch.zeros(40))
    config = config_from_training(Eagle3Training(layers=layers), parts)
    assert layers_from_config(Path(), config) == layers


def test_a_recipe_may_name_as_many_layers_as_the_drafter_reads(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"target_layer_ids": [0, 1, 2, 3, 4]}))
    asked = Eagle3Config("d", layers=[1, 2, 3, 4, 6]).chosen_layers
    assert layers_of_target(str(tmp_path), None, asked, 7, "checkpoint") == (1, 2, 3, 4, 6)
    for wrong in ([1, 1, 2], [-1, 0, 1], []):
        with pytest.raises(RecipeError, match=r"speculator\.layers: got .*; expected auto, or different layers"):
            Eagle3Config("d", layers=wrong)
