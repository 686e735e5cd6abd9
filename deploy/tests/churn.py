"""Fifty workers that join, leave and crash at random behind a gateway under load: churn.py [--seconds N] [--results FILE].

Gateway and engine-manager are the binaries of `make dist`, the workers are processes of `fake-worker`, the load is `laneway
bench`. Held: each worker's share of the running streams stays within 20 % of the mean over the time that it serves; no
stream is sent to a worker that drains, once it has had a second to say so (it takes two to end what it has, and tells of each
stream that it refuses meanwhile); no stream is lost but those that a crashed worker carried.
"""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import grpc

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIST = ROOT / "target/dist"
N_WORKERS = 50
# Three for each worker: a fourth of one is a share that shows.
CALLERS = 150
# A stream is two seconds: a worker has its share of them soon after it came.
STREAM = ["--frames", "25", "--chunk-frames", "5", "--chunk-ms", "400", "--first-chunk-ms", "50"]
SETTLES_S = 6
TOLD_MS = 1000
WITHIN = 0.2
# Samples of a worker below which a mean means nothing.
FEWEST_SAMPLES = 15


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def stubs(directory):
    """The workers' protocol, compiled from the tree."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}/proto", f"--python_out={directory}", f"--grpc_python_out={directory}"]
    subprocess.run([*command, *map(str, (ROOT / "proto/laneway/v1").glob("*.proto"))], check=True)
    sys.path.insert(0, str(directory))
    from laneway.v1 import worker_pb2, worker_pb2_grpc

    return worker_pb2, worker_pb2_grpc


def commit():
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


class Worker:
    """One process of one rank."""

    def __init__(self, rank, manager, program):
        self.rank, self.began, self.ending = rank, time.monotonic(), False
        self.late, self.refused, self.address = [], 0, None
        command = [program, "--engine-manager", f"http://{manager}", "--rank", str(rank), "--capacity", "64", *STREAM]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()
        self.samples, self.channel = [], None

    def _read(self):
        for line in self.process.stderr:
            if found := re.match(r'\{"refused_ms_into_drain":(\d+)\}', line):
                self.refused += 1
                if int(found[1]) > TOLD_MS:
                    self.late.append(int(found[1]))
            elif found := re.match(r'\{"address":"(.*)"\}', line):
                self.address = found[1]


def bench(gateway, callers, seconds, output):
    flags = ["--gateway", gateway, "--concurrency", str(callers), "--seconds", str(seconds), "--quiet", "--output", output]
    return subprocess.Popen([DIST / "laneway", "bench", *map(str, flags)], stdout=subprocess.DEVNULL)


class Fleet:
    def __init__(self, manager, program, seed):
        self.manager, self.program, self.random = manager, program, random.Random(seed)
        self.ranks, self.gone = {}, []
        self.free = list(range(N_WORKERS))
        self.counts = {"joined": 0, "left": 0, "crashed": 0}
        self.carried_by_crashed = 0

    def join(self):
        rank = self.free.pop(0)
        self.ranks[rank] = Worker(rank, self.manager, self.program)
        self.counts["joined"] += 1

    def settled(self):
        old = time.monotonic() - SETTLES_S
        return [worker for worker in self.ranks.values() if not worker.ending and worker.began < old and worker.address]

    def change(self, running):
        """One of the three, more often joining where few are left."""
        for rank in [rank for rank, worker in self.ranks.items() if worker.process.poll() is not None]:
            worker = self.ranks.pop(rank)
            assert not worker.ending or worker.process.returncode in (0, -signal.SIGKILL), worker.process.returncode
            self.gone.append(worker)
            self.free.append(rank)
        if self.free and self.random.random() < 0.5 + len(self.free) / N_WORKERS:
            self.join()
            return
        candidates = self.settled()
        if len(candidates) < N_WORKERS // 2:
            return
        worker = self.random.choice(candidates)
        worker.ending = True
        if self.random.random() < 0.5:
            self.counts["left"] += 1
            worker.process.terminate()
        else:
            carried = running(worker)
            if carried is None:
                worker.ending = False
                return
            self.counts["crashed"] += 1
            # And what may come between the count and the blow.
            self.carried_by_crashed += carried + 2
            worker.process.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--callers", type=int, default=CALLERS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fake-worker", type=pathlib.Path, default=ROOT / "target/debug/fake-worker")
    parser.add_argument("--results", type=pathlib.Path)
    arguments = parser.parse_args()
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="laneway-churn-"))
    load_before = os.getloadavg()
    worker_pb2, worker_pb2_grpc = stubs(scratch)
    manager, gateway = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen([DIST / "laneway-engine-manager", "--config", ROOT / "configs/demo.yaml", "--set", f"replicas={N_WORKERS}", "--listen", manager],
                         stderr=open(scratch / "manager.log", "w")),
        subprocess.Popen([DIST / "laneway-gateway", "--engine-manager", manager, "--listen", gateway], stderr=open(scratch / "gateway.log", "w")),
    ]
    fleet = Fleet(manager, arguments.fake_worker, arguments.seed)

    def running(worker):
        if worker.channel is None:
            worker.channel = worker_pb2_grpc.WorkerStub(grpc.insecure_channel(worker.address))
        try:
            return worker.channel.Status(worker_pb2.WorkerStatusRequest(), timeout=5).load.running
        except grpc.RpcError:
            # On a machine that has no time for it: nothing is known of this moment.
            return None

    load = None
    try:
        for _ in range(N_WORKERS):
            fleet.join()
        time.sleep(SETTLES_S)
        load = bench(gateway, arguments.callers, arguments.seconds, scratch / "bench.json")
        worst = 0.0
        time.sleep(SETTLES_S)
        while load.poll() is None:
            began = time.monotonic()
            asked = [(worker, running(worker)) for worker in fleet.settled()]
            counts = [(worker, count) for worker, count in asked if count is not None]
            mean = sum(count for _, count in counts) / max(1, len(counts))
            if mean >= 1:
                for worker, count in counts:
                    worker.samples.append(count / mean)
                worst = max(worst, max(count for _, count in counts) / mean)
            fleet.change(running)
            time.sleep(max(0.0, 1.0 - (time.monotonic() - began)))
    finally:
        if load:
            load.kill()
        for worker in fleet.ranks.values():
            worker.process.kill()
        for process in processes:
            process.terminate()
    done = json.loads((scratch / "bench.json").read_text())["runs"][0]
    workers = [*fleet.gone, *fleet.ranks.values()]
    shares = [sum(worker.samples) / len(worker.samples) for worker in workers if len(worker.samples) >= FEWEST_SAMPLES]
    if not shares:
        print(f"churn: no worker was seen {FEWEST_SAMPLES} times: this machine has no time for {N_WORKERS} of them", file=sys.stderr)
        return 1
    late = [ms for worker in workers for ms in worker.late]
    failures = sum(done["failures"].values())
    row = {
        "commit": commit(), "cores": os.cpu_count(), "machine_load": {"before": load_before, "behind": os.getloadavg()},
        "callers": arguments.callers, "seconds": arguments.seconds, **fleet.counts, "streams": done["finished"], "failures": done["failures"],
        "carried_by_crashed": fleet.carried_by_crashed, "refused_in_drain": sum(worker.refused for worker in workers), "refused_late_ms": late,
        "share_of_the_mean": {"least": round(min(shares), 3), "most": round(max(shares), 3), "workers": len(shares)},
        "most_at_once": round(worst, 2),
    }
    print(json.dumps(row))
    if arguments.results:
        arguments.results.write_text(json.dumps(row, indent=1) + "\n")
    wrong = []
    if not (1 - WITHIN <= min(shares) and max(shares) <= 1 + WITHIN):
        wrong.append(f"the shares of workers are {min(shares):.2f} to {max(shares):.2f} of the mean")
    if late:
        wrong.append(f"{len(late)} streams were sent to workers that drained for more than {TOLD_MS} ms")
    if failures > fleet.carried_by_crashed:
        wrong.append(f"{failures} streams failed, and crashed workers carried {fleet.carried_by_crashed}")
    if min(fleet.counts["left"], fleet.counts["crashed"]) == 0:
        wrong.append(f"nothing was tried: {fleet.counts}")
    for each in wrong:
        print(f"churn: {each}", file=sys.stderr)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
