"""Holds deploy/kubernetes and deploy/compose to what they promise: manifests.py KUBECTL [LANEWAY].

Every overlay is rendered, as it is and with the component for TLS, and checked against the schemas of Kubernetes; ports,
probes, time to end, resources, users, policies and certificates are asserted. With LANEWAY, the program, every configuration in them must pass `laneway validate`.
"""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = ["cpu-demo", "gpu-colocated", "gpu-split-mps", "multi-node"]
# Components that turn TLS on for an overlay.
# Overlays whose gateways hear of workers from the API server, in the place of DNS.
FROM_THE_API_SERVER = {"multi-node"}
TLS = {overlay: ["tls"] for overlay in OVERLAYS} | {"gpu-split-mps": ["tls", "tls-codec"]}
# What the API server of a bare cluster does not know, and the keys that each must have.
CUSTOM = {
    "ServiceMonitor": {"selector", "endpoints"},
    "InferencePool": {"selector", "targetPorts", "endpointPickerRef"},
}
# Last words behind a drain, and closing.
MARGIN_S = 3
GATEWAY_DRAIN_S = 30
WORKER_DRAIN_S = 30
# The model of a configuration, where the checkpoint of a cluster is not.
STAND_INS = {
    "/models/nano": str(ROOT / "crates/models/demo/nano"),
    "/models/Qwen3-TTS-12Hz-1.7B-CustomVoice": "hf://Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
}


