# SPDX-License-Identifier: Apache-2.0
"""The deployment's options for Ray, without a cluster."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from ray.serve.config import AutoscalingConfig

from speccompile.serving.ray import Replica, Settings, build, deployment_options

pytestmark = pytest.mark.live


def test_a_number_of_replicas_is_fixed_or_scaled():
    fixed = deployment_options(Settings(bundle="b", num_replicas=3, num_gpus=1))
    assert fixed["num_replicas"] == 3 and "autoscaling_config" not in fixed
    assert fixed["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 1}
    scaled = deployment_options(Settings(bundle="b", min_replicas=2, max_replicas=5, target_ongoing_requests=6))
    config = AutoscalingConfig(**scaled["autoscaling_config"])
    assert (config.min_replicas, config.max_replicas, config.target_ongoing_requests) == (2, 5, 6)
    assert "num_replicas" not in scaled


def test_the_application_names_its_deployment(tmp_path):
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call

    typed = {"bundle": str(tmp_path), "num_replicas": "2", "num_cpus": "0.5"}  # as `serve run` gives them
    for application in (build(Settings(bundle=tmp_path, num_replicas=2, num_cpus=0.5)), call(build, typed)):
        deployment = application._bound_deployment
        assert deployment.name == "speccompile" and deployment.num_replicas == 2
        [settings] = deployment.init_args
        assert settings.bundle == tmp_path.resolve() and settings.num_cpus == 0.5
    with pytest.raises(ValidationError, match="replicas"):
        call(build, {"bundle": "b", "replicas": "2"})


@pytest.mark.parametrize(
    "wrong", [{"replicas": 2}, {"num_replicas": 0}, {"min_replicas": 5}, {"speculation": "perhaps"}, {"drain_s": -1}]
)
def test_what_is_no_setting_is_refused(wrong):
    with pytest.raises(ValidationError):
        Settings(bundle="b", **wrong)


def test_a_replica_whose_service_has_ended_is_unhealthy():
    from speccompile.runtime.service import Service
    from tests.serving.mock_service import make_engine

    replica = Replica.__new__(Replica)
    replica._service = Service(make_engine()[0])
    replica._service.start()
    replica.check_health()
    replica._service.close()
    with pytest.raises(RuntimeError, match="the service was closed"):
        replica.check_health()
