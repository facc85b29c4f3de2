# SPDX-License-Identifier: Apache-2.0
"""The model's part with an engine, without Triton."""

import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np

from speccompile.serving.triton import engine_part
from speccompile.serving.triton.engine_part import EnginePart
from tests.serving.mock_service import make_engine

CONFIG = {"max_batch_size": 0, "input": [{"name": "input_ids"}], "output": [{"name": "output_ids"}]}
ARGS = {"model_config": json.dumps(CONFIG), "model_repository": "", "model_version": "1", "model_name": "mock"}


def request_of(*ids):
    sender = MagicMock(**{"is_cancelled.return_value": False})
    calls = {"parameters": "", "request_id": "", "requested_output_names": ["output_ids"]}
    methods = {name: MagicMock(return_value=value) for name, value in calls.items()}
    return SimpleNamespace(ids=np.array(ids), get_response_sender=lambda: sender, sender=sender, **methods)


def test_a_fault_of_one_request_leaves_the_others_of_its_list(monkeypatch):
    def call_from_arrays(arrays, *more):
        if arrays["input_ids"][0] == 7:
            raise OverflowError("a number that is too small")
        return read(arrays, *more)

    read = engine_part.call_from_arrays
    monkeypatch.setattr(engine_part, "call_from_arrays", call_from_arrays)
    monkeypatch.setattr(engine_part, "load", lambda *_, **options: make_engine()[0])
    pb = MagicMock()
    pb.get_input_tensor_by_name = lambda request, name: SimpleNamespace(as_numpy=lambda: request.ids)
    pb.TritonModelException = RuntimeError
    part = EnginePart(pb, ARGS)
    requests = [request_of(7), request_of(-1), request_of(2, 3)]
    part.execute(requests)
    part.finalize()
    assert [request.sender.send.call_count for request in requests] == [1, 1, 1]
    (internal, *_), (invalid, *_) = (call.args for call in pb.TritonError.call_args_list)
    assert internal == "OverflowError: a number that is too small" and invalid.startswith("input_ids: got -1")