def render(kubectl, overlay, components):
    with tempfile.TemporaryDirectory() as directory:
        def at(path):
            return os.path.relpath(KUBERNETES / path, os.path.realpath(directory))

        kustomization = {"resources": [at(f"overlays/{overlay}")], "components": [at(f"components/{each}") for each in components]}
        (pathlib.Path(directory) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        done = subprocess.run([kubectl, "kustomize", directory], capture_output=True, text=True)
    assert done.returncode == 0, f"{overlay} with {components}: {done.stderr}"
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def check_schema(resource):
    kind = resource["kind"]
    if kind in CUSTOM:
        assert CUSTOM[kind] <= set(resource["spec"]), f"{kind} lacks {CUSTOM[kind] - set(resource['spec'])}"
    else:
        kubernetes_validate.validate(resource, "1.37", strict=True)


def containers(pod):
    return pod.get("initContainers", []) + pod["containers"]


def variables(container):
    return {each["name"]: each.get("value") for each in container.get("env", [])}


def port_of(address):
    return int(address.rsplit(":", 1)[1])


def check_container(name, container):
    where = f"{name}/{container['name']}"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"], where
    assert security["capabilities"] == {"drop": ["ALL"]}, where
    resources = container["resources"]
    assert {"cpu", "memory"} <= set(resources["requests"]) and "memory" in resources["limits"], where
    assert "cpu" not in resources["limits"], f"{where}: a limit of the CPU stalls streams"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in container and "grpc" in container[probe]:
            assert container[probe]["grpc"]["port"] in ports.values(), f"{where}: {probe}"
        if probe in container and "httpGet" in container[probe]:
            assert container[probe]["httpGet"]["port"] in ports, f"{where}: {probe}"
    assert "livenessProbe" in container, where
    assert "startupProbe" in container or "readinessProbe" in container, where
    # What it is told to listen on is what it says that it listens on.
    for variable, value in variables(container).items():
        if variable in ("LANEWAY_LISTEN", "LANEWAY_METRICS_LISTEN") and not value.startswith("127."):
            assert port_of(value) in ports.values(), f"{where}: {variable}={value}"


def check_ending(name, pod):
    """A stream that runs when a pod is told to end has the whole drain bound: preStop comes before it."""
    grace = pod["terminationGracePeriodSeconds"]
    for container in pod["containers"]:
        before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain = GATEWAY_DRAIN_S if container["name"] == "gateway" else WORKER_DRAIN_S
        if container["name"] == "codec":
            # Its Talker has ended by then, and with it every stream.
            talker = next(each for each in pod["containers"] if each["name"] == "worker")
            talker_ends = talker["lifecycle"]["preStop"]["sleep"]["seconds"] + WORKER_DRAIN_S
            assert before > talker_ends, f"{name}: the Codec ends before the Talker"
            drain = 0
        assert before + drain + MARGIN_S <= grace, f"{name}/{container['name']}: {before} + {drain} s of {grace} s"


def check_pods(by_kind, asks):
    for name, deployment in by_kind["Deployment"].items():
        pod = deployment["spec"]["template"]["spec"]
        assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0, name
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 65532, name
        # A token is for who asks the API server.
        assert pod["automountServiceAccountToken"] is (asks and name == "laneway-gateway"), name
        every_port = [port["containerPort"] for container in containers(pod) for port in container["ports"]]
        assert len(every_port) == len(set(every_port)), f"{name}: containers of a pod share its ports: {every_port}"
        for container in containers(pod):
            check_container(name, container)
        check_ending(name, pod)
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        mounted = {mount["name"] for container in containers(pod) for mount in container.get("volumeMounts", [])}
        assert mounted == volumes, f"{name}: {mounted ^ volumes}"
        mounts = [mount["mountPath"] for mount in pod["containers"][0].get("volumeMounts", [])]
        assert name != "laneway-worker" or "/var/cache/laneway" in mounts, f"{name}: no volume for kernels"


def check_certificates(by_kind):
    """With the component for TLS, every role has its certificates, and nobody asks it anything without."""
    source = (ROOT / "crates/tls/src/flags.rs").read_text()
    for name, deployment in by_kind["Deployment"].items():
        pod = deployment["spec"]["template"]["spec"]
        secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        for container in containers(pod):
            where = f"{name}/{container['name']}"
            given = variables(container)
            mounts = {mount["mountPath"]: secrets.get(mount["name"]) for mount in container["volumeMounts"]}

            def secret(variable):
                assert f'"{variable}"' in source, f"{where}: nothing reads {variable}"
                assert variable in given, f"{where}: no {variable}"
                directory, key = given[variable].rsplit("/", 1)
                return mounts[directory], key

            files = {"CERT": "tls.crt", "KEY": "tls.key", "CA": "ca.crt"}
            for end, file in files.items():
                assert secret(f"LANEWAY_INTERNAL_TLS_{end}") == ("laneway-internal-tls", file), f"{where}: {end}"
            assert given["LANEWAY_INTERNAL_TLS_NAME"] == "laneway.internal", where
            asked = "laneway-internal-tls"
            if container["name"] == "gateway":
                asked = "laneway-gateway-tls"
                for end in ("CERT", "KEY"):
                    assert secret(f"LANEWAY_GATEWAY_TLS_{end}") == (asked, files[end]), f"{where}: {end}"
                assert given["LANEWAY_TLS_NAME"] in [f"{each}.laneway.svc" for each in by_kind["Service"]], where
            else:
                for end in ("CERT", "KEY"):
                    assert secret(f"LANEWAY_{end}") == (asked, files[end]), f"{where}: a probe shows no certificate"
                assert given["LANEWAY_TLS_NAME"] == given["LANEWAY_INTERNAL_TLS_NAME"], where
            assert secret("LANEWAY_CA") == (asked, "ca.crt"), where
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                how = container.get(probe, {})
                assert "grpc" not in how, f"{where}: {probe} speaks no TLS"
                if "exec" in how:
                    program, command, address = how["exec"]["command"]
                    assert (program, command) == ("/usr/local/bin/laneway", "health"), f"{where}: {probe}"
                    assert address.startswith("https://127.0.0.1:"), f"{where}: {probe} asks {address}"
            # Whoever finds a manager or a worker writes no scheme, or one that is refused.
            for variable in ("LANEWAY_ENGINE_MANAGER", "LANEWAY_GATEWAY_WORKERS"):
                assert not given.get(variable, "").startswith("http://"), f"{where}: {variable} is without TLS"


def check_access(by_kind, asks):
    """Who asks the API server may read EndpointSlices of its own namespace, and nobody may do anything else."""
    kinds = ("ServiceAccount", "Role", "RoleBinding")
    if not asks:
        assert not set(kinds) & set(by_kind), "somebody has rights that nobody needs"
        return
    account, role, binding = (by_kind[kind] for kind in kinds)
    pod = by_kind["Deployment"]["laneway-gateway"]["spec"]["template"]["spec"]
    workers = by_kind["Service"]["laneway-worker"]["metadata"]["namespace"]
    (name, granted), = role.items()
    assert granted["rules"] == [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}]
    assert granted["metadata"]["namespace"] == workers, "the right is for another namespace than the workers'"
    (bound,) = binding.values()
    assert bound["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    (subject,) = bound["subjects"]
    assert (subject["kind"], subject["name"]) == ("ServiceAccount", pod["serviceAccountName"]), subject
    assert bound["metadata"]["namespace"] == workers and subject["namespace"] == workers, subject
    assert list(account) == [pod["serviceAccountName"]]
    assert by_kind["Deployment"]["laneway-worker"]["spec"]["template"]["spec"].get("serviceAccountName") is None
    # What a policy would have to let out, were there one: the gateway's way to the API server.
    for policy in by_kind["NetworkPolicy"].values():
        assert policy["spec"]["policyTypes"] == ["Ingress"], f"{policy['metadata']['name']}: the gateway cannot reach the API server"


def check_network(by_kind, protocol, asks):
    pods = {name: each["spec"]["template"] for name, each in by_kind["Deployment"].items()}
    for name, service in by_kind["Service"].items():
        for port in service["spec"]["ports"]:
            selected = [
                template for template in pods.values() if service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
            ]
            named = {each["name"] for template in selected for each in
                     (p for container in containers(template["spec"]) for p in container["ports"])}
            assert port["targetPort"] in named, f"{name}: no pod has the port {port['targetPort']}"
            if port["name"] in ("api", "worker"):
                assert port["appProtocol"] == protocol, name
    policies = by_kind["NetworkPolicy"]
    assert policies["laneway-deny"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    to_worker = [rule for rule in policies["laneway-worker"]["spec"]["ingress"] if {"port": "worker"} in rule["ports"]]
    gateway_only = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "laneway-gateway"}}}]
    assert [rule["from"] for rule in to_worker] == [gateway_only], "workers are reachable from the gateway only"
    gateway = pods["laneway-gateway"]["spec"]["containers"][0]
    workers = by_kind["Service"]["laneway-worker"]
    namespace, (port,) = workers["metadata"]["namespace"], workers["spec"]["ports"]
    # A slice of endpoints has the Service's name of a port.
    found_at = f"k8s://{namespace}/laneway-worker:{port['name']}" if asks else f"dns://laneway-worker.{namespace}.svc:{port['port']}"
    assert variables(gateway)["LANEWAY_GATEWAY_WORKERS"] == found_at, f"the gateway does not look at {found_at}"


