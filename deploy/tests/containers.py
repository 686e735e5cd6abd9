"""Runs the system in containers and breaks it: containers.py [--only NAME,...] [--results FILE].

Needs a Docker engine, `make dist` and the images of `make images`. Everything is real: the images, `deploy/compose/cpu.yaml`
under a project name of its own, NVIDIA's Riva client as the load. Each check prints a row; the exit code counts failures.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import system as containers
from load import Load, Outcome
from system import ROLES, WORKERS, System, until

MB = 1_000_000
# What an image may add to its base.
MOST_ADDED = {"gateway": 60 * MB, "engine-manager": 60 * MB, "worker": 100 * MB}
# Longer than a lease (5 s), a lost ping (5 s) and a silent stream (10 s).
OUTAGE_S = 12
HEALED_S = 60


def check_images(_):
    """Small, labelled, not root, with a health check that is the program itself."""
    rows = {}
    for role, most in MOST_ADDED.items():
        image = containers.image(role)
        config = image["Config"]
        assert config["User"] == "65532:65532", config["User"]
        assert config["Healthcheck"]["Test"][:3] == ["CMD", "/usr/local/bin/laneway", "health"], config["Healthcheck"]
        assert config["Entrypoint"] == [f"/usr/local/bin/laneway-{role}"], config["Entrypoint"]
        for label in ("title", "description", "licenses", "version", "revision"):
            assert config["Labels"].get(f"org.opencontainers.image.{label}") not in (None, "", "unknown"), label
        added = containers.size_above_base(role)
        assert 0 < added < most, f"{role}: {added} bytes above the base"
        rows[role] = {"bytes_above_base": added, "bytes": image["Size"]}
    return rows


def check_hardening(system):
    """The root is read-only and was not written to; every process is user 65532 and has no capability."""
    for name in system.names():
        inspected = system.inspect(name)
        assert inspected["HostConfig"]["ReadonlyRootfs"], name
        status = pathlib.Path(f"/proc/{inspected['State']['Pid']}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Uid"].split() == ["65532"] * 4, fields["Uid"]
        assert int(fields["CapEff"], 16) == 0 and fields["NoNewPrivs"] == "1", status
        changed = containers.docker("diff", system.container(name)).split("\n")
        # Mount points are made by the engine.
        written = [line for line in changed if line and not line[2:].startswith(("/etc", "/models", "/var"))]
        assert not written, f"{name} wrote {written}"
        # The same as root and with a writable root would be no proof: nothing can be made there.
        shell = containers.docker("exec", system.container(name), "/bin/sh", "-c", "true", check=False)
        assert shell.returncode != 0, f"{name} has a shell"


def check_bytes(system):
    """`laneway say` against the containers writes the file that it writes without them."""
    here, there = system.scratch / "here.wav", system.scratch / "there.wav"
    text = "Good morning. Every word was made in a container."
    for path, more in [(here, []), (there, ["--gateway", system.gateway])]:
        subprocess.run([containers.LANEWAY, "say", text, "-o", path, "--seed", "7", *more], check=True, capture_output=True)
    assert here.read_bytes() == there.read_bytes(), "other bytes than without containers"
    return {"bytes": here.stat().st_size}


def hurt(system, name, break_it, mend):
    """Break one container under load. What it carried may be lost, each stream with a status; everything else goes on, and
    the system is whole again without a restart of another container."""
    before = {other: system.started(other) for other in system.names() if other != name}
    with Load(system.gateway) as load:
        load.until_busy()
        if name in WORKERS:
            until(lambda: system.running(name) > 0, 30, f"{name} carries a stream")
        began = time.monotonic()
        carried = load.open_streams() if name == "gateway" else set()
        n_carried = system.running(name) if name in WORKERS else len(carried)
        break_it(name)
        time.sleep(OUTAGE_S)
        if name != "gateway":
            assert load.finished_since(began) > 0, "nothing was spoken meanwhile"
        mend(name)
        until(lambda: system.whole(), HEALED_S, "the system is whole again")
        healed = time.monotonic()
        until(lambda: load.finished_since(healed) >= 4, HEALED_S, "streams are spoken again")
    after = {other: system.started(other) for other in before}
    assert before == after, f"others were restarted: {before} {after}"
    lost = [outcome for outcome in load.outcomes if outcome.code != "OK"]
    wrong = [outcome for outcome in load.outcomes if outcome.code == "OK" and not outcome.right]
    assert not wrong, f"{len(wrong)} streams ended well with other bytes"
    assert not load.stuck, f"{load.stuck} streams never ended"
    if name == "engine-manager":
        assert not lost, lost
    if name in WORKERS:
        # Between the count and the blow one more may have begun.
        assert len(lost) <= n_carried + 1, f"{name} carried {n_carried}, and lost are {lost}"
    allowed = {"UNAVAILABLE"} | ({"CANCELLED", "UNKNOWN", "INTERNAL"} if name == "gateway" else set())
    assert all(outcome.code in allowed for outcome in lost), lost
    return {"carried": n_carried, "lost": len(lost), "streams": len(load.outcomes), "codes": sorted({o.code for o in lost})}


def check_kill(system, name):
    return hurt(system, name, system.kill, lambda _: None)


def check_pause(system, name):
    return hurt(system, name, system.pause, system.unpause)


def check_partition(system, name):
    return hurt(system, name, system.disconnect, system.connect)


def check_drain(system, name):
    """SIGTERM under load: what runs finishes inside the bound, the exit code is 0, and a restart makes it whole."""
    with Load(system.gateway) as load:
        load.until_busy()
        # Whoever comes to a gateway that is not there has no service: only streams that ran count here.
        ran = load.open_streams()
        began = time.monotonic()
        code = system.stop(name)
        took = time.monotonic() - began
        if name == "gateway":
            load.pause()
        system.start(name)
        until(lambda: system.whole(), HEALED_S, "the system is whole again")
    assert code == 0, f"exit code {code}"
    assert took < 36, f"{took:.1f} s to drain"
    outcomes = [o for o in load.outcomes if name != "gateway" or o.number in ran]
    lost = [outcome for outcome in outcomes if outcome.code != "OK" or not outcome.right]
    assert not lost, lost
    return {"seconds": round(took, 2), "streams": len(outcomes)}


def check_rolling(system):
    """Both workers restart one behind the other under load, and no stream is lost."""
    with Load(system.gateway) as load:
        load.until_busy()
        for name in WORKERS:
            code = system.stop(name)
            assert code == 0, f"{name}: exit code {code}"
            system.start(name)
            until(lambda: system.whole(), HEALED_S, "the system is whole again")
        healed = time.monotonic()
        until(lambda: load.finished_since(healed) >= 4, HEALED_S, "streams are spoken")
    lost = [outcome for outcome in load.outcomes if outcome.code != "OK" or not outcome.right]
    assert not lost, lost
    return {"streams": len(load.outcomes)}


def checks():
    yield "images", check_images
    yield "hardening", check_hardening
    yield "bytes", check_bytes
    for verb, check in [("kill", check_kill), ("pause", check_pause), ("partition", check_partition)]:
        for name in ROLES:
            yield f"{verb}-{name}", lambda system, check=check, name=name: check(system, name)
    for name in ROLES:
        yield f"drain-{name}", lambda system, name=name: check_drain(system, name)
    yield "rolling", check_rolling


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of checks, comma separated")
    parser.add_argument("--results", type=pathlib.Path, help="where to write what came out")
    arguments = parser.parse_args()
    reason = containers.no_engine()
    if reason:
        print(f"skipped: {reason}")
        return 0
    wanted = arguments.only.split(",") if arguments.only else None
    rows = []
    with System() as system:
        for name, check in checks():
            if wanted and name not in wanted:
                continue
            began = time.monotonic()
            try:
                row = {"check": name, "outcome": "ok", **({"detail": detail} if (detail := check(system)) else {})}
            except Exception as error:  # noqa: BLE001 - every check is run, and each says what it found
                row = {"check": name, "outcome": "failed", "why": f"{type(error).__name__}: {error}"}
                system.keep_logs(name)
                system.mend()
            row["seconds"] = round(time.monotonic() - began, 1)
            rows.append(row)
            print(json.dumps(row), flush=True)
    failed = sum(row["outcome"] != "ok" for row in rows)
    if arguments.results:
        arguments.results.write_text(json.dumps({"commit": containers.commit(), "checks": rows}, indent=1) + "\n")
    print(f"{len(rows) - failed} of {len(rows)} checks hold")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
