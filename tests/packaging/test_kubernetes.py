"""The manifests hold what they promise of the gateway. (`make check` holds them against Kubernetes' own schemas.)"""

from dataclasses import fields
from typing import Any

import pytest
import yaml

from router import config
from tests.rules.source_tree import ROOT

FOLDERS = sorted(folder for folder in (ROOT / "deploy" / "kubernetes").iterdir() if folder.is_dir())


def resources(folder) -> dict[str, dict[str, Any]]:
    """By kind; no kind twice in one folder."""
    found = [item for file in sorted(folder.glob("*.yaml")) for item in yaml.safe_load_all(file.read_text())]
    by_kind = {item["kind"]: item for item in found}
    assert len(by_kind) == len(found)
    return by_kind


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def manifests(request):
    return resources(request.param)


def gateway(manifests) -> dict[str, Any]:
    (container,) = [c for c in pod(manifests)["containers"] if c["image"].startswith("kvgate:")]
    return container


def pod(manifests) -> dict[str, Any]:
    return manifests["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture
def settings(manifests, tmp_path):
    """What the gateway of the manifest reads from its ConfigMap."""
    file = tmp_path / "kvgate.toml"
    file.write_text(manifests["ConfigMap"]["data"]["kvgate.toml"])
    return config.load(file)


def test_there_is_one_for_a_fleet_and_one_for_a_sidecar():
    assert [folder.name for folder in FOLDERS] == ["fleet", "sidecar"]


def test_the_configuration_is_right_and_mounted_where_the_arguments_say(manifests, settings):
    assert settings.backends
    container, spec = gateway(manifests), pod(manifests)
    assert container["args"][:1] == ["-c"]
    (mounted,) = [m for m in container["volumeMounts"] if container["args"][1] == f"{m['mountPath']}/kvgate.toml"]
    (volume,) = [v for v in spec["volumes"] if v["name"] == mounted["name"]]
    assert volume["configMap"]["name"] == manifests["ConfigMap"]["metadata"]["name"]


def test_the_service_and_the_probes_reach_the_port_that_the_gateway_listens_on(manifests, settings):
    container = gateway(manifests)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    (service_port,) = manifests["Service"]["spec"]["ports"]
    assert ports[service_port["targetPort"]] == settings.server.port
    # the image's own --host wins over the file; a Service cannot reach loopback
    assert settings.server.host == "0.0.0.0"
    for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        asked = container[probe]["httpGet"]
        assert (asked["path"], ports[asked["port"]]) == (path, settings.server.port)


def test_what_is_selected_are_the_pods(manifests):
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [manifests["Deployment"]["spec"]["selector"]["matchLabels"], manifests["Service"]["spec"]["selector"]]
    if "PodDisruptionBudget" in manifests:
        selectors.append(manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"])
    for selector in selectors:
        assert selector
        assert selector.items() <= labels.items()


def test_streams_have_time_to_end(manifests, settings):
    grace = pod(manifests)["terminationGracePeriodSeconds"]
    assert grace > settings.timeouts.lame_duck_s + settings.timeouts.drain_s


def test_the_gateway_has_no_rights(manifests):
    container, spec = gateway(manifests), pod(manifests)
    own, shared = container["securityContext"], spec.get("securityContext", {})
    assert own["allowPrivilegeEscalation"] is False
    assert own["readOnlyRootFilesystem"] is True
    assert own["capabilities"] == {"drop": ["ALL"]}
    both = {**shared, **own}
    assert both["runAsNonRoot"] is True
    assert both["seccompProfile"] == {"type": "RuntimeDefault"}
    image_user = next(
        line.split()[1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("USER ")
    )
    assert f"{both['runAsUser']}:{both['runAsGroup']}" == image_user
    assert spec["automountServiceAccountToken"] is False


def test_the_image_is_this_version(manifests):
    from router import __version__

    assert gateway(manifests)["image"] == f"kvgate:{__version__}"


def test_a_fleet_survives_the_loss_of_a_machine():
    manifests = resources(ROOT / "deploy" / "kubernetes" / "fleet")
    assert manifests["Deployment"]["spec"]["replicas"] >= 2
    assert manifests["Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert manifests["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1


def test_beside_an_engine_the_gateway_goes_first_and_nobody_else_reaches_the_engine(tmp_path):
    manifests = resources(ROOT / "deploy" / "kubernetes" / "sidecar")
    (engine,) = pod(manifests)["initContainers"]
    assert engine["restartPolicy"] == "Always"  # started before the gateway, stopped after it
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in engine["args"] if "=" in argument)
    file = tmp_path / "kvgate.toml"
    file.write_text(manifests["ConfigMap"]["data"]["kvgate.toml"])
    (backend,) = config.load(file).backends
    assert flags["host"] == "127.0.0.1"
    assert backend.url == f"http://127.0.0.1:{flags['port']}"


def test_timeouts_are_those_of_the_configuration():
    """The two that the grace period covers exist by these names."""
    assert {"lame_duck_s", "drain_s"} <= {field.name for field in fields(config.TimeoutsConfig)}