def check_budgets(by_kind):
    for name, deployment in by_kind["Deployment"].items():
        budget = by_kind["PodDisruptionBudget"][name]["spec"]
        assert budget["selector"]["matchLabels"] == deployment["spec"]["selector"]["matchLabels"], name
        least = budget.get("minAvailable", 0)
        assert least < deployment["spec"]["replicas"], f"{name}: no node could ever be drained"
    source = (ROOT / "crates/telemetry/src/metric.rs").read_text()
    scaled = [(name, each["pods"]["metric"]["name"]) for name, scaler in by_kind["HorizontalPodAutoscaler"].items()
              for each in scaler["spec"]["metrics"]]
    for name, scaler in by_kind["HorizontalPodAutoscaler"].items():
        assert scaler["spec"]["minReplicas"] <= by_kind["Deployment"][name]["spec"]["replicas"] <= scaler["spec"]["maxReplicas"], name
    assert ("laneway-worker", "laneway_worker_queued") in scaled
    picker = (KUBERNETES / "components/inference-pool/inference-pool.yaml").read_text()
    contract = [("inference-pool", metric) for metric in re.findall(r"-metric=(\w+)", picker)]
    assert len(contract) == 3, contract
    for name, metric in scaled + contract:
        assert f'"{metric}"' in source, f"{name}: nothing exports {metric}"


