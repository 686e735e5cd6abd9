"""A fleet of cells under load, from step times that were measured: simulate.py [--check FILE] [--write FILE].

A cell is one GPU with its worker. How long a frame takes by the number of rows that run comes from a committed run of
`laneway bench` on one GPU (`SOURCE`); everything beyond one GPU here is arithmetic and has not been run on real machines. Rows share
a cell's steps, a request waits in the cell's bounded queue when all rows are taken, gateways send each request to the least
busy cell that they know of, and what they know is `REPORT_S` old. The results are tables between markers in a document: --write puts them
there, --check fails where the document says otherwise.
"""

import argparse
import bisect
import heapq
import json
import pathlib
import random
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = "benches/results/2026-11-30-h200-gateway-1.7b-5c73d75.json"
FRAMES_PER_SECOND = 12.5
ROWS, QUEUE = 128, 512
STEP_S = 0.02
# A status is asked for twice a second.
REPORT_S = 0.5
# A ping every 2 s, lost after 3: until then a gateway sends requests to a cell that is gone.
NOTICE_S = 5.0
N_ZONES = 3
# A listener who hears nothing for this long has left.
PATIENCE_S = 10.0
START, END = "<!-- simulated: {} -->", "<!-- end -->"


class Measured:
    """Milliseconds of a frame of all rows, and of the first audio, by rows."""

    def __init__(self):
        runs = [run for run in json.loads((ROOT / SOURCE).read_text())["runs"] if run["loop"] == "closed"]
        self.rows = [run["concurrency"] for run in runs]
        self.frame_s = [run["concurrency"] / (run["audio_s_per_s"] * FRAMES_PER_SECOND) for run in runs]
        self.first_s = [run["ttfa_ms"]["p50"] / 1000 for run in runs]
        self.audio_per_s = [run["audio_s_per_s"] for run in runs]
        self.mean_frames = sum(run["audio_s"] for run in runs) / sum(run["finished"] for run in runs) * FRAMES_PER_SECOND

    def at(self, values, rows):
        right = bisect.bisect_left(self.rows, rows)
        if right == 0:
            return values[0]
        if right == len(self.rows):
            return values[-1]
        low, high = self.rows[right - 1], self.rows[right]
        return values[right - 1] + (values[right] - values[right - 1]) * (rows - low) / (high - low)


class Cell:
    """Rows advance together: one clock of frames, and the frame at which each row ends."""

    def __init__(self, zone):
        self.zone, self.alive = zone, True
        self.frames = 0.0
        self.running, self.queue = [], []
        self.reported = 0
        # Of a cell that is gone: what gateways still wait for there, and count as load.
        self.stuck = 0

    def busy(self):
        return len(self.running) + len(self.queue) + self.stuck

    def step(self, measured, now, first_audio):
        while self.queue and len(self.running) < ROWS:
            asked, frames = self.queue.pop(0)
            heapq.heappush(self.running, (self.frames + frames, asked))
            first_audio.append((asked, now - asked + measured.at(measured.first_s, len(self.running))))
        if self.running:
            self.frames += STEP_S / measured.at(measured.frame_s, len(self.running))
        while self.running and self.running[0][0] <= self.frames:
            heapq.heappop(self.running)


def simulate(measured, n_cells, load, seconds, lost_at=None, retry="jitter", back_at=None, seed=1):
    """`load` is a share of what the cells make at 128 rows. From `lost_at` a zone is gone, and is back at `back_at`."""
    random.seed(seed)
    cells = [Cell(index % N_ZONES) for index in range(n_cells)]
    per_second = load * n_cells * measured.audio_per_s[-1] / (measured.mean_frames / FRAMES_PER_SECOND)
    first_audio, again, refused, left, lost = [], [], 0, 0, 0
    noticed = set()
    steps = round(seconds / STEP_S)
    due = 0.0
    for step in range(steps):
        now = step * STEP_S
        if lost_at is not None and abs(now - lost_at) < STEP_S / 2:
            for cell in cells:
                if cell.zone == 0:
                    cell.alive = False
                    # Whatever it carried ends UNAVAILABLE, and its caller asks again.
                    for _ in range(cell.busy()):
                        lost += 1
                        heapq.heappush(again, (now + NOTICE_S + pause(retry, 0), 1, now))
                    cell.stuck = cell.busy()
                    cell.running, cell.queue = [], []
        if lost_at is not None and now >= lost_at + NOTICE_S:
            noticed = {0}
        if back_at is not None and now >= back_at:
            noticed = set()
            for cell in cells:
                cell.alive, cell.stuck = True, 0
        if step % round(REPORT_S / STEP_S) == 0:
            for cell in cells:
                cell.reported = cell.busy()
        due += per_second * STEP_S
        arrivals = [(now, 0, now)] * int(random.gauss(due, due**0.5) if due > 30 else poisson(due))
        due = 0.0
        while again and again[0][0] <= now:
            _, attempt, asked = heapq.heappop(again)
            arrivals.append((now, attempt, asked))
        known = [cell for cell in cells if cell.zone not in noticed]
        for _, attempt, asked in arrivals:
            if now - asked > PATIENCE_S:
                left += 1
                continue
            # Two of those known, and the less busy: what a gateway among many comes to.
            cell = min(random.sample(known, 2), key=lambda each: each.reported)
            cell.reported += 1
            if not cell.alive:
                cell.stuck += 1
                # No audio was sent, so the gateway itself tries another once the connection is known to be dead.
                heapq.heappush(again, (now + NOTICE_S, attempt, asked))
            elif cell.busy() >= ROWS + QUEUE:
                refused += 1
                heapq.heappush(again, (now + pause(retry, attempt), attempt + 1, asked))
            else:
                cell.queue.append((asked, random.uniform(0.5, 1.5) * measured.mean_frames))
        for cell in cells:
            if cell.alive:
                cell.step(measured, now, first_audio)
    return {"first_audio": first_audio, "refused": refused, "left": left, "lost": lost, "per_second": per_second}


