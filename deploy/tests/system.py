"""The compose deployment under test, and how to hurt it."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
LANEWAY = ROOT / "target/dist/laneway"
PROJECT = "laneway-test"
COMPOSE_FILE = ROOT / "deploy/compose/cpu.yaml"
WORKERS = ["worker-0", "worker-1"]
ROLES = [*WORKERS, "engine-manager", "gateway"]
START_S = 120


def docker(*arguments, check=True):
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    if not check:
        return done
    if done.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def no_engine():
    """Why nothing can be run here, if so."""
    try:
        done = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no Docker engine: {error}"
    return None if done.returncode == 0 else f"no Docker engine: {done.stderr.strip().splitlines()[-1]}"


def commit():
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def image(role):
    return json.loads(docker("image", "inspect", f"laneway-{role}:local"))[0]


def size_above_base(role):
    """Bytes of the layers that the Dockerfile made: those of its history that are not the base's."""
    lines = docker("history", "--no-trunc", "--human=false", "--format", "{{json .}}", f"laneway-{role}:local").splitlines()
    made = [json.loads(line) for line in lines]
    added = sum(int(layer["Size"]) for layer in made if "COPY" in layer["CreatedBy"] or "ADD" in layer["CreatedBy"])
    return added


def until(holds, seconds, what):
    ends = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > ends:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.2)


class System:
    """`deploy/compose/cpu.yaml` under a name of its own, up while this is entered."""

    def __init__(self):
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="laneway-containers-"))
        # One port for all its lives: the engine would give a container that starts again another one.
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.gateway = f"127.0.0.1:{free.getsockname()[1]}"

    def __enter__(self):
        self.compose("down", "-v", check=False)
        self.compose("up", "-d")
        try:
            for name in ROLES:
                until(lambda: self.healthy(name), START_S, f"{name} is healthy")
            until(self.whole, START_S, "both workers serve")
        except BaseException:
            self.keep_logs("start")
            self.compose("down", "-v", check=False)
            raise
        return self

    def __exit__(self, *_):
        self.keep_logs("end")
        self.compose("down", "-v", "-t", "5", check=False)

    def compose(self, *arguments, check=True):
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
        command = ["docker", "compose"] if plugin else ["docker-compose"]
        environment = {**os.environ, "LANEWAY_PUBLISH": self.gateway}
        done = subprocess.run(
            [*command, "-p", PROJECT, "-f", str(COMPOSE_FILE), *arguments], capture_output=True, text=True, env=environment
        )
        if check and done.returncode:
            raise RuntimeError(f"compose {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def names(self):
        return ROLES

    def container(self, name):
        return f"{PROJECT}_{name}_1" if self.underscored(name) else f"{PROJECT}-{name}-1"

    def underscored(self, name):
        return docker("container", "inspect", f"{PROJECT}_{name}_1", check=False).returncode == 0

    def inspect(self, name):
        return json.loads(docker("container", "inspect", self.container(name)))[0]

    def healthy(self, name):
        state = self.inspect(name)["State"]
        return state["Running"] and state["Health"]["Status"] == "healthy"

    def started(self, name):
        return self.inspect(name)["State"]["StartedAt"]

    def metric(self, name, pattern):
        """The sum of the samples whose line begins like this; None where nobody answers."""
        networks = self.inspect(name)["NetworkSettings"]["Networks"]
        for network in networks.values():
            try:
                url = f"http://{network['IPAddress']}:9464/metrics"
                with urllib.request.urlopen(url, timeout=2) as answer:
                    text = answer.read().decode()
            except OSError:
                continue
            values = re.findall(rf"^{pattern} ([0-9.e+-]+)$", text, re.MULTILINE)
            return sum(map(float, values)) if values else 0
        return None

    def running(self, name):
        """Streams that a worker holds."""
        return int(self.metric(name, "laneway_worker_running") or 0) + int(self.metric(name, "laneway_worker_queued") or 0)

    def whole(self):
        """Every container is healthy, and the gateway has both workers."""
        serving = self.metric("gateway", "laneway_gateway_workers_serving")
        return serving == len(WORKERS) and all(self.healthy(name) for name in ROLES)

    def kill(self, name):
        # Not through the engine, which would take it for the wish that it stays down.
        os.kill(self.inspect(name)["State"]["Pid"], signal.SIGKILL)

    def pause(self, name):
        docker("pause", self.container(name))

    def unpause(self, name):
        docker("unpause", self.container(name))

    def network(self):
        return f"{PROJECT}_inside"

    def disconnect(self, name):
        docker("network", "disconnect", "-f", self.network(), self.container(name))

    def connect(self, name):
        docker("network", "connect", "--alias", name, self.network(), self.container(name))

    def stop(self, name):
        """SIGTERM, then its exit code."""
        docker("stop", "-t", "40", self.container(name))
        return self.inspect(name)["State"]["ExitCode"]

    def start(self, name):
        docker("start", self.container(name))

    def mend(self):
        """Whatever a failed check left."""
        for name in ROLES:
            docker("unpause", self.container(name), check=False)
            docker("network", "connect", "--alias", name, self.network(), self.container(name), check=False)
            docker("start", self.container(name), check=False)
        until(self.whole, START_S, "the system is whole again")

    def keep_logs(self, name):
        for role in ROLES:
            done = docker("logs", "--timestamps", self.container(role), check=False)
            (self.scratch / f"{name}.{role}.log").write_text(done.stdout + done.stderr)
        print(f"logs: {self.scratch}/{name}.*.log", flush=True)