def check_configuration(laneway, overlay, by_kind):
    maps = [each for name, each in by_kind["ConfigMap"].items() if name.startswith("laneway-deployment")]
    assert len(maps) == 1, f"{overlay}: {len(maps)} deployments"
    text = maps[0]["data"]["deployment.yaml"]
    configured = yaml.safe_load(text)
    pod = by_kind["Deployment"]["laneway-worker"]["spec"]["template"]["spec"]
    ranks = {rank for group in configured["node_groups"] for rank in group.get("ranks", [0])}
    served = {int(variables(each)["LANEWAY_RANK"]): each for each in pod["containers"]}
    assert set(served) == ranks, f"{overlay}: ranks {ranks}, containers for {set(served)}"
    gpus = [each["resources"]["limits"].get("nvidia.com/gpu") for each in served.values()]
    assert all(gpus) == (configured["device"] == "cuda"), f"{overlay}: {gpus}"
    shares = configured.get("mps", {}).get("ranks", {})
    for rank, share in shares.items():
        given = variables(served[rank]).get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        assert given == str(share["active_thread_percentage"]), f"{overlay}: rank {rank} has {given}"
    assume = "h200:1" if configured["device"] == "cuda" else "cpu:4"
    validate(laneway, overlay, text, configured["weights"], assume)


def validate(laneway, name, text, weights, assume, more=()):
    if not laneway:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        flags = ["--assume", assume, "--set", f"weights={STAND_INS[weights]}", *more]
        done = subprocess.run([laneway, "validate", file.name, *flags], capture_output=True, text=True)
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"


def composer():
    """The program that reads compose files, where there is one."""
    for command in (["docker", "compose"], ["docker-compose"]):
        with contextlib.suppress(OSError):
            if subprocess.run([*command, "version"], capture_output=True).returncode == 0:
                return command
    return None


def resolved(compose, path):
    """The arrangement as compose itself understands it, which needs neither an engine nor a GPU."""
    done = subprocess.run([*compose, "-f", path, "config"], capture_output=True, text=True)
    assert done.returncode == 0, f"{path.name}: {done.stderr}"
    return yaml.safe_load(done.stdout)["services"]


def check_resolved(name, services):
    """What an arrangement adds takes nothing away that its roles have."""
    for service, it in services.items():
        assert it["read_only"] and it["cap_drop"] == ["ALL"], f"{name}: {service}"
        assert it["security_opt"] == ["no-new-privileges:true"] and it["restart"] == "unless-stopped", f"{name}: {service}"
        gpus = it.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        wanted = name.startswith("gpu-") and (service.startswith("worker") or service == "mps")
        assert [gpu["driver"] for gpu in gpus] == ["nvidia"] * wanted, f"{name}: {service} has {gpus}"