def poisson(mean):
    count, left = 0, random.expovariate(1.0)
    while left < mean:
        count, left = count + 1, left + random.expovariate(1.0)
    return count


def pause(retry, attempt):
    """Seconds until a caller asks again."""
    return 0.0 if retry == "at once" else random.uniform(0, min(8.0, 0.5 * 2**attempt))


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def ms(seconds):
    return f"{seconds * 1000:.0f}"


def sizes(measured):
    """What one GPU carries."""
    yield "| rows | audio-s a s | ms a frame | requests a s | first audio p50, ms |"
    yield "|---|---|---|---|---|"
    for rows, audio, frame, first in zip(measured.rows, measured.audio_per_s, measured.frame_s, measured.first_s):
        requests = audio / (measured.mean_frames / FRAMES_PER_SECOND)
        yield f"| {rows} | {audio:.0f} | {frame * 1000:.1f} | {requests:.0f} | {ms(first)} |"


def loads(measured):
    """First audio by load, nothing lost."""
    yield "| load | requests a s and cell | first audio p50, p95, p99, ms | refused |"
    yield "|---|---|---|---|"
    for load in (0.3, 0.5, 0.66, 0.8, 0.9, 1.0):
        done = simulate(measured, 6, load, 60)
        waits = [wait for asked, wait in done["first_audio"] if asked > 10]
        shown = ", ".join(ms(quantile(waits, share)) for share in (0.5, 0.95, 0.99))
        yield f"| {load:.0%} | {done['per_second'] / 6:.0f} | {shown} | {done['refused']} |"


def zone_losses(measured):
    """A zone of three is lost at 20 s and back at 80 s."""
    yield "| load before | callers ask again | streams lost | first audio p95, ms: before, in the 5 s behind it, 5 to 15 s, 30 to 60 s | refused | left unserved |"
    yield "|---|---|---|---|---|---|"
    for load in (0.5, 0.6, 0.66, 0.8):
        for retry in ("at once", "jitter"):
            done = simulate(measured, 6, load, 110, lost_at=20, back_at=80, retry=retry)
            windows = [(10, 20), (20, 25), (25, 35), (50, 80)]
            shown = ", ".join(ms(quantile([w for asked, w in done["first_audio"] if a <= asked < b], 0.95)) for a, b in windows)
            yield f"| {load:.0%} | {retry} | {done['lost']} | {shown} | {done['refused']} | {done['left']} |"


TABLES = {"sizes": sizes, "loads": loads, "zone losses": zone_losses}


def filled(text, measured):
    for name, table in TABLES.items():
        begin = START.format(name)
        head, rest = text.split(begin, 1)
        _, tail = rest.split(END, 1)
        text = head + begin + "\n" + "\n".join(table(measured)) + "\n" + END + tail
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=pathlib.Path)
    parser.add_argument("--write", type=pathlib.Path)
    arguments = parser.parse_args()
    measured = Measured()
    if arguments.check or arguments.write:
        path = arguments.check or arguments.write
        text = path.read_text()
        now = filled(text, measured)
        if arguments.write:
            path.write_text(now)
        elif now != text:
            print(f"{path} says other than the simulation: run benches/fleet/simulate.py --write {path}", file=sys.stderr)
            return 1
        return 0
    for name, table in TABLES.items():
        print(f"\n{name}\n" + "\n".join(table(measured)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
