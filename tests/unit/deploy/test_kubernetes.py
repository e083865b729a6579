"""The manifests say what tllm really has: options, ports, paths, variables; and they agree with each other.

Command lines are read by the parser of the command itself. Names of keys are held to no schema here, as those of
Kubernetes are megabytes; docs/log/design.md says against which they were checked.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.docs.page import Block, read
from tests.house.tree import ROOT
from tests.support.serving.scripted_engine import ListedEngine
from tllm import __version__
from tllm.cli.arguments.options import API_KEY_VARIABLE
from tllm.cli.arguments.parser import Parser, size
from tllm.cli.commands.join import SECRET_VARIABLE
from tllm.core.errors import ConfigError
from tllm.server.app import build_app
from tllm.server.http.settings import ServerSettings
from tllm.training.job.job_file import read_job

BASES = ROOT / "deploy" / "kubernetes"
KINDS = ("serve", "train")
Manifest = dict[str, Any]


def manifests(base: str) -> list[Manifest]:
    """What a base's Kustomization names, in its order."""
    resources = yaml.safe_load((BASES / base / "kustomization.yaml").read_text())["resources"]
    return [one for name in resources for one in yaml.safe_load_all((BASES / base / name).read_text())]


def of_kind(base: str, *kinds: str) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in manifests(base) if one["kind"] in kinds}