def check_compose(laneway):
    """Every arrangement names a configuration that passes, and a worker for each of its ranks."""
    compose = composer()
    if not compose:
        print("skipped: compose files as compose reads them: neither `docker compose` nor `docker-compose` is here")
    roles = yaml.safe_load((ROOT / "deploy/compose/roles.yaml").read_text())["services"]
    for name, role in roles.items():
        assert role["read_only"] and role["cap_drop"] == ["ALL"] and role["security_opt"] == ["no-new-privileges:true"], name
    for role, drain in [("gateway", GATEWAY_DRAIN_S), ("worker", WORKER_DRAIN_S)]:
        assert int(roles[role]["stop_grace_period"].rstrip("s")) >= drain + MARGIN_S, role
    arrangements = sorted((ROOT / "deploy/compose").glob("*.yaml"))
    for path in arrangements:
        if path.name == "roles.yaml":
            continue
        services = yaml.safe_load(path.read_text())["services"]
        if compose:
            check_resolved(path.name, resolved(compose, path))
        for name, service in services.items():
            assert service["extends"]["file"] == "roles.yaml", f"{path.name}: {name}"
        manager = services["engine-manager"]
        file = next(volume.split(":")[0] for volume in manager["volumes"] if volume.endswith("/deployment.yaml:ro"))
        text = (path.parent / file).read_text()
        given = manager["environment"]
        weights = re.sub(r"\$\{LANEWAY_WEIGHTS:-(.*)\}", r"\1", given["LANEWAY__WEIGHTS"])
        replicas = int(given.get("LANEWAY__REPLICAS", yaml.safe_load(text).get("replicas", 1)))
        configured = yaml.safe_load(text)
        per_copy = {rank for group in configured["node_groups"] for rank in group.get("ranks", [0])}
        served = {int(each["environment"]["LANEWAY_RANK"]): each["environment"] for name, each in services.items()
                  if name.startswith("worker")}
        assert set(served) == set(range(len(per_copy) * replicas)), f"{path.name}: workers for {set(served)}"
        for rank, share in configured.get("mps", {}).get("ranks", {}).items():
            assert served[rank]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == str(share["active_thread_percentage"]), path.name
            assert served[rank]["CUDA_MPS_PIPE_DIRECTORY"] == "/mps", path.name
            limit = share.get("pinned_device_memory")
            if limit:
                stated = f"0={int(limit.removesuffix('GiB')) * 1024}M"
                assert served[rank]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == stated, path.name
        assume = "h200:1" if configured["device"] == "cuda" else "cpu:8"
        validate(laneway, path.name, text, weights, assume, ["--set", f"replicas={replicas}"])
    return len(arrangements) - 1


def check_dockerfiles():
    """The stages that build from source are one text, so that one build serves all roles."""
    builders = {}
    for path in (ROOT / "deploy/docker").glob("*.Dockerfile"):
        text = path.read_text()
        if "AS skeleton" in text:
            builders[path.name] = text[text.index("FROM ${RUST} AS skeleton") : text.index("FROM runtime AS source")]
    assert len(builders) == 3 and len(set(builders.values())) == 1, "the builder stages differ between the roles"


def check_alerts():
    """Whoever is woken finds the alert in the book."""
    rules = yaml.safe_load((ROOT / "deploy/observability/alerts.yaml").read_text())
    book = (ROOT / "docs/operate.md").read_text()
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        assert f"`{rule['alert']}`" in book, f"docs/operate.md does not say what {rule['alert']} means"


def main():
    kubectl, laneway = sys.argv[1], (sys.argv[2:] or [None])[0]
    for overlay in OVERLAYS:
        for components in ([], TLS[overlay]):
            by_kind = {}
            for resource in render(kubectl, overlay, components):
                check_schema(resource)
                by_kind.setdefault(resource["kind"], {})[resource["metadata"]["name"]] = resource
            asks = overlay in FROM_THE_API_SERVER
            check_pods(by_kind, asks)
            check_access(by_kind, asks)
            check_network(by_kind, "https" if components else "kubernetes.io/h2c", asks)
            check_budgets(by_kind)
            if components:
                check_certificates(by_kind)
        check_configuration(laneway, overlay, by_kind)
    n_arrangements = check_compose(laneway)
    check_dockerfiles()
    check_alerts()
    passed = "every configuration is valid" if laneway else "configurations were not checked: name the program"
    print(f"{len(OVERLAYS)} overlays, with TLS and without, and {n_arrangements} compose files hold; {passed}")


if __name__ == "__main__":
    main()