def workloads(base: str) -> dict[str, Manifest]:
    """By component: "first" and "node"."""
    found = of_kind(base, "StatefulSet", "Job").values()
    return {one["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: one for one in found}


def pod(workload: Manifest) -> Manifest:
    found: Manifest = workload["spec"]["template"]["spec"]
    return found


def container(workload: Manifest) -> Manifest:
    (found,) = pod(workload)["containers"]
    assert isinstance(found, dict)
    return found


def arguments(workload: Manifest) -> argparse.Namespace:
    """What the command itself makes of a pod's command line."""
    name, *words = container(workload)["args"]
    parser = Parser(prog=f"tllm {name}", description="")
    importlib.import_module(f"tllm.cli.commands.{name}").add_arguments(parser)
    return parser.parse_args(words)


def ports(workload: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(workload).get("ports", ())}


def selects(selector: Manifest, workload: Manifest) -> bool:
    return selector.items() <= workload["spec"]["template"]["metadata"]["labels"].items()


def every() -> Iterator[tuple[str, str, Manifest]]:
    for base in KINDS:
        for component, workload in workloads(base).items():
            yield base, component, workload


EVERY = pytest.mark.parametrize(("base", "component", "workload"), list(every()), ids=lambda one: str(one)[:5])


def test_a_base_names_all_of_its_files() -> None:
    for base in KINDS:
        named = yaml.safe_load((BASES / base / "kustomization.yaml").read_text())
        files = {
            *named["resources"],
            "kustomization.yaml",
            *(f for one in named.get("configMapGenerator", ()) for f in one["files"]),
        }
        assert files == {file.name for file in (BASES / base).iterdir()}
        assert [image["newTag"] for image in named["images"]] == [__version__]


@EVERY
def test_the_parser_of_the_command_reads_each_command_line(base: str, component: str, workload: Manifest) -> None:
    found = arguments(workload)
    assert container(workload)["args"][0] == {"first": base, "node": "join"}[component]
    beside = size(container(workload)["resources"]["limits"]["memory"] + "B") - found.memory
    assert beside >= size("1GiB"), "the first machine's own process and the one that forks workers are in the pod too"
    if component == "node":
        assert found.rejoin >= 300
    assert "command" not in container(workload), "the image's own entry point is tllm"


def test_a_mistyped_option_would_be_found() -> None:
    wrong = workloads("serve")["first"]
    container(wrong)["args"].append("--nodez=3")
    with pytest.raises(ConfigError, match="no option --nodez"):
        arguments(wrong)


@pytest.mark.parametrize("base", KINDS)
def test_as_many_machines_join_as_are_waited_for(base: str) -> None:
    first, node = workloads(base)["first"], workloads(base)["node"]
    joining = node["spec"]["replicas"] if base == "serve" else node["spec"]["completions"]
    assert arguments(first).nodes == joining + 1
    assert first["spec"].get("replicas", 1) == 1
    if base == "train":
        assert node["spec"]["parallelism"] == joining and node["spec"]["completionMode"] == "Indexed"


@pytest.mark.parametrize("base", KINDS)
def test_nodes_find_the_first_machine_by_a_service(base: str) -> None:
    first = workloads(base)["first"]
    name, number = arguments(workloads(base)["node"]).coordinator
    service = of_kind(base, "Service")[name]["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
    assert selects(service["selector"], first) and not selects(service["selector"], workloads(base)["node"])
    (port,) = service["ports"]
    assert port["port"] == number == ports(first)[port["targetPort"]] == arguments(first).cluster_port


def test_clients_find_every_machine_that_answers() -> None:
    service = of_kind("serve", "Service")["tllm"]["spec"]
    (port,) = service["ports"]
    for workload in workloads("serve").values():
        found = arguments(workload)
        assert selects(service["selector"], workload)
        assert found.port == ports(workload)[port["targetPort"]] == port["port"]
        assert (found.host, found.allow_host) == ("0.0.0.0", ["tllm"]), "or the service's name is a foreign Host"
    assert arguments(workloads("serve")["node"]).serve


def status_of(path: str) -> int:
    """What a server answers to a kubelet, which calls it by an address and has no key."""
    app = build_app(ListedEngine(), settings=ServerSettings(host="0.0.0.0", api_keys=("k" * 32,)))

    async def get() -> int:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://10.1.2.3:8000") as http:
            return (await http.get(path)).status_code

    return asyncio.run(get())


def test_probes_ask_paths_that_the_server_has_and_answers_without_a_key() -> None:
    asked = set()
    for workload in workloads("serve").values():
        probes = {name: one for name, one in container(workload).items() if name.endswith("Probe")}
        for probe in probes.values():
            assert probe["httpGet"]["port"] in ports(workload)
            asked.add(probe["httpGet"]["path"])
        assert {"startupProbe", "readinessProbe"} <= set(probes)
    assert asked == {"/health", "/health/ready", "/health/progress"}
    assert {path: status_of(path) for path in asked} == dict.fromkeys(asked, 200)
    assert status_of("/health/other") == 404 and status_of("/v1/models") == 401


def test_a_pod_has_time_to_drain() -> None:
    for workload in workloads("serve").values():
        kind, seconds = container(workload)["lifecycle"]["preStop"]["exec"]["command"]
        assert kind == "sleep"
        assert pod(workload)["terminationGracePeriodSeconds"] >= int(seconds) + ServerSettings().drain_seconds + 10


@EVERY
def test_secrets_come_from_one_secret_and_stand_on_no_command_line(
    base: str, component: str, workload: Manifest
) -> None:
    secret = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container(workload)["env"] if "valueFrom" in one}
    wanted = {SECRET_VARIABLE: "secret", **({API_KEY_VARIABLE: "api-key"} if base == "serve" else {})}
    assert secret == {name: {"name": "tllm", "key": key} for name, key in wanted.items()}
    guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    assert all(f"--from-literal={key}=" in guide for key in wanted.values())
    assert not re.search("token|api-key", " ".join(container(workload)["args"]))


@EVERY
def test_pods_need_no_rights(base: str, component: str, workload: Manifest) -> None:
    whole, own = pod(workload)["securityContext"], container(workload)["securityContext"]
    assert whole["runAsNonRoot"] and whole["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod(workload)["automountServiceAccountToken"] is False
    user = re.search(r"^USER (\d+):(\d+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    assert user and (int(user[1]), int(user[2])) == (whole["runAsUser"], whole["runAsGroup"])


@EVERY
def test_what_is_mounted_is_there_and_what_is_written_to_is_mounted(
    base: str, component: str, workload: Manifest
) -> None:
    there = {one["name"] for one in pod(workload)["volumes"]}
    there |= {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", ())}
    mounts = {one["mountPath"]: one["name"] for one in container(workload)["volumeMounts"]}
    assert set(mounts.values()) == there
    paths = {one["name"]: one["value"] for one in container(workload)["env"] if "value" in one}
    assert all(any(Path(path).is_relative_to(mount) for mount in mounts) for path in paths.values())
    assert "/tmp" in mounts


@pytest.mark.parametrize("base", KINDS)
def test_selectors_select_the_pods_of_this_base_alone(base: str) -> None:
    other = workloads(KINDS[1 - KINDS.index(base)])
    selectors = [one["spec"]["podSelector"] for one in of_kind(base, "NetworkPolicy").values()]
    selectors += [one["spec"]["selector"] for one in of_kind(base, "PodDisruptionBudget", "StatefulSet").values()]
    assert len(selectors) == {"serve": 4, "train": 1}[base]
    for selector in selectors:
        assert any(selects(selector["matchLabels"], one) for one in workloads(base).values())
        assert not any(selects(selector["matchLabels"], one) for one in other.values())
    for component, workload in workloads(base).items():
        if workload["kind"] == "StatefulSet":
            own = workload["spec"]["selector"]["matchLabels"]
            assert [name for name, one in workloads(base).items() if selects(own, one)] == [component]
            assert workload["spec"]["serviceName"] in of_kind(base, "Service")


def test_the_job_is_one_and_lies_where_the_command_looks() -> None:
    first = workloads("train")["first"]
    job = read_job(BASES / "train" / "job.toml").job
    mounts = {one["mountPath"]: one["name"] for one in container(first)["volumeMounts"]}
    volumes = {one["name"]: one for one in pod(first)["volumes"]}
    (generated,) = yaml.safe_load((BASES / "train" / "kustomization.yaml").read_text())["configMapGenerator"]
    assert volumes[mounts[str(arguments(first).job.parent)]]["configMap"]["name"] == generated["name"]
    assert arguments(first).job.name in generated["files"]
    claim = volumes[mounts["/data"]]["persistentVolumeClaim"]["claimName"]
    volume = of_kind("train", "PersistentVolumeClaim")[claim]["spec"]
    assert volume["accessModes"] == ["ReadWriteMany"]
    for path in (job.output_dir, job.model_name_or_path, *job.train_files):
        assert str(path).startswith("/data/")
    assert job.global_batch_size % (arguments(first).nodes * job.microbatch_size) == 0


def test_the_patches_of_the_guide_change_what_they_mean_to() -> None:
    blocks = [one for one in read(ROOT / "docs" / "guides" / "kubernetes.md") if isinstance(one, Block)]
    (text,) = (block.text for block in blocks if block.words.get("file") == "kustomization.yaml")
    own = yaml.safe_load(text)
    nodes = replicas = 0
    for patch in own["patches"]:
        target = of_kind("serve", patch["target"]["kind"])[patch["target"]["name"]]
        for change in yaml.safe_load(patch["patch"]):
            *path, last = change["path"].strip("/").split("/")
            place: Any = target
            for part in path:
                place = place[int(part) if isinstance(place, list) else part]
            key = int(last) if isinstance(place, list) else last
            before = place[key]
            place[key] = change["value"]
            assert before != change["value"]
        if target["metadata"]["name"] == "tllm-first":
            assert str(arguments(target).model) == "ORG/NAME"
            nodes = arguments(target).nodes
        else:
            replicas = target["spec"]["replicas"]
    assert nodes == replicas + 1 == 5
    assert [image["name"] for image in own["images"]] == [container(workloads("serve")["first"])["image"]]
